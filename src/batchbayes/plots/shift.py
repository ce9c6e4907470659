"""Data of another kind than that of training: is the network less certain about it, and does it call it unusual?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from batchbayes.plots.style import BLUE, GREY, VERMILION, Axes, Figure, house_style, line_look, new_figure, one_panel

BINS = 30


def shift_figure(scores: Mapping[str, tuple[ArrayLike, ArrayLike]], *, ax: Axes | None = None) -> Figure:
    """Draw histograms and cumulative shares of scores in and out of distribution, a column for each score.

    Args:
        scores: the values in distribution (N,) and out of distribution (N',) of each score, such as entropies in nats.
        ax: axes of a grid, whose place the panels take.
    """
    with house_style():
        figure, panels = new_figure(2, len(scores), (3.7 * len(scores), 4.6), share=False, ax=ax)
        for column, (name, (inside, outside)) in enumerate(scores.items()):
            both = {"test data": np.asarray(inside), "out of distribution": np.asarray(outside)}
            _histogram(panels[0, column], both)
            _cumulative(panels[1, column], both)
            panels[1, column].set_xlabel(name)
        panels[0, 0].set_ylabel("share of examples")
        panels[1, 0].set_ylabel("share at or below")
        figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return figure.figure


def _histogram(panel: Axes, both: Mapping[str, np.ndarray]) -> None:
    highest = max(float(values.max()) for values in both.values()) or 1.0
    for (name, values), color, style in zip(both.items(), (BLUE, VERMILION), ("-", "--"), strict=True):
        weights = np.full(len(values), 1 / len(values))
        options = {"bins": BINS, "range": (0, highest), "weights": weights, "color": color}
        panel.hist(values, alpha=0.25, **options)
        panel.hist(values, histtype="step", lw=1.4, ls=style, label=name, **options)
    panel.set_xlim(0, highest)


def _cumulative(panel: Axes, both: Mapping[str, np.ndarray]) -> None:
    for values, color, style in zip(both.values(), (BLUE, VERMILION), ("-", "--"), strict=True):
        panel.step(np.sort(values), np.arange(1, len(values) + 1) / len(values), where="post", color=color, ls=style)
    panel.set(ylim=(0, 1), xlim=(0, max(float(values.max()) for values in both.values()) or 1.0))


P_VALUE_BINS = 20


def novelty_figure(p_values: Mapping[str, ArrayLike], *, level: float, ax: Axes | None = None) -> Figure:
    """Draw a histogram of the p-values of novelty of each kind of data, (N,) each.

    Inputs that are like those of training are spread evenly (the dotted line). Unusual ones are on the left. The
    legend says which share is at or below `level`.
    """
    with one_panel(ax, (4.8, 3.4)) as panel:
        panel.axhline(1 / P_VALUE_BINS, color=GREY, lw=1, ls=(0, (1, 2)), label="if they are like training data")
        for number, (name, values) in enumerate(p_values.items()):
            values = np.asarray(values, dtype=float)
            look = line_look(number)
            shares = {"bins": P_VALUE_BINS, "range": (0, 1), "weights": np.full(len(values), 1 / max(1, len(values)))}
            flagged = f"{name.replace('$', chr(92) + '$')}: {100 * np.mean(values <= level):.1f} % with p ≤ {level:.2g}"
            panel.hist(values, alpha=0.2, color=look["color"], **shares)
            panel.hist(values, histtype="step", label=flagged, **look, **shares)
        panel.set(xlabel="p-value: share of ordinary inputs that are as unusual", ylabel="share of inputs", xlim=(0, 1))
        panel.legend(frameon=False, fontsize=8)
    return panel.figure


@dataclass(frozen=True, eq=False)
class EntropyPanel:
    """A title, entropies (N,) by method, and published shares by method at some entropies."""

    title: str
    curves: Mapping[str, ArrayLike]
    places: Sequence[float] = ()
    published: Mapping[str, Sequence[float]] | None = None


def entropy_figure(panels: Sequence[EntropyPanel]) -> Figure:
    """Draw the share of images with less entropy, against the entropy. Crosses are published values."""
    with house_style():
        figure, axes = new_figure(1, len(panels), (4.2 * len(panels), 3.6), share=False)
        for cell, panel in zip(axes.flat, panels, strict=True):
            for number, (method, values) in enumerate(panel.curves.items()):
                ordered, look = np.sort(np.asarray(values)), line_look(number)
                cell.plot(ordered, np.arange(1, len(ordered) + 1) / len(ordered), label=method, **look)
                if panel.published and method in panel.published:
                    cell.plot(panel.places, panel.published[method], "x", color=look["color"], ms=6)
            cell.set(title=panel.title, xlabel="entropy of an unknown image, nats", ylim=(0, 1.02))
            cell.set_xlim(left=0)
        axes.flat[0].set_ylabel("share of images with less")
        axes.flat[-1].plot([], [], "x", color="black", label="published")
        for cell in axes.flat:
            cell.legend(frameon=False, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)
    return figure
