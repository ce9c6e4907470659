"""Draws kept as what they are combined from, against draws formed one by one, in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import batchbayes as bb
from batchbayes.engines import linear as linear_draws
from batchbayes.engines.linear import Combinations, LinearDraws, formed, join_draws


def naive_moments(draws):
    return draws.mean(0), draws.var(0, correction=0)


@given(
    tangents=st.integers(1, 5),
    distinct=st.integers(1, 7),
    count=st.integers(1, 20),
    combined=st.booleans(),
    shift=st.floats(-1e3, 1e3),
)
def test_linear_draws_equal_a_naive_loop(tangents, distinct, count, combined, shift):
    """Draws, moments and summaries from tangents are those of draws formed one by one."""
    random = torch.Generator().manual_seed(tangents + 10 * distinct + 100 * count)
    middle = shift + torch.randn(4, 3, generator=random, dtype=torch.float64)
    moves = torch.randn(tangents if combined else distinct, 4, 3, generator=random, dtype=torch.float64)
    weights = torch.randn(distinct, tangents, generator=random, dtype=torch.float64) + 0.5 if combined else None
    index = torch.randint(0, distinct, (count,), generator=random)
    combinations = Combinations.of(weights, index, len(moves))
    draws = LinearDraws(middle, moves, combinations)
    mixing = torch.eye(distinct, dtype=torch.float64) if weights is None else weights
    naive = torch.stack([middle + sum(w * t for w, t in zip(mixing[i], moves, strict=True)) for i in index])
    torch.testing.assert_close(draws.outputs(), naive)
    for found, expected in zip(draws.moments(), naive_moments(naive), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
    for likelihood in (bb.categorical(), bb.gaussian(3.0)):
        compact, plain = likelihood.summary(), likelihood.summary()
        compact.add(draws)
        plain.add(naive)
        for name in ("epistemic_variance", "entropy", "mutual_information", "mean", "noise_variance"):
            one, other = (getattr(summary.finish(None), name, torch.zeros(1)) for summary in (compact, plain))
            torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)
    summary, targets = bb.gaussian(3.0).summary(), shift + torch.zeros(4, 3, dtype=torch.float64)
    summary.add(draws)
    expected = summary.finish(naive).log_prob(targets)
    torch.testing.assert_close(summary.finish(draws).log_prob(targets), expected)
    parts = [LinearDraws(middle[some], moves[:, some], combinations) for some in (slice(0, 1), slice(1, 4))]
    torch.testing.assert_close(summary.finish(join_draws(parts)).log_prob(targets), expected)
    torch.testing.assert_close(formed(join_draws(parts)), naive)
    torch.testing.assert_close(formed(join_draws([parts[0], naive[:, 1:]])), naive)
    torch.testing.assert_close(formed(join_draws([join_draws(parts), draws])), torch.cat([naive, naive], 1))
    assert join_draws([*parts, None]) is None


@pytest.mark.parametrize("weights", [None, torch.eye(2)])
def test_moments_of_float16_do_not_overflow(weights):
    moves = torch.tensor([[[500.0]], [[-500.0]]])
    draws = LinearDraws(torch.ones(1, 1).half(), moves.half(), Combinations.of(weights, torch.tensor([0, 1]), 2))
    assert draws.moments() == (torch.tensor([[1.0]]), torch.tensor([[250_000.0]]))


def test_the_density_of_many_linear_draws_needs_little_memory(monkeypatch):
    """Draws are formed in blocks, and no block holds all of them."""
    sizes = []
    blocks = LinearDraws.blocks

    def watched(self):
        for outputs, counts in blocks(self):
            sizes.append(outputs.numel())
            yield outputs, counts

    monkeypatch.setattr(LinearDraws, "blocks", watched)
    monkeypatch.setattr(linear_draws, "BLOCK", 100)
    combinations = Combinations.of(torch.randn(500, 2), torch.arange(500), 2)
    draws = LinearDraws(torch.zeros(10, 1), torch.randn(2, 10, 1), combinations)
    summary = bb.gaussian(1.0).summary()
    summary.add(draws)
    summary.finish(draws).log_prob(torch.zeros(10))
    assert sum(sizes) == 5000
    assert max(sizes) <= 100


class _Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor has that torch makes inside the block."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.untyped_storage().size():
            self.numbers = max(self.numbers, found.untyped_storage().size() // found.element_size())
        return found


@pytest.mark.parametrize("covariance", ["correlated", "factorised"])
def test_many_gaussian_draws_are_never_all_formed(covariance):
    """The largest tensor of prediction and density is a block of draws, however many draws there are."""
    torch.manual_seed(0)
    network, train = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)), torch.randn(400, 2)
    for _ in range(60):  # so that the running statistics are those of the data
        network(train)
    posterior = bb.stochastic_bn(network.eval(), train, batch_size=40, covariance=covariance)
    x, y = torch.randn(1000, 2), torch.randn(1000, 1)
    bb.predict(posterior, x, bb.gaussian(1.0), num_samples=10, engine="auto")  # the check of linearity is made once
    with _Largest() as largest:
        predictive = bb.predict(posterior, x, bb.gaussian(1.0), num_samples=4000, engine="linear")
        density = predictive.log_prob(y)
    assert predictive.engine.startswith("linear")
    assert 100_000 < largest.numbers <= linear_draws.BLOCK < 4000 * 1000 / 3
    few = slice(0, 20)
    mixture = torch.distributions.Normal(predictive.draws[:, few].double(), 1.0)
    expected = mixture.log_prob(y[few].double()).logsumexp(0) - math.log(4000)
    torch.testing.assert_close(density[few].double(), expected, rtol=1e-5, atol=1e-6)


def test_predicted_noise_is_averaged_over_linear_draws():
    """A network that predicts its noise has no closed form: the draws are formed."""
    draws = LinearDraws(
        torch.zeros(1, 2, dtype=torch.float64),
        torch.tensor([[[1.0, 0.0]], [[0.0, 2.0]]], dtype=torch.float64),
        Combinations.of(None, torch.tensor([0, 1, 1]), 2),
    )
    summary = bb.heteroscedastic_gaussian().summary()
    summary.add(draws)
    found = summary.finish(draws)
    torch.testing.assert_close(found.mean, torch.full((1, 1), 1 / 3, dtype=torch.float64))
    torch.testing.assert_close(found.noise_variance, (1 + 2 * torch.tensor([[2.0]], dtype=torch.float64).exp()) / 3)
    torch.testing.assert_close(found.draws, draws.outputs())
