"""Divergences from the prior that weight decay implies, against numerical integrals."""

import math

import numpy as np
import pytest
import torch
from helpers.cases import NETWORKS
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats
from torch import nn

import batchbayes as bb
from batchbayes.methods.batchnorm.prior import (
    flat_kl,
    gaussian_kl,
    implied_prior_var,
    kl_by_site,
    kl_to_implied_prior,
    log_normal_kl,
)

OPTIONS = {"num_examples": 500, "weight_decay": 3e-3, "precision": 2.0}


def double(value):
    return torch.tensor(value, dtype=torch.float64)


def integral(q, log_p):
    """KL(q || p) by the trapezoidal rule, over all but 1e-14 of q on either side."""
    x = np.linspace(q.ppf(1e-14), q.isf(1e-14), 20_001)
    return integrate.trapezoid(q.pdf(x) * (q.logpdf(x) - log_p(x)), x)


@settings(max_examples=25, deadline=None)
@given(st.floats(-2, 2), st.floats(0.1, 3), st.floats(-2, 2), st.floats(0.3, 3))
def test_gaussian_divergence_is_the_integral(mean, std, prior_mean, prior_std):
    expected = integral(stats.norm(mean, std), stats.norm(prior_mean, prior_std).logpdf)
    got = gaussian_kl(double(mean), double(std**2), prior_mean, prior_std**2)
    assert float(got) == pytest.approx(expected, rel=1e-5, abs=1e-5)


@settings(max_examples=25, deadline=None)
@given(st.floats(-2, 1), st.floats(0.05, 0.5), st.floats(0.3, 3))
def test_log_normal_divergence_is_the_integral(log_mean, log_std, prior_std):
    q = stats.lognorm(log_std, scale=math.exp(log_mean))
    expected = integral(q, stats.norm(0, prior_std).logpdf)
    assert float(log_normal_kl(double(log_mean), double(log_std**2), prior_std**2)) == pytest.approx(expected, rel=1e-4)


def test_log_normal_divergence_is_that_of_the_delta_method_to_first_order():
    """The difference falls with the square of the variance, as the inverse of M^2."""
    log_mean, prior_var = double(0.3), 0.7
    gaps = []
    for var in (double(1e-3), double(1e-4)):
        delta = gaussian_kl((log_mean + var / 2).exp(), var * (2 * log_mean).exp(), 0.0, prior_var)
        gaps.append(abs(float(log_normal_kl(log_mean, var, prior_var) - delta)))
    assert gaps[0] / gaps[1] == pytest.approx(100, rel=0.01)


def test_flat_divergence_is_the_negative_entropy():
    for std in (0.01, 0.7, 5.0):
        assert float(flat_kl(double(std**2))) == pytest.approx(-stats.norm(3, std).entropy(), rel=1e-12)


def test_implied_variance_has_the_gradient_of_weight_decay():
    """d/d sigma of sigma^2 / (2 v) / (N tau) is lambda sigma: what torch adds to the gradient of the mean loss."""
    sigma, var = torch.tensor(0.7, dtype=torch.float64, requires_grad=True), implied_prior_var(**OPTIONS)
    penalty = gaussian_kl(sigma, double(1e-3), 0.0, var) / (OPTIONS["num_examples"] * OPTIONS["precision"])
    (gradient,) = torch.autograd.grad(penalty, sigma)
    assert float(gradient) == pytest.approx(OPTIONS["weight_decay"] * 0.7, rel=1e-12)


@pytest.mark.parametrize("name", ["num_examples", "weight_decay", "precision"])
@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan])
def test_numbers_without_a_prior_are_refused(name, value):
    with pytest.raises(bb.BatchbayesError, match=f"{name} above zero"):
        implied_prior_var(**{**OPTIONS, name: value})


def fitted(fit=bb.mcbn, **options):
    case = NETWORKS["BatchNorm2d"]
    return fit(case.network(torch.float64), case.batches(9, dtype=torch.float64), **options)


@pytest.mark.parametrize(
    "posterior",
    [
        pytest.param(lambda: fitted(), id="mcbn"),
        pytest.param(lambda: fitted(center="running"), id="running"),
        pytest.param(lambda: fitted(bb.stochastic_bn), id="factorised"),
        pytest.param(lambda: fitted(bb.clt_bn, batch_size=8), id="central limit"),
    ],
)
def test_divergence_of_a_posterior_is_the_sum_of_integrals_over_its_statistics(posterior):
    """A naive loop over batch sizes, sites and channels; the prior's variance is 1 / (2 N tau lambda_p)."""
    posterior, sizes = posterior(), torch.tensor([3.0, 8.0, 50.0])
    prior = stats.norm(0, math.sqrt(1 / (2 * 500 * 2.0 * 3e-3 / 2)))
    expected = torch.zeros(3, len(posterior.sites), dtype=torch.float64)
    for k, size in enumerate(sizes):
        moved = posterior.at_batch_size(float(size))
        start, std = 0, moved.omega_var().sqrt()
        for number, site in enumerate(posterior.sites):
            for channel in range(start, start + site.channels):
                expected[k, number] -= stats.norm(0, std[channel]).entropy()
                place = channel + site.channels
                q = stats.lognorm(float(std[place]), scale=math.exp(moved.center[place]))
                expected[k, number] += integral(q, prior.logpdf)
            start += 2 * site.channels
    torch.testing.assert_close(kl_by_site(posterior, sizes, **OPTIONS), expected, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(kl_to_implied_prior(posterior, sizes, **OPTIONS), expected.sum(1), rtol=1e-5, atol=1e-3)


def test_divergence_rises_as_half_the_statistics_times_the_log_of_the_batch_size():
    posterior = fitted(center="running")
    small, large = kl_to_implied_prior(posterior, torch.tensor([1e6, 1e7]), **OPTIONS)
    assert float(large - small) == pytest.approx(0.5 * len(posterior.center) * math.log(10), rel=1e-6)


def test_statistics_that_never_vary_are_left_out():
    network = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)).double()
    x = torch.randn(200, 2, dtype=torch.float64)
    alone = bb.mcbn(nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)).double(), x[:, :1], batch_size=10)
    x[:, 1] = 4.0
    beside = bb.mcbn(network, x, batch_size=10)
    sizes = torch.tensor([5.0, 40.0])
    torch.testing.assert_close(
        kl_to_implied_prior(beside, sizes, **OPTIONS), kl_to_implied_prior(alone, sizes, **OPTIONS)
    )


def test_a_posterior_without_noise_is_refused():
    with pytest.raises(bb.BatchbayesError, match="with noise"):
        kl_to_implied_prior(bb.deterministic(fitted().network.module), torch.tensor([8.0]), **OPTIONS)
