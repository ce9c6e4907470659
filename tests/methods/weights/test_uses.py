"""What a posterior of weights is good for: sparse weights, mean propagation, few bits."""

import math

import pytest
import torch
import torch.nn.functional as F
from batchbayes_papers.weights.propagation import (
    bits_needed,
    compression,
    curvatures,
    kappas,
    partly_drawn,
    rounded_means,
    silent_outputs,
    sparse_weights,
    sparsity,
)
from torch import nn

import batchbayes as bb


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def data(seed=0):
    torch.manual_seed(seed)
    return torch.randn(10, 3), torch.randint(0, 2, (10,))


def sparse_posterior():
    random = bb.noisy(network(), bb.SparseVD(initial_log_var=-6.0))
    with torch.no_grad():
        random.module[0].weight[1:3] = 1e-3  # log alpha of 7.8: pruned
    return random.posterior()


def test_pruned_weights_are_zero_and_counted():
    posterior = sparse_posterior()
    zeros = int((posterior.means()["0.weight"] == 0).sum())
    assert zeros >= 6
    assert sparsity(posterior)["0.weight"] == pytest.approx(zeros / 12)
    kept = sum(int((posterior.means()[name] != 0).sum()) for name in ("0.weight", "2.weight"))
    assert compression(posterior) == pytest.approx(20 / kept)
    assert silent_outputs(posterior)["0.weight"].tolist()[1:3] == [True, True]


def test_sparse_weights_are_the_means():
    posterior = sparse_posterior()
    for name, matrix in sparse_weights(posterior).items():
        assert torch.equal(matrix.to_dense(), posterior.means()[name])
        assert matrix._nnz() == int(posterior.means()[name].count_nonzero())
    convolution = bb.noisy(nn.Conv2d(2, 4, 3), bb.SparseVD()).posterior()
    assert sparse_weights(convolution)["weight"].shape == (4, 18)


def test_the_exact_curvature_is_the_diagonal_of_the_hessian():
    posterior, (x, y) = bb.noisy(network().double(), bb.MeanField()).posterior(), data()
    x = x.double()
    found = curvatures(posterior, [(x[:6], y[:6]), (x[6:], y[6:])], bb.categorical(), method="exact")
    own = posterior.network.module

    def loss(weight):
        return F.cross_entropy(own[2](torch.tanh(F.linear(x, weight, own[0].bias))), y, reduction="sum")

    hessian = torch.autograd.functional.hessian(loss, own[0].weight).reshape(12, 12)
    torch.testing.assert_close(found["0.weight"].flatten(), hessian.diagonal())


def test_hutchinson_estimates_the_same():
    posterior, batch = bb.noisy(network(), bb.MeanField()).posterior(), data()
    exact = curvatures(posterior, [batch], bb.categorical(), method="exact")["0.weight"]
    probes = [curvatures(posterior, [batch], bb.categorical(), num_probes=20, seed=s)["0.weight"] for s in range(40)]
    samples = torch.stack(probes)
    assert ((samples.mean(0) - exact).abs() < 4.5 * samples.std(0) / 40**0.5 + 1e-5).all()


def test_gauss_newton_is_the_hessian_of_a_network_with_relus():
    torch.manual_seed(0)
    relus = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))
    posterior, (x, y) = bb.noisy(relus, bb.MeanField()).posterior(), data()
    exact = curvatures(posterior, [(x, y)], bb.categorical(), method="exact")
    halves = [(x[:6], y[:6]), (x[6:], y[6:])]
    all_classes = curvatures(posterior, halves, bb.categorical(), method="gauss-newton", num_probes=0)
    torch.testing.assert_close(all_classes, exact)
    for name, expected in exact.items():
        probes = [
            curvatures(posterior, halves, bb.categorical(), method="gauss-newton", num_probes=50, seed=s)[name]
            for s in range(20)
        ]
        samples = torch.stack(probes)
        assert ((samples.mean(0) - expected).abs() < 4.5 * samples.std(0) / 20**0.5 + 1e-5).all()


@pytest.mark.parametrize(("method", "num_probes"), [("exact", 10), ("gauss-newton", 0)])
def test_the_curvature_over_draws_is_the_mean_of_those_at_each_draw(method, num_probes):
    torch.manual_seed(0)
    relus = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))
    posterior, (x, y) = bb.noisy(relus, bb.MeanField(initial_std=0.8)).posterior(), data()
    options = {"method": method, "num_probes": num_probes}
    found = curvatures(posterior, [(x, y)], bb.categorical(), num_draws=3, seed=5, **options)

    def loss(weight, other):
        hidden = F.linear(x, weight, relus[0].bias).relu()
        return F.cross_entropy(F.linear(hidden, other, relus[2].bias), y, reduction="sum")

    expected = torch.zeros(4, 3)
    for index in range(3):
        drawn = posterior.weights(5, index)
        hessian = torch.autograd.functional.hessian(
            lambda w, drawn=drawn: loss(w, drawn["2.weight"]), drawn["0.weight"]
        )
        expected += hessian.reshape(12, 12).diagonal().view(4, 3) / 3
    torch.testing.assert_close(found["0.weight"], expected)
    at_means = curvatures(posterior, [(x, y)], bb.categorical(), **options)["0.weight"]
    assert (found["0.weight"] - at_means).abs().max() > 0.01


