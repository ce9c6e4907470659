"""Grey images for experiments: Fashion-MNIST, MNIST, or noisy patterns for a quick test."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from batchbayes._common.rng import generator
from batchbayes.data.folder import DataFolder
from batchbayes.data.mnist import load_mnist

Source = Literal["fashion_mnist", "mnist", "synthetic"]
Examples = tuple[Tensor, Tensor]
"""Images (N, 1, H, W) and labels (N,)."""
PIXEL_MEAN, PIXEL_STD = 0.2860, 0.3530
"""The moments of the Fashion-MNIST training images. MNIST images are scaled in the same way."""
NOISE_STD = 6.0
"""The noise of the pixels of synthetic images. Their patterns have a standard deviation of one."""


@dataclass(frozen=True, eq=False)
class Images:
    """The images of one seed."""

    train: Examples
    held_out: Examples
    test: Examples


def load_grey_images(source: Source, counts: tuple[int, int, int], seed: int, folder: DataFolder = None) -> Images:
    """Load so many training, held-out and test images. The seed chooses the first two; the test images are fixed."""
    num_train, num_held_out, num_test = counts
    if source == "synthetic":
        pool, labels = noisy_patterns(num_train + num_held_out, seed, "train")
        images, test_labels = noisy_patterns(num_test, seed, "test")
    else:
        pool, labels = load_mnist(source, "train", folder)
        images, test_labels = load_mnist(source, "test", folder, num_test)
    own, held_out = split_rows(len(pool), num_train, num_held_out, seed)
    return Images(
        (scale_pixels(pool[own]), labels[own]),
        (scale_pixels(pool[held_out]), labels[held_out]),
        (scale_pixels(images), test_labels),
    )


def split_rows(count: int, num_train: int, num_held_out: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return which images to train on and which to hold out, at random."""
    order = torch.randperm(count, generator=generator(seed, "split"))
    return order[:num_train], order[num_train:][:num_held_out]


def scale_pixels(images: Tensor) -> Tensor:
    """Scale bytes to about zero mean and unit variance. Images that are not bytes stay unchanged."""
    return images if images.is_floating_point() else (images.float() / 255 - PIXEL_MEAN) / PIXEL_STD


def noisy_patterns(count: int, seed: int, part: str) -> tuple[Tensor, Tensor]:
    """Return images and labels of ten coarse patterns, with too much noise to classify all of them correctly."""
    patterns = torch.randn(10, 1, 7, 7, generator=generator(seed, "patterns")).repeat_interleave(4, 2)
    source = generator(seed, "noise", part)
    labels = torch.randint(0, 10, (count,), generator=source)
    images = patterns.repeat_interleave(4, 3)[labels]
    return images + NOISE_STD * torch.randn(images.shape, generator=source), labels
