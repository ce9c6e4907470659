"""Predictions along one input, with bands of uncertainty."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from batchbayes.plots.style import BLUE, LIGHT_BLUE, MIDDLE_BLUE, VERMILION, Axes, Figure, house_style, new_figure


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
