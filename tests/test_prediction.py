"""Prediction against naive loops over draws, in float64."""

import dataclasses
import math
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from helpers.cases import NETWORKS
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributions import Normal

import batchbayes as bb
from batchbayes.likelihoods import Categorical

prediction = import_module("batchbayes.predict")


@pytest.fixture(scope="module")
def posterior():
    case = NETWORKS["BatchNorm1d (N, C)"]
    return bb.mcbn(case.network(torch.float64), case.batches(9, dtype=torch.float64), num_samples=9)


@pytest.fixture(scope="module")
def x():
    return torch.randn(11, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def naive(posterior, x, count, seed=0):
    with torch.no_grad():
        return torch.stack([posterior.draw(seed, s)(x) for s in range(count)])


def test_classification_equals_a_naive_loop(posterior, x):
    predictive = bb.predict(posterior, x, bb.categorical(), num_samples=7, seed=2)
    p = naive(posterior, x, 7, seed=2).softmax(-1)
    mean = p.mean(0)
    entropy = -(mean * mean.log()).sum(-1)
    expected = -(p * p.log()).sum(-1).mean(0)
    labels = torch.arange(11) % 3
    torch.testing.assert_close(predictive.probs, mean)
    torch.testing.assert_close(predictive.entropy, entropy)
    torch.testing.assert_close(predictive.expected_entropy, expected)
    torch.testing.assert_close(predictive.mutual_information, entropy - expected)
    torch.testing.assert_close(predictive.epistemic_variance, p.var(0, correction=0))
    torch.testing.assert_close(predictive.log_prob(labels), mean[torch.arange(11), labels].log())
    assert predictive.num_samples == 7


def test_regression_equals_a_naive_loop(posterior, x):
    predictive = bb.predict(posterior, x, bb.gaussian(precision=4.0), num_samples=7, seed=2)
    draws, y = naive(posterior, x, 7, seed=2), torch.randn(11, 3, dtype=torch.float64)
    torch.testing.assert_close(predictive.draws, draws)
    torch.testing.assert_close(predictive.mean, draws.mean(0))
    torch.testing.assert_close(predictive.epistemic_variance, draws.var(0, correction=0))
    torch.testing.assert_close(predictive.variance, draws.var(0, correction=0) + 0.25)
    torch.testing.assert_close(predictive.std**2, predictive.variance)
    # log-sum-exp over draws, as the paper writes it
    exponent = -2.0 * (y - draws) ** 2
    expected = exponent.logsumexp(0) - math.log(7) - 0.5 * math.log(2 * math.pi) + 0.5 * math.log(4.0)
    torch.testing.assert_close(predictive.log_prob(y), expected)


def test_noise_that_the_network_predicts(x):
    network = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)).double()
    posterior = bb.mcbn(network, torch.randn(64, 4).double(), batch_size=8)
    predictive = bb.predict(posterior, x, bb.heteroscedastic_gaussian(), num_samples=5)
    draws, y = naive(posterior, x, 5), torch.randn(11, 2).double()
    means, variances = draws[..., :2], draws[..., 2:].exp()
    torch.testing.assert_close(predictive.mean, means.mean(0))
    torch.testing.assert_close(predictive.noise_variance, variances.mean(0))
    torch.testing.assert_close(predictive.variance, variances.mean(0) + means.var(0, correction=0))
    mixture = Normal(means, variances.sqrt()).log_prob(y).exp().mean(0).log()
    torch.testing.assert_close(predictive.log_prob(y), mixture)


@pytest.mark.parametrize("probability", [0.025, 0.5, 0.9])
def test_quantiles_are_those_of_the_mixture(posterior, x, probability):
    predictive = bb.predict(posterior, x, bb.gaussian(precision=30.0), num_samples=6)
    quantile = predictive.quantile(probability)
    torch.testing.assert_close(predictive.cdf(quantile), torch.full_like(quantile, probability))
    grid = torch.linspace(-8, 8, 200_001, dtype=torch.float64)  # a numerical integral of the density
    draws = predictive.draws[:, 0, 0]
    density = Normal(draws[:, None], 30**-0.5).log_prob(grid).exp().mean(0)
    integral = torch.cumulative_trapezoid(density, grid)
    torch.testing.assert_close(quantile[0, 0], grid[1:][integral >= probability][0], rtol=0, atol=2e-4)


