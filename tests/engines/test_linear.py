"""The linear engine against a dense Jacobian, finite differences and exact draws, in float64."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers.cases import NETWORKS
from helpers.references import left_alone
from torch import nn

import batchbayes as bb
from batchbayes.engines.check import check_linearity
from batchbayes.engines.linear import forward_plan, linear_draws, plan_linear, tangents_by_differences
from batchbayes.methods.batchnorm.jacobian import affine_batch_norm


class PreActivation(nn.Module):
    """The input of a batch-norm layer goes on through a shortcut, and one activation works in place."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)
        self.last, self.linear = nn.BatchNorm2d(4), nn.Linear(4, 3)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        x = self.first(x)
        x = x + self.second(self.act(self.norm(x)))
        return self.linear(self.act(self.last(x)).mean((2, 3)))


CASES = {**{n: c for n, c in NETWORKS.items() if c.tracks}, "shortcut around the layer": None}


def fitted(name, **options):
    """A float64 posterior, and inputs."""
    if name == "shortcut around the layer":
        torch.manual_seed(1)
        network = PreActivation().double().eval()
        x = torch.randn(80, 2, 7, 7, dtype=torch.float64)
        return bb.mcbn(network, list(x[:72].split(8)), center="running", **options), x[72:77]
    case = NETWORKS[name]
    batches = case.batches(9, dtype=torch.float64)
    posterior = bb.mcbn(case.network(torch.float64), batches, center="running", **options)
    return posterior, case.batches(1, size=5, seed=4, dtype=torch.float64)[0]


@pytest.mark.parametrize("name", CASES)
def test_reverse_mode_equals_numerical_derivatives(name):
    """Central differences along each direction, with one step and half of it, differ by O(step^2) from the tangent."""
    posterior, x = fitted(name)
    directions = torch.randn(4, posterior.center.numel(), dtype=torch.float64)
    with left_alone(posterior.network.module):
        outputs, tangents = posterior.tangents(x, directions)
    with torch.no_grad():
        torch.testing.assert_close(outputs, posterior.function(posterior.center)(x))
        for direction, tangent in zip(directions, tangents, strict=True):
            step = 1e-6 * direction
            plus, minus = (posterior.function(posterior.center + s)(x) for s in (step, -step))
            torch.testing.assert_close(tangent, (plus - minus) / 2e-6, rtol=1e-5, atol=1e-7)


def test_reverse_mode_equals_a_dense_jacobian():
    """On a network written out by hand as a function of omega, differentiated by torch.func."""
    torch.manual_seed(0)
    norm, linear = nn.BatchNorm1d(3).double(), nn.Linear(3, 2).double()
    nn.init.uniform_(norm.weight, 0.5, 2.0)
    network = nn.Sequential(norm, nn.Tanh(), linear).eval()
    x = torch.randn(40, 3, dtype=torch.float64)
    posterior = bb.mcbn(network, list(x.split(8)))

    def written_out(omega, example):
        mean, log_std = omega[:3], omega[3:]
        return linear(torch.tanh((example - mean) / log_std.exp() * norm.weight + norm.bias))

    jacobian = torch.func.vmap(torch.func.jacrev(written_out), (None, 0))(posterior.center, x)  # (n, K, D)
    without_noise = replace(posterior, deviations=torch.zeros_like(posterior.deviations))
    for each in (posterior, without_noise):
        _, tangents = each.tangents(x, torch.eye(6, dtype=torch.float64))
        torch.testing.assert_close(tangents, jacobian.detach().permute(2, 0, 1))


@pytest.mark.parametrize("sides", [1, 2])
def test_differences_equal_reverse_mode(sides):
    posterior, x = fitted("BatchNorm2d")
    directions = 1e-3 * posterior.deviations
    exact, (_, near) = (
        posterior.tangents(x, directions)[1],
        tangents_by_differences(posterior, x, directions, sides=sides),
    )
    torch.testing.assert_close(near, exact, rtol=0.02, atol=1e-6)
    passes = []
    counted = SimpleNamespace(center=posterior.center, function=lambda o: passes.append(1) or posterior.function(o))
    tangents_by_differences(counted, x, directions, sides=sides)
    assert len(passes) == 1 + sides * len(directions)


def both(posterior, x, count):
    """Exact and linear predictives of the same draws."""
    return (
        bb.predict(posterior, x, bb.categorical(), num_samples=count, engine=engine, keep_draws=True)
        for engine in ("sample", "linear")
    )


