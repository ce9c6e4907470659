"""CIFAR-10 (Krizhevsky, 2009): 50,000 + 10,000 colour images of 32x32, ten classes.

The images are in the lossless mosaics `data_batch_1.webp` to `data_batch_5.webp` and `test_batch.webp`, the labels in
`labels.npz` with the arrays `train` and `test`.

SVHN (Netzer et al., 2011) has house numbers of the same size, as inputs that a CIFAR-10 network has never seen.
"""

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from batchbayes import BatchbayesError
from batchbayes.tools import generator
from batchbayes_papers.data.folder import DataFolder, data_file, read_mosaic

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

# The ImageNet constants that the public ResNet-20 and ResNet-32 were trained with.
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


def load_cifar10(
    split: Literal["train", "test"], folder: DataFolder = None, limit: int | None = None
) -> tuple[Tensor, Tensor]:
    """Load images (N, 3, 32, 32) as bytes, and labels (N,)."""
    names = [f"data_batch_{i}" for i in range(1, 6)] if split == "train" else ["test_batch"]
    if limit is not None:
        names = names[: -(-limit // 10_000)]
    images = np.concatenate([read_mosaic(data_file(f"cifar10/{name}.webp", folder), 32, 32) for name in names])[:limit]
    targets = _labels(data_file("cifar10/labels.npz", folder), split)[: len(images)]
    return torch.from_numpy(images), torch.from_numpy(targets.astype(np.int64))


def _labels(path: Path, split: str) -> np.ndarray:
    try:
        with np.load(path) as labels:
            return labels[split]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise BatchbayesError(
            expected=f"the labels of CIFAR-10 in {path}", got=f"{error}"[:200], fix="copy that file again"
        ) from error


def standardise(images: Tensor) -> Tensor:
    """Convert bytes to the inputs of the networks."""
    return (images.float() / 255 - MEAN) / STD


def crop_and_flip(images: Tensor, generator: torch.Generator, padding: int = 4, *, reflect: bool = False) -> Tensor:
    """Apply the transforms of training: for each image a random crop, and a random flip.

    The padding of the crop is black, or the image itself, reflected.
    """
    count, _, height, width = images.shape
    padded = torch.nn.functional.pad(images, [padding] * 4, mode="reflect" if reflect else "constant")
    top, left = torch.randint(0, 2 * padding + 1, (2, count), generator=generator)
    rows = top[:, None] + torch.arange(height)  # (N, H)
    columns = left[:, None] + torch.arange(width)  # (N, W)
    mirrored = torch.rand(count, generator=generator) < 0.5
    columns[mirrored] = columns[mirrored].flip(1)
    return padded[torch.arange(count)[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def augmented_batches(images: Tensor, batch_size: int, seed: int = 0) -> Iterator[Tensor]:
    """Yield training mini-batches without end, drawn without replacement, with the transforms of training."""
    random = generator(seed, "augmentation")
    while True:
        rows = torch.randperm(len(images), generator=random)[:batch_size]
        yield standardise(crop_and_flip(images[rows], random))


def load_svhn(folder: DataFolder = None, limit: int | None = None) -> Tensor:
    """Load test images (N, 3, 32, 32) as bytes."""
    return torch.from_numpy(read_mosaic(data_file("svhn/test_first5000.webp", folder), 32, 32)[:limit])
