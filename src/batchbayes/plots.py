"""Figures: one function each, from arrays to a matplotlib Figure, to be read in print and by the colour-blind."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from batchbayes.files import atomic_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from batchbayes.methods.batchnorm.normality import CorrelationMap, Marginal

BLUE, VERMILION = "#0072B2", "#D55E00"  # of the palette by Okabe and Ito
MIDDLE_BLUE, LIGHT_BLUE, GREY = "#7AB8DC", "#C3DEEF", "#595959"
LINES = ((VERMILION, "-"), ("black", (0, (4, 2))), ("#009E73", (0, (1, 1))), (BLUE, (0, (6, 1, 1, 1))))
"""Colour and dashes of the curves of a panel: told apart by either."""
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


def normality_figure(fits: "Mapping[str, Sequence[Marginal]]") -> "Figure":
    """Batch statistics of single units as histograms, the fitted Gaussian over them, and the p-value of its test.

    Args:
        fits: a row of panels each, by its label, such as an epoch or a batch size: `marginals(posterior)` of each.
    """
    from matplotlib import rc_context

    columns = len(next(iter(fits.values())))
    with rc_context(STYLE):
        figure, panels = _figure(len(fits), columns, (2.5 * columns + 0.5, 1.9 * len(fits) + 0.9), shared=False)
        for row, (label, shown) in zip(panels, fits.items(), strict=True):
            row[0].set_ylabel(label)
            for panel, marginal in zip(row, shown, strict=True):
                _histogram(panel, marginal)
                _p_value(panel, min(marginal.p_values.values()))
        for panel, marginal in zip(panels[0], next(iter(fits.values())), strict=True):
            panel.set_title(_title(marginal))
        entries = _legend(panels[0, 0])
        figure.legend(
            entries.values(),
            entries.keys(),
            loc="outside lower center",
            ncols=6,
            frameon=False,
            title="p: Kolmogorov-Smirnov test that allows for fitted parameters (Lilliefors)",
            title_fontsize=8,
        )
    return figure


def marginals_figure(shown: "Sequence[Marginal]") -> "Figure":
    """Above, batch statistics and the densities that claim to describe them; below, by how much these are off.

    Below is the observed less the claimed share of values under x; the largest gap is the Kolmogorov-Smirnov distance.
    An exact claim stays inside the grey band in 95 of 100 figures.
    """
    from matplotlib import rc_context

    with rc_context(STYLE):
        figure, panels = _figure(2, len(shown), (2.9 * len(shown) + 0.4, 4.6), shared=False)
        for (above, below), marginal in zip(panels.T, shown, strict=True):
            _histogram(above, marginal)
            above.set_title(_title(marginal))
            _gaps(below, marginal)
            below.sharex(above)
            above.tick_params(labelbottom=False)
        largest = max(abs(limit) for below in panels[1] for limit in below.get_ylim())
        for below in panels[1]:
            below.set_ylim(-largest, largest)
        for below in panels[1, 1:]:
            below.tick_params(labelleft=False)
        panels[0, 0].set_ylabel("density")
        panels[1, 0].set_ylabel("observed − claimed\nshare below x")
        entries = {**_legend(panels[0, 0]), **_legend(panels[1, 0])}
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=6, frameon=False)
    return figure


def correlation_figure(shown: "CorrelationMap") -> "Figure":
    """Mean absolute correlation of batch statistics between sites, and what chance alone would show."""
    from matplotlib import rc_context

    values, count = np.asarray(shown.values), len(shown.sites)
    side = min(7.0, 3.0 + 0.25 * count)
    with rc_context(STYLE):
        figure, panels = _figure(1, 1, (side + 1.4, side))
        panel = panels[0, 0]
        top = max(float(np.nanmax(values)), 1.5 * shown.floor)
        image = panel.imshow(values, cmap="Blues", vmin=shown.floor, vmax=top, interpolation="nearest")
        ticks = range(0, count, -(-count // 20))
        names = [shown.sites[i] for i in ticks]
        panel.set_xticks(ticks, names, rotation=45, ha="right", rotation_mode="anchor")
        panel.set_yticks(ticks, names)
        panel.spines[:].set_visible(False)
        for i, j in np.ndindex(*values.shape) if count <= 8 else ():
            colour = "white" if values[i, j] > 0.4 * shown.floor + 0.6 * top else "black"
            panel.text(j, i, f"{values[i, j]:.2f}", ha="center", va="center", color=colour, fontsize=8.5)
        figure.suptitle("Batch statistics: mean |correlation| of layers", fontsize=10)
        bar = figure.colorbar(image, ax=panel, shrink=0.85)
        bar.set_label(f"white: {shown.floor:.2f}, as by chance")
    return figure


def _histogram(panel: "Axes", marginal: "Marginal") -> None:
    """Observed values and the densities of the claims."""
    import torch

    observed = np.asarray(marginal.observed)
    bins = int(np.clip(np.sqrt(len(observed)), 8, 30))
    panel.hist(observed, bins, density=True, color=LIGHT_BLUE, ec="white", lw=0.4, label="mini-batches")
    margin = 0.15 * np.ptp(observed)
    x = torch.linspace(observed.min() - margin, observed.max() + margin, 200, dtype=torch.float64)
    for (name, claim), (colour, dashes) in zip(marginal.claims.items(), LINES, strict=False):
        panel.plot(x, claim.log_prob(x).exp(), color=colour, ls=dashes, lw=1.4, label=name)
    panel.set_yticks([])
    panel.locator_params(axis="x", nbins=4)
    panel.margins(x=0)


def _gaps(panel: "Axes", marginal: "Marginal") -> None:
    """The empirical distribution function less each claimed one, at the observed values."""
    values = marginal.observed.sort().values
    count = len(values)
    chance = 1.358 / count**0.5
    panel.axhspan(-chance, chance, color="0.93", lw=0, zorder=0, label="no more than chance")
    panel.axhline(0, color=GREY, lw=0.6)
    steps = np.arange(1, count + 1) / count - 0.5 / count
    for claim, (colour, dashes) in zip(marginal.claims.values(), LINES, strict=False):
        panel.plot(values, steps - np.asarray(claim.cdf(values)), color=colour, ls=dashes, lw=1.2)
    panel.locator_params(axis="x", nbins=4)


def _p_value(panel: "Axes", p_value: float) -> None:
    rejected = p_value < 0.05
    text = f"p = {p_value:.2f}" if p_value >= 0.01 else "p < 0.01"
    panel.text(
        0.97,
        0.95,
        text,
        transform=panel.transAxes,
        ha="right",
        va="top",
        color=VERMILION if rejected else "black",
        fontweight="bold" if rejected else "normal",
        fontsize=8.5,
    )


def _title(marginal: "Marginal") -> str:
    return f"{marginal.site}, unit {marginal.channel}: batch {marginal.statistic}"


def _legend(panel: "Axes") -> dict[str, Any]:
    handles, labels = panel.get_legend_handles_labels()
    return dict(zip(labels, handles, strict=True))


def save_figure(figure: "Figure", path: str | os.PathLike[str]) -> None:
    """Write a PNG, whole or not at all."""
    with atomic_path(path) as partial:
        figure.savefig(partial, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})


def _figure(
    rows: int, columns: int, size: tuple[float, float], *, shared: bool = True
) -> "tuple[Figure, np.ndarray[Any, Any]]":
    """A figure outside pyplot: no window, no global state. The panels share their axes, unless told not to."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, sharex=shared, sharey=shared, squeeze=False)
