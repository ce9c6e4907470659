"""Files that versions 0.2.0 and 0.3.0 wrote still load, and predict what they predicted then."""

from pathlib import Path

import pytest
import torch
from helpers.cases import CASES
from safetensors.torch import load_file
from torch import Tensor

import batchbayes as bb

FILES = Path(__file__).parent / "files"
EXPECTED = {
    (version, key): expected
    for version in ("0.2.0", "0.3.0")
    for key, expected in load_file(FILES / f"saved_by_{version}" / "expected.safetensors").items()
}


@pytest.mark.parametrize(("version", "key"), EXPECTED)
def test_an_old_file_predicts_as_it_did(version: str, key: str) -> None:
    _, name, file = key.split("|")
    case, folder = CASES[name], FILES / f"saved_by_{version}"
    network = case.network()
    network.load_state_dict(load_file(folder / f"network-{_plain(name)}.safetensors"))
    found = answers(bb.load(folder / file, network), name)
    torch.testing.assert_close(found, EXPECTED[version, key], rtol=1e-5, atol=1e-6)


def answers(loaded: object, name: str) -> Tensor:
    """What a posterior or a detector says of some inputs."""
    inputs = CASES[name].batches(1, 5, seed=4)[0]
    if isinstance(loaded, bb.Novelty):
        return loaded.p_value(inputs)
    if isinstance(loaded, bb.Monitor):
        watch = loaded.update(inputs)
        return torch.tensor([watch.num_examples, watch.evidence, watch.alarm, *watch.alarms], dtype=torch.float64)
    if isinstance(loaded, bb.Drift):
        adapted = loaded.adapt(3 * torch.cat(CASES[name].batches(4, 16, seed=4)) + 1)
        with torch.no_grad():
            return adapted.function(adapted.center)(inputs)  # draws are wider or narrower by the version
    return bb.predict(loaded, inputs, bb.categorical(), num_samples=3, keep_draws=True).draws


def _plain(name: str) -> str:
    return "-".join("".join(letter if letter.isalnum() or letter == "_" else " " for letter in name).split())
