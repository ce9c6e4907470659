"""The name of the engine tells whether exact draws were made of some inputs."""

import torch
from helpers.settled import X, settled
from torch import nn

import batchbayes as bb
from batchbayes.engines.choose import EXACT_TOO


class Curved(nn.Module):
    """Linear in its batch statistics, but for inputs that are far from the training data."""

    def __init__(self):
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(3), nn.Linear(3, 2)

    def forward(self, x):
        h = self.norm(x)
        return self.last(h + (h.abs() > 20) * 30 * torch.sin(8 * h))


def test_the_name_says_that_exact_draws_were_made_of_some_chunks():
    torch.manual_seed(0)
    posterior = bb.mcbn(settled(Curved()), X, batch_size=100)
    easy, hard = X[:40], X[:40] * 40

    def engines(data):
        found = bb.predict_stream(posterior, data, [bb.categorical()], engine="auto", chunk_size=40)
        return [predicted.predictives[0].engine for predicted in found]

    assert all(name.startswith("linear") and EXACT_TOO not in name for name in engines([easy, easy]))
    names = engines([easy, hard, hard])
    assert [EXACT_TOO in name for name in names] == [False, True, True]
    assert names[-1].count(EXACT_TOO) == 1
    whole = bb.predict(posterior, torch.cat([easy, hard]), bb.categorical(), engine="auto", chunk_size=40)
    assert whole.engine == names[1]