@pytest.mark.parametrize("fit", [bb.mcbn, bb.stochastic_bn], ids=["rows", "factorised"])
def test_a_network_that_is_linear_in_omega_is_drawn_exactly(fit):
    """With the means alone random, and nothing after the layer but a linear map, linear draws are the exact ones."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4)).double().eval()
    x = torch.randn(60, 3, dtype=torch.float64)
    posterior = fit(network, list(x.split(6)))
    posterior = replace(posterior, deviations=posterior.deviations * (torch.arange(6) < 3))
    exact, linear = (
        bb.predict(posterior, x, bb.categorical(), num_samples=7, engine=e, keep_draws=True)
        for e in ("sample", "linear")
    )
    torch.testing.assert_close(linear.draws, exact.draws)
    torch.testing.assert_close(linear.mutual_information, exact.mutual_information)
    assert linear.engine.startswith("linear, reverse mode")
    assert exact.engine == "sample"


@pytest.mark.parametrize("name", ["BatchNorm1d (N, C)", "BatchNorm2d", "BatchNorm3d"])
def test_the_error_falls_with_the_square_of_the_spread(name):
    posterior, x = fitted(name)

    def error(size):
        exact, linear = (predictive.draws for predictive in both(posterior.at_batch_size(size), x, 9))
        return float((exact - linear).abs().mean() / exact.std(0).mean())

    assert error(8e4) < 0.15 * error(8e2)  # a hundred times the batch size: a tenth of the spread, and of the error


def test_all_directions_keep_everything():
    """Forward mode with as many directions as there are rows is reverse mode, up to the finite step."""
    case = NETWORKS["BatchNorm2d"]
    x = case.batches(1, size=5, seed=4, dtype=torch.float64)[0]
    batches = case.batches(9, size=32, dtype=torch.float64)
    posterior = bb.mcbn(case.network(torch.float64), batches, center="running").at_batch_size(8e6)
    plan = forward_plan(posterior, len(posterior.deviations) - 1, 20, seed=1)
    assert plan.share == pytest.approx(1, abs=1e-6)
    forward = linear_draws(posterior, x, plan).outputs()
    reverse = linear_draws(posterior, x, plan_linear(posterior, 1, 20, seed=1)).outputs()
    center = posterior.function(posterior.center)(x).detach()
    torch.testing.assert_close(forward - center, reverse - center, rtol=0, atol=0.02 * float((reverse - center).std()))


def test_leading_directions_are_those_of_the_outputs():
    """The axes are the leading left singular vectors of what the rows do, to first order, to outputs of the fit."""
    case = NETWORKS["BatchNorm1d (N, C)"]
    network, batches = case.network(torch.float64), case.batches(9, size=32, dtype=torch.float64)
    posterior = bb.mcbn(network, batches, center="running")
    moved = posterior.tangents(torch.cat(batches[:2]), posterior.deviations)[1].flatten(1)
    left, singular, _ = torch.linalg.svd(moved - moved.mean(0), full_matrices=False)
    axes, share = posterior.leading_axes(3)
    torch.testing.assert_close((axes.T @ left[:, :3]).abs(), torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-6)
    assert share == pytest.approx(float(singular[:3].square().sum() / singular.square().sum()), rel=1e-9)


def test_many_outputs_go_forward_and_few_go_reverse():
    network = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 1)).eval()
    x = torch.randn(64, 2, 8, 8)
    posterior = bb.mcbn(network, x, batch_size=16, num_samples=12)
    predictive = bb.predict(posterior, x[:3], bb.categorical(), num_samples=40, engine="linear")
    exact = bb.predict(posterior, x[:3], bb.categorical(), num_samples=40)
    assert predictive.engine.startswith("linear, forward mode")
    assert predictive.probs.shape == (3, 8, 8, 3)
    assert (predictive.probs - exact.probs).abs().max() < 0.02
    assert plan_linear(posterior, 1, 5, seed=0).mode == "reverse"
    classes, pixels = plan_linear(posterior, 1000, 40, seed=0), plan_linear(posterior, 5000, 40, seed=0)
    assert (classes.sides, pixels.sides) == (1, 2)
    assert classes.cost(1000) == len(classes.directions) <= 8
    assert pixels.cost(5000) == 2 * len(pixels.directions)


def test_chunks_and_numbers_of_draws_do_not_matter():
    posterior, x = fitted("BatchNorm2d")
    posterior = posterior.at_batch_size(800)

    def draws(count, chunk_size=None):
        return bb.predict(
            posterior, x, bb.categorical(), num_samples=count, engine="linear", keep_draws=True, chunk_size=chunk_size
        ).draws

    torch.testing.assert_close(draws(12)[:3], draws(3))
    torch.testing.assert_close(draws(12, chunk_size=2), draws(12))


def rough():
    """A network whose outputs are far from linear in its batch statistics: tiny batches, steep activations."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()
    )
    network = nn.Sequential(*network, nn.Linear(8, 2)).eval()
    return bb.mcbn(network, torch.randn(200, 2), batch_size=2, num_samples=64, center="batches")


