"""Batch statistics: do they follow the claimed distributions, at which batch sizes, and which layers are correlated?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from batchbayes.tools import (
    BLUE,
    GREEN,
    GREY,
    LIGHT_BLUE,
    VERMILION,
    Axes,
    Figure,
    house_style,
    line_look,
    new_figure,
    one_panel,
)

if TYPE_CHECKING:
    from batchbayes_papers.mcbn.normality_tests import CorrelationMap, Marginal

LINES = ((VERMILION, "-"), ("black", (0, (4, 2))), (GREEN, (0, (1, 1))), (BLUE, (0, (6, 1, 1, 1))))
"""Colour and dashes of the curves of a panel. Each alone is enough to distinguish the curves."""


def normality_figure(fits: "Mapping[str, Sequence[Marginal]]", *, ax: Axes | None = None) -> Figure:
    """Draw histograms of the batch statistics of single units, the fitted Gaussian, and the p-value of its test.

    Args:
        fits: `marginals(posterior)` for each row of panels, by its label, such as an epoch or a batch size.
        ax: axes of a grid, whose place the panels take.
    """
    columns = len(next(iter(fits.values())))
    with house_style():
        size = (2.5 * columns + 0.5, 1.9 * len(fits) + 0.9)
        figure, panels = new_figure(len(fits), columns, size, share=False, ax=ax)
        for row, (label, shown) in zip(panels, fits.items(), strict=True):
            row[0].set_ylabel(label)
            for panel, marginal in zip(row, shown, strict=True):
                _histogram(panel, marginal)
                _p_value(panel, min(marginal.p_values.values()))
        for panel, marginal in zip(panels[0], next(iter(fits.values())), strict=True):
            panel.set_title(_title(marginal))
        entries = _legend(panels[0, 0])
        test = "p: Kolmogorov-Smirnov test that allows for fitted parameters (Lilliefors)"
        options: dict[str, Any] = {"ncols": 6, "frameon": False, "title": test, "title_fontsize": 8}
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", **options)
    return figure.figure


def marginals_figure(shown: "Sequence[Marginal]", *, ax: Axes | None = None) -> Figure:
    """Draw batch statistics and the densities that claim to describe them; below, the errors of these claims.

    The lower panels show the observed minus the claimed share of values below x. The largest gap is the
    Kolmogorov-Smirnov distance. An exact claim stays inside the grey band in 95 of 100 figures.
    With `ax`, the panels take the place of these axes.
    """
    with house_style():
        figure, panels = new_figure(2, len(shown), (2.9 * len(shown) + 0.4, 4.6), share=False, ax=ax)
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
    return figure.figure


def correlation_figure(shown: "CorrelationMap", *, ax: Axes | None = None) -> Figure:
    """Draw the mean absolute correlation of batch statistics between sites, from the value of pure chance up."""
    values, count = np.asarray(shown.values), len(shown.sites)
    side = min(7.0, 3.0 + 0.25 * count)
    with one_panel(ax, (side + 1.4, side)) as panel:
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
        panel.set_title("Batch statistics:\nmean |correlation| of layers")
        bar = panel.figure.colorbar(image, ax=panel, shrink=0.85)
        bar.set_label(f"white: {shown.floor:.2f}, as by chance")
    return panel.figure


def _histogram(panel: Axes, marginal: "Marginal") -> None:
    """Draw observed values and the densities of the claims."""
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


def _gaps(panel: Axes, marginal: "Marginal") -> None:
    """Draw the empirical distribution function minus each claimed one, at the observed values."""
    values = marginal.observed.sort().values
    count = len(values)
    chance = 1.358 / count**0.5
    panel.axhspan(-chance, chance, color="0.93", lw=0, zorder=0, label="within chance")
    panel.axhline(0, color=GREY, lw=0.6)
    steps = np.arange(1, count + 1) / count - 0.5 / count
    for claim, (colour, dashes) in zip(marginal.claims.values(), LINES, strict=False):
        panel.plot(values, steps - np.asarray(claim.cdf(values)), color=colour, ls=dashes, lw=1.2)
    panel.locator_params(axis="x", nbins=4)


def _p_value(panel: Axes, p_value: float) -> None:
    text = f"p = {p_value:.2f}" if p_value >= 0.01 else "p < 0.01"
    look: dict[str, Any] = {"color": VERMILION, "fontweight": "bold"} if p_value < 0.05 else {}
    panel.text(0.97, 0.95, text, transform=panel.transAxes, ha="right", va="top", fontsize=8.5, **look)


def _title(marginal: "Marginal") -> str:
    return f"{marginal.site}, unit {marginal.channel}: batch {marginal.statistic}"


def _legend(panel: Axes) -> dict[str, Any]:
    handles, labels = panel.get_legend_handles_labels()
    return dict(zip(labels, handles, strict=True))


EXPECTED, OBSERVED = "(N − M) / (N − 1): drawn without replacement", "variance: median over units"


@dataclass(frozen=True, eq=False)
class StatisticSweep:
    """One statistic of the units of a layer at each of B batch sizes, after each of E numbers of epochs."""

    title: str
    shares: Mapping[str, ArrayLike]
    """The share of units that the test of a claim does not reject, (E, B), by the name of the claim."""
    ratio: ArrayLike
    """Observed variance divided by the claimed one, (E, B)."""
    expected: ArrayLike
    """The ratio that theory predicts, (B,)."""


def normality_sweep_figure(
    batch_sizes: Sequence[int], sweeps: Sequence[StatisticSweep], *, level: float = 0.05, ax: Axes | None = None
) -> Figure:
    """Draw the share of units that pass each test, by batch size; below, observed divided by claimed variance.

    Lines are means over epochs. Dots are single epochs. An exact claim passes in a share `1 - level` of the units.
    With `ax`, the panels take the place of these axes.
    """
    with house_style():
        figure, panels = new_figure(2, len(sweeps), (2.7 * len(sweeps) + 0.4, 4.8), share=False, ax=ax)
        for (above, below), sweep in zip(panels.T, sweeps, strict=True):
            above.set_title(sweep.title)
            above.axhline(1 - level, color=GREY, lw=0.8, ls=(0, (1, 2)), label="if the claim is exact")
            for number, (name, shares) in enumerate(sweep.shares.items()):
                _epochs_line(above, batch_sizes, shares, name, "osD^"[number % 4], number)
            above.set(ylim=(-0.05, 1.05), yticks=[0, 0.5, 1], yticklabels=["0 %", "50 %", "100 %"])
            below.plot(batch_sizes, np.asarray(sweep.expected), color=GREY, lw=1, ls=(0, (4, 2)), label=EXPECTED)
            _epochs_points(below, batch_sizes, sweep.ratio, OBSERVED)
            below.axhline(1, color=GREY, lw=0.8, ls=(0, (1, 2)))
            below.set(yscale="log", xlabel="batch size M")
            below.sharey(panels[1, 0])
        _tidy(panels, batch_sizes, np.concatenate([np.ravel(sweep.ratio) for sweep in sweeps]))
        panels[0, 0].set_ylabel("units not rejected")
        panels[1, 0].set_ylabel("variance,\nobserved / CLT")
        entries = [panel.get_legend_handles_labels() for panel in panels[:, 0]]
        handles, labels = (first + second for first, second in zip(*entries, strict=True))
        figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(sweeps)), frameon=False)
    return figure.figure


def _epochs_line(
    panel: Axes, batch_sizes: Sequence[int], values: ArrayLike, label: str, marker: str, number: int
) -> None:
    each = np.asarray(values, dtype=float)  # (E, B)
    look = line_look(number)
    panel.plot(batch_sizes, each.mean(0), **look, label=label, marker=marker, ms=5)
    panel.plot(batch_sizes, each.T, marker, color=look["color"], ms=3, mew=0, alpha=0.4)


def _epochs_points(panel: Axes, batch_sizes: Sequence[int], values: ArrayLike, label: str) -> None:
    """Draw points without a line, which would hide the expected line."""
    each = np.asarray(values, dtype=float)  # (E, B)
    panel.plot(batch_sizes, each.mean(0), "o", color="black", ms=5.5, label=label)
    panel.plot(batch_sizes, each.T, "o", color="black", ms=3, mew=0, alpha=0.4)


def _tidy(panels: np.ndarray, batch_sizes: Sequence[int], ratios: np.ndarray) -> None:
    """Label batch sizes on the horizontal axes, and plain numbers on the vertical axis of the ratios."""
    for panel in panels.flat:
        panel.set_xscale("log")
        panel.set_xticks(batch_sizes, map(str, batch_sizes))
        panel.minorticks_off()
    for panel in panels[0]:
        panel.tick_params(labelbottom=False)
    for panel in panels[:, 1:].flat:
        panel.tick_params(labelleft=False)
    ticks = [tick for tick in (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3) if tick > 0.5 * ratios.min() or tick >= 0.1]
    panels[1, 0].set_yticks(ticks, [f"{tick:g}" for tick in ticks])
