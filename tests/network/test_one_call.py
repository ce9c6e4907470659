"""A call of a public function looks for changes once and keeps networks ready: no pass may see what another one did."""

import gc
import sys
import weakref
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import batchbayes as bb
from batchbayes.network.replicas import first_time, one_call

X = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))


class Restless(nn.Module):
    """Changes whatever it can in evaluation mode, and adds what it has noted to its answer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
        self.drop = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("large", torch.zeros(5000))
        self.register_buffer("hidden", torch.zeros(1))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        noted = self.calls + self.large[0] + self.hidden + len(self.seen) + getattr(self, "number", 0)
        self.calls += 1
        self.large += 1
        self.hidden.data.add_(1)  # no counter of changes tells this
        self.seen.append(x)
        self.number = getattr(self, "number", 0) + 1
        self.layers[2].extra = x
        return self.drop(self.layers(x)) + noted


class Late(nn.Module):
    """Notes something down in some passes only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.layers(x) + getattr(self, "noted", 0)
        if float(outputs.sum()) > 0:
            self.noted = 1.0
        return outputs


NETWORKS = {
    "plain": lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)),
    "restless": Restless,
    "late": Late,
}


def trained(build) -> nn.Module:
    torch.manual_seed(0)
    network = build()
    with torch.no_grad():
        for _ in range(20):
            for layer in network.modules():
                if isinstance(layer, nn.BatchNorm1d):
                    layer(torch.randn(64, 4) + 0.5)
    return network.eval()


@pytest.mark.parametrize("name", NETWORKS)
def test_draws_of_one_prediction_are_those_that_are_made_one_by_one(name):
    network = trained(NETWORKS[name])
    posterior = bb.mcbn(network, X, batch_size=8, num_samples=12)
    found = bb.predict(posterior, X, bb.categorical(), num_samples=12, keep_draws=True).draws
    with torch.no_grad():
        expected = torch.stack([posterior.draw(0, index)(X) for index in range(12)])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", NETWORKS)
def test_rows_of_a_fit_are_those_of_single_batches(name):
    network = trained(NETWORKS[name])
    batches = list(X.split(8))
    rows = bb.mcbn(network, batches, num_samples=8, center="batches")
    alone = [bb.mcbn(network, [batch], num_samples=1, center="batches").center for batch in batches]
    torch.testing.assert_close(rows.center + rows.deviations, torch.stack(alone), rtol=0, atol=1e-6)


def test_changes_are_looked_for_once_a_prediction():
    posterior = bb.mcbn(trained(NETWORKS["plain"]), X, batch_size=8)
    bb.predict(posterior, X, bb.categorical(), num_samples=4)
    calls: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, _: calls.update([frame.f_code.co_name] if event == "call" else []))
    try:
        bb.predict(posterior, X, bb.categorical(), num_samples=40)
    finally:
        sys.setprofile(None)
    assert calls["have_changed"] == 1
    assert calls["is_followed"] == calls["begin"] == calls["note"] == 1


def test_each_call_sees_what_the_user_has_changed():
    network = trained(NETWORKS["plain"])
    posterior = bb.deterministic(network)
    for change in (
        lambda: setattr(network[1], "eps", 0.5),
        lambda: network[0].weight.data.mul_(2),
        lambda: setattr(network[0], "weight", nn.Parameter(torch.ones(4, 3))),
        lambda: setattr(network[1], "running_mean", torch.ones(4)),
        lambda: network[3].register_forward_hook(lambda *_: torch.ones(64, 2)),
    ):
        change()
        found = bb.predict(posterior, X, bb.gaussian(1.0)).mean
        with torch.no_grad():
            assert torch.equal(found, network(X))


def test_a_replaced_weight_is_not_kept_alive():
    network = trained(NETWORKS["plain"])
    posterior = bb.mcbn(network, X, batch_size=8)
    bb.predict(posterior, X, bb.categorical(), num_samples=4)
    replaced = weakref.ref(network[3].weight)
    network[3].weight = nn.Parameter(torch.ones(2, 4))
    gc.collect()
    assert replaced() is None


