"""CIFAR-10 with a public ResNet-32, and house numbers (SVHN) as inputs from another distribution.

Set BATCHBAYES_DATA to the folder with the data sets. Then run in the top folder of the repository:

    batchbayes assess --model examples.cifar10:network \
        --weights $BATCHBAYES_DATA/weights/resnet32_cifar10_akamaster.safetensors \
        --train examples.cifar10:train --reference examples.cifar10:reference \
        --test examples.cifar10:test --ood examples.cifar10:ood --out cifar10-report
"""

from collections.abc import Iterator

import torch
from batchbayes_papers.data.cifar10 import CLASSES, augmented_batches, load_cifar10, load_svhn, standardise
from batchbayes_papers.models.cifar_resnet import CifarResNet
from torch import Tensor, nn
from torch.utils.data import TensorDataset

BATCH_SIZE = 128  # the script that trained the network used this one
TEST_IMAGES, STRANGE_IMAGES = 3200, 1000  # assess takes one third of the former for calibration
TRAINING_IMAGES = 10_000


def network() -> nn.Module:
    return CifarResNet(32).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def train() -> Iterator[Tensor]:
    """Yield mini-batches with the random crops and flips that the network was trained with."""
    return augmented_batches(load_cifar10("train", limit=TRAINING_IMAGES)[0], BATCH_SIZE)


def reference() -> Tensor:
    """Return training images as they look at prediction time."""
    return standardise(load_cifar10("train", limit=TRAINING_IMAGES)[0])


def test() -> TensorDataset:
    images, labels = load_cifar10("test", limit=TEST_IMAGES)
    dataset = TensorDataset(standardise(images), labels)
    dataset.name, dataset.classes = "CIFAR-10", CLASSES  # type: ignore[attr-defined]
    return dataset


def ood() -> TensorDataset:
    dataset = TensorDataset(standardise(load_svhn(limit=STRANGE_IMAGES)))
    dataset.name = "SVHN"  # type: ignore[attr-defined]
    return dataset
