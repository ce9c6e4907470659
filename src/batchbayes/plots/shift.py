"""Uncertainty in and out of distribution: is the network less certain about data of another kind?"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from batchbayes.plots.style import BLUE, VERMILION, Axes, Figure, house_style, new_figure

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
