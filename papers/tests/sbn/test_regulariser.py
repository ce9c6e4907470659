"""The regulariser of batch norm against its definition, and what training by it does."""

import math

import numpy as np
import pytest
import torch
from batchbayes_papers.sbn.regulariser import batch_kl
from helpers.references import same_state, snapshot
from scipy import integrate, stats
from torch import nn
from torch.func import functional_call

import batchbayes as bb
from batchbayes.methods.batchnorm.omega import unpack
from batchbayes.methods.batchnorm.prior import (
    gaussian_kl,
    implied_prior_var,
    kl_to_implied_prior,
)
from batchbayes.models import MLP
from batchbayes.training.batches import shuffled_batches

OPTIONS = {"num_examples": 500, "weight_decay": 3e-3, "precision": 2.0}


def double(value):
    return torch.tensor(value, dtype=torch.float64)


def integral(q, log_p):
    """KL(q || p) by the trapezoidal rule, over all but 1e-14 of q on either side."""
    x = np.linspace(q.ppf(1e-14), q.isf(1e-14), 20_001)
    return integrate.trapezoid(q.pdf(x) * (q.logpdf(x) - log_p(x)), x)


@pytest.mark.parametrize("shape", [(6, 3), (5, 3, 4), (4, 2, 3, 3)])
def test_divergence_of_a_batch_is_the_definition_channel_by_channel(shape):
    inputs, epsilon, prior_var = torch.randn(*shape, dtype=torch.float64) * 2 + 1, 1e-3, 0.4
    expected = 0.0
    for channel in range(shape[1]):
        values = inputs[:, channel].reshape(shape[0], -1)
        mean = float(values.mean())
        a = [float(v.mean()) for v in values]
        q = [float(((v - mean) ** 2).mean()) for v in values]
        var = sum(q) / len(q)
        mean_var = (sum((each - mean) ** 2 for each in a) / len(a) + epsilon) / len(a)
        std_var = (sum((each - var) ** 2 for each in q) / len(q) + epsilon**2) / (4 * (var + epsilon) * len(q))
        expected -= stats.norm(0, math.sqrt(mean_var)).entropy()
        expected += integral(stats.norm(math.sqrt(var + epsilon), math.sqrt(std_var)), stats.norm(0, 0.4**0.5).logpdf)
    assert float(batch_kl(inputs, epsilon, prior_var)) == pytest.approx(expected, rel=1e-6)


def test_divergence_of_a_batch_is_that_of_the_central_limit_posterior():
    """Whose log-normal standard deviation differs from a Gaussian one by terms of order 1/M."""
    network = nn.Sequential(nn.BatchNorm1d(3, eps=1e-12), nn.Linear(3, 1)).double()
    x = torch.randn(4000, 3, dtype=torch.float64) * double([1.0, 2.0, 0.5])
    posterior = bb.clt_bn(network, x, batch_size=len(x), center="batches")
    whole = kl_to_implied_prior(posterior, torch.tensor([float(len(x))]), **OPTIONS)
    assert float(batch_kl(x, 1e-12, implied_prior_var(**OPTIONS))) == pytest.approx(float(whole), abs=0.01)


@pytest.mark.parametrize("shape", [(6, 3), (4, 2, 3)])
def test_gradient_in_the_inputs(shape):
    inputs = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: batch_kl(x, 1e-5, 0.4), (inputs,))


def test_gradient_in_the_weights():
    network = MLP(3, [4, 2], 1).double().train()
    x, names = torch.randn(9, 3, dtype=torch.float64), [name for name, _ in network.named_parameters()]

    def penalty(*parameters):
        with bb.batch_norm_regulariser(network, **OPTIONS) as regulariser:
            functional_call(network, dict(zip(names, parameters, strict=True)), x)
            return regulariser() * 1e3

    weights = tuple(p.detach().clone().requires_grad_() for p in network.parameters())
    assert torch.autograd.gradcheck(penalty, weights)


def test_a_unit_that_never_fires_has_a_finite_divergence_and_gradient():
    inputs = torch.randn(8, 2)
    inputs[:, 1] = 0.0
    inputs.requires_grad_()
    value = batch_kl(inputs, 1e-5, 0.4)
    value.backward()
    assert value.isfinite()
    assert inputs.grad is not None
    assert inputs.grad.isfinite().all()


def test_regulariser_is_the_divergence_of_all_sites_over_examples_and_precision():
    network, x = MLP(3, [4, 2], 1).double().train(), torch.randn(9, 3, dtype=torch.float64)
    first = network.hidden[0].linear(x)
    second = network.hidden[1].linear(network.hidden[0](x))
    whole = sum(batch_kl(h, 1e-5, implied_prior_var(**OPTIONS)) for h in (first, second))
    with bb.batch_norm_regulariser(network, **OPTIONS) as regulariser:
        network(x)
        torch.testing.assert_close(regulariser(), whole / 1000)


