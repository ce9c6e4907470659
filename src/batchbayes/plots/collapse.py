"""How uncertainty depends on the batch size that networks were trained with."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from batchbayes.plots.style import BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILION, Axes, Figure, house_style, new_figure


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
