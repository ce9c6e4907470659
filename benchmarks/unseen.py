"""Fourteen kinds of images that a CIFAR-10 network was not trained on, all (N, 3, 32, 32) as bytes."""

import numpy as np
import torch
import torch.nn.functional as F
from batchbayes_papers.data.cifar10 import load_svhn
from batchbayes_papers.data.folder import data_file, read_mosaic
from batchbayes_papers.data.mnist import load_mnist, read_idx
from torch import Tensor

from batchbayes.tools import generator

NEAR = ("permuted patches", "upside-down", "street scenes")
"""Sets with the style of CIFAR-10. All others are far."""
CHOSEN_ON = (
    "SVHN", "MNIST", "noise", "blur", "low contrast", "permuted patches", "checkerboards", "street scenes",
    "smooth colours",
)  # fmt: skip
"""These sets guided the choice of settings most. The others are a weak check: their figures were in view as well."""


def street_scenes(split: str, folder: str) -> Tensor:
    """Load small images of CamVid (N, 3, 120, 160) as bytes."""
    with np.load(data_file("camvid/labels_120x160.npz", folder)) as labels:
        count = len(labels[split])
    return torch.from_numpy(read_mosaic(data_file(f"camvid/{split}_120x160.jpg", folder), 120, 160)[:count])


def unseen_sets(folder: str, images: Tensor) -> dict[str, Tensor]:
    """Return the sets by name. Corrupted ones are made from `images`, bytes (N, 3, 32, 32)."""
    random, count, values = generator(0, "unseen"), len(images), images.float() / 255
    letters = torch.from_numpy(read_idx(data_file("notmnist/t10k-images-idx3-ubyte.gz", folder)).copy())[:, None]
    streets = torch.cat([street_scenes(split, folder) for split in ("train", "val", "test")]).float() / 255
    uniform = torch.rand(count, 1, 32, 32, generator=random)
    middle = values.mean((1, 2, 3), keepdim=True)
    blobs = torch.rand(count, 3, 4, 4, generator=random)
    found = {
        "SVHN": load_svhn(folder, count).float() / 255,
        "Fashion-MNIST": _padded(load_mnist("fashion_mnist", "test", folder, count)[0]),
        "MNIST": _padded(load_mnist("mnist", "test", folder, count)[0]),
        "notMNIST": _padded(letters[torch.randperm(len(letters), generator=random)[:count]]),
        "noise": values + 0.1 * torch.randn(values.shape, generator=random),
        "salt and pepper": torch.where(uniform < 0.05, 0.0, torch.where(uniform > 0.95, 1.0, values)),
        "blur": _blurred(values, 1.5),
        "constant": torch.rand(count, 3, 1, 1, generator=random).expand(-1, -1, 32, 32),
        "checkerboards": _checkerboards(count, random),
        "low contrast": middle + 0.25 * (values - middle),
        "smooth colours": F.interpolate(blobs, size=(32, 32), mode="bicubic", align_corners=False),
        "permuted patches": _permuted(values, random),
        "upside-down": values.flip(2),
        "street scenes": F.interpolate(streets, size=(32, 32), mode="bilinear", antialias=True, align_corners=False),
    }
    return {name: (made * 255).round().clamp(0, 255).byte() for name, made in found.items()}


def _padded(images: Tensor) -> Tensor:
    """Turn grey bytes (N, 1, 28, 28) into colours on a black border of two pixels."""
    return F.pad(images.float() / 255, [2] * 4).expand(-1, 3, -1, -1)


def _blurred(values: Tensor, sigma: float) -> Tensor:
    line = torch.exp(-0.5 * (torch.arange(-4, 5) / sigma) ** 2)
    kernel = (line[:, None] * line / line.sum() ** 2).expand(3, 1, 9, 9)
    return F.conv2d(F.pad(values, [4] * 4, "reflect"), kernel, groups=3)


def _permuted(values: Tensor, random: torch.Generator) -> Tensor:
    """Put the sixteen patches of 8 x 8 pixels of each image into a random order."""
    count = len(values)
    patches = F.unfold(values, 8, stride=8)  # (N, 3 * 64, 16)
    order = torch.rand(count, 16, generator=random).argsort(1)
    return F.fold(patches.gather(2, order[:, None].expand_as(patches)), (32, 32), 8, stride=8)


def _checkerboards(count: int, random: torch.Generator) -> Tensor:
    """Return boards of two random colours, with fields of 1, 2, 4 or 8 pixels."""
    size = 2 ** torch.randint(0, 4, (count, 1), generator=random)
    line = torch.arange(32) // size  # (N, 32)
    board = ((line[:, :, None] + line[:, None]) % 2)[:, None]
    first, second = torch.rand(2, count, 3, 1, 1, generator=random)
    return first * board + second * (1 - board)
