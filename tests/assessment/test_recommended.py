"""What is recommended is what is saved: `batchbayes predict` says exactly what the assessment said, whoever wins."""

import csv
import json
import sys
from importlib import import_module

import pytest
import torch
from helpers import assess_cases

import batchbayes as bb
from batchbayes import cli
from batchbayes.assessment import recommend
from batchbayes.methods import METHODS

NEEDS_TARGETS = {"target", "target_2", "accuracy", "error_rate"}
JITTER = ("--views", "jitter:0.05")
WINNERS = [
    ("classification", "deterministic", ("--method", "none")),
    ("classification", "temperature scaling", ("--method", "none")),
    ("classification", "4 views + temperature", ("--method", "none", *JITTER)),
    ("classification", "16 views", ("--method", "none", *JITTER)),
    ("classification", "MCBN, M = 16", ()),
    ("classification", "MCBN tuned + temperature", ("--engine", "linear")),
    ("classification", "MCBN tuned with 8 views + temperature", (*JITTER, "--budget", "8")),
    ("pictures", "4 views", ("--method", "none")),
    ("pictures", "MCBN with 16 views + temperature", ()),
    ("binary", "temperature scaling", ("--method", "none")),
    ("binary", "MCBN with 16 views + temperature", JITTER),
    ("regression", "deterministic", ("--method", "none")),
    ("regression", "16 views", ("--method", "none", *JITTER)),
    ("regression", "MCBN tuned", ()),
    ("regression", "MCBN with 16 views", JITTER),
    ("two outputs", "deterministic", ("--method", "none")),
    ("two outputs", "MCBN tuned", ()),
    ("segmentation", "2 views + temperature", ("--method", "none")),
    ("segmentation", "MCBN tuned", ()),
    ("segmentation", "MCBN with 16 views", ()),
]
DRAWN = {"classification": "mutual_information", "pictures": "mutual_information",
         "binary": "mutual_information", "segmentation": "mutual_information",
         "regression": "epistemic_std", "two outputs": "epistemic_std_2"}  # fmt: skip


@pytest.fixture
def let_win(monkeypatch):
    """Make the simplest contender whose name starts so the recommended one. Figures are left out, to save time."""
    for task, name in (("classification", "class"), ("regression", "value"), ("segmentation", "image")):
        compare = import_module(f"batchbayes.assessment.{task}.compare")
        monkeypatch.setattr(compare, f"{name}_figures", lambda *_: {})
    return lambda name: monkeypatch.setattr(recommend, "_is_as_good", lambda each, best: each.name.startswith(name))


@pytest.fixture
def forgotten_toy():
    """Forget the toy method before and after the test, as if its module had never been imported."""

    def forget():
        METHODS.pop("wobble", None)
        sys.modules.pop("helpers.toy_method", None)

    forget()
    yield forget
    forget()


