"""Lines: over one quantity, in a panel for each of several measures; or the mean over seeds, with a band."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from batchbayes.plots.style import (
    GREY,
    LINE_STYLES,
    MARKERS,
    Axes,
    Figure,
    house_style,
    line_look,
    new_figure,
    one_panel,
)

MOST_INSIDE = 4
"""Legends of more lines stand above the panel, because they would hide the lines."""


@dataclass(frozen=True, eq=False)
class Line:
    """A line: its label, and the positions and values of its points, (N,) each.

    "points" are drawn as black crosses, for example values from a paper. A "level" is a thin grey line, for example a
    baseline.
    """

    label: str
    positions: ArrayLike
    values: ArrayLike
    kind: Literal["line", "points", "level"] = "line"


def lines_figure(
    panels: Mapping[str, Sequence[Line]],
    quantity: str | Sequence[str],
    *,
    log_positions: bool = False,
) -> Figure:
    """Draw panels side by side. The keys are what each panel measures, `quantity` is what the lines run over.

    If panels run over different quantities, there is one for each.
    """
    quantities = [quantity] * len(panels) if isinstance(quantity, str) else quantity
    with house_style():
        figure, axes = new_figure(1, len(panels), (4.4 * len(panels), 3.2), share=False)
        for panel, (measure, lines), over in zip(axes.flat, panels.items(), quantities, strict=True):
            for line, look in zip(lines, _looks(lines), strict=True):
                panel.plot(line.positions, line.values, label=line.label, **look)
            panel.set(xlabel=over, ylabel=measure, xscale="log" if log_positions else "linear")
            if len(lines) > MOST_INSIDE:
                panel.legend(frameon=False, fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
            elif lines:
                panel.legend(frameon=False)
    return figure


def _looks(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Return colour, dashes and marks of each line. Lines of the same kind differ."""
    found, seen = [], {"line": 0, "level": 0}
    for line in lines:
        if line.kind == "points":
            found.append({"color": "black", "ls": "none", "marker": "x", "ms": 5})
            continue
        number = seen[line.kind]
        seen[line.kind] += 1
        level = {"color": GREY, "ls": LINE_STYLES[number % len(LINE_STYLES)], "lw": 0.9}
        found.append(line_look(number) if line.kind == "line" else level)
    return found


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
