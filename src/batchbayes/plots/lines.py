"""Lines: over one quantity, in a panel for each of several measures; or the mean over seeds, with a band.

Quality against price: how good each method is, by what it costs.

Batch sizes: a held-out score against that of the noise, and uncertainty against that of training.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from batchbayes.plots.style import (
    BLUE,
    GREEN,
    GREY,
    LINE_STYLES,
    MARKERS,
    ORANGE,
    PALETTE,
    PURPLE,
    VERMILION,
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


def price_figure(
    names: Sequence[str],
    passes: Sequence[float],
    qualities: Mapping[str, ArrayLike],
    *,
    recommended: str | None = None,
    ax: Axes | None = None,
) -> Figure:
    """Draw each quality of the methods against their cost, a panel for each quality.

    Args:
        names: the methods, (G,).
        passes: the cost of one prediction in forward passes, (G,).
        qualities: a number for each method by the label of the axis, such as {"NLL (lower is better)": ...}.
        recommended: the method that gets a ring.
        ax: axes of a grid, whose place the panels take.
    """
    with house_style():
        figure, (panels,) = new_figure(1, len(qualities), (2.9 * len(qualities) + 0.3, 3.2), share=False, ax=ax)
        for panel, (label, values) in zip(panels, qualities.items(), strict=True):
            for i, (name, cost, value) in enumerate(zip(names, passes, values, strict=True)):  # type: ignore[arg-type]
                look = {"color": PALETTE[i % len(PALETTE)], "marker": MARKERS[i % len(MARKERS)]}
                panel.plot([cost], [value], ls="", ms=6, mew=1.6, mfc="none", label=name.replace("$", r"\$"), **look)
                if name == recommended:
                    panel.plot([cost], [value], "o", ms=13, mfc="none", mec=GREY, mew=1.3, label="recommended")
            panel.set(xscale="log", xlabel="price, in forward passes", title=label)
            ticks = [tick for tick in (1, 2, 4, 8, 16, 32, 64, 128, 256) if tick <= 1.5 * max(passes)]
            panel.set_xticks(ticks, map(str, ticks))
            panel.minorticks_off()
            panel.margins(x=0.12)
            shown = np.asarray(values, dtype=float)
            shown = shown[np.isfinite(shown)] if np.isfinite(shown).any() else np.zeros(1)  # an NLL can be infinite
            low, high = float(np.min(shown)), float(np.max(shown))
            room = max(0.12 * (high - low), 0.005 * abs(high)) or 0.01  # differences that do not matter look small
            panel.set_ylim(low - room, high + room)
            panel.ticklabel_format(axis="y", useOffset=False)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure.figure


def batch_size_figure(
    batch_sizes: ArrayLike,
    scores: ArrayLike,
    *,
    best: float,
    trained_with: float,
    score: str,
    ax: Axes | None = None,
) -> Figure:
    """Draw the score by batch size, its optimum, and the batch size of training.

    Shapes: batch sizes (G,), scores (G,) where lower is better; `score` is the label of the vertical axis.
    """
    batch_sizes, scores = np.asarray(batch_sizes, dtype=float), np.asarray(scores, dtype=float)
    order = np.argsort(batch_sizes)
    batch_sizes, scores = batch_sizes[order], scores[order]
    with one_panel(ax, (4.8, 3.2)) as panel:
        panel.plot(batch_sizes, scores, "o-", color=BLUE, ms=3)
        panel.axvline(trained_with, color=GREY, ls="--", lw=1, label=f"as trained, M = {trained_with:g}")
        lowest = float(np.interp(np.log(best), np.log(batch_sizes), scores))
        label = "no noise helps" if best >= 0.95 * batch_sizes[-1] else f"best, M = {best:.3g}"
        panel.plot([best], [lowest], "D", color=VERMILION, ms=7, label=label)
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        panel.set(xlabel="effective batch size M (more noise to the left)", ylabel=score)
        panel.legend(frameon=False)
    return panel.figure


@dataclass(frozen=True, eq=False)
class BatchSizeSweep:
    """Results of a method at each of B training batch sizes: the title of its panel, and arrays (seeds, B)."""

    title: str
    information_in: ArrayLike
    information_out: ArrayLike
    auroc: ArrayLike


def collapse_figure(
    batch_sizes: Sequence[int],
    sweeps: Sequence[BatchSizeSweep],
    *,
    novelty: ArrayLike | None = None,
    ax: Axes | None = None,
) -> Figure:
    """Draw mutual information in and out of distribution by training batch size, for each method; then the AUROC.

    `novelty` is the AUROC (seeds, B) of a detector without noise. Lines are means over seeds. Dots are single seeds.
    With `ax`, the panels take the place of these axes.
    """
    with house_style():
        count = len(sweeps) + 1
        figure, (panels,) = new_figure(1, count, (3.3 * count, 3.2), share=False, ax=ax)
        for panel, sweep in zip(panels, sweeps, strict=False):
            panel.sharey(panels[0])
            _seeds_line(panel, batch_sizes, sweep.information_out, "out of distribution", VERMILION, "o")
            _seeds_line(panel, batch_sizes, sweep.information_in, "in distribution", BLUE, "s")
            panel.set(title=sweep.title, yscale="log")
        panels[0].set_ylabel("mean mutual information, nats")
        panels[0].legend(frameon=False)
        for sweep, colour, marker in zip(sweeps, (GREY, GREEN, PURPLE), "^Dv", strict=False):
            _seeds_line(panels[-1], batch_sizes, sweep.auroc, sweep.title, colour, marker)
        if novelty is not None:
            _seeds_line(panels[-1], batch_sizes, novelty, "novelty", ORANGE, "P")
        panels[-1].set(title="detection of out-of-distribution data", ylabel="AUROC")
        panels[-1].legend(frameon=False)
        for panel in panels:
            panel.set(xlabel="training batch size M", xscale="log")
            panel.set_xticks(batch_sizes, map(str, batch_sizes))
            panel.minorticks_off()
    return figure.figure


def _seeds_line(
    panel: Axes, batch_sizes: Sequence[int], values: ArrayLike, label: str, colour: str, marker: str
) -> None:
    each = np.asarray(values)  # (seeds, B)
    panel.plot(batch_sizes, each.mean(0), color=colour, lw=1.6, label=label, marker=marker, ms=5)
    if len(each) > 1:
        panel.plot(batch_sizes, each.T, marker, color=colour, ms=3, mew=0, alpha=0.5)
