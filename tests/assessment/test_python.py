"""`bb.assess`: the same objects as the command writes, from loaders, data sets, tensors and arrays."""

import csv
import json
import warnings
from importlib import import_module

import numpy as np
import pytest
import torch
from helpers import assess_cases
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import batchbayes as bb
from batchbayes import cli
from batchbayes.assessment import recommend

FEW = {"batch_size": 16, "draws": 12, "method": "none"}


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    """Leave figures out, to save time."""
    torch.set_num_threads(1)
    for task, name in (("classification", "class"), ("regression", "value"), ("segmentation", "image")):
        compare = import_module(f"batchbayes.assessment.{task}.compare")
        monkeypatch.setattr(compare, f"{name}_figures", lambda *_: {})


def network(task="classification"):
    found = {
        "classification": assess_cases.classifier, "regression": assess_cases.regressor,
        "segmentation": assess_cases.segmenter,
    }[task]()  # fmt: skip
    found.load_state_dict(assess_cases.trained(task))
    return found.eval()


def rows_in(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_python_says_what_the_command_says(tmp_path):
    arguments = [*assess_cases.write_case("classification", tmp_path), "--views", "jitter:0.05"]
    assert cli.main(["assess", *arguments, "--out", str(tmp_path / "command")]) == 0
    train, test, ood = (assess_cases.blobs(count, seed) for count, seed in ((300, 0), (240, 1), (60, 2)))
    strange = TensorDataset(ood[0] + 6)
    strange.name = "ood.npz"  # type: ignore[attr-defined]
    found = bb.assess(
        network(),
        TensorDataset(*train),
        TensorDataset(*test),
        ood=strange,
        class_names=assess_cases.CLASS_NAMES,
        views="jitter:0.05",
        batch_size=16,
        draws=12,
        out=tmp_path / "python",
    )
    for name in ("predictions.csv", "posterior.safetensors", "novelty.safetensors"):
        same = [(tmp_path / place / name).read_bytes() for place in ("command", "python")]
        assert name != "predictions.csv" or same[0] == same[1]
        assert len(same[0]) == pytest.approx(len(same[1]), abs=1000)  # the posterior notes down how files are read
    told = [json.loads((tmp_path / place / "metrics.json").read_text()) for place in ("command", "python")]
    for key in ("verdict", "terms", "recommended"):
        assert told[0][key] == told[1][key]
    names = [method["name"] for method in told[0]["methods"]]
    assert names == list(found.metrics)
    assert found.recommended.name == told[0]["recommended"]
    assert "<iframe" in found._repr_html_()
    assert found.verdict["headline"] in found.html()


def sources():
    x, y = assess_cases.blobs(240, 1)
    return {
        "tensors": (x, y),
        "arrays": (x.numpy(), y.numpy()),
        "a data set": TensorDataset(x, y),
        "a loader": DataLoader(TensorDataset(x, y), batch_size=128),
        "batches": [(x[:128], y[:128]), (x[128:], y[128:])],
    }


@pytest.mark.parametrize("kind", sources())
def test_all_kinds_of_data(kind):
    expected = bb.assess(network(), assess_cases.blobs(300, 0)[0], sources()["tensors"], **FEW)
    found = bb.assess(network(), assess_cases.blobs(300, 0)[0].numpy(), sources()[kind], **FEW)
    assert found.rows == expected.rows
    assert found.metrics == expected.metrics


def test_the_network_is_left_alone_and_predicts_as_recommended(tmp_path):
    model = network().train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = bb.assess(model, assess_cases.blob_training(), assess_cases.blobs(240, 1), draws=12)
    assert all(module.training for module in model.modules())
    assert all(bool((before[key] == value).all()) for key, value in model.state_dict().items())
    rows = found.rows["row"]
    seen = found.predict(assess_cases.blobs(240, 1)[0])
    np.testing.assert_allclose(seen.probs.amax(-1)[rows].numpy(), found.rows["confidence"], atol=1e-5)
    loaded = bb.load(found.save(tmp_path / "out").with_name("posterior.safetensors"), model)
    again = bb.predict(
        loaded, assess_cases.blobs(240, 1)[0], found.likelihood, num_samples=found.recommended.num_samples
    )
    np.testing.assert_allclose(again.probs.numpy(), seen.probs.numpy(), atol=1e-5)


def test_calibration_data_takes_part_in_the_choice_and_test_data_does_not():
    calibration, test = assess_cases.blobs(120, 5), assess_cases.blobs(240, 1)
    found = bb.assess(network(), assess_cases.blobs(300, 0)[0], test, calibration=calibration, **FEW)
    wrong = (test[0], (test[1] + 1) % 3)
    other = bb.assess(network(), assess_cases.blobs(300, 0)[0], wrong, calibration=calibration, **FEW)
    assert [c.trial.mean_loss for c in found.contenders] == [c.trial.mean_loss for c in other.contenders]
    assert found.choice.name == other.choice.name
    assert found.rows["confidence"] == other.rows["confidence"]
    assert found.metrics != other.metrics


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drws": 3}, "an option of assess.*did you mean draws"),
        ({"likelihood": bb.categorical(-1)}, "along axis 1"),
        ({"likelihood": bb.categorical}, "bb.categorical"),
        ({"likelihood": bb.heteroscedastic_gaussian()}, "bb.gaussian"),
        ({"method": "magic"}, "a method, one of"),
        ({"batch_size": None, "method": "mcbn"}, "batch_size="),
    ],
)
def test_bad_options_say_what_to_do(options, message):
    with pytest.raises(bb.BatchbayesError, match=message):
        bb.assess(network(), assess_cases.blobs(300, 0)[0], assess_cases.blobs(240, 1), **{**FEW, **options})


