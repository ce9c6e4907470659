"""Networks and outputs of many kinds under the linear engine: right, or refused, and "auto" always answers."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import batchbayes as bb
from batchbayes.batches import spread_evenly
from batchbayes.engines import linear_check
from batchbayes.engines import linear_draws as drawn
from batchbayes.engines.linear_check import Linearity

X = torch.randn(400, 3, generator=torch.Generator().manual_seed(0))


def settled(network: nn.Module, inputs: Tensor = X) -> nn.Module:
    for _ in range(60):
        network.train()(inputs)
    return network.eval()


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


class Curved(nn.Module):
    """Linear for ordinary inputs, and far from it for large ones."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.last(h + (h.abs() > 20) * 30 * torch.sin(8 * h))


def test_outputs_without_an_axis():
    network = settled(Squeezed(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    posterior = bb.mcbn(network, X, batch_size=200)
    assert_linear_is_exact(posterior, X[:20], bb.gaussian(1.0), rel=0.1)
    assert bb.check_linearity(posterior, X).trusted


def test_class_maps_of_a_single_position():
    network = settled(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 4), nn.Unflatten(1, (4, 1, 1))))
    posterior = bb.mcbn(network, X, batch_size=200, center="running")
    assert_linear_is_exact(posterior, X[:20], bb.categorical(), rel=0.15)


def test_inputs_that_are_all_the_same_have_no_ranking():
    network = settled(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
    posterior = bb.mcbn(network, X, batch_size=200)
    same = X[:1].expand(5, 3)
    assert math.isnan(bb.check_linearity(posterior, same).rank_correlation)
    assert bb.predict(posterior, same, bb.categorical(), engine="auto").engine.startswith("linear")  # as the fit found


def test_what_the_fit_measured_is_kept_in_the_file(tmp_path):
    network = settled(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
    posterior = bb.mcbn(network, X, batch_size=200)
    bb.save(posterior, tmp_path / "p.safetensors")
    loaded = bb.load(tmp_path / "p.safetensors", network)
    one = {"data": X[:1], "likelihood": bb.categorical(), "engine": "auto"}
    assert bb.predict(loaded, **one).engine == bb.predict(posterior, **one).engine
    assert set(loaded.state()[0]["linearity"]) == {"values", "contrasts"}


def test_linearity_is_measured_once_on_training_examples_when_it_is_first_asked_for(monkeypatch):
    network = settled(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
    measured, measure = [], linear_check.measure_linearity
    monkeypatch.setattr(
        linear_check,
        "measure_linearity",
        lambda *args, **options: measured.append(args[1]) or measure(*args, **options),
    )
    posterior = bb.mcbn(network, X, batch_size=200)
    bb.predict(posterior, X[:3], bb.categorical(), num_samples=8)
    assert not measured
    for _ in range(2):
        bb.predict(posterior, X[:2] + 0.01, bb.categorical(), engine="auto")
    assert [len(examples) for examples in measured] == [64]
    assert all(any(torch.equal(row, own) for own in X) for row in measured[0])
    saved = bb.mcbn(network, X, batch_size=200).state()[0]["linearity"]
    assert posterior.state()[0]["linearity"] == saved


def test_contrasts_that_are_left_out_do_not_count_against_the_linear_engine():
    """Sure examples move one contrast alone. The other logits move in exact draws, but no probability depends on it."""
    network = settled(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)))
    with torch.no_grad():
        network[2].weight.mul_(0.3)
        network[2].bias.copy_(torch.tensor([30.0, *[0.0] * 9]))
    posterior = bb.mcbn(network, X, batch_size=200)
    assert bb.predict(posterior, X, bb.categorical(), engine="auto").engine.startswith("linear")


def test_what_is_not_trusted_is_measured_once(monkeypatch):
    posterior = bb.mcbn(settled(Curved()), X, batch_size=16)
    noisy = {"data": X[:40] * 40, "likelihood": bb.categorical(), "num_samples": 32, "engine": "auto"}
    before = bb.predict(posterior, **noisy)
    monkeypatch.setattr(linear_check, "measure_linearity", None)
    after = bb.predict(posterior, **noisy)
    assert "exact draws" in before.engine
    assert torch.equal(before.probs, after.probs)


def test_a_ranking_that_is_wrong_is_not_trusted():
    assert Linearity(0.95, 1.0, 0.1).trusted
    assert not Linearity(0.778, 1.0, 0.1).trusted
    assert not Linearity(float("nan"), 1.0, 0.1).trusted
    assert Linearity(float("nan"), 1.0, 0.001).trusted  # it misses nothing


def test_examples_with_more_noise_than_was_checked_are_checked_themselves():
    """The noise of such examples is far larger than where the check was made, and not linear there."""
    posterior = bb.mcbn(settled(Curved()), X, batch_size=16)
    easy, hard = X[:40], X[:40] * 40
    assert bb.predict(posterior, easy, bb.categorical(), engine="auto").engine.startswith("linear")
    exact = bb.predict(posterior, hard, bb.categorical(), num_samples=32)
    auto = bb.predict(
        posterior, torch.cat([easy, hard]), bb.categorical(), num_samples=32, engine="auto", chunk_size=40
    )
    assert torch.equal(auto.probs[40:], exact.probs)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_few_examples_with_more_noise_than_was_checked_are_checked_too(size):
    """As in a service that gets one example at a time."""
    x = X[:12] * 40
    for_auto, for_linear = (bb.mcbn(settled(Curved()), X, batch_size=16) for _ in range(2))
    drawn = {"data": x, "likelihood": bb.gaussian(1.0), "num_samples": 32}
    exact = bb.predict(for_auto, **drawn)
    auto = bb.predict(for_auto, engine="auto", chunk_size=size, **drawn)
    torch.testing.assert_close(auto.epistemic_variance, exact.epistemic_variance)
    with pytest.warns(bb.BatchbayesWarning, match="do not trust the linear engine"):
        bb.predict(for_linear, engine="linear", chunk_size=size, **drawn)


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


def test_fewer_draws_than_the_check_takes(monkeypatch):
    monkeypatch.setattr(drawn, "BLOCK", 1)  # a block for each draw
    network = settled(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
    posterior = bb.mcbn(network, X, batch_size=200)
    for likelihood in (bb.heteroscedastic_gaussian(), bb.categorical(), bb.gaussian(1.0)):
        linear, exact = (
            bb.predict(posterior, X[:9], likelihood, num_samples=2, engine=engine, keep_draws=True)
            for engine in ("linear", "sample")
        )
        assert linear.num_samples == len(linear.draws) == 2
        assert torch.allclose(linear.draws, exact.draws, atol=0.1 * float(exact.draws.std()))


def conv(channels: int = 4) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Conv2d(6, channels, 3, padding=1))


def test_directions_left_out_do_not_make_a_linear_network_untrusted():
    images = torch.randn(200, 1, 12, 12)
    posterior = bb.mcbn(settled(conv(), images), images, batch_size=32, center="running").at_batch_size(1e8)
    predictive = bb.predict(posterior, images[:20], bb.categorical(), engine="auto")
    assert predictive.engine.startswith("linear, forward mode")
    assert "by directions left out" in predictive.engine
    assert bb.check_linearity(posterior, images).trusted


def test_many_outputs_without_rows_to_choose_directions_by():
    images = torch.randn(60, 1, 20, 20)
    posterior = bb.clt_bn(settled(conv(), images), images, batch_size=32)
    assert bb.predict(posterior, images[:4], bb.categorical(), num_samples=3, engine="auto").engine.startswith("sample")
    with pytest.raises(bb.BatchbayesError, match="at most 1024 outputs"):
        bb.predict(posterior, images[:4], bb.categorical(), engine="linear")
    still = bb.population(posterior.network.module, [images])
    assert bb.predict(still, images[:4], bb.categorical(), engine="auto").engine == "sample: all draws are one function"


def test_auto_takes_what_costs_less():
    network = settled(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)))
    posterior = bb.mcbn(network, X, batch_size=200)
    names = [bb.predict(posterior, X[:9], bb.categorical(), num_samples=s, engine="auto").engine for s in (4, 64)]
    assert names[0].startswith("sample: 4 draws cost less")
    assert names[1].startswith("linear")


