"""MNIST (LeCun et al., 1998) and Fashion-MNIST (Xiao et al., 2017): 60,000 + 10,000 grey images of 28x28, ten classes.

notMNIST (letters A to J) has the same form, with test images alone. All are read from the published, gzipped idx files.
Such a file has two zero bytes, a type code, the number of axes, the lengths of the axes as big-endian 32-bit numbers,
and then the values.
"""

import gzip
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from batchbayes.data.folder import DataFolder, data_file
from batchbayes.errors import BatchbayesError

UNSIGNED_BYTES = 8
"""The type code for values from 0 to 255."""
PREFIXES = {"train": "train", "test": "t10k"}


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
