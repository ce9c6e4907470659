"""The search for one number by which a loss is lowest."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

GOLDEN = (math.sqrt(5) - 1) / 2


class Tuned(NamedTuple):
    """What a search has found."""

    log: float
    """The logarithm of the best value."""
    loss: float
    """The loss there."""

    @property
    def value(self) -> float:
        """The best value, which is positive."""
        return math.exp(self.log)


def tune(loss: Callable[[float], float], low: float, high: float, *, grid: int = 33, steps: int = 20) -> Tuned:
    """Find the positive number at which a loss is lowest: a temperature, a precision, a batch size.

    The search is in logarithms: `loss` is a function of the logarithm, and `low` and `high` are logarithms. It first
    takes the best of `grid` points. It then looks between the neighbours of that point by golden section, which needs a
    loss with one minimum there. Each step shrinks the bracket by 0.62. If nothing better is found there, the best of
    the grid is the result, so a minimum at an end of the range is that end. With `grid=0` the golden section starts
    from the whole range.

    >>> found = tune(lambda log: (log - 2) ** 2, 0.0, 5.0)
    >>> round(found.log, 4), round(found.loss, 6), round(found.value, 3)
    (2.0, 0.0, 7.389)
    """
    found: list[tuple[float, float]] = []
    if grid:
        points = torch.linspace(low, high, grid, dtype=torch.float64).tolist()
        values = [loss(point) for point in points]
        best = min(range(grid), key=values.__getitem__)
        found.append((points[best], values[best]))
        low, high = points[max(0, best - 1)], points[min(grid - 1, best + 1)]
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_left, at_right = loss(left), loss(right)
    for _ in range(steps):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - GOLDEN * (high - low)
            at_left = loss(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + GOLDEN * (high - low)
            at_right = loss(right)
    return Tuned(*min([*found, (right, at_right), (left, at_left)], key=lambda pair: pair[1]))
