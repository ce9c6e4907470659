"""CamVid (Brostow et al., 2009) in the SegNet split: 367/101/233 street scenes, 11 classes and "unlabelled".

The file `full_360x480.zip` holds some of the frames in full size, with their labels.
"""

import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from batchbayes import BatchbayesError
from batchbayes_papers.data.folder import DataFolder, data_file

CLASSES = (
    "sky", "building", "pole", "road", "pavement", "tree", "sign symbol", "fence", "car", "pedestrian", "bicyclist",
    "unlabelled",
)  # fmt: skip
UNLABELLED = 11
"""The label that does not count."""
# The public ESPNet weights need BGR from 0 to 255, standardised by these moments and then divided by 255.
MEAN = torch.tensor([110.331, 108.409, 105.034]).view(3, 1, 1)
STD = torch.tensor([72.125, 72.688, 69.903]).view(3, 1, 1)


@dataclass(frozen=True, eq=False)
class Frame:
    """A frame (3, 360, 480) as bytes, and its labels (360, 480)."""

    name: str
    image: Tensor
    labels: Tensor


def camvid_frames(
    split: Literal["train", "test"], folder: DataFolder = None, limit: int | None = None
) -> Iterator[Frame]:
    """Read full-size frames one after the other, in the order of their names. Only one is in memory."""
    path = data_file("camvid/full_360x480.zip", folder)
    try:
        with zipfile.ZipFile(path) as archive:
            for name in sorted(n for n in archive.namelist() if n.startswith(f"{split}/"))[:limit]:
                stem = name.split("/")[1].rsplit(".", 1)[0]
                image = _pixels(archive.read(name)).convert("RGB")
                labels = np.asarray(_pixels(archive.read(f"{split}annot/{stem}.png"))).astype(np.int64)
                pixels = np.asarray(image).transpose(2, 0, 1).copy()
                yield Frame(stem, torch.from_numpy(pixels), torch.from_numpy(labels))
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise BatchbayesError(
            expected=f"an archive of frames and labels in {path}", got=f"{error}"[:200], fix="copy that file again"
        ) from error


def _pixels(content: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(content))


def load_camvid_frames(
    split: Literal["train", "test"], folder: DataFolder = None, limit: int | None = None
) -> tuple[Tensor, Tensor]:
    """Load full-size frames (N, 3, 360, 480) as bytes, and labels (N, 360, 480)."""
    frames = list(camvid_frames(split, folder, limit))
    return torch.stack([frame.image for frame in frames]), torch.stack([frame.labels for frame in frames])


def standardise(images: Tensor) -> Tensor:
    """Convert RGB bytes to the inputs of ESPNet."""
    return (images.flip(1).float() - MEAN) / STD / 255
