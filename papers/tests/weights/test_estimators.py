"""Gradient estimators against closed forms, and against each other."""

import itertools
import math

import pytest
import torch
from batchbayes_papers.weights.gradient_variance import (
    gradient_moments,
    in_form,
    log_density,
    random_parameters,
    score_function_loss,
)
from torch import nn

import batchbayes as bb
from batchbayes.methods.weights.sites import find_sites

DRAWS = 10_000
X = torch.tensor([[1.0, -2.0, 0.5], [0.3, 0.4, -1.0]])
Y = torch.tensor([[0.5, -1.0], [2.0, 0.0]])
MEAN, LOG_STD = torch.tensor([[0.2, -0.1, 0.4], [0.0, 0.3, -0.5]]), torch.full((2, 3), math.log(0.3))


def exact_gradients():
    """Of E 0.5 ||y - W x||^2 with respect to mean and log std, for W ~ N(mean, std^2)."""
    return -(Y - X @ MEAN.T).T @ X, X.square().sum(0).expand(2, 3) * (2 * LOG_STD).exp()


def assert_unbiased(samples, exact):
    """Within four standard errors of the mean over all draws."""
    error = samples.std(0) / len(samples) ** 0.5
    assert ((samples.mean(0) - exact).abs() < 4 * error + 1e-6).all()


def squared_error(outputs):
    """Return the loss of each copy, from outputs (examples, 2 copies)."""
    return 0.5 * (Y[:, None] - outputs.view(2, -1, 2)).square().sum((0, 2))


@pytest.mark.parametrize("estimator", ["local", "weights", "score"])
def test_estimators_are_unbiased(estimator):
    """10,000 copies of a layer, which are the blocks of two rows of one large weight, draw their noise at once."""
    site = find_sites(nn.Linear(3, 2, bias=False))[0]
    mean, log_std = (value.repeat(DRAWS, 1).requires_grad_() for value in (MEAN, LOG_STD))
    torch.manual_seed(0)
    given = bb.MeanField().given(mean, {"log_std": log_std}, site)
    weight = given.sample()
    if estimator == "local":
        loss = squared_error(given.outputs(site, X)).sum()
    elif estimator == "weights":
        loss = squared_error(X @ weight.T).sum()
    else:
        fixed = weight.detach()
        density = torch.distributions.Normal(mean, given.variance.sqrt()).log_prob(fixed)
        torch.testing.assert_close(log_density(given, fixed), density.sum())
        loss = (squared_error(X @ fixed.T) * density.view(DRAWS, -1).sum(1)).sum()
    found = torch.autograd.grad(loss, (mean, log_std))
    for samples, exact in zip(found, exact_gradients(), strict=True):
        assert_unbiased(samples.view(DRAWS, 2, 3), exact)


def test_score_function_of_a_network_is_unbiased():
    network = bb.noisy(nn.Sequential(nn.Linear(3, 2, bias=False)), bb.MeanField(initial_std=0.3))
    with torch.no_grad():
        network.module[0].weight.copy_(MEAN)
    torch.manual_seed(0)

    def estimate():
        return score_function_loss(
            network, lambda weights: squared_error(X @ weights["0.weight"].T).sum(), num_draws=50
        )

    mean, variance = gradient_moments(random_parameters(network), estimate, 200)["0.weight"]  # 10,000 draws
    assert ((mean - exact_gradients()[0]).abs() < 4 * (variance / 200).sqrt()).all()


def test_local_reparametrisation_of_a_convolution_has_the_moments_of_weight_draws():
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 4, 3, padding=1, stride=2, groups=2, padding_mode="reflect")
    site = find_sites(layer)[0]
    given = bb.MeanField(initial_std=0.3).given(
        layer.weight.detach(), {"log_std": torch.full((4, 1, 3, 3), -1.0)}, site
    )
    x = torch.randn(1, 2, 5, 5)
    with torch.no_grad():
        local = torch.stack([given.outputs(site, x) for _ in range(2000)])
        drawn = torch.stack([site.product(x, given.sample(), layer.bias) for _ in range(2000)])
    scale = drawn.std(0)
    assert ((local.mean(0) - drawn.mean(0)).abs() < 5 * scale * (2 / 2000) ** 0.5).all()
    assert ((local.std(0) / scale).log().abs() < 5 / 2000**0.5).all()


