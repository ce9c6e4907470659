"""`bb.assess`: the same objects as the command writes, from loaders, data sets, tensors and arrays."""

import json
import warnings
from dataclasses import replace

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
from batchbayes.methods.table import METHODS
from batchbayes.report.compare.contenders import compared_candidates

pytestmark = pytest.mark.filterwarnings(
    "ignore:WARNING. most test examples",
    "ignore:The tuned batch size",
    "ignore:.*lacks classes",
)  # what a report says; tests of these warnings ask for them

network = assess_cases.trained_network
FEW = {"batch_size": 16, "draws": 12, "method": "none", "no_figures": True}


def test_python_says_what_the_command_says(tmp_path):
    arguments = [*assess_cases.write_case("classification", tmp_path), "--views", "jitter:0.05"]
    assert cli.main(["assess", *arguments, "--no-figures", "--out", str(tmp_path / "command")]) == 0
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
        "labels in one byte": (x.requires_grad_(), y.byte()),
        "a data set": TensorDataset(x, y),
        "a loader": DataLoader(TensorDataset(x, y), batch_size=128),
        "batches": [(x[:128], y[:128]), (x[128:], y[128:])],
    }


@pytest.mark.parametrize("kind", sources())
def test_all_kinds_of_data(kind):
    training, model = assess_cases.blobs(300, 0)[0], network()
    before = torch.get_rng_state()
    expected = bb.assess(model, training, sources()["tensors"], **FEW)
    assert torch.equal(torch.get_rng_state(), before)
    found = bb.assess(network(), training.numpy(), sources()[kind], **FEW)
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
    assert [c.calibration_loss for c in found.contenders] == [c.calibration_loss for c in other.contenders]
    assert found.choice.name == other.choice.name
    assert found.rows["confidence"] == other.rows["confidence"]
    assert found.metrics != other.metrics


def test_networks_without_batch_norm_are_served():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(800, 3)).eval()
    x, y = torch.randn(90, 3, 12, 12), torch.randint(0, 3, (90,))
    found = bb.assess(model, x, (x, y))
    assert list(found.metrics) == [
        "deterministic", "temperature scaling", "4 views", "4 views + temperature", "16 views", "16 views + temperature"
    ]  # fmt: skip
    assert found.novelty is None  # there are too few calibration examples
    assert set(found.rows["novelty"]) == {""}


def test_evaluate_has_the_numbers_of_a_regression():
    regressor = assess_cases.regressor()
    regressor.load_state_dict(assess_cases.trained("regression"))
    train, test = (TensorDataset(*assess_cases.wave(count, seed)) for count, seed in ((300, 0), (240, 1)))
    found = bb.assess(regressor, train, test, batch_size=16, draws=6, method=["mcbn"], task="regression")
    assert any(contender.has_draws for contender in found.contenders)
    for contender in found.contenders:
        evaluated = bb.metrics.evaluate(contender.seen.test, found.case.test.targets())
        assert evaluated == {key: contender.metrics[key] for key in evaluated}


def test_large_targets_keep_their_digits():
    random = torch.Generator().manual_seed(0)
    x = torch.randn(200, 2, generator=random).double()
    y = 1e9 + x.sum(1, keepdim=True) + 0.1 * torch.randn(200, 1, generator=random).double()
    model = nn.Linear(2, 1).double().requires_grad_(False)
    model.weight.fill_(1.0)
    model.bias.fill_(1e9)
    found = bb.assess(model, x, (x, y), draws=12)
    assert found.metrics["deterministic"]["rmse"] == pytest.approx(0.1, rel=0.2)
    told = torch.tensor([float(each) for each in found.rows["target"]], dtype=torch.float64)
    assert (told - y[torch.tensor(found.rows["row"]), 0]).abs().max() < 1e-5


def test_maps_of_a_segmentation(tmp_path):
    arguments = assess_cases.write_case("segmentation", tmp_path)
    given = [*arguments, "--method", "none", "--maps", str(tmp_path / "maps")]
    assert cli.main(["assess", *given, "--no-figures", "--out", str(tmp_path / "out")]) == 0
    rows = assess_cases.rows_in(tmp_path / "out" / "predictions.csv")
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


