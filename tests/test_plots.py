from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from PIL import Image
from torch.distributions import LogNormal, Normal

from batchbayes.methods.batchnorm.normality import CorrelationMap, Marginal
from batchbayes.plots import (
    Band,
    band_figure,
    certainty_figure,
    correlation_figure,
    marginals_figure,
    normality_figure,
    save_figure,
)

X = np.linspace(-4, 4, 33)


def bands() -> Figure:
    wide, narrow = Band("wide", X / 2, 0.5 + np.abs(X)), Band("narrow", X / 2, np.full_like(X, 0.25))
    data = np.array([[-2.0], [1.0]]), np.array([[-1.0], [0.5]])
    return band_figure(X, [wide, narrow], data=data, truth=X / 2, support=((-3, -1), (0, 2)))


def test_bands_have_the_height_of_their_standard_deviations() -> None:
    for panel, std in zip(bands().axes, (0.5 + np.abs(X), np.full_like(X, 0.25)), strict=True):
        areas = {c.get_label(): c for c in panel.collections if isinstance(c, PolyCollection)}
        for label, multiple in (("± 1 std", 1), ("± 2 std", 2)):
            corners = areas[label].get_paths()[0].vertices
            at_two = corners[np.isclose(corners[:, 0], 2.0)][:, 1]
            half_width = multiple * std[np.isclose(X, 2.0)][0]
            np.testing.assert_allclose([at_two.min(), at_two.max()], [1 - half_width, 1 + half_width])


def test_panels_share_axes_and_show_mean_truth_and_data() -> None:
    left, right = bands().axes
    assert (left.get_title(), right.get_title()) == ("wide", "narrow")
    assert left.get_ylim() == right.get_ylim()
    assert left.get_xlim() == right.get_xlim() == (-4, 4)
    lines = {line.get_label(): line for line in right.get_lines()}
    np.testing.assert_allclose(lines["mean"].get_ydata(), X / 2)
    np.testing.assert_allclose(lines["training data"].get_xydata(), [[-2, -1], [1, 0.5]])
    assert "true function" in lines


def test_what_lies_outside_the_support_is_shaded() -> None:
    spans = [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in bands().axes[0].patches]  # type: ignore[attr-defined]
    assert spans == [(-4, -3), (-1, 0), (2, 4)]


def digits() -> Figure:
    images = np.arange(5)[:, None, None, None] * np.ones((5, 1, 8, 8))
    return certainty_figure(
        images,
        labels=[0, 1, 2, 3, 4],
        predicted=[0, 1, 2, 9, 4],
        entropy=[0.9, 0.8, 0.7, 0.6, 0.5],
        mutual_information=[0.02, 0.0001, 0.03, 0.4, 0.01],
        count=2,
    )


def test_images_are_ordered_by_mutual_information() -> None:
    cells = digits().axes
    assert [float(cell.images[0].get_array()[0, 0]) for cell in cells] == [1, 4, 3, 2]  # type: ignore[index]
    assert [cell.get_title() for cell in cells] == ["says 1, is 1", "says 4, is 4", "says 9, is 3", "says 2, is 2"]
    assert [cell.get_xlabel() for cell in cells] == [
        "MI < 0.001\nH 0.800",
        "MI 0.010\nH 0.500",
        "MI 0.400\nH 0.600",
        "MI 0.030\nH 0.700",
    ]


def test_only_wrong_answers_stand_out() -> None:
    weights = [cell.title.get_fontweight() for cell in digits().axes]
    assert weights == ["normal", "normal", "bold", "normal"]


def marginal(statistic: str, p_value: float) -> Marginal:
    observed = torch.linspace(0.5, 1.5, 101, dtype=torch.float64)
    claims = {"normal": Normal(1.0, 0.3), "log-normal": LogNormal(0.0, 0.3)}
    return Marginal("norm", 3, statistic, observed, claims, {"normal": 0.1}, {"normal": p_value})  # type: ignore[arg-type]


def histograms() -> Figure:
    return normality_figure({
        "epoch 1": [marginal("mean", 0.5), marginal("std", 0.04)],
        "epoch 9": [marginal("mean", 0.001), marginal("std", 0.7)],
    })  # fmt: skip


def gaps() -> Figure:
    return marginals_figure([marginal("mean", 0.5), marginal("std", 0.04)])


def correlations() -> Figure:
    return correlation_figure(CorrelationMap(("a", "b"), torch.tensor([[0.4, 0.1], [0.1, 0.3]]), 0.08))


def test_normality_panels_say_what_they_show_and_which_are_rejected() -> None:
    panels = histograms().axes
    assert [panel.get_title() for panel in panels[:2]] == ["norm, unit 3: batch mean", "norm, unit 3: batch std"]
    assert [panel.get_ylabel() for panel in panels] == ["epoch 1", "", "epoch 9", ""]
    texts = [panel.texts[0] for panel in panels]
    assert [text.get_text() for text in texts] == ["p = 0.50", "p = 0.04", "p < 0.01", "p = 0.70"]
    assert [text.get_fontweight() for text in texts] == ["normal", "bold", "bold", "normal"]
    curve = {line.get_label(): line for line in panels[0].get_lines()}["normal"]
    x, density = np.asarray(curve.get_xdata(), float), np.asarray(curve.get_ydata(), float)
    np.testing.assert_allclose(density, np.exp(-0.5 * ((x - 1) / 0.3) ** 2) / (0.3 * np.sqrt(2 * np.pi)), rtol=1e-6)
    assert sum(bar.get_width() * bar.get_height() for bar in panels[0].patches) == pytest.approx(1)  # type: ignore[attr-defined]


def test_gaps_are_observed_less_claimed_shares_on_one_scale() -> None:
    panels = gaps().axes
    below = panels[2]
    assert below.get_ylim() == panels[3].get_ylim()
    _, normal, log_normal = below.get_lines()
    x = np.linspace(0.5, 1.5, 101)
    share = (np.arange(101) + 0.5) / 101
    np.testing.assert_allclose(normal.get_ydata(), share - Normal(1.0, 0.3).cdf(torch.tensor(x)).numpy())
    np.testing.assert_allclose(log_normal.get_ydata(), share - LogNormal(0.0, 0.3).cdf(torch.tensor(x)).numpy())


def test_the_correlation_map_starts_at_chance() -> None:
    panel, bar = correlations().axes
    np.testing.assert_allclose(panel.images[0].get_array(), [[0.4, 0.1], [0.1, 0.3]])  # type: ignore[arg-type]
    assert panel.images[0].get_clim() == pytest.approx((0.08, 0.4))
    assert [text.get_text() for text in panel.texts] == ["0.40", "0.10", "0.10", "0.30"]
    assert [label.get_text() for label in panel.get_yticklabels()] == ["a", "b"]
    assert "0.08" in bar.get_ylabel()


@pytest.mark.parametrize("make", [bands, digits, histograms, gaps, correlations])
def test_saved_figures_are_whole_png_files(make: object, tmp_path: Path) -> None:
    path = tmp_path / "figure.png"
    save_figure(make(), path)  # type: ignore[operator]
    with Image.open(BytesIO(path.read_bytes())) as image:
        image.load()
        assert image.format == "PNG"
        assert len(image.getcolors(maxcolors=2**20) or []) > 20  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == [path]
