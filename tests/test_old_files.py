"""Files that version 0.2.0 wrote still load, and predict what they predicted then."""

from pathlib import Path

import pytest
import torch
from helpers.cases import CASES
from safetensors.torch import load_file

import batchbayes as bb

FOLDER = Path(__file__).parent / "files" / "saved_by_0.2.0"
EXPECTED = load_file(FOLDER / "expected.safetensors")


@pytest.mark.parametrize("key", EXPECTED)
def test_a_file_of_0_2_0_predicts_as_it_did(key: str) -> None:
    _, name, file = key.split("|")
    case = CASES[name]
    network = case.network()
    network.load_state_dict(load_file(FOLDER / f"network-{_plain(name)}.safetensors"))
    loaded, inputs = bb.load(FOLDER / file, network), case.batches(1, 5, seed=4)[0]
    if isinstance(loaded, bb.Novelty):
        found = loaded.p_value(inputs)
    else:
        found = bb.predict(loaded, inputs, bb.categorical(), num_samples=3, keep_draws=True).draws
    torch.testing.assert_close(found, EXPECTED[key], rtol=1e-5, atol=1e-6)


def _plain(name: str) -> str:
    return "-".join("".join(letter if letter.isalnum() or letter == "_" else " " for letter in name).split())
