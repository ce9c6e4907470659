"""Whether the linear engine is given up early, in a handful of passes, where it cannot hold."""

import pytest
import torch
from torch import nn

import batchbayes as bb
from batchbayes.engines.check import _EXAMPLES, MOST_CURVED, known_curvature
from batchbayes.engines.choose import choose_engine

STREAM = torch.Generator().manual_seed(0)
X = torch.randn(400, 4, dtype=torch.float64, generator=STREAM)


class Counted(nn.Module):
    """Batch norm, and then a power of a few sums: the larger the power, the less linear."""

    passes = 0

    def __init__(self, power, outputs=30):
        super().__init__()
        torch.manual_seed(0)
        self.power, self.norm, self.last = power, nn.BatchNorm1d(4, momentum=1.0), nn.Linear(4, outputs)
        self.double()(X)
        self.norm.momentum = 0.1
        self.eval()

    def forward(self, x):
        Counted.passes += 1
        return self.last(self.norm(x).abs() ** self.power)


@pytest.mark.parametrize("contrasts", [False, True])
def test_a_curved_network_is_refused_in_eight_passes(contrasts):
    posterior = bb.mcbn(Counted(6.0), X, batch_size=3, num_samples=32)
    before = Counted.passes
    engine = choose_engine(posterior, X[:50], "auto", 64, 0, contrasts=contrasts)
    assert "the same for opposite draws" in engine.name
    assert Counted.passes - before <= 8
    choose_engine(posterior, X[:50], "auto", 64, 0, contrasts=contrasts)
    assert Counted.passes - before <= 8  # it is remembered


@torch.no_grad()
def test_the_share_equals_a_loop():
    posterior = bb.mcbn(Counted(2.0, 3), X, batch_size=16, num_samples=8)
    found = known_curvature(posterior, X[:16], contrasts=False)
    assert 0 < found < MOST_CURVED
    examples, even, odd = _EXAMPLES[posterior][0], 0.0, 0.0  # those of training, which the fit has kept
    assert len(examples) == 16
    for index in range(3):
        deviation = posterior.deviation(0, index)
        ahead, behind = (posterior.function(posterior.center + side * deviation)(examples) for side in (1, -1))
        even += float((ahead + behind - 2 * posterior.function(posterior.center)(examples)).square().sum())
        odd += float((ahead - behind).square().sum())
    assert found == pytest.approx(even / (even + odd), rel=1e-9)


def test_a_linear_network_is_not_refused():
    network = nn.Sequential(nn.BatchNorm1d(4, momentum=1.0), nn.Linear(4, 3)).double()
    network(X)
    posterior = bb.mcbn(network.eval(), X, batch_size=100, num_samples=8)
    assert known_curvature(posterior, X[:16], contrasts=True) < 0.01
    assert bb.predict(posterior, X[:50], bb.categorical(), engine="auto").engine.startswith("linear")
