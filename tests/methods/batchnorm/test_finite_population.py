"""Batches are drawn without replacement: Var(mean) = sigma^2 / M (N - M) / (N - 1)."""

import math

import pytest
import torch
from helpers.settled import settled
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import batchbayes as bb

N = 2000
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(1)).double()


def network():
    return settled(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).double(), X)


def mean_var(posterior):
    """The variance of the batch means, as a share of that of one example."""
    means = posterior.omega_var()[:3]
    return float((means / X.var(0, correction=0)).mean())


class Stream(IterableDataset):
    def __iter__(self):
        return iter(X[torch.randperm(N)])


SOURCES = {
    "tensor": lambda size: X,
    "data set": lambda size: TensorDataset(X),
    "loader": lambda size: DataLoader(TensorDataset(X), size, shuffle=True, drop_last=True),
    "loader of an endless kind": lambda size: DataLoader(Stream(), size),
    "one pass": lambda size: list(X[torch.randperm(N)].split(size)),
}


@pytest.mark.parametrize("size", [200, 1000])
@pytest.mark.parametrize("source", SOURCES)
def test_the_spread_at_another_batch_size_is_that_of_a_fit_there(source, size):
    """A mean of three chi-squares with R - 1 degrees of freedom: a relative standard error of sqrt(2 / (3 (R - 1)))."""
    torch.manual_seed(0)
    posterior = bb.mcbn(network(), SOURCES[source](size), batch_size=size, num_samples=400)
    rows = len(posterior.deviations)
    error = math.sqrt(2 / 3 / (rows - 1)) * math.sqrt(
        2 if source == "loader of an endless kind" and size == 1000 else 1
    )
    truth = 1 / 10 * (N - 10) / (N - 1)
    assert mean_var(posterior.at_batch_size(10)) == pytest.approx(truth, rel=3.5 * error)
    same = posterior.at_batch_size(size)
    torch.testing.assert_close(same.deviations, posterior.deviations)


def test_almost_all_examples_in_a_batch():
    posterior = bb.mcbn(network(), X, batch_size=1900, num_samples=400)
    assert mean_var(posterior.at_batch_size(10)) == pytest.approx(1 / 10, rel=0.15)  # 3.5 standard errors


def test_a_batch_of_all_examples_is_refused():
    posterior = bb.mcbn(network(), X, batch_size=100, num_samples=8)
    for size in (N, 1e6):
        with pytest.raises(bb.BatchbayesError, match="below 2000"):
            posterior.at_batch_size(size)


def test_an_unknown_number_of_examples_is_remarked():
    random = (X[torch.randperm(N)[:1000]] for _ in range(8))
    posterior = bb.mcbn(network(), random)
    with pytest.warns(bb.BatchbayesWarning, match="not known how many examples"):
        posterior.at_batch_size(10)


@pytest.mark.filterwarnings("ignore:the network is not linear")
@pytest.mark.parametrize("objective", ["elbo", "held-out"])
@pytest.mark.parametrize("as_list", [False, True])
def test_a_tuned_batch_size_stays_below_the_number_of_examples(objective, as_list):
    x = X[:100]
    net = settled(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)).double(), x)
    posterior = bb.mcbn(net, list(x.split(10)) if as_list else x, batch_size=10, num_samples=10)
    y = net(x).detach() + 0.01 * torch.randn(100, 1)  # no noise would be best
    tuned = bb.tune_batch_size(posterior, [(x, y)], bb.gaussian(1.0), objective=objective)
    assert tuned.batch_size < 100
    assert float(tuned.curve.batch_sizes.max()) < 100


def test_a_saved_posterior_knows_how_many_examples_there_were(tmp_path):
    net = network()
    posterior = bb.mcbn(net, X, batch_size=1000, num_samples=8)
    bb.save(posterior, tmp_path / "p.safetensors")
    again = bb.load(tmp_path / "p.safetensors", net)
    assert (again.num_examples, again.population) == (N, pytest.approx(N))
    torch.testing.assert_close(again.at_batch_size(10).deviations, posterior.at_batch_size(10).deviations)
