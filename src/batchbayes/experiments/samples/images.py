"""Grey images for the experiments of this folder: Fashion-MNIST, MNIST, or noisy patterns for a quick test."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from batchbayes.data.folder import DataFolder
from batchbayes.data.mnist import load_mnist
from batchbayes.experiments.collapse_networks import noisy_patterns, scale_pixels, split_rows

Source = Literal["fashion_mnist", "mnist", "synthetic"]
Examples = tuple[Tensor, Tensor]
"""Images (N, 1, H, W) and labels (N,)."""


@dataclass(frozen=True, eq=False)
class Images:
    """The images of one seed."""

    train: Examples
    held_out: Examples
    test: Examples


def load_images(source: Source, counts: tuple[int, int, int], seed: int, folder: DataFolder = None) -> Images:
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
