"""Batch statistics: do they follow the claimed distributions, and which layers are correlated?"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from batchbayes.plots.style import (
    BLUE,
    GREEN,
    GREY,
    LIGHT_BLUE,
    VERMILION,
    Axes,
    Figure,
    house_style,
    new_figure,
    one_panel,
)

if TYPE_CHECKING:
    from batchbayes.methods.batchnorm.diagnostics.normality import CorrelationMap, Marginal

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
