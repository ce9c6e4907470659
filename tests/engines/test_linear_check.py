"""Whether the linear engine is trusted: what is measured, on which examples, how often, and what "auto" makes of it."""

import math

import pytest
import torch
from helpers.settled import X, settled
from torch import Tensor, nn

import batchbayes as bb
from batchbayes.engines import check as linear_check
from batchbayes.engines import linear as drawn
from batchbayes.engines.check import Linearity
from batchbayes.network.source import spread_evenly


class Curved(nn.Module):
    """Linear for ordinary inputs, and far from it for large ones."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.last(h + (h.abs() > 20) * 30 * torch.sin(8 * h))


def test_inputs_that_are_all_the_same_have_no_ranking():
    network = settled(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
    posterior = bb.mcbn(network, X, batch_size=200)
    same = X[:1].expand(5, 3)
    found = bb.check_linearity(posterior, same)
    assert math.isnan(found.rank_correlation)
    assert str(found).startswith("rank correlation of the variance not known, its mean 1.0")
    assert bb.predict(posterior, same, bb.categorical(), engine="auto").engine.startswith("linear")  # as the fit found


def test_what_the_fit_measured_is_kept_in_the_file(tmp_path):
    network = settled(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
    posterior = bb.mcbn(network, X, batch_size=200)
    bb.save(posterior, tmp_path / "p.safetensors")
    loaded = bb.load(tmp_path / "p.safetensors", network)
    one = {"data": X[:1], "likelihood": bb.categorical(), "engine": "auto"}
    assert bb.predict(loaded, **one).engine == bb.predict(posterior, **one).engine
    assert set(loaded.state()[0]["linearity"]) == {"values", "contrasts"}


def test_contrasts_that_are_left_out_do_not_count_against_the_linear_engine():
    """Sure examples move one contrast alone. The other logits move in exact draws, but no probability depends on it."""
    network = settled(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)))
    with torch.no_grad():
        network[2].weight.mul_(0.3)
        network[2].bias.copy_(torch.tensor([30.0, *[0.0] * 9]))
    posterior = bb.mcbn(network, X, batch_size=200)
    assert bb.predict(posterior, X, bb.categorical(), engine="auto").engine.startswith("linear")


def test_what_is_not_trusted_is_measured_once_in_a_prediction(monkeypatch):
    posterior = bb.mcbn(settled(Curved()), X, batch_size=100)
    noisy = {"data": X[:40] * 40, "likelihood": bb.categorical(), "num_samples": 32, "engine": "auto"}
    measured, measure = [], linear_check.measure_linearity
    monkeypatch.setattr(linear_check, "measure_linearity", lambda *a, **k: measured.append(a) or measure(*a, **k))
    for _ in range(2):  # what one prediction has met changes nothing for the next
        assert "exact draws" in bb.predict(posterior, chunk_size=10, **noisy).engine
    assert len(measured) == 2


def test_a_ranking_that_is_wrong_is_not_trusted():
    assert Linearity(0.95, 1.0, 0.1).trusted
    assert not Linearity(0.778, 1.0, 0.1).trusted
    assert not Linearity(float("nan"), 1.0, 0.1).trusted
    assert Linearity(float("nan"), 1.0, 0.001).trusted  # it misses nothing


def test_examples_with_more_noise_than_was_checked_are_checked_themselves():
    """The noise of such examples is far larger than where the check was made, and not linear there."""
    posterior = bb.mcbn(settled(Curved()), X, batch_size=100)
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
    for_auto, for_linear = (bb.mcbn(settled(Curved()), X, batch_size=100) for _ in range(2))
    drawn = {"data": x, "likelihood": bb.gaussian(1.0), "num_samples": 32}
    exact = bb.predict(for_auto, **drawn)
    auto = bb.predict(for_auto, engine="auto", chunk_size=size, **drawn)
    torch.testing.assert_close(auto.epistemic_variance, exact.epistemic_variance)
    with pytest.warns(bb.BatchbayesWarning, match="do not trust the linear engine"):
        bb.predict(for_linear, engine="linear", chunk_size=size, **drawn)


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
    posterior = bb.mcbn(settled(conv(), images), images, batch_size=100)
    predictive = bb.predict(posterior, images[:20], bb.categorical(), engine="auto")
    assert predictive.engine.startswith("linear, forward mode")
    assert bb.check_linearity(posterior, images).unexplained < 0.02


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
