"""One-dimensional regression with a gap in the data, in the style of the ConvNetJS regression demo."""

from collections.abc import Sequence

import torch
from torch import Tensor

from batchbayes._common.rng import generator

SUPPORT = ((-5.0, -1.0), (1.0, 5.0))
"""The intervals with data. Between them and beyond them, a network has nothing to learn from."""
BEYOND = ((-8.0, -5.0), (-1.0, 1.0), (5.0, 8.0))
"""The intervals without data: the gap in the middle, and beyond the data on both sides."""
NOISE_STD = 0.1


def true_function(x: Tensor) -> Tensor:
    r"""Return $f(x) = 0.3 x + 0.5 \sin 2x$, which has a standard deviation of 0.8 over the support.

    It is steep in the gap, where the MCBN band is wide. For $x \sin(x) / 3$, which is nearly flat there, it is narrow.
    """
    return 0.3 * x + 0.5 * (2 * x).sin()


def noisy_points(
    count: int, seed: int = 0, name: str = "train", intervals: Sequence[tuple[float, float]] = SUPPORT
) -> tuple[Tensor, Tensor]:
    """Return inputs with a uniform distribution over the intervals, and noisy targets: (count, 1) each.

    Points with different names ("train", "test", ...) are independent.

    >>> x, y = noisy_points(100)
    >>> x.shape, y.shape, bool((x.abs() >= 1).all())
    (torch.Size([100, 1]), torch.Size([100, 1]), True)
    """
    stream = generator(seed, "toy", name)
    lows, highs = torch.tensor(intervals).T
    which = torch.multinomial(highs - lows, count, replacement=True, generator=stream)
    x = lows[which] + (highs - lows)[which] * torch.rand(count, generator=stream)
    y = true_function(x) + NOISE_STD * torch.randn(count, generator=stream)
    return x[:, None], y[:, None]
