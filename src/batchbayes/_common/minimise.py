"""One-dimensional search."""

import math
from collections.abc import Callable

import torch

GOLDEN = (math.sqrt(5) - 1) / 2


def minimise(
    function: Callable[[float], float], low: float, high: float, *, grid: int = 33, steps: int = 20
) -> tuple[float, float]:
    """Return the point between `low` and `high` where a function is lowest, and its value there.

    The search first takes the best of `grid` points. It then looks between the neighbours of that point by golden
    section, which needs a function with one minimum there. Each step shrinks the bracket by 0.62. If nothing better is
    found there, the best of the grid is the result, so a minimum at an end of the range is that end. With `grid=0`
    the golden section starts from the whole range.

    >>> x, value = minimise(lambda x: (x - 2) ** 2, 0.0, 5.0)
    >>> round(x, 4), round(value, 6)
    (2.0, 0.0)
    """
    found: list[tuple[float, float]] = []
    if grid:
        points = torch.linspace(low, high, grid, dtype=torch.float64).tolist()
        values = [function(point) for point in points]
        best = min(range(grid), key=values.__getitem__)
        found.append((points[best], values[best]))
        low, high = points[max(0, best - 1)], points[min(grid - 1, best + 1)]
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_left, at_right = function(left), function(right)
    for _ in range(steps):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - GOLDEN * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + GOLDEN * (high - low)
            at_right = function(right)
    return min([*found, (right, at_right), (left, at_left)], key=lambda pair: pair[1])
