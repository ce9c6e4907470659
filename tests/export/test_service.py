"""The example service: what it answers to requests that are wrong."""

import json
import runpy
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from torch import nn

import batchbayes as bb

pytest.importorskip("onnxruntime")
SERVICE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "service.py"))


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
    server = SERVICE["serve"](path, 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/predict"
    server.shutdown()
    thread.join()
    server.server_close()


def answer(address, body):
    try:
        with urllib.request.urlopen(urllib.request.Request(address, body.encode()), timeout=10) as found:
            return found.status, json.loads(found.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


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
