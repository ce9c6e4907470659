"""The table and the figure of the experiment `ensembles`: what every method is worth in networks of a deep ensemble."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

import batchbayes as bb
from batchbayes.plots.style import Figure, house_style, new_figure
from batchbayes.reproduce.tables import ResultTable

DEEP = "deep ensemble"
PANELS = {"one training": (0, 1), "one network, trained for longer": (1, 2), "many trainings": (2, math.inf)}
"""Methods whose training costs more than the first and at most the second number of trainings share a panel."""


@dataclass(frozen=True)
class Curve:
    """How good a method is after so many forward passes."""

    seed: int
    method: str
    passes: Sequence[int]
    nll: Sequence[float]
    calibrated_nll: Sequence[float]
    """With the temperature that is best on held-out images."""
    accuracy: Sequence[float]
    trainings: float
    """What its training costs, in trainings of one network."""


Curves = Mapping[str, Sequence[Curve]]
"""By method, one for each seed."""


def methods_table(found: Curves, num_members: int) -> ResultTable:
    """Return means over seeds with all passes of each method, and its equivalent in a deep ensemble of so many."""
    ensembles, lines = {own.seed: own for own in found.get(DEEP, [])}, []
    for method, each in found.items():
        paired = [own for own in each if own.seed in ensembles]
        groups = [paired, *([own] for own in paired)] if paired else []  # all seeds, then each of them
        together, *alone = [equivalent(own, [ensembles[one.seed] for one in own]) for own in groups] or [None]
        lines.append((
            method, each[0].trainings, each[0].passes[-1],
            fmean(own.accuracy[-1] for own in each), fmean(own.nll[-1] for own in each),
            fmean(own.calibrated_nll[-1] for own in each),
            _shown(together, num_members), " ".join(_shown(value, num_members) for value in alone),
        ))  # fmt: skip
    return ResultTable(
        "Every method with all its passes",
        ("method", "trainings", "passes", "accuracy", "NLL", "calibrated NLL", "equivalent", "each seed"),
        tuple(lines),
        ("", ".1f", "", ".4f", ".4f", ".4f", "", ""),
        ("Calibrated NLL: with the temperature that is best on held-out images.",
         "Equivalent: the number of networks of a deep ensemble with the same calibrated NLL, by the mean curve. "
         f"{num_members}+ is better than all of them."),
    )  # fmt: skip


def equivalent(own: Sequence[Curve], ensembles: Sequence[Curve]) -> float:
    """Return the deep-ensemble equivalent by means over seeds. It is infinite beyond the largest ensemble."""
    value = -fmean(each.calibrated_nll[-1] for each in own)
    mean_curve = [-fmean(column) for column in zip(*(each.calibrated_nll for each in ensembles), strict=True)]
    return bb.metrics.deep_ensemble_equivalent(
        value, torch.tensor(ensembles[0].passes), torch.tensor(mean_curve, dtype=torch.float64)
    )


def _shown(value: float | None, most: int) -> str:
    return "" if value is None else f"{most}+" if value == math.inf else f"{value:.1f}"


def passes_figure(found: Curves, ticks: Sequence[int]) -> Figure:
    """Show the calibrated NLL against forward passes, in a panel for each price of training.

    Methods that are much worse than a single network are left out.
    """
    deep = [fmean(column) for column in zip(*(own.calibrated_nll for own in found[DEEP]), strict=True)]
    room = 0.5 * (deep[0] - deep[-1])
    seen = {m: each for m, each in found.items() if fmean(own.calibrated_nll[-1] for own in each) < deep[0] + room}
    with house_style():
        figure, panels = new_figure(len(PANELS), 1, (7.2, 9.0))
        for panel, (title, (above, most)) in zip(panels[:, 0], PANELS.items(), strict=True):
            own = {DEEP: found[DEEP]} | {m: each for m, each in seen.items() if above < each[0].trainings <= most}
            lines = {m: (each[0].passes, [one.calibrated_nll for one in each]) for m, each in own.items()}
            bb.plots.seeds_figure(lines, xlabel="forward passes", ylabel="calibrated NLL", xscale="log", ax=panel)
            panel.set(title=title, xticks=ticks, xticklabels=ticks)
            panel.minorticks_off()
        panels[0, 0].set_ylim(deep[-1] - room, deep[0] + room)
    return figure
