"""Files: one flipped bit, a load during a save, and functions of a user that pick an output."""

import threading

import pytest
import torch
from helpers.settled import settled
from torch import nn

import batchbayes as bb
from batchbayes.saving import load_notes

X = torch.randn(400, 3, generator=torch.Generator().manual_seed(0))


def network():
    torch.manual_seed(1)
    return settled(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)), X)


def test_one_flipped_bit_is_noticed(tmp_path):
    model = network()
    for number, made in enumerate((bb.mcbn(model, X, batch_size=32, num_samples=4), bb.novelty(model, X))):
        path = tmp_path / f"{number}.safetensors"
        bb.save(made, path, notes={"unit": "kg"})
        bb.load(path, model)
        content = bytearray(path.read_bytes())
        start = int.from_bytes(content[:8], "little") + 8
        for place in (start, (start + len(content)) // 2, len(content) - 1):
            content[place] ^= 1
            path.write_bytes(content)
            with pytest.raises(bb.BatchbayesError, match=r"checksum|damaged|finite"):
                bb.load(path, model)
            content[place] ^= 1
        changed = bytes(content).replace(b'\\"kg\\"', b'\\"mg\\"')
        assert changed != content
        path.write_bytes(changed)
        with pytest.raises(bb.BatchbayesError, match="checksum"):
            load_notes(path)


def test_a_file_can_be_loaded_while_it_is_saved(tmp_path):
    model, path, stop, wrong = network(), tmp_path / "p.safetensors", threading.Event(), []
    posteriors = [bb.mcbn(model, X, batch_size=32, num_samples=4, seed=seed) for seed in (0, 1)]
    bb.save(posteriors[0], path)

    def save_on():
        number = 0
        while not stop.is_set():
            bb.save(posteriors[number % 2], path)
            number += 1

    saving = threading.Thread(target=save_on)
    saving.start()
    try:
        for _ in range(100):
            found = bb.load(path, model).deviations
            wrong += [found] if not any(torch.equal(found, each.deviations) for each in posteriors) else []
    finally:
        stop.set()
        saving.join()
    assert not wrong


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(3), nn.Linear(3, 2)

    def forward(self, x):
        return {"logits": self.last(self.norm(x)), "features": x}


def pick(outputs):
    return outputs["logits"]


@pytest.mark.parametrize("wrapped", ["alone", "views", "ensemble"])
def test_a_function_that_picks_the_output_is_passed_again(tmp_path, wrapped):
    model, path = settled(TwoHeads(), X), tmp_path / "p.safetensors"
    posterior = bb.mcbn(model, X, batch_size=32, num_samples=4, output=pick)
    posterior = {
        "alone": lambda: posterior,
        "views": lambda: bb.with_views(posterior, bb.TableJitter.of(X, 0.1)),
        "ensemble": lambda: bb.ensemble([posterior, bb.mc_dropout(nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 2)))]),
    }[wrapped]()
    bb.save(posterior, path)
    networks = nn.ModuleList([m.network.module for m in posterior.members]) if wrapped == "ensemble" else model
    with pytest.raises(bb.BatchbayesError, match="output=pick"):
        bb.load(path, networks)
    again = bb.load(path, networks, output=pick)
    first, second = (bb.predict(p, X[:5], bb.categorical(), num_samples=4).probs for p in (posterior, again))
    assert torch.equal(first, second)
    named = tmp_path / "named.safetensors"
    bb.save(bb.mcbn(model, X, batch_size=32, num_samples=4, output="logits"), named)
    with pytest.raises(bb.BatchbayesError, match="leave them out"):
        bb.load(named, model, output=pick)
