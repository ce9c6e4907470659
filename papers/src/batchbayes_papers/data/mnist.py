"""MNIST (LeCun et al., 1998) and Fashion-MNIST (Xiao et al., 2017): 60,000 + 10,000 grey images of 28x28, ten classes.

notMNIST (letters A to J) has the same form, with test images alone. All are read from the published, gzipped idx files.
Such a file has two zero bytes, a type code, the number of axes, the lengths of the axes as big-endian 32-bit numbers,
and then the values.

For experiments, `load_grey_images` has scaled images of one of them, or noisy patterns for a quick test.
"""

import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from batchbayes import BatchbayesError
from batchbayes.tools import generator
from batchbayes_papers.data.folder import DataFolder, data_file

UNSIGNED_BYTES = 8
"""The type code for values from 0 to 255."""
PREFIXES = {"train": "train", "test": "t10k"}
Source = Literal["fashion_mnist", "mnist", "synthetic"]
Examples = tuple[Tensor, Tensor]
"""Images (N, 1, H, W) and labels (N,)."""
PIXEL_MEAN, PIXEL_STD = 0.2860, 0.3530
"""The moments of the Fashion-MNIST training images. MNIST images are scaled in the same way."""
NOISE_STD = 6.0
"""The noise of the pixels of synthetic images. Their patterns have a standard deviation of one."""


def load_mnist(
    name: Literal["mnist", "fashion_mnist", "notmnist"],
    split: Literal["train", "test"],
    folder: DataFolder = None,
    limit: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Load images (N, 1, 28, 28) as bytes, and labels (N,)."""
    prefix = f"{name}/{PREFIXES[split]}"
    images = read_idx(data_file(f"{prefix}-images-idx3-ubyte.gz", folder))[:limit]
    labels = read_idx(data_file(f"{prefix}-labels-idx1-ubyte.gz", folder))[:limit]
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise BatchbayesError(
            expected=f"images (N, 28, 28) and as many labels in {prefix}-*",
            got=f"{images.shape} and {labels.shape}",
            fix="use files from the same source",
        )
    return torch.from_numpy(images[:, None].copy()), torch.from_numpy(labels.astype(np.int64))


def read_idx(path: Path) -> np.ndarray:
    """Read the array of bytes in a gzipped idx file."""
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError) as error:
        raise _not_idx(path, str(error)) from error
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != UNSIGNED_BYTES:
        raise _not_idx(path, f"a file that starts with {content[:4].hex() or 'nothing'}")
    start = 4 + 4 * content[3]
    shape = np.frombuffer(content[4:start].ljust(start - 4, b"\0"), ">u4").tolist()
    if len(content) != start + int(np.prod(shape)):
        raise _not_idx(path, f"{len(content)} bytes for an array {tuple(shape)}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _not_idx(path: Path, got: str) -> BatchbayesError:
    return BatchbayesError(expected=f"gzipped idx bytes in {path}", got=got, fix="download that file again")


@dataclass(frozen=True, eq=False)
class Images:
    """The images of one seed."""

    train: Examples
    held_out: Examples
    test: Examples


def load_grey_images(source: Source, counts: tuple[int, int, int], seed: int, folder: DataFolder = None) -> Images:
    """Load training, held-out and test images. The seed chooses the first two; the test images are fixed."""
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
