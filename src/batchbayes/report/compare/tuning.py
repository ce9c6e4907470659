"""Tuned numbers are judged on examples that took no part in their tuning: the losses by which methods are chosen."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from batchbayes._common.rng import fold_numbers

T = TypeVar("T")

FOLDS = 5
DOUBT = 2.0
"""Two methods count as equally good if their mean losses differ by at most this many standard errors."""


def cross_fitted(count: int, fit: Callable[[Tensor], T], losses: Callable[[T, Tensor], Tensor], *, seed: int) -> Tensor:
    """Return the loss of each of `count` examples with a number that was fitted to the other folds, (count,).

    Args:
        count: the number of examples.
        fit: returns what is tuned on some examples, given as (n,) positions.
        losses: returns the losses of some examples with what was tuned, (n,).
        seed: which example is in which fold.

    >>> values = torch.tensor([1.0, 2.0, 6.0])  # each is judged by the mean of the others
    >>> cross_fitted(3, lambda rows: values[rows].mean(), lambda mean, rows: (values[rows] - mean).abs(), seed=0)
    tensor([3.0000, 1.5000, 4.5000], dtype=torch.float64)
    """
    fold, found = fold_numbers(count, min(FOLDS, count), seed), torch.zeros(count, dtype=torch.float64)
    for number in fold.unique():
        rest = (fold == number).nonzero()[:, 0]
        others = (fold != number).nonzero()[:, 0] if count > 1 else rest
        found[rest] = losses(fit(others), rest).double()
    return found


def temperature_grid(low: float, high: float, count: int) -> list[float]:
    """Return temperatures at equal ratios.

    >>> temperature_grid(0.5, 2.0, 3)
    [0.5, 1.0, 2.0]
    """
    return torch.linspace(math.log(low), math.log(high), count, dtype=torch.float64).exp().tolist()


@dataclass(frozen=True, eq=False)
class TemperatureCurve:
    """The loss of each example at each temperature of a grid, (G, N). Between them it is a parabola in log T."""

    temperatures: Sequence[float]
    losses: Tensor

    def best(self, rows: Tensor) -> float:
        """Return the temperature with the lowest mean loss of some examples."""
        return between(self.temperatures, self.losses[:, rows].double().mean(1).tolist())

    def at(self, temperature: float, rows: Tensor) -> Tensor:
        """Return the losses of some examples at a temperature, (n,)."""
        start = _start(self.temperatures, temperature)
        weights = _weights(self.temperatures[start : start + 3], temperature)
        return sum(w * row for w, row in zip(weights, self.losses[start : start + 3, rows].double(), strict=True))  # type: ignore[return-value]

    def cross_fitted(self, seed: int) -> Tensor:
        """Return the loss of each example at the temperature that is best for the other folds, (N,)."""
        return cross_fitted(self.losses.shape[1], self.best, self.at, seed=seed)


def between(temperatures: Sequence[float], costs: Sequence[float]) -> float:
    """Return the lowest point of the parabola in log T through the best point of a grid and its neighbours.

    >>> round(between([1.0, 2.0, 4.0], [1.0, 0.0, 1.0]), 3)
    2.0
    """
    start = min(range(1, len(costs) - 1), key=lambda i: costs[i]) - 1
    (left, x, right), (a, b, c) = map(math.log, temperatures[start : start + 3]), costs[start : start + 3]
    left_slope, right_slope = (b - a) / (x - left), (c - b) / (right - x)
    if right_slope <= left_slope:  # no parabola with a lowest point: the lower end
        return math.exp(left if a <= c else right)
    at = (left + x) / 2 - left_slope * (right - left) / (2 * (right_slope - left_slope))
    return math.exp(min(max(at, left), right))


def _start(temperatures: Sequence[float], at: float) -> int:
    """Return the first of the three points of the grid that are nearest."""
    nearest = min(range(len(temperatures)), key=lambda i: abs(math.log(temperatures[i] / at)))
    return min(max(nearest - 1, 0), len(temperatures) - 3)


def _weights(temperatures: Sequence[float], at: float) -> list[float]:
    """Return the weights of three points in the parabola in log T through them."""
    x, u = [math.log(t) for t in temperatures], math.log(at)
    others = [[x[j] for j in range(3) if j != i] for i in range(3)]
    return [(u - a) * (u - b) / ((x[i] - a) * (x[i] - b)) for i, (a, b) in enumerate(others)]


def paired_difference(losses: Tensor, others: Tensor) -> tuple[float, float]:
    """Return the mean of the differences of losses of the same examples, and its standard error.

    >>> paired_difference(Tensor([1.0, 3.0]), Tensor([0.0, 0.0]))
    (2.0, 1.0)
    """
    difference = (losses - others).double()
    return float(difference.mean()), float(difference.std(correction=0)) / max(1, len(difference) - 1) ** 0.5
