"""Kolmogorov-Smirnov tests against scipy, the null distributions against simulations, the map against corrcoef."""

import math

import numpy as np
import pytest
import torch
from batchbayes_papers.mcbn.normality_tests import (
    correlation_map,
    kolmogorov_p_value,
    ks_distance,
    lilliefors_p_value,
    marginals,
    normality,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn
from torch.distributions import Normal

import batchbayes as bb
from batchbayes.models import MLP


def layer(channels, examples=4000, dtype=torch.float64):
    """A network that is little more than one batch-norm layer, and inputs that are far from Gaussian."""
    network = nn.Sequential(nn.BatchNorm1d(channels), nn.Linear(channels, 1)).to(dtype)
    return network, torch.rand(examples, channels, dtype=dtype).pow(6) * 3 - 1


def rows_of(posterior):
    return (posterior.center + posterior.deviations).double().numpy()


@settings(max_examples=60, deadline=None)
@given(st.integers(8, 800), st.floats(0.2, 3.0))
def test_p_values_are_close_to_the_exact_ones(count, scaled):
    distance = scaled / math.sqrt(count)
    got = float(kolmogorov_p_value(torch.tensor(distance), count))
    assert got == pytest.approx(stats.kstwo.sf(distance, count), abs=0.03 / count)


@pytest.mark.parametrize("scaled", [0.1, 0.4, 0.99, 1.01, 1.5, 3.0])
def test_p_values_of_many_values_are_those_of_the_limit(scaled):
    count = 10**14
    got = float(kolmogorov_p_value(torch.tensor(scaled / math.sqrt(count), dtype=torch.float64), count))
    assert got == pytest.approx(stats.kstwobign.sf(scaled), rel=1e-5, abs=1e-12)


def test_distances_are_those_of_scipy_column_by_column():
    values = torch.randn(37, 5, dtype=torch.float64) * 2 + 1
    means, stds = torch.linspace(0, 2, 5, dtype=torch.float64), torch.linspace(1, 3, 5, dtype=torch.float64)
    expected = [
        stats.ks_1samp(v, stats.norm(m, s).cdf).statistic for v, m, s in zip(values.T, means, stds, strict=True)
    ]
    np.testing.assert_allclose(ks_distance(values, Normal(means, stds)), expected, rtol=1e-12)


def test_lilliefors_rejects_as_often_as_it_says_and_the_usual_p_value_hardly_ever():
    """4000 Gaussian samples: 10 % within four standard errors, of the count and of the simulated null together."""
    values = torch.randn(60, 4000, dtype=torch.float64) * 3 - 5
    distance = ks_distance(values, Normal(values.mean(0), values.std(0)))
    rejected = float((lilliefors_p_value(distance, 60) < 0.1).double().mean())
    assert rejected == pytest.approx(0.1, abs=4 * math.sqrt(0.09 / 4000 + 0.09 / 5000))
    assert float((kolmogorov_p_value(distance, 60) < 0.1).double().mean()) < 0.005


@pytest.mark.parametrize(("count", "five_percent"), [(20, 0.192), (50, 0.1246), (400, 0.895 / 20.03)])
def test_lilliefors_has_the_published_critical_values(count, five_percent):
    """Tables by Molin and Abdi (1998), and their formula for large samples."""
    assert float(lilliefors_p_value(torch.tensor(five_percent), count)) == pytest.approx(0.05, abs=0.015)


@pytest.mark.parametrize("center", ["batches", "running"])
def test_every_unit_is_tested_as_scipy_would(center):
    network, x = layer(3)
    posterior = bb.mcbn(network, x, batch_size=16, num_samples=200, center=center)
    means, stds = normality(posterior)
    assert (means.site, means.statistic, stds.site, stds.statistic) == ("0", "mean", "0", "std")
    rows = rows_of(posterior)
    for test, values in ((means, rows[:, :3]), (stds, np.exp(rows[:, 3:]))):
        for unit in range(3):
            column = values[:, unit]
            expected = stats.ks_1samp(column, stats.norm(column.mean(), column.std(ddof=1)).cdf)
            assert float(test.distance[unit]) == pytest.approx(expected.statistic, rel=1e-9)
            assert float(test.p_value[unit]) == pytest.approx(expected.pvalue, abs=0.03 / 200)
        assert test.lilliefors_p_value is not None
        assert (test.lilliefors_p_value < test.p_value).all()


def test_large_batches_pass_and_small_ones_do_not():
    """Inputs with heavy tails; 50 rows could not tell, 400 can."""
    network, x = layer(20)
    for size, few in ((4, False), (512, True)):
        for test in normality(bb.mcbn(network, x, batch_size=size, num_samples=400)):
            assert test.lilliefors_p_value is not None
            rejected = float((test.lilliefors_p_value < 0.05).double().mean())
            assert rejected < 0.25 if few else rejected > 0.75


def test_against_another_posterior_means_are_normal_and_stds_log_normal():
    network, x = layer(2)
    posterior = bb.mcbn(network, x, batch_size=16, num_samples=100)
    other = bb.clt_bn(network, x, batch_size=16)
    rows, center, std = rows_of(posterior), other.center.numpy(), other.omega_var().sqrt().numpy()
    means, stds = normality(posterior, other)
    assert means.lilliefors_p_value is stds.lilliefors_p_value is None
    for unit in range(2):
        expected = stats.ks_1samp(rows[:, unit], stats.norm(center[unit], std[unit]).cdf)
        assert float(means.distance[unit]) == pytest.approx(expected.statistic, rel=1e-9)
        claim = stats.lognorm(std[2 + unit], scale=math.exp(center[2 + unit]))
        expected = stats.ks_1samp(np.exp(rows[:, 2 + unit]), claim.cdf)
        assert float(stds.distance[unit]) == pytest.approx(expected.statistic, rel=1e-9)


def test_the_central_limit_theorem_holds_in_the_first_layer():
    network, x = layer(30, examples=50_000)
    posterior = bb.mcbn(network, x, batch_size=200, num_samples=100)
    means = normality(posterior, bb.clt_bn(network, x, batch_size=200))[0]
    assert float((means.p_value < 0.05).double().mean()) < 0.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_unit_that_never_varies_is_nan_and_the_others_are_not(dtype):
    network, x = layer(3, dtype=dtype)
    x[:, 1] = 0.7
    posterior = bb.mcbn(network, x, batch_size=16)
    for test in normality(posterior):
        assert test.lilliefors_p_value is not None
        for values in (test.distance, test.p_value, test.lilliefors_p_value):
            assert values.isnan().tolist() == [False, True, False]
    assert correlation_map(posterior).values.isfinite().all()


def test_marginals_are_one_unit_of_each_site():
    network, x = MLP(2, [5, 3], 1).double(), torch.randn(600, 2, dtype=torch.float64)
    posterior = bb.mcbn(network, x, batch_size=20, num_samples=50)
    shown, rows, tests = marginals(posterior, channel=4), rows_of(posterior), normality(posterior)
    assert [(m.site, m.channel, m.statistic) for m in shown] == [
        ("hidden.0.norm", 4, "mean"),
        ("hidden.0.norm", 4, "std"),
        ("hidden.1.norm", 2, "mean"),
        ("hidden.1.norm", 2, "std"),
    ]
    columns = rows[:, 4], np.exp(rows[:, 9]), rows[:, 12], np.exp(rows[:, 15])
    for marginal, column, test in zip(shown, columns, tests, strict=True):
        np.testing.assert_allclose(marginal.observed, column)
        claim = marginal.claims["fitted Gaussian"]
        assert float(claim.mean) == pytest.approx(column.mean())
        assert float(claim.stddev) == pytest.approx(column.std(ddof=1))
        assert marginal.distances["fitted Gaussian"] == pytest.approx(float(test.distance[marginal.channel]))
        assert test.lilliefors_p_value is not None
        expected = float(test.lilliefors_p_value[marginal.channel])
        assert marginal.p_values["fitted Gaussian"] == pytest.approx(expected)


def test_marginals_of_claims_carry_their_distances():
    network, x = MLP(2, [5, 3], 1).double(), torch.randn(600, 2, dtype=torch.float64)
    posterior = bb.mcbn(network, x, batch_size=20, num_samples=50)
    claims = {"SBN": bb.stochastic_bn(network, x, batch_size=20, seed=1), "CLT": bb.clt_bn(network, x, batch_size=20)}
    shown = marginals(posterior, claims, channel=1)
    for name, claim in claims.items():
        for marginal, test in zip(shown, normality(posterior, claim), strict=True):
            assert marginal.distances[name] == pytest.approx(float(test.distance[1]), rel=1e-9)
            assert marginal.p_values[name] == pytest.approx(float(test.p_value[1]), rel=1e-9)


def test_correlations_are_means_over_pairs():
    network, x = MLP(2, [4, 3], 1).double(), torch.randn(600, 2, dtype=torch.float64)
    posterior = bb.mcbn(network, x, batch_size=20, num_samples=50)
    shown, dense = correlation_map(posterior), np.abs(np.corrcoef(rows_of(posterior).T))
    assert shown.sites == ("hidden.0.norm", "hidden.1.norm")
    within = [block[~np.eye(len(block), dtype=bool)].mean() for block in (dense[:8, :8], dense[8:, 8:])]
    across = dense[:8, 8:].mean()
    np.testing.assert_allclose(shown.values, [[within[0], across], [across, within[1]]], rtol=1e-9)


@pytest.mark.parametrize("count", [8, 64])
def test_the_floor_is_the_mean_correlation_of_independent_values(count):
    network, x = layer(2)
    floor = correlation_map(bb.mcbn(network, x, batch_size=16, num_samples=count)).floor
    values = torch.randn(count, 400, dtype=torch.float64)
    dense = np.abs(np.corrcoef(values.T))[np.triu_indices(400, 1)]
    assert floor == pytest.approx(dense.mean(), abs=4 * dense.std() / math.sqrt(400))  # pairs share columns


@pytest.mark.parametrize("look", [normality, marginals, correlation_map])
def test_posteriors_without_rows_are_refused(look):
    network, x = layer(2)
    for posterior in (bb.clt_bn(network, x, batch_size=16), bb.mcbn(network, x, batch_size=16, num_samples=7)):
        with pytest.raises(bb.BatchbayesError, match="8 mini-batches or more"):
            look(posterior)


def test_posteriors_that_cannot_be_compared_are_refused():
    network, x = layer(2)
    posterior = bb.mcbn(network, x, batch_size=16)
    with pytest.raises(bb.BatchbayesError, match="at batch size 16"):
        normality(posterior, bb.clt_bn(network, x, batch_size=32))
    normality(posterior, bb.clt_bn(network, x, batch_size=32).at_batch_size(16))
    other = nn.Sequential(nn.Identity(), nn.BatchNorm1d(2)).double()
    with pytest.raises(bb.BatchbayesError, match="same 1 sites"):
        marginals(posterior, {"other": bb.clt_bn(other, x, batch_size=16)})