def test_local_reparametrisation_has_less_variance():
    torch.manual_seed(0)
    network = bb.noisy(nn.Sequential(nn.Linear(20, 10), nn.ReLU(), nn.Linear(10, 3)), bb.MeanField(initial_std=0.1))
    x, y = torch.randn(100, 20), torch.randint(0, 3, (100,))

    def variances(estimator):
        network.estimator = estimator
        found = gradient_moments(random_parameters(network), lambda: nn.functional.cross_entropy(network(x), y), 200)
        return {name: float(variance.sum()) for name, (_, variance) in found.items()}

    local, weights = variances("local"), variances("weights")
    assert weights["0.weight log_std"] > 10 * local["0.weight log_std"]
    assert weights["2.weight log_std"] > 2 * local["2.weight log_std"]


@pytest.mark.parametrize("family", [bb.Variance("bernoulli"), bb.MultiplicativeFlow()])
def test_weights_without_a_known_density_have_no_score_function(family):
    network = bb.noisy(nn.Linear(3, 2), family)
    with pytest.raises(bb.BatchbayesError, match="weights whose density is known"):
        score_function_loss(network, lambda weights: weights["weight"].sum())


@pytest.mark.parametrize("estimator", ["local", "weights"])
def test_the_rate_of_binary_dropout_has_the_gradient_of_the_expected_loss(estimator):
    """Exact by all masks. The relaxed masks of training are almost binary."""
    torch.manual_seed(0)
    network = bb.noisy(nn.Linear(3, 2), bb.BinaryDropout(initial_rate=0.3), estimator=estimator)
    moments = gradient_moments(random_parameters(network), lambda: (network(X) - Y).square().sum(), 4000)
    mean, variance = moments["weight logit"]
    weight, bias = network.module.weight.detach(), network.module.bias.detach()
    logit = torch.tensor(math.log(3 / 7), requires_grad=True)
    rate, expected = logit.sigmoid(), torch.zeros(())
    for kept in itertools.product([0.0, 1.0], repeat=3):
        mask = torch.tensor(kept)
        outputs = nn.functional.linear(X, weight * mask / (1 - rate), bias)
        expected = expected + torch.where(mask > 0, 1 - rate, rate).prod() * (outputs - Y).square().sum()
    (exact,) = torch.autograd.grad(expected, logit)
    assert abs(float(mean) - float(exact)) < 4 * float(variance / 4000) ** 0.5 + 0.05 * abs(float(exact))


@pytest.mark.parametrize(
    ("form", "alpha"), [("additive", 0.0), ("multiplicative", 7.389), ("multiplicative, alpha at most 1", 1.0)]
)
def test_the_multiplicative_form_adds_noise_in_proportion_to_alpha(form, alpha):
    """For a loss c w, the gradient by theta is c, or c (1 + sqrt(alpha) eps). All have the same weights at alpha."""
    network = in_form(nn.Linear(3, 2, bias=False), form, log_alpha=2.0)
    network.estimator = "weights"
    (site,) = network.sites
    expected = torch.full((2, 3), alpha if form != "additive" else 7.389) * site.weight.square()
    torch.testing.assert_close(
        network.posterior().distributions["weight"].variance, expected.detach(), rtol=1e-3, atol=0
    )
    torch.manual_seed(0)
    _, variance = gradient_moments({"weight": site.weight}, lambda: network(X[:1]).sum(), 2000)["weight"]
    torch.testing.assert_close(variance.float(), alpha * X[:1].square().expand(2, 3), rtol=0.2, atol=1e-9)
