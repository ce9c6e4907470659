"""Figures: one function each, from arrays to a matplotlib Figure, to be read in print and by the colour-blind."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from batchbayes.files import atomic_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, VERMILION = "#0072B2", "#D55E00"  # of the palette by Okabe and Ito
MIDDLE_BLUE, LIGHT_BLUE, GREY = "#7AB8DC", "#C3DEEF", "#595959"
STYLE: Any = {"font.size": 9, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False}
DOTS_PER_INCH = 130


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
    from matplotlib import rc_context

    with rc_context(STYLE):
        figure, panels = _figure(1, len(bands), (4.4 * len(bands), 3.5))
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


def certainty_figure(
    images: ArrayLike,
    labels: ArrayLike,
    predicted: ArrayLike,
    *,
    entropy: ArrayLike,
    mutual_information: ArrayLike,
    count: int = 8,
) -> "Figure":
    """The most certain images above, the least certain below, by mutual information; wrong answers stand out.

    Shapes: images (N, 1, H, W), all others (N,). Both uncertainties are in nats.
    """
    from matplotlib import rc_context

    images, labels, predicted = np.asarray(images), np.asarray(labels), np.asarray(predicted)
    entropy, mutual_information = np.asarray(entropy), np.asarray(mutual_information)
    order = np.argsort(mutual_information, kind="stable")
    count = min(count, len(order))
    with rc_context(STYLE):
        figure, cells = _figure(2, count, (1.12 * count, 3.6))
        for cells_of_row, chosen in zip(cells, (order[:count], order[::-1][:count]), strict=True):
            for cell, i in zip(cells_of_row, chosen, strict=True):
                _image_cell(cell, images[i, 0], int(predicted[i]), int(labels[i]))
                uncertainty = f"MI {_nats(float(mutual_information[i]))}\nH {_nats(float(entropy[i]))}"
                cell.set_xlabel(uncertainty, fontsize=8, color=GREY)
        cells[0, 0].set_ylabel("most certain")
        cells[1, 0].set_ylabel("least certain")
        figure.supxlabel("MI: mutual information, by which they are ordered; H: entropy; both in nats", fontsize=8)
    return figure


def _image_cell(cell: "Axes", image: np.ndarray, predicted: int, label: int) -> None:
    wrong = predicted != label
    cell.imshow(image, cmap="gray_r", interpolation="nearest")
    cell.set(xticks=[], yticks=[])
    cell.set_title(
        f"says {predicted}, is {label}",
        color=VERMILION if wrong else "black",
        fontweight="bold" if wrong else "normal",
        fontsize=8.5,
    )
    cell.spines[:].set(visible=True, color=VERMILION if wrong else "0.7", lw=2 if wrong else 0.8)


def _nats(value: float) -> str:
    """Three decimals.

    >>> _nats(0.1234), _nats(0.0001)
    ('0.123', '< 0.001')
    """
    return f"{value:.3f}" if value >= 0.001 else "< 0.001"


def save_figure(figure: "Figure", path: str | os.PathLike[str]) -> None:
    """Write a PNG, whole or not at all."""
    with atomic_path(path) as partial:
        figure.savefig(partial, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})


def _figure(rows: int, columns: int, size: tuple[float, float]) -> "tuple[Figure, np.ndarray[Any, Any]]":
    """A figure outside pyplot: no window, no global state. The panels share their axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
