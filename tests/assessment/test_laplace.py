"""Last-layer Laplace in an assessment: fitted, compared, and repeated by `predict`."""

import json

import pytest
from helpers import assess_cases

from batchbayes import cli


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_it_is_compared(task, tmp_path):
    arguments = assess_cases.write_case(task, tmp_path)
    out = tmp_path / "out"
    cli.main(["assess", *arguments, "--method", "last-layer-laplace", "--draws", "6", "--quiet", "--out", str(out)])
    metrics = json.loads((out / "metrics.json").read_text())
    names = [method["name"] for method in metrics["methods"]]
    assert "Last-layer Laplace" in names
