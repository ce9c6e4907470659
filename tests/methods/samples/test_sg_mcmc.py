"""SG-MCMC against posteriors that are known exactly, and its diagnostics against series with known correlation."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from batchbayes_papers.samples.diagnostics import chain_diagnostics, effective_sample_size, r_hat
from torch import nn

import batchbayes as bb
from batchbayes.methods.samples.schedules import Cyclical, Polynomial, kept_steps
from batchbayes.methods.samples.sg_mcmc import Hamiltonian, Langevin
from batchbayes.training.loop import TrainingConfig, half_squared_error

CHAINS, N, D, TAU, DELTA = 40, 60, 3, 4.0, 2.0
SHAPE = torch.tensor([[1.0, 0.0, 0.0], [0.4, 0.9, 0.0], [-0.3, 0.2, 0.9]]).double()
X = torch.linalg.qr(torch.randn(N, D, generator=torch.Generator().manual_seed(0)).double())[0] * N**0.5 @ SHAPE
Y = X @ torch.tensor([1.0, -2.0, 0.5]).double() + 0.5 * torch.randn(N, generator=torch.Generator().manual_seed(1))
COVARIANCE = (TAU * X.T @ X + DELTA * torch.eye(D)).inverse()
MEAN = TAU * COVARIANCE @ X.T @ Y
STIFFNESS = float(torch.linalg.eigvalsh(COVARIANCE.inverse())[-1]) / N
"""The largest curvature of the mean loss: steps are fractions of its inverse."""


def mean_loss(weights):
    """The loss of an example with its share of the prior, for weights (D,)."""
    return (TAU / 2 * (X @ weights - Y).square().sum() + DELTA / 2 * weights.square().sum()) / N


def regression(weights):
    """The gradient of the mean loss, for the weights (C, D) of all chains."""
    return (weights - MEAN) @ COVARIANCE.inverse() / N


def regression_on_batches(weights):
    """The same from forty examples, other ones for each chain."""
    rows = torch.randint(N, (len(weights), 40))
    inputs = X[rows]  # (C, 40, D)
    errors = (inputs @ weights[:, :, None])[:, :, 0] - Y[rows]
    return TAU * (errors[:, None] @ inputs)[:, 0] / 40 + DELTA / N * weights


def banana(weights):
    """The gradient for x ~ N(0, 1), y | x ~ N(b (x^2 - 1), 1) with b = 0.6."""
    x, y = weights.T
    error = y - 0.6 * (x.square() - 1)
    return torch.stack([x - 1.2 * x * error, error], 1)


def run(gradient, start, optimiser, *, steps=20_000, every=20, burn_in=2000):
    """Run many chains at once, as the rows of one parameter, and return what they keep, (C, S, D)."""
    torch.manual_seed(0)
    weights = nn.Parameter(start + 0.3 * torch.randn(CHAINS, len(start), dtype=torch.float64))
    sampler, kept = optimiser([weights]), []
    for step in range(steps):
        weights.grad = gradient(weights.detach())
        sampler.step()
        if step >= burn_in:
            sampler.param_groups[0]["adapts"] = False
            if (step + 1) % every == 0:
                kept.append(weights.detach().clone())
    return torch.stack(kept, 1)


def require_moments(kept, mean, covariance, errors=3.0):
    """Assert that mean and covariance agree within a number of Monte Carlo standard errors, and that chains agree."""
    assert r_hat(kept).max() < 1.01
    products = (kept - mean)[..., :, None] * (kept - mean)[..., None, :]  # (C, S, D, D)
    for values, exact in ((kept, mean), (products, covariance)):
        spread = values.flatten(0, 1).std(0) / effective_sample_size(values).sqrt()
        assert ((values.mean((0, 1)) - exact).abs() / spread).max() < errors


LONG = {"steps": 40_000, "burn_in": 4000}
CONJUGATE = {
    "sgld": (regression, lambda p: Langevin(p, 0.05 / STIFFNESS, num_examples=N), {}),
    "psgld": (regression, lambda p: Langevin(p, 0.003, num_examples=N, preconditioned=True), {}),
    "sghmc": (regression, lambda p: Hamiltonian(p, 0.02 / STIFFNESS, num_examples=N, friction=0.2), {}),
}
ON_BATCHES = {
    "sgld": (regression_on_batches, lambda p: Langevin(p, 0.02 / STIFFNESS, num_examples=N), LONG),
    "sghmc": (regression_on_batches, lambda p: Hamiltonian(p, 0.005 / STIFFNESS, num_examples=N, friction=0.2), LONG),
}


@pytest.mark.parametrize(("gradient", "optimiser", "length"), CONJUGATE.values(), ids=CONJUGATE)
def test_moments_of_a_conjugate_regression(gradient, optimiser, length):
    require_moments(run(gradient, MEAN, optimiser, **length), MEAN, COVARIANCE)


@pytest.mark.slow
@pytest.mark.parametrize(("gradient", "optimiser", "length"), ON_BATCHES.values(), ids=ON_BATCHES)
def test_moments_under_the_noise_of_mini_batches(gradient, optimiser, length):
    require_moments(run(gradient, MEAN, optimiser, **length), MEAN, COVARIANCE)


@pytest.mark.parametrize("temperature", [0.1, 4.0])
def test_temperature_scales_the_covariance(temperature):
    options = {"num_examples": N, "temperature": temperature}
    kept = run(regression, MEAN, lambda p: Langevin(p, 0.05 / STIFFNESS, **options), steps=10_000)
    require_moments(kept, MEAN, temperature * COVARIANCE)


BANANA = {
    "sgld": (lambda p: Langevin(p, 0.02, num_examples=1), LONG),
    "psgld": (lambda p: Langevin(p, 0.02, num_examples=1, preconditioned=True), LONG),
    "sghmc": (lambda p: Hamiltonian(p, 0.005, num_examples=1, friction=0.1), {}),
}


@pytest.mark.parametrize(
    ("optimiser", "length"),
    [pytest.param(*case, id=name, marks=[pytest.mark.slow] * bool(case[1])) for name, case in BANANA.items()],
)
def test_moments_of_a_banana(optimiser, length):
    kept = run(banana, torch.zeros(2).double(), optimiser, **length)
    require_moments(kept, torch.zeros(2).double(), torch.tensor([[1.0, 0.0], [0.0, 1 + 2 * 0.6**2]]).double())
    x, y = kept.unbind(-1)
    bend = x.square() * y  # its mean is 2 b: zero for a Gaussian of the same moments
    error = bend.flatten().std() / effective_sample_size(bend).sqrt()
    assert abs(bend.mean() - 2 * 0.6) < 3 * error


def linear():
    return nn.Linear(D, 1, bias=False).double()


def tempered_error(outputs, targets):
    return TAU * half_squared_error(outputs, targets)


BATCHES = [(X, Y[:, None])] * 100
"""An epoch of a hundred steps, each on the whole training set."""


def test_the_whole_method_on_a_conjugate_regression():
    config = TrainingConfig(epochs=40, batch_size=N, learning_rate=0.02 / STIFFNESS, seed=1)
    options = {"sampler": "sghmc", "prior_precision": DELTA, "num_chains": 2, "num_samples": 400, "num_examples": N}
    samples = bb.sg_mcmc(linear, BATCHES, tempered_error, config, schedule=Polynomial(burn_in=0.1), **options)
    kept = samples.weights["weight"][:, 0].unflatten(0, (2, -1))  # (C, S, D)
    require_moments(kept, MEAN, COVARIANCE)
    found = chain_diagnostics(samples, X[:5])
    assert found.r_hat.max() < 1.01
    assert found.effective_sample_size.min() > 100
    # At the posterior U exceeds its least value by half a chi-squared number of D degrees of freedom.
    lowest = N * mean_loss(MEAN)
    assert math.isclose(found.log_posterior[:, 1:].mean(), -lowest - D / 2, abs_tol=0.3)


def test_cycles_keep_weights_at_their_ends():
    steps = kept_steps(Cyclical(cycles=3, exploring=0.75), 120, 6)
    assert steps == [34, 39, 74, 79, 114, 119]
    schedule = Cyclical(cycles=3)
    assert [round(schedule.factor(step, 120), 6) for step in (0, 20, 40, 60)] == [1.0, 0.5, 1.0, 0.5]
    config = TrainingConfig(epochs=3, batch_size=N, learning_rate=0.2 / STIFFNESS)
    options = {"schedule": Cyclical(3), "num_samples": 30, "prior_precision": DELTA, "num_examples": N}
    samples = bb.sg_mcmc(linear, BATCHES, tempered_error, config, **options)
    assert (samples.weights["weight"][:, 0] - MEAN).abs().max() < 5 * COVARIANCE.diagonal().sqrt().max()


def test_without_noise_a_cycle_is_gradient_descent():
    """In the exploring part there is no noise: all but the last steps equal those of SGD by hand."""
    config = TrainingConfig(epochs=10, batch_size=N, learning_rate=0.1 / STIFFNESS, seed=3)
    schedule, start = Cyclical(cycles=1, exploring=0.9), torch.zeros(1, D, dtype=torch.float64)

    def make():
        made = linear()
        nn.init.zeros_(made.weight)
        return made

    options = {"schedule": schedule, "num_samples": 1, "num_chains": 2, "prior_precision": DELTA}
    samples = bb.sg_mcmc(make, (X, Y[:, None]), tempered_error, config, **options)
    weights = start.clone().requires_grad_()
    for step in range(10):
        (gradient,) = torch.autograd.grad(mean_loss(weights[0]), weights)
        weights = (weights - config.learning_rate * schedule.factor(step, 10) * gradient).detach().requires_grad_()
    noise = (2 * config.learning_rate * schedule.factor(9, 10) / N) ** 0.5
    for number in range(2):
        difference = (samples.weights["weight"][number] - weights).abs().max()
        assert 0 < difference < 4 * noise


def test_effective_sample_size_of_an_autoregression():
    torch.manual_seed(0)
    for rho in (0.0, 0.6, 0.9):
        series = [torch.randn(8, 2)]
        for _ in range(4000):
            series.append(rho * series[-1] + (1 - rho**2) ** 0.5 * torch.randn(8, 2))
        values = torch.stack(series, 1)
        expected = 8 * 4001 * (1 - rho) / (1 + rho)
        assert ((effective_sample_size(values) / expected - 1).abs() < 0.15).all()
        assert r_hat(values).max() < 1.01
    assert (r_hat(values + torch.arange(8)[:, None, None]) > 1.5).all()


def naive_effective_size(chains):
    """Vehtari et al. 2021, for one quantity: halves of chains, and autocorrelations by sums."""
    halves = [half for chain in chains.tolist() for half in (chain[: len(chain) // 2], chain[len(chain) // 2 :])]
    count, means = len(halves[0]), [sum(half) / len(half) for half in halves]

    def covariance(lag):
        terms = [
            sum((half[t] - mean) * (half[t + lag] - mean) for t in range(count - lag)) / count
            for half, mean in zip(halves, means, strict=True)
        ]
        return sum(terms) / len(terms)

    within, middle = covariance(0) * count / (count - 1), sum(means) / len(means)
    total = covariance(0) + sum((mean - middle) ** 2 for mean in means) / (len(means) - 1)
    pairs = []
    for lag in range(0, count - 1, 2):
        pair = sum(1 - (within - covariance(step)) / total for step in (lag, lag + 1))
        if pair <= 0:
            break
        pairs.append(min([pair, *pairs]))
    return len(halves) * count / (2 * sum(pairs) - 1)


@pytest.mark.parametrize("drift", [0.0, 0.1])
def test_effective_sizes_are_those_of_halves_of_chains(drift):
    noise = torch.randn(3, 40, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    values = (noise + 0.6 * noise.roll(1, 1) + drift * torch.arange(40))[..., None]
    torch.testing.assert_close(float(effective_sample_size(values)), naive_effective_size(values[..., 0]))


def test_outputs_that_never_change_agree():
    same = torch.full((2, 6, 3), 0.1)
    assert (r_hat(same) == 1).all()
    assert (effective_sample_size(same) == 12).all()
    assert (r_hat(same + torch.arange(2.0)[:, None, None]) > 1e3).all()  # two chains that never move


def test_networks_without_chains_have_no_diagnostics():
    with pytest.raises(bb.BatchbayesError, match=r"bb\.sg_mcmc returns them; got a EnsemblePosterior"):
        chain_diagnostics(bb.ensemble([nn.Linear(3, 1), nn.Linear(3, 1)]), X)


BAD = {
    "sampler": ({"sampler": "sgd"}, 'sampler="sgld", "psgld" or "sghmc"'),
    "prior": ({"prior_precision": 0.0}, "a prior precision above 0"),
    "temperature": ({"temperature": -1.0}, "temperature above 0"),
    "too many": ({"num_samples": 1000}, "between 1 and"),
    "chains": ({"num_chains": 0}, "num_chains as a whole number"),
    "cycles": ({"schedule": lambda: Cyclical(0)}, "one cycle or more"),
    "burn-in": ({"schedule": lambda: Polynomial(burn_in=1.0)}, "burn_in from 0 to below 1"),
    "delay": ({"schedule": lambda: Polynomial(delay=0.0)}, "delay above 0"),
}


@pytest.mark.parametrize(("options", "words"), BAD.values(), ids=BAD)
def test_bad_options_are_refused(options, words):
    config = TrainingConfig(epochs=4, batch_size=N, learning_rate=1e-3)
    with pytest.raises(bb.BatchbayesError, match=words):
        sample_with(config, options)


@pytest.mark.parametrize("loss", [nn.MSELoss(reduction="sum"), partial(F.mse_loss, reduction="none")])
def test_a_loss_that_is_no_mean_is_refused(loss):
    with pytest.raises(bb.BatchbayesError, match="a loss that is the mean over a batch"):
        bb.sg_mcmc(linear, (X, Y[:, None]), loss, TrainingConfig(4, N))


def test_labels_that_do_not_count_are_refused():
    labels = torch.tensor([0, 1, -100]).repeat(20)
    with pytest.raises(bb.BatchbayesError, match="each example counts in the posterior; got a label of -100"):
        bb.sg_mcmc(lambda: nn.Linear(3, 2).double(), (X, labels), F.cross_entropy, TrainingConfig(4, N), num_samples=2)


def sample_with(config, options):
    made = {name: value() if callable(value) else value for name, value in options.items()}
    bb.sg_mcmc(linear, (X, Y[:, None]), tempered_error, config, **made)


def test_a_chain_that_diverges_is_refused():
    config = TrainingConfig(epochs=10, batch_size=N, learning_rate=50 / STIFFNESS)
    with pytest.raises(bb.BatchbayesError, match="a finite training loss"):
        bb.sg_mcmc(linear, BATCHES, tempered_error, config, num_examples=N)


def test_other_temperatures_weight_decay_and_unknown_sizes_are_told():
    config = TrainingConfig(epochs=4, batch_size=N, learning_rate=1e-3)
    with pytest.warns(bb.BatchbayesWarning, match="colder, that is, more certain"):
        bb.sg_mcmc(linear, (X, Y[:, None]), tempered_error, config, temperature=0.1, num_samples=2)
    decayed = TrainingConfig(epochs=4, batch_size=N, learning_rate=1e-3, weight_decay=1e-4)
    with pytest.raises(bb.BatchbayesError, match="no weight decay beside the prior"):
        bb.sg_mcmc(linear, (X, Y[:, None]), tempered_error, decayed)
    other = TrainingConfig(epochs=4, batch_size=N, optimiser="sgd")
    with pytest.raises(bb.BatchbayesError, match=r"because sampler= takes the steps; got optimiser='sgd'"):
        bb.sg_mcmc(linear, (X, Y[:, None]), tempered_error, other)
    with pytest.raises(bb.BatchbayesError, match="num_examples="):
        bb.sg_mcmc(linear, iter([(X, Y[:, None])]), tempered_error, config)
    bb.sg_mcmc(linear, [(X, Y[:, None])], tempered_error, config, num_examples=N, num_samples=2)
    with pytest.raises(bb.BatchbayesError, match="batches with a length"):
        bb.sg_mcmc(linear, lambda epoch: [(X, Y[:, None])], tempered_error, config, num_examples=N)
    with pytest.raises(bb.BatchbayesError, match="four samples or more"):
        chain_diagnostics(bb.sg_mcmc(linear, (X, Y[:, None]), F.mse_loss, config, num_samples=2), X)