def test_an_untrustworthy_answer_is_said_loudly_and_auto_avoids_it():
    posterior, x = rough(), torch.randn(50, 2)
    with pytest.warns(bb.BatchbayesWarning, match="do not trust the linear engine"):
        assert not check_linearity(posterior, x).trusted
    with pytest.warns(bb.BatchbayesWarning, match="do not trust the linear engine"):
        bb.predict(posterior, x, bb.categorical(), num_samples=8, engine="linear")
    auto = bb.predict(posterior, x, bb.categorical(), num_samples=8, engine="auto")
    assert auto.engine.startswith("sample: not linear enough")
    torch.testing.assert_close(auto.probs, bb.predict(posterior, x, bb.categorical(), num_samples=8).probs)


class PlusItsInput(nn.BatchNorm1d):
    def forward(self, input):
        return super().forward(input) + 3 * input


def test_a_layer_that_uses_its_input_twice_has_other_derivatives_and_the_check_says_so():
    network = nn.Sequential(nn.Linear(3, 6), PlusItsInput(6), nn.Tanh(), nn.Linear(6, 1)).double()
    x = torch.randn(40, 3, dtype=torch.float64)
    posterior = bb.mcbn(network, torch.randn(500, 3, dtype=torch.float64), batch_size=50)
    with pytest.warns(bb.BatchbayesWarning, match="do not trust"):
        assert not bb.check_linearity(posterior, x).trusted


def test_auto_is_linear_where_it_may_be():
    posterior, x = fitted("BatchNorm2d")
    predictive = bb.predict(posterior.at_batch_size(8000), x, bb.categorical(), num_samples=8, engine="auto")
    assert predictive.engine.startswith("linear, reverse mode")
    query = bb.mcbn(posterior.network.module, list(x.split(2)), include_query=True)
    assert "no linear engine" in bb.predict(query, x, bb.categorical(), num_samples=2, engine="auto").engine
    with pytest.raises(bb.BatchbayesError, match="QueryInBatchPosterior"):
        bb.predict(query, x, bb.categorical(), engine="linear")


def test_posteriors_without_noise_are_linear_too():
    posterior, x = fitted("BatchNorm2d")
    network = posterior.network.module
    for flat in (bb.deterministic(network), bb.population(network, [x])):
        predictive = bb.predict(flat, x, bb.categorical(), num_samples=3, engine="auto")
        assert predictive.mutual_information.max() == 0
        assert predictive.engine == "sample: all draws are one function"


@pytest.mark.parametrize("noise", ["rows", "correlated", "factorised"])
@pytest.mark.parametrize("count", [3, 40])
def test_draws_are_the_posteriors_own_deviations(noise, count):
    """Fewer draws than rows or more: each is the centre plus the Jacobian times that draw's deviation of omega."""
    posterior, x = fitted("BatchNorm2d")
    posterior = posterior.at_batch_size(8000)
    posterior = replace(posterior, noise=noise)
    plan = plan_linear(posterior, 3, count, seed=5)
    deviations = torch.stack([posterior.deviation(5, s) for s in range(count)])
    outputs, moves = posterior.tangents(x, deviations)
    torch.testing.assert_close(linear_draws(posterior, x, plan).outputs(), outputs + moves)
    if noise == "rows":
        assert len(plan.directions) == min(count, len(posterior.deviations))


def test_contrasts_are_differences_to_the_last_output():
    posterior, x = fitted("BatchNorm2d")
    _, full = posterior.tangents(x, posterior.deviations)
    _, contrasts = posterior.tangents(x, posterior.deviations, contrasts=True)
    assert full[..., -1].abs().max() > 0
    torch.testing.assert_close(contrasts, full - full[..., -1:])


