"""Colour images as bytes, and the training of a network on random crops and flips of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from batchbayes._common.rng import generator
from batchbayes.data.cifar10 import crop_and_flip, load_cifar10, standardise
from batchbayes.data.folder import DataFolder
from batchbayes.training.batches import shuffled_batches
from batchbayes.training.loop import Step, TrainingConfig, supervised, train

Source = Literal["cifar10", "synthetic"]
Prepare = Callable[[Tensor, torch.Generator], Tensor]
"""From the bytes of a batch to the inputs of the network, with the random transforms of training."""


@dataclass(frozen=True)
class Recipe:
    """How a network is trained. The learning rate falls linearly to zero."""

    epochs: int
    batch_size: int
    learning_rate: float
    optimiser: Literal["adam", "sgd"] = "sgd"
    """Adam takes its steps in one kernel, which saves a quarter of the time of a small network."""
    weight_decay: float = 0.0


def load_colour(
    source: Source, split: Literal["train", "test"], folder: DataFolder = None, limit: int | None = None
) -> tuple[Tensor, Tensor]:
    """Load images (N, 3, 32, 32) as bytes, and labels (N,)."""
    if source == "cifar10":
        return load_cifar10(split, folder, limit)
    return colour_patterns(limit or 100, split)


def colour_patterns(count: int, part: str) -> tuple[Tensor, Tensor]:
    """Return noisy images of ten coarse patterns as bytes, and their labels, to test a program without data."""
    coarse = 255 * torch.rand(10, 3, 8, 8, generator=generator(0, "patterns"))
    source = generator(0, "noise", part)
    labels = torch.randint(0, 10, (count,), generator=source)
    images = coarse[labels].repeat_interleave(4, 2).repeat_interleave(4, 3)
    images += 60 * torch.randn(images.shape, generator=source)
    return images.clamp(0, 255).to(torch.uint8), labels


def augmented(images: Tensor, random: torch.Generator) -> Tensor:
    """Return random crops and flips of bytes, standardised."""
    return standardise(crop_and_flip(images, random))


def train_on_bytes(
    network: nn.Module, images: Tensor, labels: Tensor, recipe: Recipe, prepare: Prepare, seed: int
) -> float:
    """Train a network in place on images (N, C, H, W). Return its mean loss in the last epoch."""
    size = min(recipe.batch_size, len(images))

    def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        random = generator(seed, "transforms", epoch)
        for rows in shuffled_batches(len(images), size, seed, epoch):
            yield prepare(images[rows], random), labels[rows]

    optimiser = partial(torch.optim.Adam, fused=True) if recipe.optimiser == "adam" else recipe.optimiser
    config = TrainingConfig(recipe.epochs, size, recipe.learning_rate, recipe.weight_decay, optimiser, seed)
    steps = recipe.epochs * (len(images) // size)

    def slow_down(step: Step) -> None:
        step.set_learning_rate(recipe.learning_rate * (1 - step.number / steps))

    return train(network, batches, supervised(cross_entropy), config, after_step=slow_down)[-1]
