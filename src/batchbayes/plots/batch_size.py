"""How much noise is best: a held-out score against the effective batch size of the noise."""

import numpy as np
from numpy.typing import ArrayLike

from batchbayes.plots.style import BLUE, GREY, VERMILION, Axes, Figure, one_panel


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
