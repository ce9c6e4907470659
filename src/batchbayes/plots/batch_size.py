"""Batch sizes: a held-out score against that of the noise, and uncertainty against that of training."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from batchbayes.plots.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    VERMILION,
    Axes,
    Figure,
    house_style,
    new_figure,
    one_panel,
)


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
