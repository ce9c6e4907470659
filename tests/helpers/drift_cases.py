"""A small classifier whose data can drift."""

import pytest
import torch
from torch import nn

import batchbayes as bb
from batchbayes._common.rng import generator

CENTRES = 2.5 * torch.eye(4)


def blobs(count, seed, mix=(0.25, 0.25, 0.25, 0.25)):
    """Four classes around the corners of a simplex."""
    random = generator(seed, "blobs")
    labels = torch.multinomial(torch.tensor(mix), count, replacement=True, generator=random)
    return CENTRES[labels] + 0.8 * torch.randn(count, 4, generator=random), labels


@pytest.fixture(scope="module")
def classifier():
    """A trained classifier of four classes, and its drift."""
    x, y = blobs(2000, 0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = nn.Sequential(
            nn.Linear(4, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(),
            nn.Linear(32, 4),
        )  # fmt: skip
        optimiser = torch.optim.Adam(network.parameters(), 1e-2)
        for _ in range(3):
            for rows in torch.randperm(len(x)).split(64):
                optimiser.zero_grad()
                nn.functional.cross_entropy(network(x[rows]), y[rows]).backward()
                optimiser.step()
    network.eval().requires_grad_(False)
    return network, bb.drift(network, x, calibration=[blobs(1500, 1)])