def test_a_pass_that_fails_inside_a_call_harms_no_other():
    network = trained(NETWORKS["restless"])
    posterior = bb.mcbn(network, X, batch_size=8)
    with torch.no_grad(), one_call():
        expected = posterior.draw(0, 0)(X)
        with pytest.raises(bb.BatchbayesError):
            posterior.draw(0, 1)(X[:, :2])
        assert torch.equal(posterior.draw(0, 0)(X), expected)


def test_networks_that_come_and_go_in_a_call_are_not_mistaken_for_each_other():
    """A new network may get the identity of one that is gone."""
    with torch.no_grad(), one_call():
        for number in range(50):
            network = nn.Linear(3, 1)
            nn.init.constant_(network.weight, number)
            assert torch.equal(bb.deterministic(network).draw(0, 0)(X), network(X))
            del network


def test_a_call_inside_a_call_looks_for_changes_itself():
    network = trained(NETWORKS["plain"])
    posterior = bb.deterministic(network)
    with torch.no_grad(), one_call():
        before = posterior.draw(0, 0)(X)
        network[1].eps = 0.5
        with one_call():
            inner = posterior.draw(0, 0)(X)
        assert torch.equal(inner, network(X))
        assert torch.equal(posterior.draw(0, 0)(X), before)
    assert not torch.equal(before, inner)
    assert first_time(network)


def test_data_that_predicts_while_a_fit_reads_it():
    """A loader may use the network itself, and change it, while random weights are trained."""
    network, seen = trained(NETWORKS["plain"]), []

    def batches(_: int):
        for _ in range(3):
            network[0].weight.data.add_(0.5)
            with torch.no_grad():
                seen.append((bb.predict(bb.deterministic(network), X, bb.gaussian(1.0)).mean, network(X)))
            yield X, torch.zeros(64, dtype=torch.long)

    bb.variational(network, batches, epochs=2, num_examples=64)
    assert len(seen) == 6
    assert all(torch.equal(found, expected) for found, expected in seen)


def passes_of(network: nn.Module, job) -> int:
    seen: list[None] = []
    handle = network.register_forward_pre_hook(lambda *_: seen.append(None))
    job()
    handle.remove()
    return len(seen)


@pytest.mark.filterwarnings("ignore:the network is not linear enough")
@pytest.mark.parametrize("classes", [2, 30])
def test_the_linear_engine_is_prepared_by_the_fit(classes, tmp_path):
    network = trained(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, classes)))
    posteriors = []
    fitting = lambda: posteriors.append(bb.mcbn(network, X, batch_size=16, num_samples=20))  # noqa: E731
    assert passes_of(network, fitting) <= 22 + 8
    fitting()
    asked, saved = posteriors
    assert passes_of(network, lambda: asked.at_batch_size(8)) == 0
    assert passes_of(network, lambda: bb.predict(asked, X, bb.categorical(), num_samples=5)) <= 4 + 5
    linear = bb.predict(asked, X, bb.categorical(), engine="linear").probs
    bb.save(asked.at_batch_size(16), tmp_path / "scaled.safetensors")
    bb.save(saved, tmp_path / "posterior.safetensors")
    for name in ("scaled", "posterior"):
        loaded = bb.load(tmp_path / f"{name}.safetensors", network)
        assert torch.equal(loaded.influence, asked.influence)
        assert (loaded.output_axes is None) == (classes == 2)
        assert torch.equal(bb.predict(loaded, X, bb.categorical(), engine="linear").probs, linear)


def test_the_first_batch_may_change_after_the_fit():
    first, others = X[:16].clone(), list(X[16:].split(16))
    network = trained(NETWORKS["plain"])
    expected = bb.mcbn(network, [first.clone(), *others]).influence
    posterior = bb.mcbn(network, [first, *others])
    first.zero_()
    assert torch.equal(posterior.influence, expected)
