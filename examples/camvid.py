"""Street scenes (CamVid) segmented by a public ESPNet, at full size.

Set BATCHBAYES_DATA to the folder of the data sets, then in the top folder of the repository:

    batchbayes assess --model examples.camvid:network \
        --weights $BATCHBAYES_DATA/weights/espnet_camvid_sacmehta.safetensors \
        --train examples.camvid:train --test examples.camvid:test --batch-size 6 --ignore-label 11 \
        --draws 8 --out camvid-report
"""

import io
import zipfile
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from batchbayes.data.folder import data_file
from batchbayes.models.espnet import ESPNet

CLASSES = (
    "sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist",
    "unlabelled",
)  # fmt: skip
# Of the training data, in the order blue, green, red.
MEAN = torch.tensor([110.331, 108.409, 105.034]).view(3, 1, 1)
STD = torch.tensor([72.125, 72.688, 69.903]).view(3, 1, 1)


class Frames(Dataset[Any]):
    """Frames and labels, read from the archive one at a time."""

    classes = CLASSES

    def __init__(self, split: str) -> None:
        self.split, self.archive = split, zipfile.ZipFile(data_file("camvid/full_360x480.zip"))
        self.names = sorted(name for name in self.archive.namelist() if name.startswith(f"{split}/") and "." in name)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        name = self.names[index]
        stem = name.split("/")[1].rsplit(".", 1)[0]
        labels = torch.from_numpy(self._pixels(f"{self.split}annot/{stem}.png").astype(np.int64))
        colours = torch.from_numpy(self._pixels(name)[..., 2::-1].transpose(2, 0, 1).astype(np.float32))
        return (colours - MEAN) / STD / 255, labels

    def _pixels(self, name: str) -> np.ndarray:
        from PIL import Image

        with Image.open(io.BytesIO(self.archive.read(name))) as image:
            return np.asarray(image if image.mode in ("L", "P") else image.convert("RGB"))


def network() -> nn.Module:
    return ESPNet(len(CLASSES)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def train() -> "DataLoader[Any]":
    return DataLoader(Frames("train"), batch_size=6, shuffle=True, drop_last=True)


def test() -> "DataLoader[Any]":
    return DataLoader(Frames("test"), batch_size=1)
