"""KL divergences against numerical integrals in float64."""

import math

import pytest
import torch
from helpers.integrals import expected_log_magnitude, gaussian_expectation
from torch import nn

import batchbayes as bb
from batchbayes.methods.weights.sites import find_sites
from batchbayes.methods.weights.sparse import _Sparse, log_uniform_divergence, sparse_moments

LIMIT_OF_LOG_UNIFORM = 0.5 * (math.log(2) + 0.5772156649015329)  # -E log|z| for standard normal z, 0.6352


def given(family, weight, **own):
    weight = torch.tensor([[weight]], dtype=torch.float64)
    site = find_sites(nn.Linear(1, 1))[0]
    return family.given(weight, {name: torch.full_like(weight, value) for name, value in own.items()}, site)


@pytest.mark.parametrize(("mean", "std", "prior"), [(0.0, 1.0, 1.0), (0.7, 0.2, 0.5), (-2.0, 3.0, 1.5)])
def test_mean_field(mean, std, prior):
    def integrand(w):
        q, p = (torch.distributions.Normal(*torch.tensor(own, dtype=w.dtype)) for own in ((mean, std), (0.0, prior)))
        return q.log_prob(w) - p.log_prob(w)

    found = given(bb.MeanField(prior), mean, log_std=math.log(std)).divergence()
    assert float(found) == pytest.approx(gaussian_expectation(integrand, mean, std), abs=1e-9)


def test_empirical_bayes_is_the_best_prior():
    weight, log_std = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    site = find_sites(nn.Linear(3, 4))[0]
    own = {"log_std": log_std}
    best = float((weight.square() + (2 * log_std).exp()).mean().sqrt())
    found = float(bb.MeanField(None).given(weight, own, site).divergence())
    at = {s: float(bb.MeanField(s * best).given(weight, own, site).divergence()) for s in (0.9, 1.0, 1.1)}
    assert found == pytest.approx(at[1.0])
    assert min(at[0.9], at[1.1]) > found


def test_log_uniform_is_off_by_at_most_the_stated_error():
    log_alphas = torch.linspace(-8, 8, 65, dtype=torch.float64)
    exact = [
        LIMIT_OF_LOG_UNIFORM - 0.5 * a + expected_log_magnitude(1.0, math.exp(0.5 * a)) for a in log_alphas.tolist()
    ]
    errors = (log_uniform_divergence(log_alphas) - torch.tensor(exact, dtype=torch.float64)).abs()
    assert 0.008 < errors.max() < 0.011


def test_sparse_moments_have_the_gradient_of_autograd():
    torch.manual_seed(0)
    weight = (0.05 * torch.randn(40, 30, dtype=torch.float64)).requires_grad_()
    log_var = (4 * torch.randn(40, 30, dtype=torch.float64) - 8).requires_grad_()
    by_mean, by_variance = torch.randn(2, 40, 30, dtype=torch.float64)

    def gradient(function):
        mean, variance, kl = function(weight, log_var)
        return torch.autograd.grad((mean * by_mean + variance * by_variance).sum() + 1.7 * kl, (weight, log_var))

    for found, expected in zip(_Sparse.apply(weight, log_var), sparse_moments(weight, log_var), strict=True):
        torch.testing.assert_close(found, expected)
    for found, expected in zip(gradient(_Sparse.apply), gradient(sparse_moments), strict=True):
        torch.testing.assert_close(found, expected)