def test_empty_batches_are_passed_over():
    network = settled(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    posterior = bb.mcbn(network, X, batch_size=200)
    assert len(bb.predict(posterior, [X[:0], X[:5]], bb.gaussian(1.0), engine="auto").mean) == 5
    with pytest.raises(bb.BatchbayesError, match="at least one example"):
        bb.predict(posterior, X[:0], bb.gaussian(1.0), engine="linear")


@pytest.mark.parametrize(
    ("inputs", "options", "words"),
    [
        ([X], {}, "a tensor of inputs"),
        (X[:0], {}, "a tensor of inputs"),
        (X, {"num_draws": 1}, "num_draws as a whole number of at least 2"),
        (X, {"num_draws": "a"}, "num_draws as a whole number of at least 2"),
        (X, {"max_examples": 0}, "max_examples as a whole number of at least 1"),
    ],
)
def test_check_linearity_says_what_it_needs(inputs, options, words):
    network = settled(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    with pytest.raises(bb.BatchbayesError, match=words):
        bb.check_linearity(bb.mcbn(network, X, batch_size=200), inputs, **options)


@pytest.mark.parametrize(("length", "count"), [(127, 64), (5, 9), (1, 1), (1000, 7)])
def test_examples_are_spread_over_all(length, count):
    index = spread_evenly(length, count)
    assert len(index.unique()) == min(length, count)
    assert (int(index[0]), int(index[-1])) == (0, length - 1)
    steps = {*index.diff().tolist()} or {0}
    assert max(steps) - min(steps) <= 1


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
    with pytest.warns(bb.BatchbayesWarning, match="cannot be copied"):
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
    assert bb.predict(posterior, X[:9], bb.gaussian(1.0), engine="auto").engine.startswith("sample: no linear engine")
