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

NEEDS_TARGETS = {"target", "accuracy", "error_rate"}
WITHOUT_DRAWS = {"classification": {"std", "mutual_information"}, "regression": {"epistemic_std"},
                 "segmentation": {"mutual_information"}}  # fmt: skip
WINNERS = [(task, rank) for task in WITHOUT_DRAWS for rank in range(5) if task != "regression" or rank % 2 == 0]


@pytest.fixture
def let_win(monkeypatch):
    """Make the first contender of a rank the recommended one."""
    return lambda rank: monkeypatch.setattr(recommend, "_is_as_good", lambda each, best: each.candidate.rank == rank)


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


@pytest.mark.parametrize(("task", "rank"), WINNERS)
def test_predict_says_what_the_assessment_said(task, rank, tmp_path, let_win):
    let_win(rank)
    arguments = assess_cases.write_case(task, tmp_path)
    metrics, rows = assess(tmp_path, arguments)
    position = rank // 2 if task == "regression" else rank  # a regression has no temperatures
    assert metrics["recommended"] == metrics["methods"][position]["name"]
    new = predict(tmp_path, arguments, "test")
    assert len(new) == (18 if task == "segmentation" else 240)
    assert_same_text([row for row in rows if row["source"] == "test"], new)
    if task == "classification":
        assert_same_text([row for row in rows if row["source"] == "ood"], predict(tmp_path, arguments, "ood"))
    is_empty = {key: [row[key] == "" for row in rows] for key in WITHOUT_DRAWS[task]}
    for column in is_empty.values():
        assert all(column) if rank < 2 else not any(column)


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


@pytest.mark.parametrize(("rank", "kind"), [(0, bb.PointPosterior), (1, bb.PointPosterior), (4, bb.BatchNormPosterior)])
def test_the_file_holds_the_winner(rank, kind, tmp_path, let_win):
    let_win(rank)
    metrics, _ = assess(tmp_path, assess_cases.write_case("classification", tmp_path))
    network = assess_cases.classifier()
    network.load_state_dict(assess_cases.trained("classification"))
    posterior = bb.load(tmp_path / "out" / "posterior.safetensors", network)
    assert isinstance(posterior, kind)
    assert rank < 4 or posterior.batch_size == 16
    assert metrics["explorer"]["y"] == ("mutual_information" if rank == 4 else "confidence")
    figures = [figure["caption"] for figure in metrics["figures"] if "out-of-distribution" in figure["file"]]
    assert metrics["recommended"] in figures[0]


def without_batch_norm(tmp_path, *more):
    """Arguments for a network with dropout, without batch norm, and without a batch size."""
    arguments = assess_cases.write_case("classification", tmp_path)
    options = dict(zip(arguments[::2], arguments[1::2], strict=False))
    kept = [word for key in ("--train", "--test", "--ood") for word in (key, options[key])]
    return ["--model", "helpers.assess_cases:with_dropout", *kept, *more, "--draws", "6", "--quiet"]


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_a_network_without_batch_norm(rank, tmp_path, let_win):
    let_win(rank)
    arguments = without_batch_norm(tmp_path, "--method", "mc-dropout")
    metrics, rows = assess(tmp_path, arguments)
    names = [method["name"] for method in metrics["methods"]]
    assert names == ["deterministic", "temperature scaling", "MC dropout", "MC dropout + temperature"]
    assert not any("tuning" in figure["file"] for figure in metrics["figures"])
    assert "batch size" not in (tmp_path / "out" / "report.html").read_text()
    assert metrics["recommended"] == names[rank]
    assert_same_text([row for row in rows if row["source"] == "test"], predict(tmp_path, arguments, "test"))


def test_a_registered_method_is_offered_and_compared(tmp_path, let_win, forgotten_toy, capsys):
    toy_method = import_module("helpers.toy_method")

    with pytest.raises(SystemExit):
        cli.main(["assess", "--help"])
    assert "wobble" in capsys.readouterr().out
    let_win(4)
    arguments = without_batch_norm(tmp_path, "--method", "wobble")
    metrics, rows = assess(tmp_path, arguments)
    assert metrics["recommended"] == "Wobble"
    assert metrics["methods"][-1]["about"] == "a random number is added to each output"
    assert "error_auroc_mi" in metrics["methods"][-1]["metrics"]
    network = assess_cases.with_dropout()
    assert isinstance(bb.load(tmp_path / "out" / "posterior.safetensors", network), toy_method.WobblePosterior)
    posterior = toy_method.wobble(network, None)
    seen = bb.predict(posterior, assess_cases.blobs(240, 1)[0], bb.categorical(), num_samples=6)
    told = [float(row["mutual_information"]) for row in rows if row["source"] == "test"]
    kept = [int(row["row"]) for row in rows if row["source"] == "test"]
    torch.testing.assert_close(torch.tensor(told), seen.mutual_information[kept], atol=1e-6, rtol=1e-5)


def test_a_method_is_imported_by_the_name_of_its_module(tmp_path, let_win, forgotten_toy, capsys):
    let_win(4)
    arguments = without_batch_norm(tmp_path, "--method", "helpers.toy_method:wobble")
    metrics, rows = assess(tmp_path, arguments)
    assert metrics["recommended"] == "Wobble"
    forgotten_toy()
    assert predict(tmp_path, arguments, "test") == 2
    assert "a posterior of a known kind" in capsys.readouterr().err
    new = predict(tmp_path, arguments, "test", "--method", "helpers.toy_method:wobble")
    assert_same_text([row for row in rows if row["source"] == "test"], new)
