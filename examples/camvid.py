"""Street scenes (CamVid) segmented by a public ESPNet, at full size.

Set BATCHBAYES_DATA to the folder with the data sets. Then run in the top folder of the repository:

    batchbayes assess --model examples.camvid:network \
        --weights $BATCHBAYES_DATA/weights/espnet_camvid_sacmehta.safetensors \
        --train examples.camvid:train --test examples.camvid:test --ignore-label 11 --draws 8 --out camvid-report
"""

from typing import Any, Literal

import torch
from batchbayes_papers.data.camvid import CLASSES, load_camvid_frames, standardise
from batchbayes_papers.models.espnet import ESPNet
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

BATCH_SIZE = 6  # assumed: the file of weights does not say


class Frames(Dataset[Any]):
    """Frames that are kept as bytes. Each is standardised when it is read, so that memory stays small."""

    name, classes = "CamVid", CLASSES

    def __init__(self, split: Literal["train", "test"]) -> None:
        self.images, self.labels = load_camvid_frames(split)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return standardise(self.images[index : index + 1])[0], self.labels[index]


def network() -> nn.Module:
    return ESPNet(len(CLASSES)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def train() -> "DataLoader[Any]":
    return DataLoader(Frames("train"), batch_size=BATCH_SIZE, shuffle=True, drop_last=True)


def test() -> "DataLoader[Any]":
    return DataLoader(Frames("test"), batch_size=1)
