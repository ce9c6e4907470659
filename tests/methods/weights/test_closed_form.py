"""Gradients in closed form against those of autograd, in float64."""

from functools import partial

import pytest
import torch
from torch import nn

import batchbayes as bb
from batchbayes.methods.weights.family import noise_like
from batchbayes.methods.weights.mean_field import product_of
from batchbayes.methods.weights.sites import find_sites
from batchbayes.methods.weights.sparse import LIMIT, THRESHOLD, TINY, log_uniform_divergence


def mean_field_moments(prior, mean, log_std):
    variance = (2 * log_std).exp()
    power = variance + mean.square()
    best = power.mean().sqrt() if prior is None else torch.tensor(prior, dtype=torch.float64)
    return mean, variance, (best.log() - log_std + power / (2 * best.square()) - 0.5).sum()


def sparse_moments(weight, log_var):
    square = weight.square() + TINY
    log_alpha = (log_var - square.log()).clamp(-LIMIT, LIMIT)
    return weight * (log_alpha <= THRESHOLD), log_alpha.exp() * square, log_uniform_divergence(log_alpha).sum()


FAMILIES = {
    "mean field": (bb.MeanField(0.7), partial(mean_field_moments, 0.7)),
    "empirical Bayes": (bb.MeanField(None), partial(mean_field_moments, None)),
    "sparse VD": (bb.SparseVD(), sparse_moments),
}


@pytest.fixture(params=FAMILIES)
def case(request):
    """Weights of a family, their moments for autograd, the parameters of both, and the layer that they belong to."""
    torch.manual_seed(0)
    family, moments = FAMILIES[request.param]
    layer = nn.Linear(30, 40).double()
    weight, own = 0.05 * torch.randn(40, 30).double(), 4 * torch.randn(40, 30).double() - 8
    weight[0, 0] = 0
    parameters = (weight.requires_grad_(), own.requires_grad_())
    site = find_sites(layer)[0]
    return family.given(weight, {"own": own}, site), moments(*parameters), parameters, site


def test_moments(case):
    given, (mean, variance, kl), parameters, _ = case
    by_mean, by_variance = torch.randn(2, 40, 30).double()

    def with_gradients(mean, variance, kl):
        loss = (mean * by_mean + variance * by_variance).sum() + 1.7 * kl
        return mean, variance, kl, *torch.autograd.grad(loss, parameters)

    found = with_gradients(given.mean, given.variance, given.divergence())
    torch.testing.assert_close(found, with_gradients(mean, variance, kl))


@pytest.mark.parametrize("shape", [(7,), (2, 5), ()])
def test_a_linear_layer(case, shape):
    given, (mean, variance, kl), parameters, site = case
    inputs, by_outputs = torch.randn(*shape, 30).double().requires_grad_(), torch.randn(*shape, 40).double()

    def with_gradients(outputs, kl):
        loss = (outputs * by_outputs).sum() + 1.7 * kl
        return outputs, kl, *torch.autograd.grad(loss, (inputs, site.bias, *parameters))

    torch.manual_seed(1)
    found = with_gradients(given.outputs(site, inputs), given.divergence())
    torch.manual_seed(1)
    spread = nn.functional.linear(inputs.square(), variance) + 1e-16
    outputs = nn.functional.linear(inputs, mean, site.bias) + spread.sqrt() * torch.randn_like(spread)
    torch.testing.assert_close(found, with_gradients(outputs, kl))


CONVOLUTIONS = {
    "1d, without a bias": (nn.Conv1d(4, 6, 3, stride=2, bias=False), (5, 4, 9)),
    "2d, groups": (nn.Conv2d(4, 6, (3, 1), padding=(2, 1), dilation=(2, 1), groups=2), (5, 4, 7, 8)),
    "2d, same size": (nn.Conv2d(4, 6, (3, 5), padding="same"), (5, 4, 7, 8)),
    "3d": (nn.Conv3d(2, 3, 2, padding=1), (4, 2, 3, 4, 5)),
}
UNCOMMON = {
    "no zeros around": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), (5, 4, 7, 8)),
    "one example": (nn.Conv2d(4, 6, 3), (4, 7, 8)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS | UNCOMMON)
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_convolution(name, channels_last):
    torch.manual_seed(0)
    layer, shape = (CONVOLUTIONS | UNCOMMON)[name]
    layer = layer.double()
    (site,), inputs = find_sites(layer), torch.randn(shape).double()
    if channels_last and inputs.ndim == 4:
        layer, inputs = layer.to(memory_format=torch.channels_last), inputs.to(memory_format=torch.channels_last)
    assert (product_of(site, inputs) is None) == (name in UNCOMMON)
    own, inputs = (torch.randn_like(site.weight) - 3).requires_grad_(), inputs.requires_grad_()
    asked = [inputs, *layer.parameters(), own]
    given = bb.MeanField(0.7).given(site.weight, {"log_std": own}, site)

    def with_gradients(outputs, kl):
        loss = outputs.sin().sum() + 1.7 * kl
        return outputs, kl, *torch.autograd.grad(loss, asked)

    torch.manual_seed(1)
    found = with_gradients(given.outputs(site, inputs), given.divergence())
    torch.manual_seed(1)
    mean, variance, kl = mean_field_moments(0.7, site.weight, own)
    spread = site.product(inputs.square(), variance) + 1e-16
    expected = with_gradients(site.product(inputs, mean, site.bias) + spread.sqrt() * noise_like(spread), kl)
    torch.testing.assert_close(found, expected)
