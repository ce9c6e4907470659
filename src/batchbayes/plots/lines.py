"""Quality against price, and a held-out score against the batch size of the noise."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from batchbayes.plots.style import (
    BLUE,
    GREY,
    MARKERS,
    PALETTE,
    VERMILION,
    Axes,
    Figure,
    house_style,
    new_figure,
    one_panel,
)


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
