"""Files: refused by the wrong network, whole or absent, never executed."""

import json
import pickle
import stat

import pytest
import torch
from batchbayes_papers.data.folder import data_file
from safetensors.torch import save_file
from torch import nn

import batchbayes as bb
from batchbayes._common.files import atomic_path
from batchbayes.saving import fingerprint, load_notes
from batchbayes.training.loop import supervised


def build(width=4, depth=1, epsilon=1e-5):
    torch.manual_seed(0)
    layers = [m for _ in range(depth) for m in (nn.Linear(4, 4), nn.ReLU())]
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width, eps=epsilon), *layers, nn.BatchNorm1d(4))


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "posterior.safetensors"
    bb.save(bb.mcbn(build(), torch.randn(64, 4), batch_size=8, num_samples=6), path)
    return path


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (nn.Sequential(nn.Linear(4, 4)), "0 batch-norm layers where the file has 2; no layer 1 with 4 channels"),
        (nn.Sequential(nn.BatchNorm1d(4)), "1 batch-norm layers where the file has 2.*an unknown layer 0"),
        (build(epsilon=1e-3), "no layer 1 with 4 channels and epsilon 1e-05; an unknown layer 1 .* epsilon 0.001"),
        (build(depth=2), "an unknown layer 6 with 4 channels"),
    ],
)
def test_the_wrong_network_is_refused_with_what_differs(saved, other, message):
    with pytest.raises(bb.BatchbayesError, match=message):
        bb.load(saved, other)


def test_wrappers_do_not_matter(saved):
    network = build()
    x = torch.randn(3, 4)
    with torch.no_grad():
        plain, wrapped = bb.load(saved, network).draw(0, 1)(x), bb.load(saved, nn.DataParallel(network)).draw(0, 1)(x)
    assert torch.equal(plain, wrapped)


def test_a_network_in_place_of_the_path_is_named(saved):
    with pytest.raises(bb.BatchbayesError, match=r"call bb.load\(path, model\)"):
        bb.load(build(), saved)


@pytest.mark.parametrize("content", [b"", b"not a posterior", pickle.dumps({"a": 1}), b"\xff" * 64])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(bb.BatchbayesError, match="something else, or damaged"):
        bb.load(path, build())


def test_a_cut_file_is_refused(saved):
    saved.write_bytes(saved.read_bytes()[:-10])
    with pytest.raises(bb.BatchbayesError, match="damaged"):
        bb.load(saved, build())


