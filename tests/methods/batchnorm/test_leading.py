"""Many classes: the combinations of logits that matter most, against all logits and against exact draws, in float64."""

from dataclasses import replace

import pytest
import torch
from helpers.references import left_alone
from torch import nn

import batchbayes as bb
from batchbayes.engines.linear import linear_draws, plan_linear
from batchbayes.methods.batchnorm.facts import Facts
from batchbayes.methods.batchnorm.leading import OutputAxes, find_output_axes, leading_coordinates
from batchbayes.metrics import rank_correlation


def fitted(classes=30, width=8, **options):
    """A posterior of a network with many classes, and new inputs."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, width), nn.BatchNorm1d(width)
    )
    network = nn.Sequential(*network, nn.Linear(width, classes)).double().eval()
    with torch.no_grad():
        network[-1].weight *= 4
    posterior = bb.mcbn(network, torch.randn(600, 5).double(), batch_size=40, num_samples=12, **options)
    return posterior, torch.randn(60, 5).double()


def both(posterior, x):
    """Draws of the leading combinations, and of all logits, each less their mean over classes."""
    draws = linear_draws(posterior, x, plan_linear(posterior, 30, 12, 0, contrasts=True))
    every = linear_draws(
        replace(posterior, facts=Facts()), x, plan_linear(replace(posterior, facts=Facts()), 30, 12, 0)
    )
    return draws, every


def centred(outputs):
    return outputs - outputs.mean(-1, keepdim=True)


@pytest.mark.parametrize("noise", ["rows", "correlated"])
def test_if_logits_move_along_few_axes_nothing_is_left_out(noise):
    posterior, x = fitted(width=4)
    posterior = replace(posterior, noise=noise)
    with left_alone(posterior.network.module):
        draws, every = both(posterior, x)
    torch.testing.assert_close(centred(draws.outputs()), centred(every.outputs()), rtol=1e-8, atol=1e-10)


def test_moments_are_those_of_the_draws_that_are_formed():
    posterior, x = fitted()
    for noise, count in (("rows", 30), ("correlated", 40)):
        plan = plan_linear(replace(posterior, noise=noise), 30, count, 0, contrasts=True)
        draws = linear_draws(replace(posterior, noise=noise), x, plan)
        mean, variance = draws.moments()
        torch.testing.assert_close(mean, draws.outputs().mean(0))
        torch.testing.assert_close(variance, draws.outputs().var(0, correction=0))


def test_what_is_left_out_is_made_up_for():
    """Of 30 classes and 8 features six combinations remain; mutual information keeps its order and its scale."""
    posterior, x = fitted()
    exact, linear = (
        bb.predict(posterior, x, bb.categorical(), num_samples=12, engine=engine) for engine in ("sample", "linear")
    )
    assert "6 backward passes" in linear.engine
    assert rank_correlation(linear.mutual_information, exact.mutual_information) > 0.97
    assert 0.9 < float(linear.mutual_information.mean() / exact.mutual_information.mean()) < 1.1
    torch.testing.assert_close(linear.probs, exact.probs, rtol=0, atol=0.02)


def test_combinations_are_the_leading_eigenvectors():
    """Logits near the first of two training examples take its covariance, and a tenth of that of all."""
    torch.manual_seed(0)
    axes, logits = torch.randn(20, 9).double(), torch.randn(4, 20).double()
    axes = torch.linalg.qr(axes - axes.mean(0)).Q.T * torch.logspace(0, -1.5, 9)[:, None]
    positions = torch.stack([logits[0] @ (axes / axes.norm(dim=1, keepdim=True)).T, torch.full((9,), 1e3)])
    root = torch.eye(9).double() + 0.2 * torch.randn(9, 9).double()
    given = OutputAxes(axes, positions, torch.stack([root @ root.T, torch.eye(9).double()]))
    covariance = 0.9 * root @ root.T + 0.1 * torch.eye(9)
    weights, basis, (total, kept) = leading_coordinates(logits, given, 3)
    for n, probs in enumerate(logits.softmax(1)):
        fisher = probs.diag() - torch.outer(probs, probs)
        values = torch.linalg.eigvals(covariance @ axes @ fisher @ axes.T).real.sort().values
        assert float(total[n]) == pytest.approx(float(values.sum()))
        assert float(kept[n]) == pytest.approx(float(values[-3:].sum()), rel=1e-3)
        factor = (total[n] / kept[n]).sqrt()
        torch.testing.assert_close(weights[n] @ basis[n].T, factor * torch.eye(3).double())
        of_combinations = weights[n] @ axes.T @ covariance @ axes @ weights[n].T  # they are uncorrelated, of length one
        torch.testing.assert_close(of_combinations, torch.eye(3).double())


def test_axes_and_covariances_are_those_of_a_loop():
    torch.manual_seed(0)
    logits = torch.randn(7, 5, 4).double() * torch.tensor([3.0, 1.0, 0.5, 0.1])
    found, centred_logits = find_output_axes(logits), centred(logits)
    axes, positions, covariances = found.tensors()
    assert axes.shape == (3, 4)  # a shift of all logits does not count
    for n in range(5):
        middle = centred_logits[:, n].mean(0)
        torch.testing.assert_close(positions[n], torch.stack([middle @ axis / axis.norm() for axis in axes]))
        along = torch.stack([torch.stack([(one - middle) @ axis / axis.dot(axis) for axis in axes])
                             for one in centred_logits[:, n]])  # fmt: skip
        torch.testing.assert_close(covariances[n], sum(torch.outer(one, one) for one in along) / 7)
    torch.testing.assert_close(covariances.mean(0), torch.eye(3).double())


def test_examples_that_are_all_alike_do_no_harm():
    axes = torch.tensor([[1.0, -1.0, 0.0], [0.2, 0.2, -0.4]])
    for examples in (1, 2):
        given = OutputAxes(axes, torch.zeros(examples, 2), torch.eye(2).expand(examples, 2, 2))
        assert all(part.isfinite().all() for part in leading_coordinates(torch.randn(3, 3), given, 1))


def test_logits_so_large_that_their_squares_overflow_take_the_covariance_of_all_examples():
    axes = torch.tensor([[1.0, -1.0, 0.0], [0.2, 0.2, -0.4]])
    covariances = torch.stack([2 * torch.eye(2), torch.zeros(2, 2)])
    roots = OutputAxes(axes, torch.eye(2), covariances).roots(torch.tensor([[1e25, -1e25, 0.0]]))
    torch.testing.assert_close(roots, torch.eye(2)[None])


def test_covariances_have_enough_digits_where_all_logits_are_far_from_zero():
    torch.manual_seed(0)
    axes, numbers = torch.linalg.qr(torch.randn(12, 4).double()).Q.T, torch.randn(200, 4).double()
    given = OutputAxes(axes, 1e3 + 0.3 * numbers[:150], torch.diag_embed(numbers[:150].square()))
    logits = (1e3 + 0.3 * numbers[150:]) @ axes
    rounded = given.to(torch.empty(0)).roots(logits.float())
    torch.testing.assert_close(rounded.double(), given.roots(logits), rtol=0, atol=0.01)


@pytest.mark.parametrize("likelihood", [bb.categorical(), bb.gaussian(1.0)])
def test_outputs_that_do_not_move(likelihood):
    network = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 20)).eval()
    nn.init.zeros_(network[1].weight)
    nn.init.zeros_(network[1].bias)
    posterior = bb.mcbn(network, torch.randn(64, 5), batch_size=8, num_samples=8)
    assert posterior.output_axes is None
    found = bb.predict(posterior, torch.randn(4, 5), likelihood, engine="linear")
    assert found.epistemic_variance.max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_covariances_of_few_digits_are_computed_with_more(dtype):
    """Movements of 1e-3 have squares that float16 cannot hold."""
    torch.manual_seed(0)
    logits = 1e-3 * torch.randn(16, 6, 20).to(dtype)
    both_found = (find_output_axes(each).tensors() for each in (logits, logits.double()))
    for found, wanted in zip(*both_found, strict=True):
        torch.testing.assert_close(found.double().abs(), wanted.abs(), rtol=1e-3, atol=1e-5)


def test_axes_are_kept_in_the_file_and_belong_to_many_classes_only(tmp_path):
    posterior, x = fitted()
    assert posterior.output_axes.axes.shape[1] == 30
    bb.save(posterior, tmp_path / "a.safetensors")
    again = bb.load(tmp_path / "a.safetensors", posterior.network.module)
    options = {"num_samples": 50, "engine": "linear"}
    found, wanted = (bb.predict(each, x, bb.categorical(), **options) for each in (again, posterior))
    assert torch.equal(found.probs, wanted.probs)
    assert fitted(classes=10)[0].output_axes is None
    pixels = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3)).eval()
    assert bb.mcbn(pixels, torch.randn(32, 2, 6, 6), batch_size=8, num_samples=4).output_axes is None


def test_infinite_logits_are_refused_in_words():
    posterior, x = fitted()
    posterior.network.module[-1].weight.data[3] = torch.inf
    refused = pytest.raises(bb.BatchbayesError, match="finite numbers in the network's output")
    with pytest.warns(bb.BatchbayesWarning, match="have changed since the fit"), refused:
        posterior.leading_tangents(x, posterior.deviations)
