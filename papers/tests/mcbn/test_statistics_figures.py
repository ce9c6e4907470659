"""Figures of the distribution of batch statistics."""

from pathlib import Path

import numpy as np
import pytest
import torch
from batchbayes_papers.mcbn.normality_tests import CorrelationMap, Marginal
from batchbayes_papers.mcbn.statistics_figures import (
    StatisticSweep,
    correlation_figure,
    marginals_figure,
    normality_figure,
    normality_sweep_figure,
)
from batchbayes_papers.runner.figures import (
    BatchSizeSweep,
    Line,
    collapse_figure,
    lines_figure,
    uncertainty_error_grid,
)
from matplotlib.figure import Figure
from torch.distributions import LogNormal, Normal

from batchbayes.plots import save_figure


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


def sweep() -> Figure:
    shares = {"fitted": [[0.9, 1.0], [0.8, 0.9]], "limit": [[0.0, 0.5], [0.2, 0.3]]}
    panels = [StatisticSweep(title, shares, [[0.02, 0.5], [0.04, 0.7]], [0.9, 0.6]) for title in ("mean", "std")]
    return normality_sweep_figure([8, 64], panels)


def test_shares_and_ratios_are_means_over_epochs() -> None:
    above, _, below, other = sweep().axes
    lines = {line.get_label(): np.asarray(line.get_ydata(), float) for line in above.get_lines()}
    np.testing.assert_allclose(lines["fitted"], [0.85, 0.95])
    np.testing.assert_allclose(lines["limit"], [0.1, 0.4])
    np.testing.assert_allclose(lines["if the claim is exact"], 0.95)
    lines = {line.get_label(): np.asarray(line.get_ydata(), float) for line in below.get_lines()}
    np.testing.assert_allclose(lines["variance: median over units"], [0.03, 0.6])
    np.testing.assert_allclose(lines["(N − M) / (N − 1): drawn without replacement"], [0.9, 0.6])
    assert below.get_ylim() == other.get_ylim()


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


def test_uncertainty_error_grid_has_a_panel_for_each_data_set():
    panels = {f"set {n}": ([3.0, 1.0, 2.0], [-9.0, 1.0, 4.0 + n], 2.0) for n in range(5)}
    figure = uncertainty_error_grid(panels)
    shown = [panel for panel in figure.axes if panel.get_visible()]
    assert [panel.get_title() for panel in shown] == list(panels)
    for n, panel in enumerate(shown):  # the most certain first
        assert panel.lines[0].get_ydata().tolist() == [1.0, 4.0 + n, 9.0]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_the_legend_of_a_grid_is_not_cut_off(count: int) -> None:
    figure = uncertainty_error_grid({f"set {n}": ([3.0, 1.0, 2.0], [9.0, 1.0, 4.0], 2.0) for n in range(count)})
    figure.canvas.draw()
    legend = figure.legends[0].get_window_extent()
    assert figure.bbox.x0 <= legend.x0 < legend.x1 <= figure.bbox.x1
    assert len(figure.legends[0].get_texts()) == 5


@pytest.mark.parametrize("make", [histograms, gaps, correlations, sweep])
def test_figures_can_be_saved(make, tmp_path: Path) -> None:
    save_figure(make(), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 5000


def test_the_map_is_drawn_into_given_axes() -> None:
    other, given = Figure().subplots(1, 2)
    shown = CorrelationMap(("a", "b"), torch.tensor([[0.4, 0.1], [0.1, 0.3]]), 0.08)
    assert correlation_figure(shown, ax=given) is given.figure
    assert given.has_data()
    assert not other.has_data()


@pytest.mark.parametrize(
    "draw",
    [
        lambda ax: normality_sweep_figure(
            [4, 8], [StatisticSweep("mean", {"a": [[0.1, 0.2]]}, [[1.0, 1.0]], [1.0, 1.0])], ax=ax
        ),
        lambda ax: collapse_figure([4, 8], [BatchSizeSweep("a", [[1.0, 2.0]], [[1.0, 2.0]], [[0.5, 0.6]])], ax=ax),
        lambda ax: uncertainty_error_grid({"a": ([3.0, 1.0, 2.0], [-9.0, 1.0, 4.0], 2.0)}, ax=ax),
        lambda ax: normality_figure({"a": [marginal("mean", 0.5)]}, ax=ax),
        lambda ax: marginals_figure([marginal("mean", 0.5)], ax=ax),
    ],
)
def test_several_panels_take_the_place_of_given_axes(draw) -> None:
    figure = Figure(layout="constrained")
    other, given = figure.subplots(1, 2)
    assert draw(given) is figure
    figure.canvas.draw()
    assert given not in figure.axes
    assert any(panel.has_data() for panel in figure.axes if panel is not other)
    assert not other.has_data()


@pytest.mark.parametrize("label", ["short", "moving average, decay 0."])
def test_a_legend_of_many_lines_is_not_wider_than_its_figure(label):
    figure = lines_figure({"measure": [Line(f"{label} {i}", [1, 2], [1, 2]) for i in range(9)]}, "passes")
    figure.canvas.draw()
    box, width = figure.axes[0].get_legend().get_window_extent(), figure.bbox.width
    assert 0 <= box.x0 < box.x1 <= width