def unclear():
    x, y = assess_cases.blobs(240, 1)
    steps = nn.Sequential(nn.Linear(2, 3), nn.Unflatten(1, (3, 1)), nn.Upsample(4))
    yes = (y > 0).float()
    return {
        "yes or no as floats": (assess_cases.one_logit(), (x, yes), r"y\.long\(\)"),
        "the same as a column": (assess_cases.one_logit(), (x, yes[:, None]), r"y\.long\(\)"),
        "several labels as floats": (network(), (x, torch.stack([yes, 1 - yes, yes], 1)), "one output at a time"),
        "several labels": (network(), (x, torch.stack([y, y, y], 1)), "one output at a time"),
        "labels in a column": (network(), (x, y[:, None]), r"y\[:, 0\]"),
        "a label for each time step": (steps, (x, y[:, None].expand(-1, 4)), r"\(N, classes, 1, steps\)"),
        "one test example": (network(), (x[:1], y[:1]), "a random third"),
    }


@pytest.mark.parametrize("kind", unclear())
def test_data_without_a_clear_meaning_is_refused(kind):
    model, data, message = unclear()[kind]
    with pytest.raises(bb.BatchbayesError, match=message):
        bb.assess(model, data[0], data, **FEW)


class Words(nn.Module):
    """A network for sentences of seven words, which are whole numbers."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.last = nn.Embedding(20, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, words):
        return self.last(self.norm(self.embed(words).mean(1)).relu())


def test_inputs_get_the_type_that_the_network_needs(tmp_path):
    random = torch.Generator().manual_seed(0)
    words = torch.randint(0, 20, (90, 7), generator=random)
    labels = torch.randint(0, 2, (90,), generator=random)
    found = bb.assess(Words().eval(), words, (words, labels), **FEW)
    assert found.case.reading.input_dtype == "int64"
    (x, y), plain = assess_cases.blobs(240, 1), assess_cases.blobs(240, 0)[0]
    expected = bb.assess(network(), plain, (x, y), **FEW)
    assert expected.case.reading.input_dtype is None
    wide = bb.assess(network(), plain.double().numpy(), (x.double().numpy(), y.numpy()), **FEW)
    assert wide.rows == expected.rows
    exact = bb.assess(network().double(), plain, (x, y), **(FEW | {"method": "mcbn"}))
    assert exact.case.reading.input_dtype == "float64"
    exact.save(tmp_path / "out")
    np.savez(tmp_path / "new.npz", X=x.numpy())
    save_file(network().double().state_dict(), tmp_path / "weights.safetensors")
    given = ["--model", "helpers.assess_cases:double_classifier", "--weights", str(tmp_path / "weights.safetensors")]
    given += ["--posterior", str(tmp_path / "out" / "posterior.safetensors"), "--input", str(tmp_path / "new.npz")]
    assert cli.main(["predict", *given, "--out", str(tmp_path / "new.csv"), "--quiet"]) == 0
    new = rows_in(tmp_path / "new.csv")
    assert [new[row]["confidence"] for row in exact.rows["row"]] == [str(c) for c in exact.rows["confidence"]]


def test_zeros_and_ones_are_values_if_the_user_says_so():
    x, y = assess_cases.halves(240, 1)
    found = bb.assess(assess_cases.one_logit(), x, (x, y.float()), task="regression", **FEW)
    assert found.case.task == "regression"


def test_one_logit_is_two_classes():
    model = assess_cases.one_logit()
    model.load_state_dict(assess_cases.trained("binary"))
    x, y = assess_cases.halves(240, 1)
    found = bb.assess(model, x, (x, y), **FEW)
    kept = found.rows["row"]
    with torch.no_grad():
        loss = nn.functional.binary_cross_entropy_with_logits(model.eval()(x)[kept, 0], y[kept].float())
    assert found.case.task == "classification"
    assert found.metrics["deterministic"]["nll"] == pytest.approx(float(loss), abs=1e-6)
    assert bb.assess(model, x, (x, y), likelihood=bb.bernoulli(), **FEW).metrics == found.metrics


def test_outputs_that_are_probabilities_are_taken_so():
    model = nn.Sequential(network(), nn.Softmax(1))
    data = assess_cases.blobs(240, 1)
    with pytest.warns(bb.BatchbayesWarning, match="are probabilities"):
        found = bb.assess(model, assess_cases.blobs(300, 0)[0], data, **FEW)
    plain = bb.assess(network(), assess_cases.blobs(300, 0)[0], data, **FEW)
    assert found.metrics["deterministic"]["nll"] == pytest.approx(plain.metrics["deterministic"]["nll"], abs=1e-5)


def scripted(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch wants another form
        return torch.jit.script(model)


@pytest.mark.parametrize("make", [lambda model: model, scripted], ids=["group norm", "scripted"])
def test_networks_without_batch_norm_are_served(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(800, 3)).eval()
    x, y = torch.randn(90, 3, 12, 12), torch.randint(0, 3, (90,))
    found = bb.assess(make(model), x, (x, y))
    assert list(found.metrics) == [
        "deterministic", "temperature scaling", "4 views", "4 views + temperature", "16 views", "16 views + temperature"
    ]  # fmt: skip
    assert found.novelty is None
    assert set(found.rows["novelty"]) == {""}


def test_maps_of_a_segmentation(tmp_path):
    arguments = assess_cases.write_case("segmentation", tmp_path)
    given = [*arguments, "--method", "none", "--maps", str(tmp_path / "maps")]
    assert cli.main(["assess", *given, "--out", str(tmp_path / "out")]) == 0
    rows = rows_in(tmp_path / "out" / "predictions.csv")
    assert len(list((tmp_path / "maps").iterdir())) == 2 * len(rows)
    options = dict(zip(arguments[::2], arguments[1::2], strict=False))
    given = ["--model", options["--model"], "--weights", options["--weights"], "--input", options["--test"], "--quiet"]
    given += ["--posterior", str(tmp_path / "out" / "posterior.safetensors"), "--maps", str(tmp_path / "new")]
    assert cli.main(["predict", *given]) == 0
    model, (images, _) = network("segmentation"), assess_cases.scenes(18, 1)
    for row in (0, 17):
        classes = np.asarray(Image.open(tmp_path / "new" / f"{row:05}_classes.png"))
        entropy = np.asarray(Image.open(tmp_path / "new" / f"{row:05}_entropy.png"))
        assert classes.shape == entropy.shape == (12, 16)
        assert set(np.unique(classes)) <= {0, 1, 2}
        with torch.no_grad():
            logits = model(images[row : row + 1])[0]
        assert (classes == logits.argmax(0).numpy()).mean() > 0.9  # views may win
        assert np.corrcoef(entropy.ravel(), (-(logits.softmax(0) * logits.log_softmax(0)).sum(0)).ravel())[0, 1] > 0.8


def test_several_weights_are_compared_as_an_ensemble(tmp_path, monkeypatch):
    monkeypatch.setattr(recommend, "_is_as_good", lambda each, best: each.name == "ensemble of 2 + temperature")
    arguments = assess_cases.write_case("classification", tmp_path)
    options = dict(zip(arguments[::2], arguments[1::2], strict=False))
    other = network()
    with torch.no_grad():
        for tensor in other.parameters():
            tensor.mul_(1.1)
    save_file(other.state_dict(), tmp_path / "other.safetensors")
    files = ["--weights", options["--weights"], str(tmp_path / "other.safetensors")]
    common = ["--model", options["--model"], "--quiet"]
    given = [*common, *files, "--train", options["--train"], "--test", options["--test"], "--method", "none"]
    assert cli.main(["assess", *given, "--out", str(tmp_path / "out")]) == 0
    new = ["--posterior", str(tmp_path / "out" / "posterior.safetensors"), "--input", options["--test"]]
    assert cli.main(["predict", *common, *files[:2], *new, "--out", str(tmp_path / "new.csv")]) == 0
    told, again = rows_in(tmp_path / "out" / "predictions.csv"), rows_in(tmp_path / "new.csv")
    for row in told:
        same = again[int(row["row"])]
        assert all(row[key] == same[key] for key in row.keys() - {"source", "target"})
    x, y = assess_cases.blobs(240, 1)
    found = bb.assess([network(), other], x, (x, y), **FEW)
    kept = found.rows["row"]
    with torch.no_grad():
        probs = (network()(x).softmax(1) + other(x).softmax(1)) / 2
    expected = nn.functional.nll_loss(probs.log()[kept], y[kept])
    assert found.metrics["ensemble of 2"]["nll"] == pytest.approx(float(expected), abs=1e-5)
    assert found.metrics["ensemble of 2"]["passes"] == 2


def test_one_image_file_is_enough_for_predict(tmp_path, capsys):
    random = np.random.default_rng(0)
    for part, count in (("train", 30), ("test", 30)):
        for k in range(3):
            (tmp_path / part / "abc"[k]).mkdir(parents=True)
            for i in range(count):
                image = random.integers(0, 150, (8, 8, 3))
                image[..., k] += 80
                Image.fromarray(image.astype(np.uint8)).save(tmp_path / part / "abc"[k] / f"{i}.png")
    common = ["--model", "helpers.assess_cases:picture_classifier", "--quiet"]
    given = [*common, "--train", str(tmp_path / "train"), "--test", str(tmp_path / "test"), "--method", "none"]
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", bb.BatchbayesWarning)  # the network is not trained
        made = assess_cases.picture_classifier()
        patch.setattr(assess_cases, "picture_classifier", lambda: made)
        assert cli.main(["assess", *given, "--out", str(tmp_path / "out")]) == 0
        told = rows_in(tmp_path / "out" / "predictions.csv")[0]
        new = ["--posterior", str(tmp_path / "out" / "posterior.safetensors"), "--json"]
        capsys.readouterr()
        assert cli.main(["predict", *common, *new, "--input", str(tmp_path / "test" / told["id"])]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert row["id"] == told["id"].split("/")[1]
    assert row["prediction"] == told["prediction"]
    assert row["confidence"] == pytest.approx(float(told["confidence"]), abs=1e-5)


@pytest.mark.parametrize("values", [(-1, 1), (1, 2)])
def test_two_whole_numbers_that_are_no_classes_are_not_taken_as_values(values):
    """With one output they were assessed as a regression."""
    one = assess_cases.one_logit().eval()
    one.load_state_dict(assess_cases.trained("binary"))
    x, y = assess_cases.halves(60, 1)
    with pytest.raises(bb.BatchbayesError, match="which may be two classes, or values"):
        bb.assess(one, assess_cases.blobs(300, 0)[0], (x, torch.tensor(values)[y]), **FEW)


@pytest.mark.parametrize("count", [1, 2])
def test_one_or_two_calibration_examples_decide_nothing(count):
    """A temperature was recommended that fitted the one example, and most answers were marked."""
    x, y = assess_cases.blobs(200, 1)
    found = bb.assess(network(), assess_cases.blobs(300, 0)[0], (x, y), calibration=(x[-count:], y[-count:]), **FEW)
    assert found.choice.is_network
    assert 0 < sum(found.rows["flag"]) <= 0.11 * 200


def test_calibration_data_that_is_the_test_data_is_told():
    x, y = assess_cases.blobs(120, 1)
    with pytest.warns(bb.BatchbayesWarning, match="most test examples are calibration examples too"):
        bb.assess(
            network(), assess_cases.blobs(300, 0)[0], (x, y), calibration=TensorDataset(x.flip(0), y.flip(0)), **FEW
        )


def test_a_network_that_ends_in_softmax_is_drawn_exactly():
    """Where probabilities are taken as linear they leave 0 to 1. A new module around a network freezes nothing."""
    whole = nn.Sequential(network(), nn.Softmax(-1))
    (x, _), data = assess_cases.blobs(300, 0), assess_cases.blobs(240, 1)
    with pytest.warns(bb.BatchbayesWarning, match="are probabilities, it seems") as warned:
        found = bb.assess(whole, x, data, batch_size=16, draws=12)
    assert not [each for each in warned if "frozen" in str(each.message)]
    plain = bb.assess(network(), x, data, batch_size=16, draws=12, engine="sample")
    for name, metrics in plain.metrics.items():
        if "tuned" not in name:  # tuning takes the outputs as linear
            assert found.metrics[name]["nll"] == pytest.approx(metrics["nll"], abs=1e-3)
    posterior = bb.mcbn(whole, x, batch_size=16, num_samples=4)
    with pytest.raises(bb.BatchbayesError, match="for outputs that are probabilities"):
        bb.predict(posterior, x, bb.categorical(probabilities=True), engine="linear")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_networks_of_few_digits(dtype):
    """Their probabilities, rounded to so few digits, did not sum to one."""
    x, data = assess_cases.blobs(300, 0)[0], assess_cases.blobs(120, 1)
    small, full = (bb.assess(each, x, data, **FEW) for each in (network().to(dtype), network()))
    assert small.metrics["deterministic"]["nll"] == pytest.approx(full.metrics["deterministic"]["nll"], rel=1e-2)
    assert torch.equal(small.predict(data[0]).probs, small.predict(data[0].to(dtype)).probs)
    assert small.predict(data[0]).probs.dtype == torch.float32
    with pytest.warns(bb.BatchbayesWarning, match="most test examples are calibration examples too"):
        bb.assess(network().to(dtype), x, data, calibration=data, **FEW)


def test_labels_as_text_and_several_outputs_are_refused_in_words():
    (x, _), (data, labels) = assess_cases.blobs(60, 0), assess_cases.blobs(60, 1)
    with pytest.raises(bb.BatchbayesError, match="number classes from 0"):
        bb.assess(network(), x, (data.numpy(), np.array(["a", "b", "c"])[labels]), **FEW)
    with pytest.raises(bb.BatchbayesError, match="test as arrays of numbers; got a list"):
        bb.assess(network(), x, (data, labels.tolist()), **FEW)

    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, x):
            return {"logits": self.inner(x), "features": x}

    with pytest.raises(bb.BatchbayesError, match="let the model return the logits alone"):
        bb.assess(Several(), x, (data, labels), **FEW)


@pytest.mark.parametrize("kind", ["tensor", "loader", "data set"])
def test_training_data_as_test_data_is_told(kind):
    x, y = assess_cases.blobs(120, 1)
    given = TensorDataset(x, y)
    train = {"tensor": x, "loader": DataLoader(given, 16, shuffle=True), "data set": given}[kind]
    with pytest.warns(bb.BatchbayesWarning, match="most test examples are training examples too"):
        bb.assess(network(), train, (x[:60].double(), y[:60]), **FEW)


def test_options_are_checked_and_truth_values_are_labels():
    (x, _), (data, yes) = assess_cases.blobs(60, 0), assess_cases.halves(60, 1)
    wrong = {"draws": 0, "budget": 0, "task": "regresion", "seed": 0.5}
    for name, value in wrong.items():
        with pytest.raises(bb.BatchbayesError, match=f"expected {name}"):
            bb.assess(network(), x, (data, yes), **{**FEW, name: value})
    one = assess_cases.one_logit().eval()
    found, same = (bb.assess(one, x, (data, y), **FEW, unit=3) for y in (yes.bool(), yes))
    assert found.metrics == same.metrics
    assert torch.equal(found.predict(data.int()).probs, found.predict(data.int().float()).probs)


def test_a_segmentation_that_guesses_is_told():
    images, _ = assess_cases.scenes(24, 1)
    labels = torch.randint(0, 3, (24, *images.shape[2:]), generator=torch.Generator().manual_seed(0))
    found = bb.assess(network("segmentation"), assess_cases.scenes(32, 0)[0], (images, labels), **FEW, views="none")
    assert found.verdict["headline"].startswith("It is no better than guessing: of 100 pixels")
