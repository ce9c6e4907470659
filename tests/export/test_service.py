"""The example service: what it answers to requests that are wrong."""

import json
import urllib.request

import pytest
import torch
from helpers.served import answer, served
from torch import nn

import batchbayes as bb

pytest.importorskip("onnxruntime")


class Tokens(nn.Module):
    """A network whose inputs are whole numbers, and whose logits are too large for some of them."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        with torch.no_grad():
            self.embedding.weight[4] = torch.finfo(torch.float32).max

    def forward(self, tokens):
        return self.embedding(tokens).sum(1)


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    path = tmp_path_factory.mktemp("service") / "tokens.onnx"
    bb.export(bb.deterministic(Tokens()), path, torch.zeros(4, 2).long(), bb.categorical())
    with served(path) as found:
        yield found


def test_inputs_that_are_whole_numbers_are_answered(address):
    status, found = answer(address, '{"inputs": [[0, 1], [2, 3]]}')
    assert status == 200
    assert len(found["probs"]) == 2


BAD = {
    "no JSON": "inputs",
    "nested": "[" * 100_000,
    "another key": '{"input": [[0, 1]]}',
    "another shape": '{"inputs": [[0, 1, 2]]}',
    "rows of two lengths": '{"inputs": [[0, 1], [2]]}',
    "text": '{"inputs": [["a", "b"]]}',
    "too large": '{"inputs": [[1e400, 0]]}',
    "an answer that is no number": '{"inputs": [[4, 4]]}',
}


@pytest.mark.parametrize("body", BAD.values(), ids=BAD)
def test_bad_requests_are_answered_with_the_reason(address, body):
    status, found = answer(address, body)
    assert status == 400
    assert found["error"]


COLUMNS = [
    {"name": "length (mm)", "dtype": "real", "low": -3.0, "high": 3.0, "unit": "mm"},
    {"name": "count", "dtype": "integer", "low": -3.0, "high": 3.0, "unit": ""},
]


@pytest.fixture(scope="module")
def by_name(tmp_path_factory):
    """A file that knows its columns and classes."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("service") / "table.onnx"
    notes = {"columns": json.dumps(COLUMNS), "classes": json.dumps(["small", "large"])}
    network = nn.Linear(2, 2)
    bb.export(bb.deterministic(network), path, torch.randn(4, 2), bb.categorical(), notes=notes)
    with served(path) as address:
        yield address, network


def test_records_are_taken_by_name(by_name):
    address, network = by_name
    status, found = answer(address, '{"inputs": [{"count": 2, "length (mm)": -1.5}, {"length (mm)": 0, "count": 9}]}')
    assert status == 200
    rows = torch.tensor([[-1.5, 2.0], [0.0, 9.0]])
    expected = network(rows).softmax(1)
    torch.testing.assert_close(torch.tensor(found["probs"]), expected.detach(), rtol=1e-5, atol=1e-6)
    assert found["prediction"] == [["small", "large"][k] for k in expected.argmax(1)]
    assert found["outside"] == [[], ["count"]]


MIXED = {
    "positions": '{"inputs": [[2, -1.5]]}',
    "a name that is missing": '{"inputs": [{"count": 2}]}',
    "another name": '{"inputs": [{"count": 2, "length": -1.5}]}',
    "a name too much": '{"inputs": [{"count": 2, "length (mm)": -1.5, "age": 3}]}',
    "a text": '{"inputs": [{"count": "2", "length (mm)": -1.5}]}',
    "yes": '{"inputs": [{"count": true, "length (mm)": -1.5}]}',
    "no rows": '{"inputs": []}',
}


@pytest.mark.parametrize("body", MIXED.values(), ids=MIXED)
def test_columns_that_are_mixed_up_are_no_answer(by_name, body):
    status, found = answer(by_name[0], body)
    assert status == 400
    assert "expected" in found["error"]


def test_the_service_says_what_its_numbers_mean(by_name):
    with urllib.request.urlopen(by_name[0].replace("predict", "health"), timeout=10) as found:
        told = json.loads(found.read())
    assert told["columns"] == COLUMNS
    assert told["classes"] == ["small", "large"]
    assert float(told["passes"]) > 0