@pytest.mark.parametrize("count", [5, 40])
def test_probabilities_need_only_contrasts(count):
    """Draws that are kept are logits, so they take every output; what is summed up is the same."""
    posterior, x = fitted("BatchNorm2d")
    posterior = posterior.at_batch_size(8000)
    short, full = (
        bb.predict(posterior, x, bb.categorical(), num_samples=count, engine="linear", keep_draws=keep)
        for keep in (None, True)
    )
    for name in ("probs", "entropy", "mutual_information", "epistemic_variance"):
        torch.testing.assert_close(getattr(short, name), getattr(full, name))
    assert len(full.draws) == min(count, len(posterior.deviations))
    outputs, moves = posterior.tangents(x, torch.stack([posterior.deviation(0, s) for s in range(len(full.draws))]))
    torch.testing.assert_close(full.draws, outputs + moves)


def test_forward_mode_is_the_best_linear_fit_of_cubics():
    """Least squares of a cubic over a standard Gaussian: a z + b z^3 has the slope a + 3 b."""

    class Cubic:
        center = torch.zeros(1, dtype=torch.float64)

        def function(self, omega):
            return lambda inputs: inputs + 2 * omega - 5 * omega**2 + 0.3 * omega**3

    outputs, moves = tangents_by_differences(
        Cubic(), torch.ones(4, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    )
    torch.testing.assert_close(outputs, torch.ones_like(outputs))
    torch.testing.assert_close(moves, torch.full_like(moves, 2 + 3 * 0.3))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 4), (5, 3, 2, 4)])
def test_affine_batch_norm_is_batch_norm(affine, shape):
    layer = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)](3, affine=affine).double()
    layer(torch.randn(*shape, dtype=torch.float64))
    if affine:
        nn.init.uniform_(layer.weight, 0.5, 2.0)
        nn.init.normal_(layer.bias)
    layer.eval()
    x = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    with affine_batch_norm():
        found = layer(x)
    assert "Add" in type(found.grad_fn).__name__
    torch.testing.assert_close(found, layer(x))
    g = torch.randn(*shape, dtype=torch.float64)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, g)[0] for y in (found, layer(x))))
    layer.train()
    with affine_batch_norm():  # training statistics are not ours to replace
        torch.testing.assert_close(layer(x), layer(x))
        assert "BatchNorm" in type(layer(x).grad_fn).__name__


def fitted_to(function, size=8):
    """A posterior of a network that is a function of normalised inputs, and inputs."""

    class Applied(nn.BatchNorm1d):
        def forward(self, input):
            return function(super().forward(input))

    torch.manual_seed(0)
    network, x = Applied(3, momentum=1.0), torch.randn(64, 3)
    network(x)
    return bb.mcbn(network.eval(), x, batch_size=size, num_samples=6), x


@pytest.mark.parametrize("noise", ["rows", "correlated"])
def test_derivatives_that_do_not_exist_are_refused_in_words(noise):
    posterior, x = fitted_to(lambda h: (h * (h > 0)).sqrt())
    posterior = replace(posterior, noise=noise)
    with pytest.raises(bb.BatchbayesError, match=r'finite derivatives.*got \d+ of \d+ that are NaN.*engine="sample"'):
        linear_draws(posterior, x, plan_linear(posterior, 3, 20, seed=0))


def test_large_outputs_whose_variance_overflows_are_no_error():
    posterior, x = fitted_to(lambda h: 1e25 * h)
    draws = linear_draws(posterior, x, plan_linear(posterior, 3, 6, seed=0))
    assert draws.outputs().isfinite().all()
    assert draws.moments()[1].isinf().any()


def test_auto_makes_exact_draws_where_there_are_no_derivatives():
    posterior, x = fitted_to(lambda h: h + (1e-3 * (h + 30) * (h > -30)).sqrt(), size=32)
    x = torch.cat([x, x - 1000])
    exact, found = (
        bb.predict(posterior, x, bb.categorical(), num_samples=6, engine=engine, chunk_size=len(x) // 2)
        for engine in ("sample", "auto")
    )
    assert found.engine.startswith("linear, ")
    assert found.engine.endswith("exact draws of chunks that are not linear enough")
    assert torch.equal(found.probs[len(x) // 2 :], exact.probs[len(x) // 2 :])
