"""Networks and outputs of many kinds under the linear engine: right, or refused, and "auto" always answers."""

import types

import pytest
import torch
from helpers.settled import X, settled
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import batchbayes as bb


def assert_linear_is_exact(posterior, inputs: Tensor, likelihood, rel: float = 0.05) -> None:
    linear, exact = (
        bb.predict(posterior, inputs, likelihood, num_samples=32, engine=engine) for engine in ("linear", "sample")
    )
    a, b = linear.epistemic_variance.double(), exact.epistemic_variance.double()
    assert torch.allclose(a, b, rtol=rel, atol=rel * float(b.mean()))
    assert float(b.mean()) > 0


class Squeezed(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).squeeze(-1)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8))
        self.main, self.other = (nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)) for _ in range(2))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.body(x)
        return {"main": self.main(hidden), "other": self.other(hidden)}


class FrozenBackbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8))
        self.head = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = self.back(x)
        return self.head(hidden)


class TimeSteps(nn.Module):
    """The layer sees every time step of every example as a row, and is called by name."""

    def __init__(self) -> None:
        super().__init__()
        self.bn, self.out = nn.BatchNorm1d(3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.bn(input=x.reshape(-1, 3))
        return self.out(rows).view(len(x), -1).mean(1, keepdim=True)


def test_outputs_without_an_axis():
    network = settled(Squeezed(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    posterior = bb.mcbn(network, X, batch_size=200)
    assert_linear_is_exact(posterior, X[:20], bb.gaussian(1.0), rel=0.1)
    assert bb.check_linearity(posterior, X).trusted


def test_class_maps_of_a_single_position():
    network = settled(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 4), nn.Unflatten(1, (4, 1, 1))))
    posterior = bb.mcbn(network, X, batch_size=200, center="running")
    assert_linear_is_exact(posterior, X[:20], bb.categorical(), rel=0.15)


def test_heads_that_are_not_asked_for_move_nothing():
    posterior = bb.mcbn(settled(TwoHeads()), X, batch_size=200, output="main", center="running")
    assert len(posterior.sites) == 3
    assert_linear_is_exact(posterior, X[:20], bb.gaussian(1.0), rel=0.15)


def test_layers_without_gradients_are_refused_and_auto_draws_exactly():
    posterior = bb.mcbn(settled(FrozenBackbone()), X, batch_size=200, center="running")
    with pytest.raises(bb.BatchbayesError, match=r"back\.1 under no_grad"):
        bb.predict(posterior, X[:20], bb.gaussian(1.0), engine="linear")
    assert bb.predict(posterior, X[:20], bb.gaussian(1.0), engine="auto").engine.startswith("sample: no linear engine")


def test_several_rows_of_an_example():
    x = torch.randn(600, 5, 3)
    posterior = bb.mcbn(settled(TimeSteps(), x), x, batch_size=200, center="running")
    assert_linear_is_exact(posterior, x[:20], bb.gaussian(1.0))


def test_half_precision():
    network = settled(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    rounded = network.bfloat16()
    for fit in (bb.mcbn, bb.stochastic_bn):
        posterior = fit(rounded, X.bfloat16(), batch_size=100, center="running")
        assert posterior.center.dtype == torch.float32
        for engine in ("linear", "sample"):
            predictive = bb.predict(posterior, X[:9].bfloat16(), bb.gaussian(1.0), engine=engine)
            assert predictive.epistemic_variance.float().mean() > 0


def test_inference_mode():
    network = settled(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    posterior = bb.mcbn(network, X, batch_size=200)
    expected = bb.predict(posterior, X[:9], bb.gaussian(1.0), engine="linear")
    with torch.inference_mode():
        predictive = bb.predict(posterior, X[:9].clone(), bb.gaussian(1.0), engine="linear")
    assert torch.equal(predictive.mean, expected.mean)


def test_empty_batches_are_passed_over():
    network = settled(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    posterior = bb.mcbn(network, X, batch_size=200)
    assert len(bb.predict(posterior, [X[:0], X[:5]], bb.gaussian(1.0), engine="auto").mean) == 5
    with pytest.raises(bb.BatchbayesError, match="at least one example"):
        bb.predict(posterior, X[:0], bb.gaussian(1.0), engine="linear")


class OwnBatchNorm(nn.BatchNorm1d):
    """A subclass, which may do more than normalise."""


class Checkpointed(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 8), norm(8), nn.Tanh(), nn.Linear(8, 8), norm(8))
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        return self.last(checkpoint(self.first, x, use_reentrant=False))


def test_activation_checkpoints_change_nothing():
    network = settled(Checkpointed(nn.BatchNorm1d))
    posterior = bb.mcbn(network, X, batch_size=100)
    plain = bb.mcbn(nn.Sequential(network.first, network.last), X, batch_size=100)
    found, expected = (p.tangents(X[:40], p.deviations)[1] for p in (posterior, plain))
    torch.testing.assert_close(found, expected)
    assert found.abs().max() > 0.01


def test_checkpoints_around_other_layers_are_told_and_auto_makes_exact_draws():
    posterior = bb.mcbn(settled(Checkpointed(OwnBatchNorm)), X, batch_size=100)
    with pytest.raises(bb.BatchbayesError, match="activation checkpoints"):
        bb.predict(posterior, X[:40], bb.categorical(), engine="linear")
    exact, auto = (bb.predict(posterior, X[:40], bb.categorical(), engine=engine) for engine in ("sample", "auto"))
    assert torch.equal(exact.probs, auto.probs)


def test_a_network_may_change_its_precision_after_the_fit():
    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    network = nn.Sequential(nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 3))
    network(x)
    posterior = bb.mcbn(network.eval(), x, batch_size=50)
    network.double()
    found = bb.predict(posterior, x.double(), bb.categorical(), engine="linear")
    assert found.probs.dtype == torch.float64


class BySize(nn.Module):
    """What runs, in which order and how often depends on the number of positions."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.second = kind, nn.BatchNorm1d(3), nn.BatchNorm1d(3)
        self.mix, self.last = nn.Conv1d(3, 3, 1), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "order" and x.shape[-1] < 8:
            b, a = self.second(self.mix(x)), self.first(x)
        else:
            a, b = self.first(x), self.second(self.mix(x))
        h = torch.tanh(a + 0.3 * b)
        if self.kind == "twice" and x.shape[-1] < 8:
            h = torch.tanh(self.second(self.mix(h)))
        return self.last(h.mean(2))


class Skips(BySize):
    def forward(self, x: Tensor) -> Tensor:
        h = x if self.kind == "both" and x.shape[-1] < 8 else torch.tanh(self.first(x))
        h = h + torch.tanh(self.second(self.mix(h))) if x.shape[-1] >= 8 else h
        return self.last(h.mean(2))


@pytest.mark.parametrize("network", [BySize("order"), BySize("twice"), Skips("one"), Skips("both")])
def test_what_runs_may_depend_on_the_inputs(network):
    x = torch.randn(400, 3, 8, generator=torch.Generator().manual_seed(0)).double() + 0.5
    posterior = bb.mcbn(settled(network.double(), x), x, batch_size=50)
    few, step = x[:20, :, :5], 1e-4
    outputs, found = posterior.tangents(few, posterior.deviations)
    with torch.no_grad():
        there, back = (
            torch.stack([posterior.function(posterior.center + side * row)(few) for row in posterior.deviations])
            for side in (step, -step)
        )
        assert torch.equal(outputs, posterior.function(posterior.center)(few))
    torch.testing.assert_close(found, (there - back) / (2 * step), atol=1e-7, rtol=1e-5)


class ChangesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.last = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.last(h.add_(torch.tanh(self.norm(h))))


def test_inputs_of_layers_that_change_in_place_are_refused_and_auto_draws_exactly():
    posterior = bb.mcbn(settled(ChangesItsInput()), X, batch_size=100)
    with pytest.raises(
        bb.BatchbayesError, match=r"leaves the input of a batch-norm layer alone.*got a change in place"
    ):
        bb.predict(posterior, X[:20], bb.gaussian(1.0), engine="linear")
    exact, auto = (bb.predict(posterior, X[:20], bb.gaussian(1.0), engine=engine) for engine in ("sample", "auto"))
    assert torch.equal(exact.mean, auto.mean)


class Cut(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).detach()


def test_frozen_outputs_without_a_gradient_are_not_trusted():
    network = settled(Cut(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))).requires_grad_(False)
    posterior = bb.mcbn(network, X, batch_size=100)
    with pytest.warns(bb.BatchbayesWarning, match="do not trust the linear engine"):
        bb.predict(posterior, X[:20], bb.gaussian(1.0), engine="linear")


def test_a_forward_that_the_user_has_put_into_a_layer_is_used():
    network = settled(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
    plain = bb.mcbn(nn.Sequential(network[0], network[1], nn.Tanh(), network[2]), X, batch_size=100)
    expected = plain.tangents(X[:9], plain.deviations)[1]
    usual = network[1].forward
    network[1].forward = lambda input: torch.tanh(usual(input))
    with pytest.raises(bb.BatchbayesError, match=r"got BatchNorm1d.forward, which refers to a"):
        bb.mcbn(network, X, batch_size=100)
    network[1].forward = types.MethodType(
        lambda self, input: torch.tanh(nn.BatchNorm1d.forward(self, input)), network[1]
    )
    posterior = bb.mcbn(network, X, batch_size=100)
    torch.testing.assert_close(posterior.tangents(X[:9], posterior.deviations)[1], expected)


@pytest.mark.filterwarnings("ignore:the weights of Sequential have changed")
def test_a_new_head_with_other_classes_is_told():
    network = settled(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 40)))
    posterior = bb.mcbn(network, X, batch_size=200)
    assert "for the classes that matter" in bb.predict(posterior, X[:20], bb.categorical(), engine="linear").engine
    network[2] = nn.Linear(8, 30)
    with pytest.raises(bb.BatchbayesError, match="40 classes, as at the fit; got 30"):
        bb.predict(posterior, X[:20], bb.categorical(), engine="linear")
    assert bb.predict(posterior, X[:20], bb.categorical(), engine="auto").probs.shape == (20, 30)


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()


class WithoutBackward(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first = kind, nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Sigmoid())
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(h.mul_(2) if self.kind == "in place" else Round.apply(4 * h))


@pytest.mark.parametrize(
    ("kind", "message"), [("in place", "modified by an inplace"), ("no backward", "backward or vjp")]
)
def test_networks_without_a_backward_pass_are_refused_in_words(kind, message):
    with torch.no_grad():
        posterior = bb.mcbn(settled(WithoutBackward(kind)), X, batch_size=100)
    with pytest.raises(bb.BatchbayesError, match=f"a network that gradients can pass through.*{message}"):
        bb.check_linearity(posterior, X)
    assert bb.predict(posterior, X[:9], bb.gaussian(1.0), engine="auto").engine.startswith(
        ("sample: no linear engine", "sample: not linear")
    )