def test_on_white_inputs_the_squared_means_are_weight_decay():
    """Then the variance of a unit is the squared norm of its weights, and the penalty lambda/2 of their sum."""
    noise = torch.randn(40, 4, dtype=torch.float64)
    white = torch.linalg.qr(noise - noise.mean(0)).Q * 40**0.5
    weights, prior_var = torch.randn(5, 4, dtype=torch.float64), implied_prior_var(**OPTIONS)
    std, var = (white @ weights.T).std(0, correction=0), double(0.01)
    moved = gaussian_kl(std, var, 0.0, prior_var) - gaussian_kl(torch.zeros_like(std), var, 0.0, prior_var)
    decay = 0.5 * OPTIONS["weight_decay"] * weights.square().sum()
    torch.testing.assert_close(moved.sum() / 1000, decay)


def test_passes_without_gradients_or_in_evaluation_mode_are_not_looked_at():
    network, x = MLP(3, [4], 1), torch.randn(9, 3)
    with bb.batch_norm_regulariser(network, **OPTIONS) as regulariser:
        network.train()(x)
        expected = regulariser()
        with torch.no_grad():
            network(torch.randn(5, 3))
        network.eval()(torch.randn(5, 3))
        network.train()(x)
        torch.testing.assert_close(regulariser(), expected)


def test_a_forgotten_or_a_second_pass_is_refused():
    network, x = MLP(3, [4], 1).train(), torch.randn(9, 3)
    with bb.batch_norm_regulariser(network, **OPTIONS) as regulariser:
        with pytest.raises(bb.BatchbayesError, match="0 runs of 0"):
            regulariser()
        network(x), network(x)
        with pytest.raises(bb.BatchbayesError, match="2 runs of 1"):
            regulariser()
        network(x)
        assert regulariser().isfinite()
    with pytest.raises(bb.BatchbayesError, match="batch norm"), bb.batch_norm_regulariser(nn.Linear(2, 1), **OPTIONS):
        pass


def test_the_network_is_left_alone_after_the_block():
    network = MLP(3, [4], 1).eval()
    before = snapshot(network)
    with bb.batch_norm_regulariser(network, **OPTIONS):
        network(torch.randn(9, 3))
        assert not same_state(before, snapshot(network))  # it looks at the layers
    assert same_state(before, snapshot(network))


def trained(x, y, *, regularised, decay):
    """Half the squared error, with Omega or with plain decay before batch norm, plain decay at the output."""
    torch.manual_seed(0)
    network, steps = MLP(4, [12, 8], 1).train(), 900
    matrices = [p for p in network.hidden.parameters() if p.ndim > 1]
    others = [p for p in network.hidden.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.0 if regularised else decay},
        {"params": others},
        {"params": network.output.parameters(), "weight_decay": decay},
    ]
    stepper, losses = torch.optim.SGD(groups, lr=0.3), []
    slower = torch.optim.lr_scheduler.LambdaLR(stepper, lambda step: 1 - step / steps)
    with bb.batch_norm_regulariser(network, num_examples=len(x), weight_decay=decay) as regulariser:
        for epoch in range(steps // 4):
            for rows in shuffled_batches(len(x), 50, 0, epoch):
                error = 0.5 * nn.functional.mse_loss(network(x[rows]), y[rows])
                loss = error + regulariser() * regularised
                stepper.zero_grad()
                loss.backward()
                stepper.step()
                slower.step()
                losses.append(float(error.detach()))
    return network.eval(), losses


def test_training_by_it_fits_the_data_and_sets_the_scale_that_the_theory_says():
    """The data term does not see a unit's scale, so E[sigma_B^2] = 2 / (N tau lambda): plain decay is far below."""
    x = torch.randn(200, 4) * torch.tensor([1.0, 2.0, 0.5, 1.0]) + 1
    y = torch.sin(x[:, :1]) + 0.3 * x[:, 1:2] + 0.1 * torch.randn(200, 1)
    decay, variances = 0.02, {}
    for regularised in (False, True):
        network, losses = trained(x, y, regularised=regularised, decay=decay)
        assert sum(losses[-20:]) < 0.15 * sum(losses[:20])
        posterior = bb.mcbn(network, x, batch_size=50, num_samples=32)
        variances[regularised] = torch.cat([var for _, var in unpack(posterior.sites, posterior.center)])
    target = 2 / (200 * decay)
    assert (variances[True] / target - 1).abs().max() < 0.3
    assert float(variances[True].mean()) == pytest.approx(target, rel=0.1)
    assert (variances[False] < 0.3 * target).all()
