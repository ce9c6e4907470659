"""The images and networks of stochastic batch normalisation: known classes to train on, and unknown ones to meet."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from batchbayes._common.rng import GlobalStream, generator
from batchbayes.data.cifar10 import crop_and_flip, load_cifar10
from batchbayes.data.folder import DataFolder
from batchbayes.data.mnist import load_mnist
from batchbayes.experiments.images.colour import Prepare, Recipe, colour_patterns
from batchbayes.experiments.weights.images import fast
from batchbayes.models.atanov import VGG11, AtanovLeNet5, ResNet18

LENET, VGG, RESNET = "LeNet-5", "VGG-11", "ResNet-18"
LETTERS, CLASSES = "notMNIST", "the other five classes of CIFAR-10"
UNKNOWN = {LENET: LETTERS, VGG: CLASSES, RESNET: CLASSES}
KNOWN_CLASSES = 5
"""CIFAR-5 has the first five classes of CIFAR-10: airplane, automobile, bird, cat, deer."""
CROP = 4


@dataclass(frozen=True)
class NetworkSetting:
    """How one of the networks is trained and tested. The defaults are those of the paper."""

    recipe: Recipe
    dropout_recipe: Recipe | None = None
    """For the network with dropout; None if there is none."""
    members: int = 6
    width: int = 64
    """The channels of the first stage. LeNet-5 has one width."""
    num_train: int = 60_000
    num_held_out: int = 0
    """Training images that are left out of training. They tune the batch size; 0 leaves that out."""
    num_known: int = 10_000
    num_unknown: int = 10_000
    passes: int = 50
    num_batches: int = 3000
    """Mini-batches that the moments of stochastic BN are estimated from."""


@dataclass(frozen=True, eq=False)
class SbnData:
    """Images for training as bytes, and others as inputs in [0, 1]."""

    train: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]
    known: tuple[Tensor, Tensor]
    unknown: Tensor


def load_sbn(
    name: str, source: Literal["real", "synthetic"], setting: NetworkSetting, folder: DataFolder = None
) -> SbnData:
    """Load the images of one network. The held-out ones are the last of those that are read for training."""
    count = setting.num_train + setting.num_held_out
    if source == "synthetic":
        train, known = (_patterns(name, number, part) for number, part in ((count, "train"), (setting.num_known, "t")))
        unknown = 255 - known[0][: setting.num_unknown]
    elif name == LENET:
        train, known = load_mnist("mnist", "train", folder, count), load_mnist("mnist", "test", folder)
        unknown = load_mnist("notmnist", "test", folder, setting.num_unknown)[0]
    else:
        images, labels = load_cifar10("train", folder, min(50_000, 3 * count))  # half of them are of known classes
        own = (labels < KNOWN_CLASSES).nonzero()[:count, 0]
        train = images[own], labels[own]
        images, labels = load_cifar10("test", folder)
        is_known = labels < KNOWN_CLASSES
        known, unknown = (images[is_known], labels[is_known]), images[~is_known][: setting.num_unknown]
    end, limit = setting.num_train, setting.num_known
    return SbnData(
        (train[0][:end], train[1][:end]),
        (scaled(train[0][end:]), train[1][end:]),
        (scaled(known[0][:limit]), known[1][:limit]),
        scaled(unknown),
    )


def _patterns(name: str, count: int, part: str) -> tuple[Tensor, Tensor]:
    images, labels = colour_patterns(count, part)
    return (images[:, :1, 2:30, 2:30], labels) if name == LENET else (images, labels % KNOWN_CLASSES)


def scaled(images: Tensor) -> Tensor:
    """Return bytes as numbers from 0 to 1, the inputs of all networks."""
    return images.float() / 255


def prepare_for(name: str) -> Prepare:
    """Return the transforms of training: a reflected crop and a flip for colour images, none for digits."""
    if name == LENET:
        return lambda images, _: scaled(images)
    return lambda images, random: scaled(crop_and_flip(images, random, CROP, reflect=True))


def one_view(name: str, images: Tensor, random: torch.Generator) -> Tensor:
    """Return a view of inputs (N, C, H, W): one random shift for all of them, and for colour images one flip."""
    padding = 2 if name == LENET else CROP
    padded = nn.functional.pad(images, [padding] * 4, mode="reflect")
    top, left = torch.randint(0, 2 * padding + 1, (2,), generator=random).tolist()
    seen = padded[..., top : top + images.shape[-2], left : left + images.shape[-1]]
    mirrored = name != LENET and float(torch.rand((), generator=random)) < 0.5
    return seen.flip(-1) if mirrored else seen


def new_network(name: str, setting: NetworkSetting, seed: int, *, dropout: bool = False) -> nn.Module:
    """Return a network with random weights."""
    make = {
        LENET: lambda: AtanovLeNet5(0.5 if dropout else 0.0),
        VGG: lambda: VGG11(KNOWN_CLASSES, setting.width, (0.5, 0.3) if dropout else (0.0, 0.0)),
        RESNET: partial(ResNet18, KNOWN_CLASSES, setting.width),
    }[name]
    with GlobalStream(seed):
        return fast(make())


def training_batches(name: str, images: Tensor, batch_size: int, count: int) -> list[Tensor]:
    """Return `count` mini-batches as in training: in epochs without replacement, with the transforms of training."""
    random, prepare, rows = generator(0, "statistics"), prepare_for(name), torch.empty(0, dtype=torch.long)
    found = []
    for _ in range(count):
        if len(rows) < batch_size:
            rows = torch.randperm(len(images), generator=random)
        found.append(prepare(images[rows[:batch_size]], random))
        rows = rows[batch_size:]
    return found
