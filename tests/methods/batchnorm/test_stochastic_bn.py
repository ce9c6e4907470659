"""Gaussian posteriors against the moments that they must have."""

import pytest
import torch
from helpers.cases import NETWORKS
from torch import nn

import batchbayes as bb
from batchbayes.methods.batchnorm.omega import is_mean
from batchbayes.methods.batchnorm.stochastic_bn import moving_average_moments

CASE = NETWORKS["BatchNorm1d (N, C)"]


def fit(**options):
    return bb.stochastic_bn(CASE.network(torch.float64), CASE.batches(40, dtype=torch.float64), **options)


def drawn(posterior, count=4000):
    return torch.stack([posterior.center + posterior.deviation(3, s) for s in range(count)])


def observed():
    posterior = bb.mcbn(CASE.network(torch.float64), CASE.batches(40, dtype=torch.float64))
    return posterior.center + posterior.deviations


@pytest.mark.parametrize("covariance", ["factorised", "correlated"])
def test_moments_match_those_of_the_batches(covariance):
    """4000 draws know a mean to 0.016 standard deviations, and a variance to 2.2 %."""
    draws, rows = drawn(fit(covariance=covariance)), observed()
    assert ((draws.mean(0) - rows.mean(0)) / rows.std(0)).abs().max() < 5 * 0.016
    assert (draws.var(0) / rows.var(0) - 1).abs().max() < 5 * 0.022


def test_only_the_correlated_one_moves_layers_together():
    rows, together, apart = (
        torch.corrcoef(d.T) for d in (observed(), drawn(fit(covariance="correlated")), drawn(fit()))
    )
    away = ~torch.eye(len(rows), dtype=torch.bool)
    assert (together - rows)[away].abs().max() < 5 * 0.016
    assert apart[away].abs().max() < 5 * 0.016
    assert rows[away].abs().max() > 0.3


def test_the_mean_is_normal_and_the_std_log_normal():
    """Skewness of the drawn statistics: 0 for the mean, 0 for the log std (so a log-normal std)."""
    draws = drawn(fit())
    standard = (draws - draws.mean(0)) / draws.std(0)
    assert standard.pow(3).mean(0).abs().max() < 5 * (6 / 4000) ** 0.5
    assert (standard.pow(4).mean(0) - 3).abs().max() < 5 * (24 / 4000) ** 0.5


def test_the_moving_average_is_the_recursion():
    rows = torch.tensor([[1.0], [3.0]])
    mean, std = moving_average_moments(rows)
    assert float(mean) == pytest.approx(0.9 * 0.1 * 1 + 0.1 * 3)
    assert float(std) ** 2 == pytest.approx(0.9 * 0.1 * 1 + 0.1 * 9 - float(mean) ** 2)


def test_the_moving_average_settles_at_the_moments():
    torch.manual_seed(0)
    rows = torch.randn(20_000, 50).double() * 2 + 5
    mean, std = moving_average_moments(rows)
    assert float(mean.mean()) == pytest.approx(5, abs=0.3)
    assert float(std.square().mean()) == pytest.approx(4 * 18 / 19, rel=0.15)  # low by 5 %: 19 effective batches


def test_bad_options():
    with pytest.raises(bb.BatchbayesError, match="covariance"):
        fit(covariance="diagonal")
    with pytest.raises(bb.BatchbayesError, match="correlated Gaussian"):
        fit(covariance="correlated", estimator="moving-average")


