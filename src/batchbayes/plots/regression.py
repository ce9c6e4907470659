"""Does the predicted spread grow with the error, and do intervals contain as many targets as they should?"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from batchbayes.plots.style import (
    GREY,
    LIGHT_BLUE,
    MIDDLE_BLUE,
    VERMILION,
    Axes,
    Figure,
    house_style,
    line_look,
    new_figure,
    one_panel,
)

HALF, MOST = 0.6745, 1.96
"""Half-widths of the central 50 % and 95 % of a Gaussian, in standard deviations."""


def uncertainty_error_figure(
    std: ArrayLike, error: ArrayLike, *, constant_std: float, unit: str = "target", ax: Axes | None = None
) -> Figure:
    """Draw the absolute errors of the points, sorted by predicted std, over the errors that the std predicts.

    If the uncertainty is informative, the dots and their running mean rise with the bands. The dashed line is the end
    of the 95 % band with one spread for all points. Shapes: std (N,), error (N,).
    """
    with one_panel(ax, (6.4, 3.6)) as panel:
        _draw_errors(panel, std, error, constant_std)
        panel.set(xlabel="points, the most certain first", ylabel=f"absolute error ({unit})")
        if ax is None:
            panel.figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
        else:
            panel.legend(frameon=False, fontsize=8)
    return panel.figure


def uncertainty_error_grid(
    panels: "Mapping[str, tuple[ArrayLike, ArrayLike, float]]", columns: int = 4, *, ax: Axes | None = None
) -> Figure:
    """Draw `uncertainty_error_figure` for several data sets: (std, error, constant_std) by title.

    With `ax`, the panels take the place of these axes.
    """
    with house_style():
        rows, across = -(-len(panels) // columns), min(columns, len(panels))
        beside = 5 if across > 3 else across  # entries in each row of the legend, which are narrower than a panel
        height = 2.2 * rows + 0.6 + 0.17 * (-(-5 // beside) - 1)
        figure, axes = new_figure(rows, across, (2.7 * across, height), share=False, ax=ax)
        for panel in axes.flat[len(panels) :]:
            panel.set_visible(False)
        for panel, (title, (std, error, constant_std)) in zip(axes.flat, panels.items(), strict=False):
            _draw_errors(panel, std, error, constant_std)
            panel.set_title(title.replace("$", r"\$"))
        figure.supxlabel("points, the most certain first", fontsize=9)
        figure.supylabel("absolute error", fontsize=9)
        handles, labels = axes.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=beside, frameon=False, fontsize=8)
    return figure.figure


def _draw_errors(panel: Axes, std: ArrayLike, error: ArrayLike, constant_std: float) -> None:
    std, error = np.asarray(std), np.abs(np.asarray(error))
    order = np.argsort(std, kind="stable")
    std, error, rank = std[order], error[order], np.arange(1, len(std) + 1)
    panel.fill_between(rank, 0, MOST * std, color=LIGHT_BLUE, lw=0, label="95 % of errors expected below")
    panel.fill_between(rank, 0, HALF * std, color=MIDDLE_BLUE, lw=0, label="50 % of errors expected below")
    size = 2 if len(std) < 500 else 1
    panel.plot(
        rank, error, "o", color="black", ms=size, mew=0, alpha=0.6 if size > 1 else 0.3, label="error of a point"
    )
    panel.plot(rank, running_mean(error, max(1, len(error) // 10)), color=VERMILION, label="running mean of errors")
    panel.axhline(MOST * constant_std, color=GREY, ls="--", lw=1, label="95 % band, one spread for all")
    top = max(1.05 * MOST * float(std[-1]), float(np.quantile(error, 0.99)) * 1.1)
    panel.set(xlim=(1, len(std)), ylim=(0, top))


def running_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Return the mean over a window around each point. The window is shorter at the ends.

    >>> running_mean(np.array([0.0, 3.0, 6.0]), 3).tolist()
    [1.5, 3.0, 4.5]
    """
    sums = np.concatenate([[0.0], np.cumsum(values)])
    positions = np.arange(len(values))
    start, stop = np.maximum(0, positions - width // 2), np.minimum(len(values), positions + (width + 1) // 2)
    return (sums[stop] - sums[start]) / (stop - start)


def interval_coverage_figure(
    levels: ArrayLike, coverages: Mapping[str, ArrayLike], *, ax: Axes | None = None
) -> Figure:
    """Draw the share of targets inside central intervals against their level. Below the diagonal they are too narrow.

    Shapes: levels (L,), and coverage (L,) for each method.
    """
    with one_panel(ax, (4.2, 3.8)) as panel:
        panel.plot([0, 1], [0, 1], color=GREY, lw=0.8, ls="--")
        for number, (name, coverage) in enumerate(coverages.items()):
            panel.plot(levels, coverage, label=name.replace("$", r"\$"), marker="o", ms=3, **line_look(number))
        panel.set(xlabel="level of the interval", ylabel="share of targets inside", xlim=(0, 1), ylim=(0, 1))
        panel.set_aspect("equal")
        panel.legend(frameon=False, fontsize=8)
    return panel.figure
