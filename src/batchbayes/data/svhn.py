"""SVHN (Netzer et al., 2011): house numbers, used as inputs that a CIFAR-10 network has never seen."""

import os

import torch
from torch import Tensor

from batchbayes.data.folder import data_file, read_mosaic


def load_svhn(folder: str | os.PathLike[str] | None = None, limit: int | None = None) -> Tensor:
    """Test images (N, 3, 32, 32) as bytes."""
    images = read_mosaic(data_file("svhn/test_first5000.webp", folder), 32, 32)[:limit]
    return torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