def test_gauss_newton_refuses_convolutions():
    posterior = bb.noisy(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()), bb.MeanField()).posterior()
    batch = torch.randn(2, 1, 4, 4), torch.tensor([0, 1])
    with pytest.raises(bb.BatchbayesError, match='method="hutchinson"'):
        curvatures(posterior, [batch], bb.categorical(), method="gauss-newton")


class Scaled(nn.Linear):
    def forward(self, x):
        return 3 * super().forward(x)


class Twice(nn.Sequential):
    def forward(self, x):
        return super().forward(super().forward(x))


@pytest.mark.parametrize("odd", [Scaled(3, 3), Twice(nn.Linear(3, 3))])
def test_gauss_newton_refuses_layers_with_a_forward_of_their_own_and_layers_that_run_twice(odd):
    posterior = bb.noisy(odd, bb.MeanField()).posterior()
    with pytest.raises(bb.BatchbayesError, match=r'plain linear layers that run once.*method="hutchinson"'):
        curvatures(posterior, [data()], bb.categorical(), method="gauss-newton")


def test_kappa_and_draws_of_some_weights():
    posterior, (x, y) = bb.noisy(network(), bb.MeanField(initial_std=0.3)).posterior(), data()
    curvature = curvatures(posterior, [(x, y)], bb.categorical(), method="exact")
    kappa = kappas(posterior, curvature)
    torch.testing.assert_close(kappa["2.weight"], 0.3**2 * curvature["2.weight"].abs())
    none, every = ({name: torch.full_like(k, value, dtype=torch.bool) for name, k in kappa.items()} for value in (0, 1))
    for noisy, expected in ((none, network()(x)), (every, posterior.draw(0, 1)(x))):
        torch.testing.assert_close(posterior.network(x, tensors=partly_drawn(posterior, noisy, 0, 1)), expected)


def test_exact_curvature_of_large_layers_unknown_methods_and_no_probes_are_refused():
    posterior = bb.noisy(nn.Linear(100, 100), bb.MeanField()).posterior()
    with pytest.raises(bb.BatchbayesError, match='method="hutchinson"'):
        curvatures(posterior, [], bb.categorical(), method="exact")
    with pytest.raises(bb.BatchbayesError, match="a method, one of: exact, gauss-newton, hutchinson"):
        curvatures(posterior, [], bb.categorical(), method="diagonal")
    with pytest.raises(bb.BatchbayesError, match="num_probes as a whole number"):
        curvatures(posterior, [], bb.categorical(), num_probes=0)


def test_wide_posteriors_need_fewer_bits_and_rounding_stays_within_the_spread():
    bits = {}
    for std in (1e-4, 1e-2, 0.1):
        posterior = bb.noisy(network(), bb.MeanField(initial_std=std)).posterior()
        bits[std] = bits_needed(posterior)["0.weight"]
        errors = rounded_means(posterior)["0.weight"] - posterior.means()["0.weight"]
        assert errors.abs().max() <= 0.5 * 12**0.5 * std + 1e-6
        assert len(rounded_means(posterior)["0.weight"].unique()) <= 2 ** bits[std]
    assert bits[1e-4] > bits[1e-2] > bits[0.1] >= 1


def test_rounding_neither_wipes_out_wide_weights_nor_blurs_the_few_that_are_known_well():
    wide = bb.noisy(network(), bb.MeanField(initial_std=10.0)).posterior()
    mean, rounded = wide.means()["0.weight"], rounded_means(wide)["0.weight"]
    assert (rounded - mean).square().mean() < 0.15 * mean.square().mean()

    mixed = bb.noisy(network(), bb.MeanField(initial_std=10.0))
    log_std = mixed.parameters_of(mixed.sites[0])["log_std"]
    log_std.data.view(-1)[::4] = math.log(1e-3)  # one in four has a spread of 0.001
    errors = rounded_means(mixed.posterior())["0.weight"] - mixed.posterior().means()["0.weight"]
    assert errors.abs().max() <= 0.5 * 48**0.5 * 1e-3 + 1e-6
