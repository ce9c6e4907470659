"""The share of units whose batch statistics follow each claim, by batch size; a column of panels for each statistic."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from batchbayes.plots.style import GREY, Axes, Figure, house_style, line_look, new_figure

EXPECTED, OBSERVED = "(N − M) / (N − 1): drawn without replacement", "variance: median over units"


@dataclass(frozen=True, eq=False)
class StatisticSweep:
    """One statistic of the units of a layer at each of B batch sizes, after each of E numbers of epochs."""

    title: str
    shares: Mapping[str, ArrayLike]
    """The share of units that the test of a claim does not reject, (E, B), by the name of the claim."""
    ratio: ArrayLike
    """Observed variance divided by the claimed one, (E, B)."""
    expected: ArrayLike
    """The ratio that theory predicts, (B,)."""


def normality_sweep_figure(
    batch_sizes: Sequence[int], sweeps: Sequence[StatisticSweep], *, level: float = 0.05, ax: Axes | None = None
) -> Figure:
    """Draw the share of units that pass each test, by batch size; below, observed divided by claimed variance.

    Lines are means over epochs. Dots are single epochs. An exact claim passes in a share `1 - level` of the units.
    With `ax`, the panels take the place of these axes.
    """
    with house_style():
        figure, panels = new_figure(2, len(sweeps), (2.7 * len(sweeps) + 0.4, 4.8), share=False, ax=ax)
        for (above, below), sweep in zip(panels.T, sweeps, strict=True):
            above.set_title(sweep.title)
            above.axhline(1 - level, color=GREY, lw=0.8, ls=(0, (1, 2)), label="if the claim is exact")
            for number, (name, shares) in enumerate(sweep.shares.items()):
                _epochs_line(above, batch_sizes, shares, name, "osD^"[number % 4], number)
            above.set(ylim=(-0.05, 1.05), yticks=[0, 0.5, 1], yticklabels=["0 %", "50 %", "100 %"])
            below.plot(batch_sizes, np.asarray(sweep.expected), color=GREY, lw=1, ls=(0, (4, 2)), label=EXPECTED)
            _epochs_points(below, batch_sizes, sweep.ratio, OBSERVED)
            below.axhline(1, color=GREY, lw=0.8, ls=(0, (1, 2)))
            below.set(yscale="log", xlabel="batch size M")
            below.sharey(panels[1, 0])
        _tidy(panels, batch_sizes, np.concatenate([np.ravel(sweep.ratio) for sweep in sweeps]))
        panels[0, 0].set_ylabel("units not rejected")
        panels[1, 0].set_ylabel("variance,\nobserved / CLT")
        entries = [panel.get_legend_handles_labels() for panel in panels[:, 0]]
        handles, labels = (first + second for first, second in zip(*entries, strict=True))
        figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(sweeps)), frameon=False)
    return figure.figure


def _epochs_line(
    panel: Axes, batch_sizes: Sequence[int], values: ArrayLike, label: str, marker: str, number: int
) -> None:
    each = np.asarray(values, dtype=float)  # (E, B)
    look = line_look(number)
    panel.plot(batch_sizes, each.mean(0), **look, label=label, marker=marker, ms=5)
    panel.plot(batch_sizes, each.T, marker, color=look["color"], ms=3, mew=0, alpha=0.4)


def _epochs_points(panel: Axes, batch_sizes: Sequence[int], values: ArrayLike, label: str) -> None:
    """Draw points without a line, which would hide the expected line."""
    each = np.asarray(values, dtype=float)  # (E, B)
    panel.plot(batch_sizes, each.mean(0), "o", color="black", ms=5.5, label=label)
    panel.plot(batch_sizes, each.T, "o", color="black", ms=3, mew=0, alpha=0.4)


def _tidy(panels: np.ndarray, batch_sizes: Sequence[int], ratios: np.ndarray) -> None:
    """Label batch sizes on the horizontal axes, and plain numbers on the vertical axis of the ratios."""
    for panel in panels.flat:
        panel.set_xscale("log")
        panel.set_xticks(batch_sizes, map(str, batch_sizes))
        panel.minorticks_off()
    for panel in panels[0]:
        panel.tick_params(labelbottom=False)
    for panel in panels[:, 1:].flat:
        panel.tick_params(labelleft=False)
    ticks = [tick for tick in (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3) if tick > 0.5 * ratios.min() or tick >= 0.1]
    panels[1, 0].set_yticks(ticks, [f"{tick:g}" for tick in ticks])
