r"""Intervals that hold for small and for large predictions alike, and not only on average.

An interval reaches from the prediction $m$ down by $s\, b(m)$ and up by $s\, a(m)$, where $s$ is the predicted
standard deviation. The functions $a$ and $b$ are fitted to calibration data, for each output:

- plain: both are one number, the conformal quantile of $|e| / s$ (Lei et al., JASA 113, 2018).
- spread: both are $w\, g(m)$, with the mean of $|e| / s$ in each fifth of the predictions, joined by straight lines, as
  $g$: intervals scaled by a predicted spread. $w$ is the conformal quantile of $|e| / (s\, g)$.
- groups: a conformal quantile for each fifth of the predictions (Mondrian groups: Vovk et al., 2005).
- quantiles: the quantiles of $e / s$ in each fifth, joined by straight lines, both moved by one conformal number
  (conformalised quantile regression: Romano, Patterson & Candès, NeurIPS 2019).

Scores of an example come from a fit to other folds. The simplest kind is taken that is as good as the best by the
interval score (Gneiting & Raftery, JASA 102, 2007), and whose intervals are not too narrow for one of the fifths.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from batchbayes._common.rng import fold_numbers
from batchbayes.calibrate import conformal_quantile, interval_ends
from batchbayes.report.compare.groups import FIFTHS, By, Group, groups_by, in_groups, worst_group
from batchbayes.report.compare.tuning import DOUBT, FOLDS, paired_difference

LEVEL = 0.9
"""The share of true values that intervals are made to hold."""
MOST_GROUPS, GROUP = 10, 100
"""Intervals are judged in fifths of the predictions. They are fitted in fifths too, or in up to MOST_GROUPS groups if
these have GROUP examples each."""
NARROWEST = 0.1
"""The reach goes from one value to the next over at least this share of a standard deviation. On a steeper way it would
follow the last digits of the prediction, which differ between machines."""
FEWEST = 100
"""With fewer calibration examples a fifth of them says too little, and intervals are plain."""


class Kind(Enum):
    """How the reach of intervals depends on the prediction, the simplest first."""

    PLAIN = "plain"
    SPREAD = "spread"
    GROUPS = "groups"
    QUANTILES = "quantiles"


@dataclass(frozen=True)
class Reach:
    """How far the intervals of one output reach, in predicted standard deviations, as a function of the prediction."""

    kind: Kind
    ramps: tuple[tuple[float, float], ...]
    """Between which predictions the reach goes from one value to the next. It jumps if both are the same. They may
    overlap, but both starts and stops are sorted."""
    below: tuple[float, ...]
    """The values below the prediction, one more than ramps."""
    above: tuple[float, ...]

    def ends(self, middle: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
        """Return both ends, from predictions and their standard deviations, (N,) each."""
        lower, _ = interval_ends(middle, spread * self._at(middle, self.below))
        _, upper = interval_ends(middle, spread * self._at(middle, self.above))
        crossed, between = lower > upper, (lower + upper) / 2  # an empty interval: a point holds no less
        return torch.where(crossed, between, lower), torch.where(crossed, between, upper)

    def _at(self, middle: Tensor, values: Sequence[float]) -> Tensor:
        at, found = middle.double(), torch.full_like(middle, values[0], dtype=torch.float64)
        for (start, stop), value, last in zip(self.ramps, values[1:], values, strict=False):
            passed = (at > start).double() if start == stop else ((at - start) / (stop - start)).clamp(0, 1)
            found = found + (value - last) * passed
        return found


@dataclass(frozen=True)
class Intervals:
    """The intervals of all outputs. `bb.export` takes them as it takes those of `conformal_intervals`."""

    outputs: tuple[Reach, ...]
    level: float = LEVEL

    def ends(self, middle: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
        """Return both ends, in the shape (N, ...) of the means and the predicted standard deviations."""
        columns = zip(self.outputs, middle.flatten(1).T if middle.ndim > 1 else [middle],
                      spread.flatten(1).T if spread.ndim > 1 else [spread], strict=True)  # fmt: skip
        lower, upper = zip(*(reach.ends(*column) for reach, *column in columns), strict=True)
        return torch.stack(lower, 1).reshape(middle.shape), torch.stack(upper, 1).reshape(middle.shape)

    @property
    def is_known(self) -> bool:
        """Whether there was enough calibration data."""
        return all(math.isfinite(sum(reach.below) + sum(reach.above)) for reach in self.outputs)

    def to_json(self) -> list[dict[str, Any]]:
        """Return values that `json` can write."""
        return [{"kind": r.kind.value, "ramps": r.ramps, "below": r.below, "above": r.above} for r in self.outputs]

    @classmethod
    def from_notes(cls, notes: Mapping[str, Any]) -> "Intervals":
        """Return the intervals that an assessment has saved. Those of version 0.2.0 have one width for each output."""
        if "intervals" not in notes:
            return cls(tuple(Reach(Kind.PLAIN, (), (width,), (width,)) for width in notes["conformal_width"]))
        return cls(
            tuple(
                Reach(
                    Kind(one["kind"]), tuple((a, b) for a, b in one["ramps"]), tuple(one["below"]), tuple(one["above"])
                )
                for one in notes["intervals"]
            )
        )


def fit_intervals(mean: Tensor, std: Tensor, targets: Tensor, *, kind: str = "auto", seed: int = 0) -> Intervals:
    """Return intervals for each output, from what was predicted for calibration examples, (N, D) each."""
    columns = zip(mean.double().T, std.double().T, targets.double().T, strict=True)
    return Intervals(tuple(_fit_one(*column, kind, seed) for column in columns))


def _fit_one(mean: Tensor, std: Tensor, targets: Tensor, kind: str, seed: int) -> Reach:
    if len(mean) < FEWEST or len(mean.unique()) < FIFTHS:
        return fit_reach(Kind.PLAIN, mean, std, targets, seed)
    return fit_reach(choose_kind(mean, std, targets, seed) if kind == "auto" else Kind(kind), mean, std, targets, seed)


def choose_kind(mean: Tensor, std: Tensor, targets: Tensor, seed: int) -> Kind:
    """Return the simplest kind that is as good as the best one on examples that took no part in its fit."""
    fold = fold_numbers(len(mean), FOLDS, seed)
    scores, is_narrow = {}, {}
    for kind in Kind:
        lower, upper = torch.empty_like(mean), torch.empty_like(mean)
        for number in range(FOLDS):
            rest, others = fold == number, fold != number
            reach = fit_reach(kind, mean[others], std[others], targets[others], seed)
            lower[rest], upper[rest] = reach.ends(mean[rest], std[rest])
        scores[kind] = interval_score(lower, upper, targets)
        is_narrow[kind] = worst_group(fifths_of(mean, (targets >= lower) & (targets <= upper))) is not None
    fitting = [kind for kind in Kind if not is_narrow[kind]] or list(Kind)
    best = min(fitting, key=lambda kind: float(scores[kind].mean()))

    def is_as_good(kind: Kind) -> bool:
        difference, error = paired_difference(scores[kind], scores[best])
        return difference <= DOUBT * error

    return next(kind for kind in fitting if is_as_good(kind))


def fifths_of(mean: Tensor, held: Tensor, calibration_count: int | None = None) -> list[Group]:
    """Return which share of the targets each fifth of the predictions (N,) holds in its intervals."""
    extra = LEVEL * (1 - LEVEL) / calibration_count if calibration_count else 0.0
    said = torch.full_like(mean, LEVEL, dtype=torch.float64)
    return list(groups_by(By.PREDICTION, mean, said, held, extra=extra))


def interval_score(lower: Tensor, upper: Tensor, targets: Tensor) -> Tensor:
    r"""Return the width of each interval, plus $2 / \alpha$ times how far the target is outside. Lower is better."""
    outside = (lower - targets).clamp_min(0) + (targets - upper).clamp_min(0)
    return upper - lower + 2 / (1 - LEVEL) * outside


def fit_reach(kind: Kind, mean: Tensor, std: Tensor, targets: Tensor, seed: int) -> Reach:
    """Fit one kind of intervals to calibration examples, (N,) each, in float64."""
    errors = (targets - mean) / std
    if kind is Kind.PLAIN:
        width = conformal_quantile(errors.abs(), LEVEL)
        return Reach(kind, (), (width,), (width,))
    group, edges = in_groups(mean, min(MOST_GROUPS, max(FIFTHS, len(mean) // GROUP)))
    if kind is Kind.GROUPS:
        widths = tuple(conformal_quantile(errors[group == k].abs(), LEVEL) for k in range(len(edges) + 1))
        if not math.isfinite(sum(widths)):  # equal predictions have left too few to a group
            return fit_reach(Kind.PLAIN, mean, std, targets, seed)
        return Reach(kind, tuple((edge, edge) for edge in edges), widths, widths)
    shape = _spread_shape if kind is Kind.SPREAD else _quantile_shape
    scores, fold = torch.empty_like(mean), fold_numbers(len(mean), FOLDS, seed)
    for number in range(FOLDS):  # what was fitted to an example would be too kind to it
        rest, others = fold == number, fold != number
        scores[rest] = _scores(kind, shape(mean[others], std[others], errors[others]), mean[rest], errors[rest])
    ramps, below, above = shape(mean, std, errors)
    moved = conformal_quantile(scores, LEVEL)
    if kind is Kind.SPREAD:
        return Reach(kind, ramps, tuple(moved * v for v in below), tuple(moved * v for v in above))
    return Reach(kind, ramps, tuple(moved + v for v in below), tuple(moved + v for v in above))


Shape = tuple[tuple[tuple[float, float], ...], tuple[float, ...], tuple[float, ...]]
"""Ramps, and values below and above, before they are made to hold the level."""


def _scores(kind: Kind, shape: Shape, mean: Tensor, errors: Tensor) -> Tensor:
    """Return by how much the reach must be multiplied (spread) or extended (quantiles) to hold each error."""
    reach = Reach(kind, *shape)
    below, above = reach._at(mean, reach.below), reach._at(mean, reach.above)
    return errors.abs() / above if kind is Kind.SPREAD else torch.maximum(-errors - below, errors - above)


def _spread_shape(mean: Tensor, std: Tensor, errors: Tensor) -> Shape:
    ramps, parts = _parts_of(mean, std, errors)
    least = 1e-3 * float(errors.abs().mean()) + 1e-300  # a fifth may be predicted without an error
    values = tuple(max(least, float(part.abs().mean())) for part in parts)
    return ramps, values, values


def _quantile_shape(mean: Tensor, std: Tensor, errors: Tensor) -> Shape:
    ramps, parts = _parts_of(mean, std, errors)
    tail = (1 - LEVEL) / 2
    below = tuple(-float(part.quantile(tail)) for part in parts)
    return ramps, below, tuple(float(part.quantile(1 - tail)) for part in parts)


def _parts_of(mean: Tensor, std: Tensor, errors: Tensor) -> tuple[tuple[tuple[float, float], ...], list[Tensor]]:
    """Return ramps between the middles of the fifths of the predictions, and the errors in each fifth."""
    group, edges = in_groups(mean, min(MOST_GROUPS, max(FIFTHS, len(mean) // GROUP)))
    numbers = range(len(edges) + 1)
    least = NARROWEST * float(std.median())
    steps = [
        ((a + b) / 2, max(b - a, least) / 2) for a, b in pairwise(float(mean[group == k].median()) for k in numbers)
    ]
    return tuple((middle - half, middle + half) for middle, half in steps), [errors[group == k] for k in numbers]
