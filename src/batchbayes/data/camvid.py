"""CamVid (Brostow et al., 2009) in the SegNet split: 367/101/233 street scenes, 11 classes and "unlabelled".

The file `full_360x480.zip` holds some of the frames in full size, with their labels.
"""

import io
import zipfile
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from batchbayes.data.folder import DataFolder, data_file

CLASSES = (
    "sky", "building", "pole", "road", "pavement", "tree", "sign symbol", "fence", "car", "pedestrian", "bicyclist",
    "unlabelled",
)  # fmt: skip
# The public ESPNet weights need BGR from 0 to 255, standardised by these moments and then divided by 255.
MEAN = torch.tensor([110.331, 108.409, 105.034]).view(3, 1, 1)
STD = torch.tensor([72.125, 72.688, 69.903]).view(3, 1, 1)


def load_camvid_frames(
    split: Literal["train", "test"], folder: DataFolder = None, limit: int | None = None
) -> tuple[Tensor, Tensor]:
    """Load full-size frames (N, 3, 360, 480) as bytes, and labels (N, 360, 480)."""
    from PIL import Image

    images, targets = [], []
    with zipfile.ZipFile(data_file("camvid/full_360x480.zip", folder)) as archive:
        for name in sorted(n for n in archive.namelist() if n.startswith(f"{split}/"))[:limit]:
            stem = name.split("/")[1].rsplit(".", 1)[0]
            images.append(np.asarray(Image.open(io.BytesIO(archive.read(name))).convert("RGB")))
            targets.append(np.asarray(Image.open(io.BytesIO(archive.read(f"{split}annot/{stem}.png")))))
    frames = np.stack(images).transpose(0, 3, 1, 2).copy()
    return torch.from_numpy(frames), torch.from_numpy(np.stack(targets).astype(np.int64))


def standardise(images: Tensor) -> Tensor:
    """Convert RGB bytes to the inputs of ESPNet."""
    return (images.flip(1).float() - MEAN) / STD / 255
