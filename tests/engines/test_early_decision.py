"""What the choice between engines costs: a few passes of at most 64 examples in the fit, and none afterwards."""

import pytest
import torch
from torch import nn

import batchbayes as bb
from batchbayes.engines.check import CHECK_DRAWS, OF_GROUP, STEP, Linearity, measure_linearity
from batchbayes.engines.choose import choose_engine
from batchbayes.metrics import rank_correlation

STREAM = torch.Generator().manual_seed(0)
X = torch.randn(400, 4, dtype=torch.float64, generator=STREAM)


class Counted(nn.Module):
    """Batch norm, and then a power of a few sums: the larger the power, the less linear."""

    examples = 0

    def __init__(self, power, outputs=30):
        super().__init__()
        torch.manual_seed(0)
        self.power, self.norm, self.last = power, nn.BatchNorm1d(4, momentum=1.0), nn.Linear(4, outputs)
        self.double()(X)
        self.norm.momentum = 0.1
        self.eval()

    def forward(self, x):
        Counted.examples += len(x)
        return self.last(self.norm(x).abs() ** self.power)


@pytest.mark.parametrize("contrasts", [False, True])
@pytest.mark.parametrize(
    ("power", "outputs", "batch_size"), [(6.0, 30, 16), (6.0, 3, 64), (1.0, 3, 300), (1.0, 1, 300)]
)
def test_the_fit_finds_out_in_eight_passes_which_engine_is_to_be_taken(contrasts, power, outputs, batch_size):
    network = Counted(power, outputs)
    before = Counted.examples
    posterior = bb.mcbn(network, X, batch_size=batch_size, num_samples=32)
    of_fit = Counted.examples - before
    assert of_fit <= 32 * batch_size + 2 * 256 + 8 * 64  # its rows, two looks at the network, and the facts
    engine = choose_engine(posterior, X, "auto", 64, 0, contrasts=contrasts)
    assert engine.name.startswith("linear" if power == 1 else "sample: not linear enough")
    assert Counted.examples - before - of_fit <= 1  # how many outputs there are


def test_maps_are_drawn_exactly_without_a_check():
    network = nn.Sequential(nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 1))
    images = torch.randn(40, 1, 20, 20)
    posterior = bb.mcbn(network, images, batch_size=20)
    seen = []
    handle = network[0].register_forward_hook(lambda module, given, found: seen.append(len(given[0])))
    engine = choose_engine(posterior, images, "auto", 64, 0, contrasts=True)
    handle.remove()
    assert engine.name.startswith("sample: of maps")
    assert sum(seen) <= 1


@torch.no_grad()
def test_what_is_measured_equals_a_loop():
    posterior = bb.mcbn(Counted(2.0, 3), X, batch_size=16, num_samples=16)
    found = measure_linearity(posterior, X[:16])
    middle = posterior.function(posterior.center)(X[:16])
    exact, linear = torch.empty(2, CHECK_DRAWS, 16, 3, dtype=torch.float64)
    for example in range(16):
        for draw in range(CHECK_DRAWS):
            move = posterior.deviation(0, (example % (16 // OF_GROUP)) * CHECK_DRAWS + draw)
            whole, part = (posterior.function(posterior.center + p * move)(X[:16])[example] for p in (1, STEP))
            exact[draw, example] = whole
            linear[draw, example] = middle[example] + (part - middle[example]) / STEP
    variances = exact.var(0).mean(-1), linear.var(0).mean(-1)
    share = float((exact - linear).square().sum() / (exact - middle).square().sum())
    off = (variances[1] - variances[0]).square().mean().sqrt() / variances[0].square().mean().sqrt()
    assert found.rank_correlation == pytest.approx(rank_correlation(*variances))
    assert found.scale_ratio == pytest.approx(float(variances[1].mean() / variances[0].mean()), rel=1e-9)
    assert found.error == pytest.approx(float(off), rel=1e-9)
    assert 0 <= found.unexplained - share < 0.02  # by how much derivatives differ from slopes over an eighth


def test_the_error_says_how_many_exact_draws_are_as_near():
    """The variance of n normal numbers is off by a share of sqrt(2 / n)."""
    draws = torch.randn(20, 4000, generator=torch.Generator().manual_seed(0))
    error = float((draws.var(0) - 1).square().mean().sqrt())
    assert Linearity(1.0, 1.0, 0.0, error=error).worth == pytest.approx(20, rel=0.15)
