import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from batchbayes import BatchbayesError
from batchbayes.report.read.factories import read_weights

NETWORK = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
WEIGHTS = NETWORK.state_dict()


def prefixed(prefix):
    return {f"{prefix}{key}": tensor for key, tensor in WEIGHTS.items()}


READABLE = {
    "plain": WEIGHTS,
    "state_dict": {"epoch": 3, "state_dict": WEIGHTS, "optimizer": {"lr": 0.1}},
    "model": {"model": WEIGHTS, "args": ["a", 1]},
    "model_state_dict": {"model_state_dict": WEIGHTS, "loss": 0.5},
    "parallel": prefixed("module."),
    "compiled and parallel": {"state_dict": prefixed("_orig_mod.module.")},
}


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".ckpt", ".PT"])
@pytest.mark.parametrize("name", READABLE)
def test_weights_are_found_in_a_checkpoint(tmp_path, name, suffix):
    torch.save(READABLE[name], tmp_path / f"w{suffix}")
    read = read_weights(tmp_path / f"w{suffix}")
    assert list(read) == list(WEIGHTS)
    assert all(torch.equal(read[key], WEIGHTS[key]) for key in WEIGHTS)


@pytest.mark.parametrize("prefix", ["", "module."])
def test_safetensors(tmp_path, prefix):
    save_file(prefixed(prefix), tmp_path / "w.safetensors")
    read = read_weights(tmp_path / "w.safetensors")
    assert read.keys() == WEIGHTS.keys()
    assert all(torch.equal(read[key], WEIGHTS[key]) for key in WEIGHTS)


def test_a_prefix_that_only_some_have_is_a_name(tmp_path):
    mixed = {"module.a": torch.zeros(1), "b": torch.ones(1)}
    torch.save(mixed, tmp_path / "w.pt")
    assert read_weights(tmp_path / "w.pt").keys() == mixed.keys()


class Trap:
    ran = False

    def __reduce__(self):
        return setattr, (Trap, "ran", True)


REFUSED = {
    "a whole network": (NETWORK, "cannot be read without running code in it"),
    "code": ({"state_dict": WEIGHTS, "extra": Trap()}, "cannot be read without running code in it"),
    "a list": ([1, 2], "got a list"),
    "a tensor": (torch.zeros(2), "got a Tensor"),
    "no tensors": ({}, "got no tensors"),
    "an empty state dict": ({"state_dict": {}}, "got no tensors"),
    "two state dicts": ({"state_dict": WEIGHTS, "model": WEIGHTS}, "more than one key: state_dict, model"),
    "something else inside": ({**WEIGHTS, "epoch": 3}, "got 'epoch', which is no tensor"),
    "numbers as names": ({1: torch.zeros(2)}, "got 1, which is no tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_content_is_refused(tmp_path, name):
    content, message = REFUSED[name]
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(BatchbayesError, match=rf"a state dict, names and tensors, in w\.pt; .*{message}"):
        read_weights(tmp_path / "w.pt")
    assert not Trap.ran


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
@pytest.mark.parametrize("share", [0, 0.2, 0.9])
def test_damaged_files_are_refused(tmp_path, name, share):
    torch.save(WEIGHTS, tmp_path / "w.pt")
    save_file(WEIGHTS, tmp_path / "w.safetensors")
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: int(share * len(content))])
    with pytest.raises(BatchbayesError, match=rf"in {name}; got a file that cannot be read"):
        read_weights(tmp_path / name)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_network_is_refused(tmp_path):
    torch.jit.save(torch.jit.script(NETWORK), tmp_path / "w.pt")
    with pytest.raises(BatchbayesError, match=r"w\.pt; got a file that cannot be read"):
        read_weights(tmp_path / "w.pt")


def test_other_files(tmp_path):
    with pytest.raises(BatchbayesError, match="nothing at"):
        read_weights(tmp_path / "w.pt")
    (tmp_path / "w.onnx").write_bytes(b"")
    with pytest.raises(BatchbayesError, match=r"in w\.onnx; got a file of another kind"):
        read_weights(tmp_path / "w.onnx")
