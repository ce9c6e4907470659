"""SVHN (Netzer et al., 2011): house numbers, as inputs that a CIFAR-10 network has never seen."""

import torch
from torch import Tensor

from batchbayes.data.folder import DataFolder, data_file, read_mosaic


def load_svhn(folder: DataFolder = None, limit: int | None = None) -> Tensor:
    """Load test images (N, 3, 32, 32) as bytes."""
    return torch.from_numpy(read_mosaic(data_file("svhn/test_first5000.webp", folder), 32, 32)[:limit])
