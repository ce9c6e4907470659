"""What all methods of the experiment `online` share: the settings, the data in parts, and plain training on a part."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchbayes import TrainingConfig, categorical, train
from batchbayes.tools import generator, shuffled
from batchbayes.training.loop import half_squared_error, supervised
from batchbayes_papers.data.folder import DataFolder
from batchbayes_papers.data.mnist import load_grey_images
from batchbayes_papers.data.uci import load_regression, published_split
from batchbayes_papers.online import DataPart


@dataclass(frozen=True)
class OnlineConfig:
    """A configuration. The defaults are those of the preset `quick`."""

    datasets: tuple[str, ...] = ("boston", "concrete", "energy", "kin8nm", "power", "protein", "wine", "mnist")
    seeds: tuple[int, ...] = (0, 1, 2)
    num_parts: int = 5
    width: int = 50
    steps: int = 1500
    """Training steps for each part, and for joint training with as many parts in proportion."""
    batch_size: int = 32
    learning_rate: float = 5e-3
    prior_std: float = 0.5
    num_images: int = 2500
    """Training images of MNIST, in all parts together."""
    num_members: int = 50
    """Draws of the mean field."""
    wide: int = 400
    """Random directions of the features of tables."""
    wide_images: int = 121
    """Features of images."""
    filters: int = 128
    """Kinds of patches behind the features of images."""


@dataclass(frozen=True, eq=False)
class Task:
    """The parts and the test data of one data set and seed."""

    parts: list[DataPart]
    test: DataPart
    outputs: int
    likelihood: Any
    """A `TargetLikelihood`, or None in a regression whose noise is not known yet."""
    log_unit: float = 0.0
    """The log of the standard deviation of the targets. Added to an NLL, it gives the NLL in the unit of the data."""


def load_task(config: OnlineConfig, name: str, seed: int, folder: DataFolder = None) -> Task:
    """Load a data set, standardised by its first part, and cut the training set into random parts."""
    likelihood, outputs, log_unit = None, 1, 0.0
    if name == "mnist":
        images = load_grey_images("mnist", (config.num_images, 0, 2000), seed, folder)
        inputs, targets = images.train
        test = F.avg_pool2d(images.test[0], 2).flatten(1), images.test[1]
        inputs, likelihood, outputs = F.avg_pool2d(inputs, 2).flatten(1), categorical(), 10
    else:
        inputs, targets, test = _regression(name, seed, folder)
    order = torch.randperm(len(inputs), generator=generator(seed, "parts")).chunk(config.num_parts)
    parts = [(inputs[rows], targets[rows]) for rows in order]
    if likelihood is None:
        scales = [(part.mean(0), part.std(0).clamp_min(1e-6)) for part in parts[0]]
        parts = [_scaled(part, scales) for part in parts]
        test = _scaled(test, scales)
        log_unit = float(scales[1][1].log())
    return Task(parts, test, outputs, likelihood, log_unit)


def _regression(name: str, seed: int, folder: DataFolder) -> tuple[Tensor, Tensor, DataPart]:
    if name == "synthetic":
        x = torch.randn(120, 3, generator=generator(seed, "x"))
        y = x.sum(1, keepdim=True).sin() + 0.3 * torch.randn(120, 1, generator=generator(seed, "noise"))
        return x[:90], y[:90], (x[90:], y[90:])
    data = load_regression(name, folder)
    inputs, targets = torch.tensor(data.inputs).float(), torch.tensor(data.targets).float()[:, None]
    train_rows, test_rows = (torch.as_tensor(rows) for rows in published_split(len(inputs), seed))
    return inputs[train_rows], targets[train_rows], (inputs[test_rows], targets[test_rows])


def _scaled(part: DataPart, scales: Sequence[tuple[Tensor, Tensor]]) -> DataPart:
    inputs, targets = ((values - mean) / std for values, (mean, std) in zip(part, scales, strict=True))
    return inputs, targets


def together(parts: Sequence[DataPart]) -> DataPart:
    """Return several parts as one."""
    inputs, targets = (torch.cat(column) for column in zip(*parts, strict=True))
    return inputs, targets


def training_of(config: OnlineConfig, part: DataPart, seed: int) -> TrainingConfig:
    """Return a training of as many steps for each part, whatever its size."""
    size = min(config.batch_size, len(part[0]))
    epochs = max(1, round(config.steps / (len(part[0]) // size)))
    return TrainingConfig(epochs, size, config.learning_rate, seed=seed)


def fit(config: OnlineConfig, network: nn.Module, part: DataPart, seed: int) -> None:
    """Train a network on one part without any prior."""
    training = training_of(config, part, seed)
    loss = half_squared_error if part[1].is_floating_point() else F.cross_entropy
    train(network, shuffled(*part, training.batch_size, seed), supervised(loss), training)