@pytest.mark.parametrize("shape", [(3,), (3, 5, 4)], ids=["vectors", "images"])
def test_the_central_limit_theorem_gives_the_spread_of_real_batches(shape):
    """Against the statistics of 2000 real mini-batches of 50; in images the pixels of an example move together."""
    torch.manual_seed(0)
    layer = nn.BatchNorm1d(3) if len(shape) == 1 else nn.BatchNorm2d(3)
    network = nn.Sequential(layer, nn.Flatten()).double().eval()
    shared = torch.randn(20_000, 3, *[1] * (len(shape) - 1), dtype=torch.float64)
    x = 3 * torch.rand(20_000, *shape, dtype=torch.float64).square() + shared
    rows = bb.mcbn(network, x, batch_size=50, num_samples=2000)
    theorem = bb.clt_bn(network, x, batch_size=50)
    mean = is_mean(rows.sites)
    # a finite population of 400 batches: sampling without replacement loses 1/400 of the variance
    torch.testing.assert_close(theorem.deviations[0][mean], rows.deviations.std(0)[mean], rtol=0.05, atol=0)
    torch.testing.assert_close(theorem.deviations[0][~mean], rows.deviations.std(0)[~mean], rtol=0.1, atol=0)
    torch.testing.assert_close(theorem.center[mean], rows.center[mean], rtol=0, atol=0.02)
    torch.testing.assert_close(theorem.center[~mean], rows.center[~mean], rtol=0, atol=0.05)


def test_the_central_limit_theorem_is_the_published_formula_for_vectors():
    x = torch.randn(500, 3, dtype=torch.float64).exp()
    network = nn.Sequential(nn.BatchNorm1d(3, eps=1e-12)).double().eval()
    theorem = bb.clt_bn(network, list(x.split(37)), batch_size=20)
    variance, fourth = x.var(0, correction=0), (x - x.mean(0)).pow(4).mean(0)
    std_of_std = ((fourth - variance**2) / (4 * variance * 20)).sqrt()
    torch.testing.assert_close(theorem.deviations[0, :3], (variance / 20).sqrt())
    torch.testing.assert_close(theorem.deviations[0, 3:], std_of_std / variance.sqrt())


def test_the_central_limit_theorem_scales_with_the_batch_size():
    network, x = CASE.network(), torch.cat(CASE.batches(20))
    small, large = (bb.clt_bn(network, x, batch_size=m) for m in (8, 32))
    torch.testing.assert_close(small.deviations, 2 * large.deviations)
    moved = small.at_batch_size(32)
    torch.testing.assert_close(moved.deviations, large.deviations)
    torch.testing.assert_close(moved.center, large.center, rtol=0, atol=0.02)
    with pytest.raises(bb.BatchbayesError, match="batch of one"):
        bb.clt_bn(network, x, batch_size=1)


class TimeSteps(nn.Module):
    """Its layer sees every time step of every example as a row."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn(x.reshape(-1, 2)).view_as(x).mean(1)


def test_the_central_limit_theorem_counts_examples_where_a_layer_sees_several_rows_of_each():
    torch.manual_seed(0)
    x = 3 + torch.randn(6000, 1, 2).double() + 0.5 * torch.randn(6000, 4, 2).double()  # steps of an example are alike
    network = TimeSteps().double().eval()
    network.bn.running_mean.fill_(3)
    network.bn.running_var.fill_(1.25)
    theorem = bb.clt_bn(network, x, batch_size=50)
    observed = bb.mcbn(network, x, batch_size=50, num_samples=400)
    assert torch.allclose(theorem.center, observed.center, atol=0.02)
    assert torch.allclose(theorem.omega_var().sqrt(), observed.omega_var().sqrt(), rtol=0.15)


def test_the_central_limit_theorem_reads_a_generator_once():
    network, x = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval(), torch.randn(90, 3)
    whole = bb.clt_bn(network, list(x.split(30)), batch_size=8)
    once = bb.clt_bn(network, (batch for batch in x.split(30)), batch_size=8)
    assert torch.equal(once.center, whole.center)
    assert torch.equal(once.deviations, whole.deviations)


def test_what_the_central_limit_theorem_needs():
    network, x = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), torch.randn(90, 3)
    with pytest.raises(bb.BatchbayesError, match='center="batches" or "running"'):
        bb.clt_bn(network, x, batch_size=8, center="bogus")  # type: ignore[arg-type]
    blind = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False))
    with pytest.raises(bb.BatchbayesError, match="use stochastic_bn"):
        bb.clt_bn(blind, x, batch_size=8)