def test_several_weights_are_compared_as_an_ensemble(tmp_path):
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
    wanted = ["--recommend", "ensemble of 2 + temperature"]
    assert cli.main(["assess", *given, "--no-figures", *wanted, "--out", str(tmp_path / "out")]) == 0
    new = ["--posterior", str(tmp_path / "out" / "posterior.safetensors"), "--input", options["--test"]]
    assert cli.main(["predict", *common, *files[:2], *new, "--out", str(tmp_path / "new.csv")]) == 0
    told, again = assess_cases.rows_in(tmp_path / "out" / "predictions.csv"), assess_cases.rows_in(tmp_path / "new.csv")
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
        assert cli.main(["assess", *given, "--no-figures", "--out", str(tmp_path / "out")]) == 0
        told = assess_cases.rows_in(tmp_path / "out" / "predictions.csv")[0]
        new = ["--posterior", str(tmp_path / "out" / "posterior.safetensors"), "--json"]
        capsys.readouterr()
        assert cli.main(["predict", *common, *new, "--input", str(tmp_path / "test" / told["id"])]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert row["id"] == told["id"].split("/")[1]
    assert row["prediction"] == told["prediction"]
    assert row["confidence"] == pytest.approx(float(told["confidence"]), abs=1e-5)


@pytest.mark.parametrize("count", [1, 2])
def test_one_or_two_calibration_examples_decide_nothing(count):
    """A temperature was recommended that fitted the one example, and most answers were marked."""
    x, y = assess_cases.blobs(200, 1)
    found = bb.assess(network(), assess_cases.blobs(300, 0)[0], (x, y), calibration=(x[-count:], y[-count:]), **FEW)
    assert found.choice.is_network
    assert 0 < sum(found.rows["flag"]) <= 0.11 * 200


def test_classes_that_the_calibration_data_lacks_are_named():
    (x, y), given = assess_cases.blobs(240, 1), assess_cases.blobs(120, 4)
    some = given[1] > 0
    lacking, whole = (given[0][some], given[1][some]), given
    with pytest.warns(bb.BatchbayesWarning, match=r"lacks classes to which \d+ % of the test examples belong"):
        bb.assess(network(), assess_cases.blobs(300, 0)[0], (x, y), calibration=lacking, **FEW)
    with warnings.catch_warnings():
        warnings.simplefilter("error", bb.BatchbayesWarning)
        bb.assess(network(), assess_cases.blobs(300, 0)[0], (x, y), calibration=whole, **FEW)


def test_methods_are_tuned_on_examples_from_all_of_the_calibration_data():
    """Data is often in the order of classes. The examples by which a method is tuned are then of all classes."""
    x, y = assess_cases.blobs(120, 4)
    by_class, seen = y.argsort(stable=True), []
    watched = replace(METHODS["mcbn"], candidates=lambda method, setting: seen.append(setting.calibration) or [])
    held_out = (x[by_class], y[by_class])
    found = bb.assess(network(), assess_cases.blobs(300, 0)[0], assess_cases.blobs(240, 1), calibration=held_out, **FEW)
    compared_candidates(replace(found.case, methods=[watched]), bb.categorical(), tuning_examples=30)
    labels = torch.cat([targets for _, targets in seen[0]])
    assert len(labels) == 30
    assert torch.equal(labels.unique(), y.unique())


@pytest.mark.parametrize("action", ["ignore", "error"])
def test_the_filters_of_the_caller_count(action):
    x, y = assess_cases.blobs(240, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action, bb.BatchbayesWarning)
        if action == "error":
            with pytest.raises(bb.BatchbayesWarning, match="most test examples are training examples too"):
                bb.assess(network(), x, (x, y), **FEW)
        else:
            assert any("most test examples" in note for note in bb.assess(network(), x, (x, y), **FEW).caveats)
    assert not caught


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_what_changes_of_the_data_would_do(task, tmp_path):
    torch.manual_seed(0)
    if task == "classification":
        model, (x, y), train = network(), assess_cases.blobs(240, 1), assess_cases.blobs(300, 0)[0]
    else:
        x, y, train = torch.randn(240, 3), torch.randn(240, 1), torch.randn(300, 3)
        model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).eval()
    found = bb.assess(model, train, (x, y), changes=True, out=tmp_path / "out", **FEW | {"no_figures": False})
    each = found.facts["changes"]["each"]
    assert {change["name"] for change in each} == {"as it is", "noise", "shift", "scale"}
    if task == "classification":
        first, shifted = each[0], next(c for c in each if (c["name"], c["strength"]) == ("shift", 1.0))
        assert shifted["network"] > first["network"] + 0.1
        assert shifted["adapted"] < shifted["network"] - 0.05
    page = (tmp_path / "out" / "report.html").read_text()
    assert "When your data changes" in page
    assert "forward passes of single examples" in page
    assert (tmp_path / "out" / "figures" / "changes.png").exists()


def test_changes_need_batch_norm_and_are_off_by_default():
    x, y = assess_cases.blobs(240, 1)
    plain = nn.Sequential(nn.Linear(x.shape[1], 3)).eval()
    found = bb.assess(plain, x[:100], (x[100:], y[100:]), changes=True, **FEW)
    assert "expected a network with batch normalisation" in found.terms["When your data changes"]
    assert "changes" not in bb.assess(network(), x[:100], (x[100:], y[100:]), **FEW).facts