def test_targets_without_the_output_axis_are_meant_column_wise():
    network = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    posterior = bb.mcbn(network, torch.randn(64, 2), batch_size=8)
    predictive = bb.predict(posterior, torch.randn(5, 2), bb.gaussian(1.0))
    y = torch.randn(5)
    assert predictive.log_prob(y).shape == (5,)
    torch.testing.assert_close(predictive.log_prob(y), predictive.log_prob(y[:, None])[:, 0])
    with pytest.raises(bb.BatchbayesError, match=r"targets of shape \(5, 1\); got shape \(4,\)"):
        predictive.log_prob(y[:4])


def test_segmentation_puts_the_classes_last():
    network = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 1))
    posterior = bb.mcbn(network, torch.randn(32, 2, 6, 5), batch_size=4)
    x = torch.randn(2, 2, 6, 5)
    predictive = bb.predict(posterior, x, bb.categorical(), num_samples=4)
    assert predictive.probs.shape == (2, 6, 5, 3)
    assert predictive.mutual_information.shape == (2, 6, 5)
    torch.testing.assert_close(predictive.probs, naive(posterior, x, 4).softmax(2).mean(0).permute(0, 2, 3, 1))
    assert predictive.log_prob(torch.zeros(2, 6, 5, dtype=torch.long)).shape == (2, 6, 5)
    last = Categorical(class_axis=-1).logits(torch.zeros(1, 2, 6, 7))
    assert last.shape == (1, 2, 6, 7)


def test_draws_are_kept_only_where_needed_and_small(posterior, x, monkeypatch):
    with pytest.raises(bb.BatchbayesError, match="keep_draws=True"):
        _ = bb.predict(posterior, x, bb.categorical()).draws
    monkeypatch.setattr(prediction, "KEPT_DRAWS_LIMIT", 100)
    predictive = bb.predict(posterior, x, bb.gaussian(1.0), num_samples=8, chunk_size=2)
    with pytest.raises(bb.BatchbayesError, match="keep_draws=True"):
        predictive.log_prob(torch.zeros(11, 3))
    assert predictive.mean.shape == (11, 3)
    assert bb.predict(posterior, x, bb.gaussian(1.0), num_samples=8, keep_draws=True).draws.shape == (8, 11, 3)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.zeros(11, 3), "integer labels"),
        (torch.zeros(11), "integer labels"),
        (torch.full((11,), 3), "labels from 0 to 2; got 3 to 3"),
        (torch.full((11,), -1), "labels from 0 to 2"),
    ],
)
def test_bad_labels(posterior, x, labels, message):
    with pytest.raises(bb.BatchbayesError, match=message):
        bb.predict(posterior, x, bb.categorical(), num_samples=2).log_prob(labels)


@pytest.mark.parametrize("precision", [0.0, -1.0, float("inf"), float("nan")])
def test_bad_precision(precision):
    with pytest.raises(bb.BatchbayesError, match="positive, finite precision"):
        bb.gaussian(precision)


@pytest.mark.parametrize("probability", [0.0, 1.0, 1.5])
def test_bad_quantile(posterior, x, probability):
    with pytest.raises(bb.BatchbayesError, match="between 0 and 1"):
        bb.predict(posterior, x, bb.gaussian(1.0), num_samples=2).quantile(probability)


def test_likelihoods_refuse_outputs_that_do_not_fit(posterior, x):
    with pytest.raises(bb.BatchbayesError, match="even number of outputs"):
        bb.predict(posterior, x, bb.heteroscedastic_gaussian())
    flat = bb.mcbn(nn.Sequential(nn.BatchNorm1d(1), nn.Flatten(0)), torch.randn(64, 1), batch_size=8)
    with pytest.raises(bb.BatchbayesError, match="regression"):
        bb.predict(flat, torch.randn(3, 1), bb.categorical())


