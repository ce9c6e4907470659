"""MCBN against a naive training-mode forward pass, on every kind of batch norm."""

from dataclasses import replace

import pytest
import torch
from helpers.cases import NETWORKS, vectors
from helpers.references import left_alone, training_forward, training_statistics
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import batchbayes as bb
from batchbayes.methods.batchnorm.omega import is_mean, running_omega, unpack

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def tabular(dtype=torch.float32):
    return NETWORKS["BatchNorm1d (N, C)"].network(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_draw_on_its_own_batch_is_the_training_forward(name, dtype):
    case = NETWORKS[name]
    network, batches = case.network(dtype), case.batches(5, dtype=dtype)
    posterior = bb.mcbn(network, batches, num_samples=5, center="batches")
    rows = posterior.center + posterior.deviations
    with torch.no_grad():
        for row, batch in zip(rows, batches, strict=True):
            drawn = posterior.function(row)(batch)
            torch.testing.assert_close(drawn, training_forward(network, batch), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", NETWORKS)
def test_draws_in_one_pass_are_those_made_one_by_one(name, dtype):
    case = NETWORKS[name]
    network, x = case.network(dtype), case.batches(1, size=3, seed=8, dtype=dtype)[0]
    for fit in (bb.mcbn, bb.stochastic_bn):
        posterior = fit(network, case.batches(5, dtype=dtype), num_samples=5)
        with torch.no_grad(), left_alone(network):
            one_by_one = torch.stack([posterior.draw(3, s)(x) for s in (4, 0, 2)])
            together = posterior.draw_together(3, (4, 0, 2))(x)
        assert len(together.flatten(1).unique(dim=0)) == 3
        torch.testing.assert_close(together, one_by_one, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", [n for n in NETWORKS if n not in ("DataParallel", "torch.compile")])
def test_statistics_are_those_of_a_training_pass(name):
    case = NETWORKS[name]
    network, batches = case.network(torch.float64), case.batches(3, dtype=torch.float64)
    posterior = bb.mcbn(network, batches, num_samples=3, center="batches")
    for row, batch in zip(posterior.center + posterior.deviations, batches, strict=True):
        truth = training_statistics(network, batch)
        for site, (mean, variance) in zip(posterior.sites, unpack(posterior.sites, row), strict=True):
            torch.testing.assert_close(mean, truth[site.name][0], rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(variance, truth[site.name][1], rtol=1e-9, atol=1e-9)


def test_rows_are_drawn_once_each_before_any_comes_again():
    case = NETWORKS["BatchNorm1d (N, C)"]
    posterior = bb.mcbn(case.network(), case.batches(7), num_samples=7)
    drawn = torch.stack([posterior.deviation(3, s) for s in range(14)])
    assert len(torch.unique(drawn[:7], dim=0)) == 7
    assert len(torch.unique(drawn, dim=0)) == 7


def test_center_running_keeps_the_networks_own_statistics_and_the_batches_spread():
    network, x = tabular(), torch.randn(400, 4)
    batches = bb.mcbn(network, x, batch_size=16, center="batches")
    running = bb.mcbn(network, x, batch_size=16, center="running")
    torch.testing.assert_close(running.deviations, batches.deviations)
    torch.testing.assert_close(running.center, running_omega(running.sites))
    with torch.no_grad():
        torch.testing.assert_close(running.function(running.center)(x), network(x), rtol=1e-5, atol=1e-5)


def test_query_in_its_batch_equals_a_naive_loop():
    case = NETWORKS["BatchNorm2d"]
    network, batches, x = case.network(), case.batches(3), case.batches(1, size=4, seed=8)[0]
    posterior = bb.mcbn(network, batches, num_samples=3, include_query=True)
    assert posterior.batch_size == 8
    drawn = bb.predict(posterior, x, bb.categorical(), num_samples=3, keep_draws=True).draws
    naive = torch.stack(
        [torch.stack([training_forward(network, torch.cat([q[None], b[1:]]))[0] for q in x]) for b in batches]
    )
    order = [int((naive - d).abs().amax((1, 2)).argmin()) for d in drawn]
    assert sorted(order) == [0, 1, 2]
    torch.testing.assert_close(drawn, naive[order], rtol=0, atol=1e-5)


def test_deviations_scale_with_the_batch_size():
    case = NETWORKS["BatchNorm1d (N, C)"]
    posterior = bb.mcbn(case.network(), case.batches(9), num_samples=9, center="batches")
    wide = posterior.at_batch_size(2)
    assert wide.batch_size == 2
    torch.testing.assert_close(wide.deviations, posterior.deviations * 2)
    mean = is_mean(posterior.sites)
    torch.testing.assert_close(wide.center[mean], posterior.center[mean])
    assert (wide.center[~mean] < posterior.center[~mean]).all()  # E[var_B] = (M-1)/M var: smaller batches, less


def fitted_at(size, seed):
    """MCBN with 4000 rows, computed all at once: the statistics of mini-batches of this size from the same data."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(20_000, 3, dtype=torch.float64, generator=random) * torch.tensor([1.0, 2.0, 0.5]) + 1
    network = nn.Sequential(nn.BatchNorm1d(3, eps=1e-12), nn.Linear(3, 2)).double()
    few = bb.mcbn(network, x, batch_size=size, num_samples=2, center="batches")
    drawn = x[torch.randint(len(x), (4000, size), generator=random.manual_seed(seed))]  # (4000, size, 3)
    rows = torch.cat([drawn.mean(1), 0.5 * drawn.var(1, correction=0).log()], 1)
    return replace(few, center=rows.mean(0), deviations=rows - rows.mean(0))


@pytest.mark.parametrize(("size", "tolerance"), [(20, 0.006), (80, 0.006), (8, 0.02)])
def test_a_posterior_taken_to_another_batch_size_is_the_one_fitted_there(size, tolerance):
    """Centre and spread; 4000 rows estimate a mean log std to 0.0025. At M = 8 the expansion in 1/M ends to show."""
    moved, fitted = fitted_at(40, seed=0).at_batch_size(size), fitted_at(size, seed=1)
    mean = is_mean(moved.sites)
    torch.testing.assert_close(moved.center[~mean], fitted.center[~mean], rtol=0, atol=tolerance)
    torch.testing.assert_close(moved.center[mean], fitted.center[mean], rtol=0, atol=0.03)
    torch.testing.assert_close(moved.deviations.std(0), fitted.deviations.std(0), rtol=0.15, atol=0)


@pytest.mark.parametrize(
    ("select", "names"),
    [
        (None, ["1", "5"]),
        (1, ["1"]),
        ("5", ["5"]),
        (["1", "5"], ["1", "5"]),
        ("*", ["1", "5"]),
        (lambda name, layer: layer.num_features == 6, ["5"]),
    ],
)
def test_sites_are_selected_by_count_name_pattern_or_function(select, names):
    posterior = bb.mcbn(tabular(), torch.randn(64, 4), batch_size=8, sites=select)
    assert [site.name for site in posterior.sites] == names


def test_sites_stand_in_the_order_of_execution():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.first = nn.BatchNorm1d(3), nn.BatchNorm1d(3)

        def forward(self, x):
            return self.last(self.first(x) ** 2)

    posterior = bb.mcbn(Backwards(), torch.randn(64, 3), batch_size=8, sites=1)
    assert [site.name for site in posterior.sites] == ["first"]


def test_layers_outside_the_selection_keep_their_running_statistics():
    network, x = tabular(), torch.randn(64, 4)
    posterior = bb.mcbn(network, x, batch_size=8, sites=["5"])
    hidden = network[:5]
    mean = posterior.center[:6]
    with torch.no_grad():
        torch.testing.assert_close(mean, hidden(x).mean(0), rtol=0, atol=0.2)
        assert (network[1].running_mean - network[0](x).mean(0)).abs().max() > 0


def test_a_layer_that_never_runs_is_left_out():
    class Auxiliary(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.BatchNorm1d(3), nn.BatchNorm1d(3)

        def forward(self, x):
            return self.idle(self.used(x)) if self.training else self.used(x)

    assert [s.name for s in bb.mcbn(Auxiliary(), torch.randn(64, 3), batch_size=8).sites] == ["used"]


def test_a_layer_used_twice_is_refused_and_can_be_left_out():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.other = nn.BatchNorm1d(3), nn.BatchNorm1d(3)

        def forward(self, x):
            return self.other(self.norm(self.norm(x) + 1))

    x = torch.randn(64, 3)
    with pytest.raises(bb.BatchbayesError, match="several batch statistics under one name: norm"):
        bb.mcbn(Shared(), x, batch_size=8)
    assert [s.name for s in bb.mcbn(Shared(), x, batch_size=8, sites="other").sites] == ["other"]


def test_dropout_rests_unless_asked_for():
    network, batches = tabular(), [torch.randn(8, 4)] * 6
    with pytest.raises(bb.BatchbayesError, match="zero spread"):
        bb.mcbn(network, batches)
    posterior = bb.mcbn(network, batches, dropout=True)
    first = 2 * 8
    assert posterior.deviations[:, :first].abs().max() < 1e-5  # before the dropout
    assert posterior.deviations[:, first:].abs().max() > 0.05  # after it


def test_loader_batches_are_cut_and_joined_and_left_overs_dropped():
    network, x = tabular(), torch.randn(50, 4)
    loader = DataLoader(TensorDataset(x, torch.zeros(50)), batch_size=8, shuffle=True)
    posterior = bb.mcbn(network, loader, num_samples=20)
    assert (posterior.batch_size, len(posterior.deviations)) == (8, 20)
    assert bb.mcbn(network, loader, num_samples=20, batch_size=12).batch_size == 12
    assert len(bb.mcbn(network, list(loader), num_samples=20).deviations) == 6  # a list is read once


def test_cut_batches_hold_the_same_examples():
    network, x = tabular(), torch.randn(48, 4)
    cut = bb.mcbn(network, [x[:20], x[20:]], batch_size=12, num_samples=4)
    whole = bb.mcbn(network, list(x.split(12)), num_samples=4)
    # the stream is 12 of the first batch, its last 8 with 4 of the second, ...: the same order of examples
    torch.testing.assert_close(cut.deviations, whole.deviations)


def test_fits_are_repeatable_and_leave_the_global_generators_alone():
    network, x = tabular(), torch.randn(64, 4)
    loader = DataLoader(TensorDataset(x), batch_size=8, shuffle=True)
    before = torch.get_rng_state()
    first, again, other = (bb.mcbn(network, loader, seed=s, num_samples=5) for s in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first.deviations, again.deviations)
    assert not torch.equal(first.deviations, other.deviations)


def test_batch_size_that_differs_from_training_is_remarked():
    with pytest.warns(bb.BatchbayesWarning, match=r"trained with batches of 32: .*factor of 2\.00"):
        bb.mcbn(tabular(), torch.randn(64, 4), batch_size=8, training_batch_size=32)
    bb.mcbn(tabular(), torch.randn(64, 4), batch_size=8, training_batch_size=8)


def settled(network, x):
    """Running statistics after many batches: what training leaves behind."""
    network.train()
    with torch.no_grad():
        for _ in range(100):
            network(x[torch.randperm(len(x))[:32]])
    return network.eval()


def test_batches_unlike_those_of_training_are_remarked():
    x = torch.randn(1000, 4)
    network = settled(vectors(), x)
    bb.mcbn(network, x, batch_size=32)  # says nothing
    for center in ("batches", "running"):
        with pytest.warns(bb.BatchbayesWarning, match="WARNING: the batches do not look like the training data"):
            bb.mcbn(network, 2 * x + 1, batch_size=32, center=center)
    with pytest.warns(bb.BatchbayesWarning, match="same transforms as in training"):
        bb.mcbn(network, 0.8 * x, batch_size=32, center="batches")
    bb.mcbn(network, 0.8 * x, batch_size=32, center="running")  # keeps the network's own answer


def test_population_statistics_are_those_of_one_big_batch():
    for name, case in NETWORKS.items():
        network = case.network(torch.float64)
        x = torch.cat(case.batches(6, dtype=torch.float64))
        batches = list(x.split(7))  # uneven on purpose
        drawn = bb.population(network, batches).draw(0, 0)
        with torch.no_grad():
            torch.testing.assert_close(drawn(x), training_forward(network, x), rtol=0, atol=1e-9, msg=name)


@settings(max_examples=25, deadline=None)
@given(
    size=st.integers(2, 9),
    count=st.integers(2, 6),
    channels=st.integers(1, 5),
    scale=st.floats(1e-3, 1e3),
    shift=st.floats(-100, 100),
)
def test_any_shape_and_scale(size, count, channels, scale, shift):
    network = nn.Sequential(nn.BatchNorm1d(channels), nn.ReLU(), nn.BatchNorm1d(channels)).double()
    random = torch.Generator().manual_seed(size * 100 + count)
    batches = [torch.randn(size, channels, generator=random).double() * scale + shift for _ in range(count)]
    with left_alone(network):
        posterior = bb.mcbn(network, batches, num_samples=count, center="batches")
    for row, batch in zip(posterior.center + posterior.deviations, batches, strict=True):
        drawn = posterior.function(row)(batch)
        torch.testing.assert_close(drawn, training_forward(network, batch), rtol=1e-6, atol=1e-6)
