"""One-dimensional search."""

import math
from collections.abc import Callable

GOLDEN = (math.sqrt(5) - 1) / 2


def maximise(function: Callable[[float], float], low: float, high: float, steps: int = 40) -> tuple[float, float]:
    """Where a function with one maximum between `low` and `high` has it, and its value there (golden section).

    >>> x, value = maximise(lambda x: -((x - 2) ** 2), 0.0, 5.0)
    >>> round(x, 6), round(value, 6)
    (2.0, -0.0)
    """
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_left, at_right = function(left), function(right)
    for _ in range(steps):
        if at_left > at_right:
            high, right, at_right = right, left, at_left
            left = high - GOLDEN * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + GOLDEN * (high - low)
            at_right = function(right)
    return (left, at_left) if at_left > at_right else (right, at_right)