def rows_in(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def assess(folder, arguments):
    assert cli.main(["assess", *arguments, "--out", str(folder / "out")]) == 0
    return json.loads((folder / "out" / "metrics.json").read_text()), rows_in(folder / "out" / "predictions.csv")


def predict(folder, arguments, source, *more):
    options = dict(zip(arguments[::2], arguments[1::2], strict=False))
    given = ["--model", options["--model"], "--posterior", str(folder / "out" / "posterior.safetensors"), *more]
    given += ["--weights", options["--weights"]] if "--weights" in options else []
    given += ["--target", options["--target"]] if "--target" in options else []
    out = folder / f"predicted-{source}.csv"
    code = cli.main(["predict", *given, "--input", options[f"--{source}"], "--out", str(out), "--quiet"])
    return rows_in(out) if code == 0 else code


def assert_same_text(told, new):
    """The rows of an assessment are among those of the whole file, letter by letter."""
    assert told
    for row in told:
        same = new[int(row["row"])]
        assert list(same) == list(row)
        assert {key: same[key] for key in row.keys() - NEEDS_TARGETS - {"source"}} == {
            key: row[key] for key in row.keys() - NEEDS_TARGETS - {"source"}
        }
        assert same["source"] == "new"
        assert all(same[key] == "" for key in NEEDS_TARGETS & same.keys())


@pytest.mark.parametrize(("task", "name", "options"), WINNERS, ids=[f"{task}: {name}" for task, name, _ in WINNERS])
def test_predict_says_what_the_assessment_said(task, name, options, tmp_path, let_win):
    let_win(name)
    arguments = assess_cases.write_case(task, tmp_path)
    metrics, rows = assess(tmp_path, [*arguments[:-1], *options, "--quiet"])
    assert metrics["recommended"].startswith(name)
    new = predict(tmp_path, arguments, "test")
    assert len(new) == (18 if task == "segmentation" else 240)
    assert_same_text([row for row in rows if row["source"] == "test"], new)
    if "--ood" in arguments:
        assert_same_text([row for row in rows if row["source"] == "ood"], predict(tmp_path, arguments, "ood"))
    is_point = name in ("deterministic", "temperature scaling") or name.startswith(("4 views", "2 views"))
    assert [row[DRAWN[task]] == "" for row in rows] == [is_point] * len(rows)
    assert [row["novelty"] == "" for row in rows] == [task == "segmentation"] * len(rows)  # 32 scenes are too few


def test_novelty_and_uncertainty_say_why_a_row_is_marked(tmp_path, let_win):
    let_win("deterministic")
    arguments = assess_cases.write_case("classification", tmp_path)
    metrics, rows = assess(tmp_path, [*arguments, "--method", "none"])
    threshold, level = metrics["data"]["threshold"], 1 / 90  # 89 calibration examples
    for row in rows:
        uncertain, novel = float(row["entropy"]) > threshold, float(row["novelty"]) <= max(0.01, level + 1e-9)
        words = [word for word, holds in (("uncertain", uncertain), ("novel", novel)) if holds]
        assert row["why"] == " and ".join(words)
        assert row["flag"] == str(int(bool(words)))
    assert {row["why"] for row in rows if row["source"] == "ood"} & {"novel", "uncertain and novel"}
    (tmp_path / "out" / "novelty.safetensors").unlink()
    assert predict(tmp_path, arguments, "test") == 2


def test_what_is_printed_is_what_is_written(tmp_path, capsys):
    arguments = assess_cases.write_case("classification", tmp_path)
    assess(tmp_path, arguments)
    predict(tmp_path, arguments, "test")
    given = ["--model", arguments[1], "--weights", str(tmp_path / "weights.safetensors"), "--quiet"]
    given += ["--posterior", str(tmp_path / "out" / "posterior.safetensors"), "--input", str(tmp_path / "test.npz")]
    capsys.readouterr()
    assert cli.main(["predict", *given]) == 0
    assert capsys.readouterr().out == (tmp_path / "predicted-test.csv").read_text()
    assert cli.main(["predict", *given, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [{key: str(cell) for key, cell in row.items()} for row in rows] == rows_in(tmp_path / "predicted-test.csv")


@pytest.mark.parametrize(
    ("name", "kind"), [("temperature scaling", bb.PointPosterior), ("MCBN, M = 16", bb.BatchNormPosterior)]
)
def test_the_file_holds_the_winner(name, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(recommend, "_is_as_good", lambda each, best: each.name == name)
    metrics, _ = assess(tmp_path, assess_cases.write_case("classification", tmp_path))
    network = assess_cases.classifier()
    network.load_state_dict(assess_cases.trained("classification"))
    posterior = bb.load(tmp_path / "out" / "posterior.safetensors", network)
    assert isinstance(posterior, kind)
    drawn = kind is bb.BatchNormPosterior
    assert not drawn or posterior.batch_size == 16
    assert metrics["explorer"]["y"] == ("mutual_information" if drawn else "confidence")


def without_batch_norm(tmp_path, *more):
    """Arguments for a network with dropout, without batch norm, and without a batch size."""
    arguments = assess_cases.write_case("classification", tmp_path)
    options = dict(zip(arguments[::2], arguments[1::2], strict=False))
    kept = [word for key in ("--train", "--test", "--ood") for word in (key, options[key])]
    return ["--model", "helpers.assess_cases:with_dropout", *kept, *more, "--draws", "6", "--quiet"]


@pytest.mark.parametrize("name", ["temperature scaling", "MC dropout", "MC dropout with 16 views + temperature"])
def test_a_network_without_batch_norm(name, tmp_path, let_win):
    let_win(name)
    arguments = without_batch_norm(tmp_path, *JITTER)
    metrics, rows = assess(tmp_path, arguments)
    names = [method["name"] for method in metrics["methods"]]
    assert names[:2] == ["deterministic", "temperature scaling"]
    assert {"MC dropout", "MC dropout + temperature", "16 views", "MC dropout with 16 views"} < set(names)
    assert not any("tuning" in figure["file"] for figure in metrics["figures"])
    assert metrics["recommended"] == name
    assert "a network with batch normalisation" in metrics["data"]["no_novelty"]
    assert not (tmp_path / "out" / "novelty.safetensors").exists()
    assert_same_text([row for row in rows if row["source"] == "test"], predict(tmp_path, arguments, "test"))


def test_a_registered_method_is_offered_and_compared(tmp_path, let_win, forgotten_toy, capsys):
    toy_method = import_module("helpers.toy_method")

    with pytest.raises(SystemExit):
        cli.main(["assess", "--help"])
    assert "wobble" in capsys.readouterr().out
    let_win("Wobble")
    arguments = without_batch_norm(tmp_path, "--method", "wobble")
    metrics, rows = assess(tmp_path, arguments)
    assert metrics["recommended"] == "Wobble"
    toy = next(method for method in metrics["methods"] if method["name"] == "Wobble")
    assert toy["about"] == "a random number is added to each output"
    assert "error_auroc_mi" in toy["metrics"]
    network = assess_cases.with_dropout()
    assert isinstance(bb.load(tmp_path / "out" / "posterior.safetensors", network), toy_method.WobblePosterior)
    posterior = toy_method.wobble(network, None)
    seen = bb.predict(posterior, assess_cases.blobs(240, 1)[0], bb.categorical(), num_samples=6)
    told = [float(row["mutual_information"]) for row in rows if row["source"] == "test"]
    kept = [int(row["row"]) for row in rows if row["source"] == "test"]
    torch.testing.assert_close(torch.tensor(told), seen.mutual_information[kept], atol=1e-6, rtol=1e-5)


def test_a_method_is_imported_by_the_name_of_its_module(tmp_path, let_win, forgotten_toy, capsys):
    let_win("Wobble")
    arguments = without_batch_norm(tmp_path, "--method", "helpers.toy_method:wobble")
    metrics, rows = assess(tmp_path, arguments)
    assert metrics["recommended"] == "Wobble"
    forgotten_toy()
    assert predict(tmp_path, arguments, "test") == 2
    assert "a posterior of a known kind" in capsys.readouterr().err
    new = predict(tmp_path, arguments, "test", "--method", "helpers.toy_method:wobble")
    assert_same_text([row for row in rows if row["source"] == "test"], new)