@settings(max_examples=40, deadline=None)
@given(gap=st.floats(0, 600), draws=st.integers(1, 5), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_extreme_logits_stay_finite(gap, draws, dtype):
    """A confident answer, right or wrong, has a finite log-probability, and information between 0 and log K."""
    summary = bb.categorical().summary()
    for s in range(draws):
        summary.add(torch.tensor([[[gap, 0.0], [0.0, gap if s % 2 else -gap]]], dtype=dtype))
    predictive = summary.finish(None)
    assert torch.isfinite(predictive.log_prob(torch.tensor([1, 1]))).all()
    information = predictive.mutual_information
    assert ((information >= 0) & (information <= math.log(2) + 1e-6)).all()
    assert torch.isfinite(predictive.entropy).all()


@settings(max_examples=40, deadline=None)
@given(blocks=st.lists(st.integers(1, 4), min_size=1, max_size=5), shift=st.floats(-1e6, 1e6))
def test_running_moments_do_not_depend_on_the_blocks(blocks, shift):
    """Blocks of any size give the variance of all draws, also when it is tiny beside the mean."""
    draws = torch.randn(sum(blocks), 3, 2, dtype=torch.float64) + shift
    summary = bb.gaussian(2.0).summary()
    for block in draws.split(blocks):
        summary.add(block)
    predictive = summary.finish(draws)
    torch.testing.assert_close(predictive.mean, draws.mean(0))
    torch.testing.assert_close(predictive.epistemic_variance, draws.var(0, correction=0), rtol=1e-6, atol=1e-9)


# Draws that are no functions


class Restless(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.norm, self.how = nn.BatchNorm1d(4), how

    def forward(self, x):
        y = self.norm(x)
        if self.how == "dropout":
            return F.dropout(y, 0.5)
        if self.how == "noise":
            return y + 0.01 * torch.randn_like(y)
        if self.how == "batch norm":
            return F.batch_norm(y, None, None, training=True)
        return y - y.mean(0)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("dropout", "gives the same answer twice"),
        ("noise", "gives the same answer twice"),
        ("batch norm", "treats each example by itself"),
        ("mean", "treats each example by itself"),
    ],
)
@pytest.mark.parametrize("engine", ["sample", "auto"])
def test_draws_that_depend_on_chance_or_neighbours_are_refused(x, how, message, engine):
    for dtype in (torch.float32, torch.float64):
        network = Restless(how).to(dtype).eval()
        if how != "batch norm":
            posterior = bb.mcbn(network, x.to(dtype), batch_size=4, num_samples=4)
            with pytest.raises(bb.BatchbayesError, match=message):
                bb.predict(posterior, x.to(dtype), bb.categorical(), num_samples=4, engine=engine)
        with pytest.raises(bb.BatchbayesError, match=message):
            bb.predict(bb.deterministic(network), x.to(dtype), bb.categorical(), engine=engine)


@pytest.fixture
def counting(posterior):
    """The same posterior, which notes the number of each draw in `calls`."""

    class Counting(bb.Posterior):
        kind = "counting"
        device = torch.device("cpu")
        calls = []  # noqa: RUF012

        def draw(self, seed, index):
            self.calls.append(index)
            return posterior.draw(seed, index)

        def state(self):
            raise NotImplementedError

        @classmethod
        def restore(cls, header, tensors, model):
            raise NotImplementedError

    return Counting()


def test_a_draw_is_tried_once_for_each_posterior(counting, x):
    for _ in range(2):
        bb.predict(counting, x, bb.categorical(), num_samples=3)
    assert counting.calls == [0, 0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize(("most_outputs", "times"), [(2**20, 2), (12, 4), (1, 6)])
def test_chunks_share_their_draws(counting, x, monkeypatch, most_outputs, times):
    """Six chunks: the first for itself, then as many together as the size of their outputs allows."""
    alone = bb.predict(counting, x, bb.categorical(), num_samples=10, chunk_size=2)
    counting.calls.clear()
    monkeypatch.setattr(prediction, "CHUNK", 8)  # two examples
    monkeypatch.setattr(prediction, "SHARED_OUTPUTS", most_outputs)
    together = bb.predict(counting, x, bb.categorical(), num_samples=10)
    assert counting.calls == times * list(range(10))
    assert torch.equal(together.probs, alone.probs)
    assert torch.equal(together.mutual_information, alone.mutual_information)


def test_a_posterior_of_ones_own_needs_no_hash():
    @dataclasses.dataclass
    class Shifted(bb.Posterior):
        """A plain dataclass has __eq__, so it has no hash."""

        step: float

        @property
        def device(self):
            return torch.device("cpu")

        def draw(self, seed, index):
            return lambda inputs: inputs + self.step * index

        def state(self):
            return {}, {}

        @classmethod
        def restore(cls, header, tensors, model):
            return cls(1.0)

    x = torch.randn(5, 3)
    found = bb.predict(Shifted(1.0), x, bb.gaussian(1.0), num_samples=3)
    torch.testing.assert_close(found.mean, x + 1)
