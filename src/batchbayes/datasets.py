"""One-dimensional regression with a gap in the data, in the style of the ConvNetJS regression demo.

Handwritten digits of 8 x 8 pixels, which come with scikit-learn: 1,797 images, no download.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
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


BRIGHTEST = 16.0
"""The largest pixel value. Pixels measure ink from 0 to 16."""
TEST_SHARE = 0.3


@dataclass(frozen=True, eq=False)
class Digits:
    """Images (N, 1, 8, 8) with values from 0 (paper) to 1 (ink), and labels (N,)."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_digits(seed: int = 0) -> Digits:
    """Load the digits and split them at random. This needs scikit-learn."""
    from sklearn.datasets import load_digits as bundled

    pixels, labels = bundled(return_X_y=True)
    images = torch.from_numpy(np.asarray(pixels, dtype=np.float32)).reshape(-1, 1, 8, 8) / BRIGHTEST
    order = torch.randperm(len(images), generator=generator(seed, "digits"))
    count = round(TEST_SHARE * len(order))
    test, train = order[:count], order[count:]
    targets = torch.from_numpy(np.asarray(labels, dtype=np.int64))
    return Digits(images[train], targets[train], images[test], targets[test])


def inverted(images: Tensor) -> Tensor:
    """Exchange ink and paper.

    >>> inverted(torch.tensor([0.0, 0.25]))
    tensor([1.0000, 0.7500])
    """
    return 1 - images


def pixel_shuffled(images: Tensor, seed: int = 0) -> Tensor:
    """Shuffle the pixels of each image, in a different order for each: the ink stays, the shape is lost.

    >>> images = torch.arange(8.0).reshape(1, 1, 2, 4)
    >>> pixel_shuffled(images).shape, int(pixel_shuffled(images).sum())
    (torch.Size([1, 1, 2, 4]), 28)
    """
    flat = images.flatten(1)  # (N, pixels)
    order = torch.rand(flat.shape, generator=generator(seed, "pixels")).argsort(1)
    return flat.gather(1, order).reshape(images.shape)
