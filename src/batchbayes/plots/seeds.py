"""Curves over seeds: the mean of each, and a band for the spread."""

from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from batchbayes.plots.style import MARKERS, Axes, Figure, line_look, one_panel

MOST_MARKERS = 30
"""Longer lines have no markers."""


def seeds_figure(
    lines: Mapping[str, tuple[ArrayLike, ArrayLike]],
    *,
    xlabel: str,
    ylabel: str,
    xscale: Literal["linear", "log"] = "linear",
    published: Mapping[str, tuple[ArrayLike, ArrayLike]] | None = None,
    ax: Axes | None = None,
) -> Figure:
    """Draw a line for each name: positions (X,) and values (seeds, X), as the mean with a band of two standard errors.

    Args:
        lines: what to draw, by label.
        xlabel: what the positions are.
        ylabel: what the values are.
        xscale: "log" for positions that double.
        published: values (X,) from a paper at positions (X,), drawn as crosses in the colour of the line of that name.
        ax: axes to draw into.
    """
    with one_panel(ax, (7.2, 4.2)) as panel:
        for number, (name, (positions, values)) in enumerate(lines.items()):
            each, look = np.atleast_2d(np.asarray(values)), line_look(number)
            mean = each.mean(0)
            marker = MARKERS[number % len(MARKERS)] if len(mean) <= MOST_MARKERS else ""
            panel.plot(positions, mean, label=name, marker=marker, ms=4, **look)
            if len(each) > 1:
                error = 2 * each.std(0, ddof=1) / len(each) ** 0.5
                panel.fill_between(positions, mean - error, mean + error, color=look["color"], alpha=0.15, lw=0)
            if published and name in published:
                panel.plot(*published[name], "x", color=look["color"], ms=5, label=f"{name}, published")
        panel.set(xlabel=xlabel, ylabel=ylabel, xscale=xscale)
        panel.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))
        return panel.figure
