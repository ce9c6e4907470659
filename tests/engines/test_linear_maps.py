"""Maps (N, K, H, W): "auto" draws them exactly. The linear engine, if asked for, warns where it does not hold."""

import pytest
import torch
from torch import Tensor, nn

import batchbayes as bb
from batchbayes.engines import check as linear_check


def block(channels_in: int, channels: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels_in, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())


class UNet(nn.Module):
    """Two resolutions and a shortcut. `curve` is the activation before the last layer."""

    def __init__(self, curve: nn.Module) -> None:
        super().__init__()
        self.down, self.deep, self.up = block(1, 6), block(6, 6), block(12, 6)
        self.curve, self.last = curve, nn.Conv2d(6, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = self.down(x)
        low = nn.functional.interpolate(self.deep(nn.functional.avg_pool2d(high, 2)), scale_factor=2)
        return self.last(self.curve(self.up(torch.cat([low, high], 1))))


class Wave(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return torch.sin(30 * h)


class Steep(nn.Module):
    """Linear for ordinary values, and far from it for large ones."""

    def forward(self, h: Tensor) -> Tensor:
        return h + (h.abs() > 12) * 30 * torch.sin(8 * h)


def fitted(curve: nn.Module, size: int = 40) -> tuple[bb.Posterior, Tensor]:
    """Fit batches of 4, which are fewer examples than a check of vectors takes."""
    torch.manual_seed(0)
    network, images = UNet(curve), torch.randn(40, 1, size, size)
    for _ in range(60):
        network(images[torch.randperm(40)[:4]])
    return bb.mcbn(network.eval(), images, batch_size=4, center="running"), torch.randn(2, 1, size, size)


def disagreement(posterior: bb.Posterior, images: Tensor) -> float:
    """Return the mean difference of the mutual information of exact and linear draws, over its mean."""
    exact, linear = (
        bb.predict(posterior, images, bb.categorical(), engine=engine).mutual_information
        for engine in ("sample", "linear")
    )
    return float((exact - linear).abs().mean() / exact.mean())


@pytest.mark.parametrize("size", [20, 40])
@pytest.mark.parametrize("likelihood", [bb.categorical(), bb.gaussian(1.0)], ids=["classes", "numbers"])
def test_maps_are_drawn_exactly_unless_the_linear_engine_is_asked_for(size, likelihood):
    posterior, images = fitted(nn.Identity(), size)
    auto, exact, linear = (
        bb.predict(posterior, images, likelihood, engine=engine, keep_draws=True)
        for engine in ("auto", "sample", "linear")
    )
    assert auto.engine.startswith("sample: of maps")
    assert torch.equal(auto.draws, exact.draws)
    assert linear.engine.startswith("linear, forward mode")
    assert disagreement(posterior, images) < 0.2


def test_the_linear_engine_warns_where_maps_are_not_linear():
    posterior, images = fitted(Wave())
    with pytest.warns(bb.BatchbayesWarning, match="not linear enough"):
        assert disagreement(posterior, images) > 0.3


def test_a_fit_checks_maps_on_few_examples_and_positions(monkeypatch):
    compared, compare = [], linear_check.compare_with_exact
    monkeypatch.setattr(linear_check, "compare_with_exact", lambda *a, **k: compared.append(a) or compare(*a, **k))
    posterior, images = fitted(nn.Identity())
    for likelihood in (bb.categorical(), bb.gaussian(1.0)):
        bb.predict(posterior, images[:1], likelihood, engine="linear")
    assert set(posterior.state()[0]["linearity"]) == {"values"}
    large = linear_check.measure_linearity(posterior, torch.randn(2, 1, 200, 200))
    assert large.trusted
    assert [exact.shape[1:] for _, _, exact, _ in compared] == [(4 * 1600, 3), (2 * 4096, 3)]


def test_a_single_map_with_more_noise_than_was_checked_is_checked_itself():
    posterior, images = fitted(Steep())
    bb.predict(posterior, images, bb.categorical(), engine="linear")
    hard = torch.cat([images[:1], images[1:] * 40])
    with pytest.warns(bb.BatchbayesWarning, match="do not trust the linear engine"):
        bb.predict(posterior, hard, bb.categorical(), engine="linear", chunk_size=1)
