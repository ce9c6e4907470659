"""Which layers are sites: routed experts, layers that are called by their forward, and layers that were replaced."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import batchbayes as bb

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))


class Experts(nn.Module):
    """Examples whose first number is above a threshold go through a layer of their own."""

    def __init__(self, tracks=True):
        super().__init__()
        self.norm, self.threshold = nn.BatchNorm1d(4), 1.0
        self.often, self.rare = nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=tracks)

    def forward(self, x):
        high = x[:, 0] > self.threshold
        y = self.norm(x)
        out = torch.zeros_like(y)
        for mask, layer in ((~high, self.often), (high, self.rare)):
            if mask.any():
                out = out.index_put((mask.nonzero()[:, 0],), layer(y[mask]))
        return out


LOW, HIGH = X.clone(), X.clone()
LOW[:, 0], HIGH[:, 0] = -X[:, 0].abs(), X[:, 0].abs() + 1.1


def test_a_layer_that_later_examples_of_the_first_batch_reach_is_a_site():
    batches = [torch.cat([LOW[r], HIGH[r]]) for r in torch.arange(64).split(8)]
    posterior = bb.mcbn(Experts(), batches)
    assert sorted(site.name for site in posterior.sites) == ["norm", "often", "rare"]


@pytest.mark.parametrize("fit", [bb.mcbn, bb.population, lambda n, b: bb.clt_bn(n, b, batch_size=8)])
@pytest.mark.parametrize("tracks", [True, False])
def test_a_layer_that_other_batches_reach_is_no_silent_gap(fit, tracks):
    batches = [*LOW.split(8), HIGH[:8]]
    with pytest.raises(
        bb.BatchbayesError, match=r"an example that reaches rare|batch for which these did not|none .track"
    ):
        fit(Experts(tracks), batches)


@pytest.mark.parametrize("method", [bb.mcbn, bb.stochastic_bn, bb.population])
@pytest.mark.parametrize("tracks", [True, False])
def test_a_test_example_that_reaches_an_unknown_layer_is_refused(method, tracks, tmp_path):
    network = Experts(tracks)
    posterior = method(network, list(LOW.split(8)))
    bb.save(posterior, tmp_path / "p")
    for kept in (posterior, bb.load(tmp_path / "p", network)):
        bb.predict(kept, LOW, bb.categorical(), num_samples=2)
        for engine in ("sample", "linear", "auto"):
            with pytest.raises(bb.BatchbayesError, match=r"an example that reaches rare"):
                bb.predict(kept, HIGH, bb.categorical(), num_samples=2, engine=engine)


def test_a_layer_that_the_user_leaves_out_may_run():
    posterior = bb.mcbn(Experts(), list(LOW.split(8)), sites=["norm", "often"])
    bb.predict(posterior, HIGH, bb.categorical(), num_samples=2)
    blind = bb.mcbn(Experts(tracks=False), list(LOW.split(8)), sites=["norm", "often"])
    with pytest.raises(bb.BatchbayesError, match=r"an example that reaches rare"):
        bb.predict(blind, HIGH, bb.categorical(), num_samples=2)


def test_moments_of_single_examples_need_every_layer_in_every_batch():
    batches = [torch.cat([LOW[:4], HIGH[:4]]), *LOW.split(8)]
    with pytest.raises(bb.BatchbayesError, match=r"these did not: rare|same number of rows"):
        bb.clt_bn(Experts(), batches, batch_size=8)


class ByForward(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.norm, self.second, self.how = nn.BatchNorm1d(4), nn.BatchNorm1d(4), how

    def forward(self, x):
        y = self.norm(x)
        if self.how == "forward":
            return self.second.forward(y)
        if self.how == "functional":
            return F.batch_norm(y, self.second.running_mean, self.second.running_var, training=False)
        return F.batch_norm(self.second(y), None, None, training=True)


@pytest.mark.parametrize("how", ["forward", "functional", "training"])
def test_batch_norm_that_is_not_called_as_a_layer_is_refused(how):
    with pytest.raises(bb.BatchbayesError, match="1 batch norms in functional form"):
        bb.mcbn(ByForward(how), X, batch_size=8)


def test_batch_norm_layers_that_never_run():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)

        def forward(self, x):
            return self.linear(x)

    with pytest.raises(bb.BatchbayesError, match="1 layers that were not called: norm"):
        bb.mcbn(Idle(), X, batch_size=8)


def test_functional_batch_norm_beside_layers_is_told():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x):
            return F.batch_norm(self.norm(x), torch.zeros(4), torch.ones(4))

    with pytest.warns(bb.BatchbayesWarning, match="outside of layers carry no noise"):
        bb.mcbn(Both(), X, batch_size=8)


@pytest.mark.parametrize("other", [nn.BatchNorm1d(4), nn.Identity(), nn.LayerNorm(4), nn.BatchNorm1d(4, eps=0.1)])
@pytest.mark.parametrize("engine", ["sample", "linear", "auto"])
def test_a_layer_that_was_replaced_after_the_fit(other, engine):
    network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    for include_query in (False, True):
        network[1] = nn.BatchNorm1d(4)
        posterior = bb.mcbn(network, X, batch_size=8, include_query=include_query)
        network[1] = other
        if engine == "linear" and include_query:
            continue
        with pytest.raises(bb.BatchbayesError, match="another layer in its place"):
            bb.predict(posterior, X, bb.categorical(), num_samples=2, engine=engine)


def test_a_part_that_is_compiled_after_the_fit_is_the_same():
    network = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4)), nn.Linear(4, 3))
    posterior = bb.mcbn(network, X, batch_size=8)
    before = bb.predict(posterior, X, bb.categorical(), num_samples=2).probs
    network[1] = torch.compile(network[1], backend="eager")
    assert torch.equal(bb.predict(posterior, X, bb.categorical(), num_samples=2).probs, before)
