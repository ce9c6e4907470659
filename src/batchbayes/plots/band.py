"""Predictions along a line, with bands."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from batchbayes.plots.style import BLUE, LIGHT_BLUE, MIDDLE_BLUE, VERMILION, house_style, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class Band:
    """A prediction along a line: a panel's title, means (N,) and standard deviations (N,)."""

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
) -> "Figure":
    """Predictions along a line with bands of one and two standard deviations, a panel each, on shared axes.

    Args:
        inputs: where the predictions were made, in rising order, (N,).
        bands: what is compared.
        data: inputs and targets of the training data.
        truth: the function that the data came from, (N,).
        support: the intervals where training data lies; what is outside is shaded.
    """
    with house_style():
        figure, panels = new_figure(1, len(bands), (4.4 * len(bands), 3.5))
        for panel, band in zip(panels[0], bands, strict=True):
            _band_panel(panel, np.asarray(inputs), band, data, np.asarray(truth), support)
        panels[0, 0].set_ylabel("y")
        figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    return figure


def _band_panel(
    panel: "Axes",
    x: np.ndarray,
    band: Band,
    data: tuple[ArrayLike, ArrayLike],
    truth: np.ndarray,
    support: Sequence[tuple[float, float]],
) -> None:
    mean, std = np.asarray(band.mean), np.asarray(band.std)
    edges = [x.min(), *(end for interval in support for end in interval), x.max()]
    for number, (start, end) in enumerate(zip(edges[::2], edges[1::2], strict=True)):
        panel.axvspan(start, end, color="0.93", lw=0, zorder=0, label="no data" if number == 0 else None)
    panel.fill_between(x, mean - 2 * std, mean + 2 * std, color=LIGHT_BLUE, lw=0, label="± 2 std")
    panel.fill_between(x, mean - std, mean + std, color=MIDDLE_BLUE, lw=0, label="± 1 std")
    panel.plot(x, mean, color=BLUE, lw=1.6, label="mean")
    panel.plot(x, truth, color=VERMILION, lw=1.2, ls=(0, (4, 2)), label="true function")
    panel.plot(*map(np.ravel, data), "o", color="black", ms=2.2, mew=0, label="training data")
    spread = np.ptp(truth)
    panel.set(title=band.title, xlabel="x", xlim=(x.min(), x.max()))
    panel.set_ylim(truth.min() - 0.3 * spread, truth.max() + 0.3 * spread)