def rewritten(path, header=None, tensors=None):
    """The file with another header or other tensors."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        old = json.loads(file.metadata()["batchbayes"])
        kept = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    save_file(tensors or kept, path, {"batchbayes": json.dumps({**old, **(header or {})})})
    return path


@pytest.mark.parametrize(
    ("header", "tensors", "message"),
    [
        ({"format": 99}, None, "posterior format 1; got format 99"),
        ({"kind": "voodoo"}, None, "got kind 'voodoo'"),
        ({}, {"center": torch.zeros(3), "deviations": torch.zeros(2, 3)}, "for 16 statistics"),
        ({}, {"center": torch.zeros(16)}, "deviations"),
        ({"idle": "text"}, None, "idle layers 'text'"),
        ({"idle": ["nowhere"]}, None, "idle layers"),
    ],
)
def test_headers_that_do_not_fit_are_refused(saved, header, tensors, message):
    with pytest.raises(bb.BatchbayesError, match=message):
        bb.load(rewritten(saved, header, tensors), build())


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(bb.BatchbayesError, match="nothing at"):
        bb.load(tmp_path / "nowhere", build())


def test_the_header_says_what_it_is(saved):
    from safetensors import safe_open

    with safe_open(saved, framework="pt") as file:
        header = json.loads(file.metadata()["batchbayes"])
    assert header["format"] == 1
    assert (header["method"], header["batch_size"], header["sites"]) == ("mcbn", 8.0, ["1", "4"])
    assert header["layout"][0][0] == "1"


def test_the_name_of_the_output_survives(tmp_path):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x):
            return {"logits": self.norm(x)}

    network = Named()
    bb.save(bb.mcbn(network, torch.randn(64, 4), batch_size=8, output="logits"), tmp_path / "p")
    assert bb.predict(bb.load(tmp_path / "p", network), torch.randn(2, 4), bb.categorical()).probs.shape == (2, 4)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(saved):
    before = saved.read_bytes()

    def interrupted():
        with atomic_path(saved) as partial:
            partial.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def test_files_have_ordinary_permissions(saved, tmp_path):
    plain = tmp_path / "plain"
    plain.touch()
    assert stat.S_IMODE(saved.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


# The right weights


@pytest.mark.parametrize("change", ["weight", "running_mean", "dtype"])
def test_other_weights_are_refused_unless_the_user_says_so(saved, change):
    network = build()
    with torch.no_grad():
        if change == "weight":
            network[0].weight[0, 0] += 1e-6
        elif change == "running_mean":
            network[1].running_mean[3] += 1e-6
        else:
            network.double()
    with pytest.raises(
        bb.BatchbayesError, match=r"the weights that Sequential had.*got other weights.*other_weights=True"
    ):
        bb.load(saved, network)
    assert isinstance(bb.load(saved, network, other_weights=True), bb.BatchNormPosterior)


def test_what_does_not_change_the_network_does_not_matter(saved):
    network = build().train()
    network[1].num_batches_tracked += 7
    network.register_buffer("scratch", torch.randn(3), persistent=False)
    network.requires_grad_(False)
    for same in (network, nn.DataParallel(network), torch.compile(network, backend="eager")):
        assert isinstance(bb.load(saved, same), bb.BatchNormPosterior)


@pytest.mark.parametrize("kind", ["point", "dropout", "query", "population"])
def test_every_kind_of_posterior_knows_its_weights(tmp_path, kind):
    def fresh():
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))

    network, x = fresh(), torch.randn(64, 4)
    posterior = {
        "point": lambda: bb.deterministic(network),
        "dropout": lambda: bb.mc_dropout(network),
        "query": lambda: bb.mcbn(network, x, batch_size=8, include_query=True),
        "population": lambda: bb.population(network, x),
    }[kind]()
    bb.save(posterior, tmp_path / "p")
    bb.load(tmp_path / "p", network)
    with pytest.raises(bb.BatchbayesError, match="other weights"):
        bb.load(tmp_path / "p", fresh())


def test_a_posterior_that_holds_all_weights_fits_any(tmp_path, monkeypatch):
    monkeypatch.setattr(bb.PointPosterior, "needs_weights", False)
    bb.save(bb.deterministic(nn.Linear(4, 4)), tmp_path / "p")
    assert isinstance(bb.load(tmp_path / "p", nn.Linear(4, 4)), bb.PointPosterior)


def test_the_fingerprint_takes_odd_tensors():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.short = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
            self.register_buffer("scalar", torch.tensor(True))
            self.register_buffer("none", None)
            self.register_buffer("empty", torch.zeros(0))
            self.register_buffer("strided", torch.randn(4, 4).T)

    torch.manual_seed(0)
    first = Odd()
    torch.manual_seed(0)
    assert fingerprint(first) == fingerprint(Odd())
    first.scalar.logical_not_()
    torch.manual_seed(0)
    assert fingerprint(first) != fingerprint(Odd())


def test_a_file_without_a_fingerprint_is_not_trusted(saved):
    rewritten(saved, {"weights": None})
    with pytest.raises(bb.BatchbayesError, match="does not say which weights"):
        bb.load(saved, build())
    bb.load(saved, build(), other_weights=True)


# Damaged headers and tensors


@pytest.mark.parametrize(
    "header",
    [
        {"batch_size": 0},
        {"batch_size": 1},
        {"batch_size": -8.0},
        {"batch_size": float("nan")},
        {"batch_size": float("inf")},
        {"batch_size": None},
        {"batch_size": "many"},
        {"batch_size": [8]},
        {"batch_size": 10**400},
        {"noise": "magic"},
        {"noise": None},
        {"noise": ["rows"]},
        {"centered_on": "moon"},
        {"site_batch_sizes": [8.0]},
        {"site_batch_sizes": [8.0, 0.0]},
        {"site_batch_sizes": 3},
        {"sites": []},
        {"sites": ["1", "1"]},
        {"sites": ["nowhere", "1"]},
        {"sites": 3},
        {"sites": None},
        {"layout": []},
        {"layout": 3},
        {"layout": [["1", 4], ["4"]]},
        {"layout": [[1, 2, "x"], [3, 4, 5]]},
        {"layout": None},
        {"output": ["logits"]},
        {"output": 1.5},
        {"kind": None},
        {"kind": ["batchnorm"]},
        {"idle": 3},
    ],
    ids=str,
)
def test_damaged_headers_are_refused_in_words(saved, header):
    with pytest.raises(bb.BatchbayesError, match="expected"):
        bb.predict(bb.load(rewritten(saved, header), build()), torch.randn(2, 4), bb.categorical())


GOOD = {"center": torch.zeros(16), "deviations": torch.randn(6, 16), "influence": torch.eye(6)}


@pytest.mark.parametrize(
    "tensors",
    [
        {"deviations": torch.zeros(0, 16), "influence": torch.zeros(0, 0)},
        {"deviations": torch.zeros(16)},
        {"deviations": torch.full((6, 16), float("nan"))},
        {"center": torch.full((16,), float("inf"))},
        {"center": torch.zeros(16, dtype=torch.int64)},
        {"center": torch.zeros(16, dtype=torch.float16)},
        {"deviations": torch.zeros(6, 16, dtype=torch.bool)},
        {"influence": torch.eye(5)},
        {"influence": torch.zeros(6)},
        {"influence": torch.eye(6).double()},
    ],
)
def test_damaged_tensors_are_refused_in_words(saved, tensors):
    bb.load(rewritten(saved, None, GOOD), build())
    with pytest.raises(bb.BatchbayesError, match="expected"):
        bb.load(rewritten(saved, None, {**GOOD, **tensors}), build())


@pytest.mark.parametrize("text", ["[" * 100_000, '{"format": ' + "9" * 5000 + "}", "[1]", "null", "{}", "{"])
def test_headers_that_are_no_headers(saved, text):
    save_file(GOOD, saved, {"batchbayes": text})
    with pytest.raises(bb.BatchbayesError, match="expected"):
        bb.load(saved, build())
    with pytest.raises(bb.BatchbayesError, match="expected"):
        load_notes(saved)


@pytest.mark.parametrize("text", ["[" * 100_000, "3", '["a"]', "{"])
def test_notes_that_are_no_notes(saved, text):
    save_file(GOOD, saved, {"batchbayes": '{"format": 1}', "notes": text})
    with pytest.raises(bb.BatchbayesError, match="notes that cannot be read"):
        load_notes(saved)


# Where and what to save


def test_places_that_cannot_be_written(tmp_path):
    posterior = bb.deterministic(build())
    (tmp_path / "file").touch()
    for path in (tmp_path / "nowhere" / "p", tmp_path / "file" / "p", tmp_path, tmp_path / ("x" * 300)):
        with pytest.raises(bb.BatchbayesError, match="a place to write to"):
            bb.save(posterior, path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


NO_PATH = r"the path of a file or folder as text or as a pathlib\.Path; got a "


@pytest.mark.parametrize("path", [b"bytes", None, 3])
def test_what_is_no_path(path):
    posterior = bb.deterministic(build())
    examples = torch.zeros(3, 4)
    for use in (
        lambda: bb.save(posterior, path),
        lambda: bb.load(path, build()),
        lambda: load_notes(path),
        lambda: bb.export(posterior, path, examples, bb.categorical()),
        lambda: bb.plots.save_figure(None, path),
        lambda: bb.online.RandomFeatures.load(path),
    ):
        with pytest.raises(bb.BatchbayesError, match=NO_PATH):
            use()


@pytest.mark.parametrize("path", [b"bytes", 3])
def test_what_is_no_path_where_none_may_be_given(path):
    x, y, config = torch.randn(60, 4), torch.zeros(60).long(), bb.TrainingConfig(epochs=1, batch_size=20)
    loss, state = torch.nn.functional.cross_entropy, bb.online.ConjugateRegression.start([4])
    for use in (
        lambda: bb.assess(build(), x, (x, y), batch_size=20, draws=4, out=path),
        lambda: bb.train(build(), [(x, y)], supervised(loss), config, checkpoint=path),
        lambda: bb.deep_ensemble(lambda: nn.Linear(4, 3), (x, y), loss, config, checkpoints=path),
        lambda: bb.online.learn_parts(state, [], checkpoint=path),
        lambda: data_file("boston", path),
    ):
        with pytest.raises(bb.BatchbayesError, match=NO_PATH):
            use()


@pytest.mark.parametrize("inputs", ["x", ["x"], lambda batch: batch["x"]])
def test_a_posterior_remembers_where_the_inputs_are(inputs, tmp_path):
    network = build()
    x = torch.randn(64, *next(iter(network.parameters())).shape[1:])
    batches = [{"y": torch.zeros(16), "x": part} for part in x.split(16)]
    posterior = bb.mcbn(network, batches, inputs=inputs)
    expected = bb.predict(posterior, batches, bb.categorical(), inputs=inputs).probs
    assert torch.equal(bb.predict(posterior, batches, bb.categorical()).probs, expected)
    assert torch.equal(bb.predict(posterior, x, bb.categorical()).probs, expected)
    assert len(list(bb.predict_stream(posterior, batches, [bb.categorical()]))) == 4
    pickle.loads(pickle.dumps(posterior))
    bb.save(posterior, tmp_path / "p")
    loaded = bb.load(tmp_path / "p", network)
    if callable(inputs):
        with pytest.raises(bb.BatchbayesError, match="say where the inputs are"):
            bb.predict(loaded, batches, bb.categorical())
    else:
        assert torch.equal(bb.predict(loaded, batches, bb.categorical()).probs, expected)


def test_what_cannot_be_saved(tmp_path):
    with pytest.raises(bb.BatchbayesError, match="a posterior to save; got a Sequential"):
        bb.save(build(), tmp_path / "p")
    with pytest.raises(bb.BatchbayesError, match="notes= as JSON"):
        bb.save(bb.deterministic(build()), tmp_path / "p", notes={"network": build()})
    assert not list(tmp_path.iterdir())
