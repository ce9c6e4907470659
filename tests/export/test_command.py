"""`batchbayes export` from the folder of an assessment: the file says what `batchbayes predict` says."""

import csv
import json

import pytest
import torch
from helpers import assess_cases

from batchbayes import cli

NAMES = {
    "classification": {"confidence": lambda f: f["probs"].amax(1), "entropy": lambda f: f["entropy"]},
    "regression": {
        "mean": lambda f: f["pred_mean"][:, 0],
        "std": lambda f: f["pred_std"][:, 0],
        "lower": lambda f: f["lower"][:, 0],
        "upper": lambda f: f["upper"][:, 0],
    },
}
"""Columns of `batchbayes predict`, and how they follow from the outputs of the file."""
NAMES["binary"] = NAMES["classification"]  # a network with one logit


def assert_names(task, notes):
    """The file knows what its numbers mean."""
    told = {name: json.loads(notes[name]) for name in ("columns", "targets", "classes") if name in notes}
    if task == "regression":
        assert [column["name"] for column in told["columns"]] == ["left", "right"]
        assert all(-2 <= column["low"] < -1.9 and 1.9 < column["high"] <= 2 for column in told["columns"])
        assert told["targets"] == [{"name": "height", "unit": "cm"}]
    else:
        assert told == ({"classes": list(assess_cases.CLASS_NAMES)} if task == "classification" else {})


@pytest.mark.parametrize("task", NAMES)
def test_a_file_says_what_predict_says(task, tmp_path, capsys):
    arguments = assess_cases.write_case(task, tmp_path)
    standardise = ["--mean", "0.1,0.2", "--std", "0.9,1.1"]
    unit = ["--unit", "cm"] if task == "regression" else []
    assert cli.main(["assess", *arguments, *standardise, *unit, "--out", str(tmp_path / "report")]) == 0
    given = dict(zip(arguments[::2], arguments[1::2], strict=False))
    common = ["--model", given["--model"], "--weights", given["--weights"], "--input", given["--test"], "--draws", "3"]
    common += ["--posterior", str(tmp_path / "report" / "posterior.safetensors")]
    common += ["--target", given["--target"]] if "--target" in given else []
    table, file = tmp_path / "rows.csv", tmp_path / "network.pt2"
    assert cli.main(["predict", *common, "--out", str(table), "--quiet"]) == 0
    capsys.readouterr()
    assert cli.main(["export", *common, "--out", str(file), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["largest_difference"] < 1e-5
    with table.open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    raw = {"classification": assess_cases.blobs, "regression": assess_cases.wave, "binary": assess_cases.halves}[task](
        240, 1
    )[0]
    texts = {"batchbayes.json": ""}
    found = torch.export.load(file, extra_files=texts).module()(raw)
    assert_names(task, json.loads(texts["batchbayes.json"]))
    for column, read in NAMES[task].items():
        expected = torch.tensor([float(row[column]) for row in rows])
        torch.testing.assert_close(read(found), expected, rtol=1e-5, atol=1e-5)
    assert found["flag"].tolist() == [row["flag"] == "1" for row in rows]


def test_a_file_that_exists_is_kept(tmp_path, capsys):
    (tmp_path / "a.onnx").write_text("mine")
    given = ["--model", "helpers.assess_cases:regressor", "--posterior", "none", "--input", "none.csv"]
    assert cli.main(["export", *given, "--out", str(tmp_path / "a.onnx")]) == 2
    assert "does not exist yet" in capsys.readouterr().err
    assert (tmp_path / "a.onnx").read_text() == "mine"
