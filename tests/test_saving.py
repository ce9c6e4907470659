"""Files: refused by the wrong network, whole or absent, never executed."""

import json
import pickle
import stat

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import batchbayes as bb
from batchbayes._common.atomic import atomic_path


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
    assert len(header["layout_hash"]) == 16


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
