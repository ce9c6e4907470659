"""Does the predicted spread grow with the error, and do intervals contain as many targets as they should?

Predictions along one input, with bands of uncertainty.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from batchbayes.plots.style import (
    BLUE,
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

FARTHEST = 0.99
"""Targets beyond this share of them are drawn at the edge, so that a few of them do not flatten all others."""
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


@dataclass(frozen=True, eq=False)
class Band:
    """A prediction along one input: the title of its panel, means (N,) and standard deviations (N,)."""

    title: str
    mean: ArrayLike
    std: ArrayLike


def band_figure(
    inputs: ArrayLike,
    bands: Sequence[Band],
    *,
    data: tuple[ArrayLike, ArrayLike],
    truth: ArrayLike,
    support: Sequence[tuple[float, float]],
    levels: Sequence[float] = (1, 2),
    columns: int | None = None,
    ax: Axes | None = None,
) -> Figure:
    """Draw predictions along one input with bands of uncertainty: one panel for each prediction, with shared axes.

    Args:
        inputs: inputs of the predictions in rising order, (N,).
        bands: the predictions.
        data: inputs and targets of the training data.
        truth: the function that the data comes from, (N,).
        support: the intervals with training data; the rest is shaded.
        levels: the half widths of the bands in standard deviations.
        columns: the number of panels side by side, by default all.
        ax: axes of a grid, whose place the panels take.
    """
    columns = columns or len(bands)
    rows = -(-len(bands) // columns)
    with house_style():
        figure, panels = new_figure(rows, columns, (4.4 * columns, 3.0 * rows + 0.5), ax=ax)
        for panel, band in zip(panels.flat, bands, strict=False):
            _band_panel(panel, np.asarray(inputs), band, data, np.asarray(truth), support, sorted(levels))
        for empty in panels.flat[len(bands) :]:
            empty.set_visible(False)
        for panel in panels[:, 0]:
            panel.set_ylabel("y")
        for panel in panels[-1]:
            panel.set_xlabel("x")
        handles, labels = panels[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, columnspacing=1.2)
    return figure.figure


def _band_panel(
    panel: Axes,
    x: np.ndarray,
    band: Band,
    data: tuple[ArrayLike, ArrayLike],
    truth: np.ndarray,
    support: Sequence[tuple[float, float]],
    levels: Sequence[float],
) -> None:
    mean, std = np.asarray(band.mean), np.asarray(band.std)
    edges = [x.min(), *(end for interval in support for end in interval), x.max()]
    for number, (start, end) in enumerate(zip(edges[::2], edges[1::2], strict=True)):
        panel.axvspan(start, end, color="0.93", lw=0, zorder=0, label="no data" if number == 0 else None)
    for level, colour in zip(reversed(levels), _shades(len(levels)), strict=True):
        panel.fill_between(x, mean - level * std, mean + level * std, color=colour, lw=0, label=f"± {level:g} std")
    panel.plot(x, mean, color=BLUE, lw=1.6, label="mean")
    panel.plot(x, truth, color=VERMILION, lw=1.2, ls=(0, (4, 2)), label="true function")
    panel.plot(*map(np.ravel, data), "o", color="black", ms=2.2, mew=0, label="training data")
    spread = np.ptp(truth)
    panel.set(title=band.title, xlim=(x.min(), x.max()))
    panel.set_ylim(truth.min() - 0.3 * spread, truth.max() + 0.3 * spread)


def _shades(count: int) -> list[tuple[float, ...]]:
    """Return colours from the lightest, for the widest band, to the darkest."""
    from matplotlib.colors import to_rgb

    pale, dark = np.array(to_rgb(LIGHT_BLUE)), np.array(to_rgb(MIDDLE_BLUE))
    return [tuple(pale + (dark - pale) * step) for step in np.linspace(0, 1, count)]


def table_figure(
    lower: ArrayLike,
    upper: ArrayLike,
    targets: ArrayLike,
    pit: ArrayLike,
    *,
    level: float = 0.9,
    ax: Axes | None = None,
) -> Figure:
    """Draw three looks at intervals: sorted by width, their coverage by fifths of width, and the PIT.

    The PIT is the predicted probability of a target below the true one: if predictions are right, its tenths are
    equally full. Shapes: all (N,). With `ax`, the panels take the place of these axes.
    """
    lower, upper, targets = np.asarray(lower), np.asarray(upper), np.asarray(targets)
    order = np.argsort(upper - lower, kind="stable")
    inside, rank = ((lower <= targets) & (targets <= upper))[order], np.arange(1, len(order) + 1)
    middle = ((lower + upper) / 2)[order]
    with house_style():
        figure, panels = new_figure(1, 3, (9.6, 3.0), share=False, ax=ax)
        first, second, third = panels[0]
        first.fill_between(rank, lower[order] - middle, upper[order] - middle, color=LIGHT_BLUE, lw=0)
        distance = targets[order] - middle
        most = 1.1 * max(float(np.quantile(np.abs(distance), FARTHEST)), float((upper - lower).max()) / 2)
        shown, is_far = np.clip(distance, -most, most), np.abs(distance) > most
        looks = (inside, "black", "o", "inside"), (~inside & ~is_far, VERMILION, "o", "outside")
        for kept, colour, marker, name in (*looks, (is_far, VERMILION, "^", "farther outside")):
            if kept.any():
                first.plot(rank[kept], shown[kept], marker, ms=2 + 2 * (marker == "^"), mew=0, color=colour, label=name)
        first.set(
            xlabel="rows, the narrowest interval first", ylabel="target less middle", ylim=(-1.1 * most, 1.1 * most)
        )
        first.legend(frameon=False, fontsize=7, loc="upper left", markerscale=2)
        first.set_title(f"{inside.mean():.0%} inside, {level:.0%} wanted")
        fifths = [part.mean() if len(part) else np.nan for part in np.array_split(inside, 5)]
        second.bar(range(1, 6), fifths, color=MIDDLE_BLUE)
        second.axhline(level, color=GREY, ls="--", lw=1)
        second.set(xlabel="fifth of rows by width", ylabel="share inside", ylim=(0, 1), title="coverage by fifths")
        third.hist(np.asarray(pit), bins=10, range=(0, 1), weights=np.full(len(rank), 1 / len(rank)), color=MIDDLE_BLUE)
        third.axhline(0.1, color=GREY, ls="--", lw=1)
        third.set(xlabel="PIT", ylabel="share of rows", title="predicted probabilities")
    return figure.figure
