"""Images and small networks that several papers train: grey digits, colour images as bytes, networks with noise."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import batchbayes as bb
from batchbayes.tools import GlobalStream, generator, made, shuffled, shuffled_batches
from batchbayes.training.loop import Step, supervised
from batchbayes_papers.data.cifar10 import crop_and_flip, load_cifar10, standardise
from batchbayes_papers.data.folder import DataFolder
from batchbayes_papers.data.mnist import Examples, load_mnist
from batchbayes_papers.models.lenet import LeNet5, LeNet300, init_for_sparsity
from batchbayes_papers.models.row_lstm import RowLSTM
from batchbayes_papers.models.small_vgg import SmallVGG

NETWORKS = {"LeNet-300-100": LeNet300, "LeNet-5": LeNet5, "LSTM": RowLSTM}
Source = Literal["cifar10", "synthetic"]
Prepare = Callable[[Tensor, torch.Generator], Tensor]
"""From the bytes of a batch to the inputs of the network, with the random transforms of training."""


@dataclass(frozen=True, eq=False)
class ImageData:
    """Images (N, 1, 28, 28) and labels (N,) for training and test."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def load_images(
    data: Literal["mnist", "synthetic"], num_train: int, num_test: int, data_folder: DataFolder = None
) -> ImageData:
    """Load images, scaled to [0, 1] and with the mean image of the training set subtracted."""
    if data == "synthetic":
        images, labels = patterns(num_train, "train")
        test, test_labels = patterns(num_test, "test")
    else:
        images, labels = load_mnist("mnist", "train", data_folder, num_train)
        test, test_labels = load_mnist("mnist", "test", data_folder, num_test)
        images, test = images.float() / 256, test.float() / 256
    mean = images.mean(0)
    return ImageData((images - mean, labels), (test - mean, test_labels))


def patterns(count: int, part: str) -> tuple[Tensor, Tensor]:
    """Return noisy images of ten coarse patterns, and their labels, to test the program without data."""
    coarse = torch.rand(10, 1, 7, 7, generator=generator(0, "patterns")).repeat_interleave(4, 2)
    source = generator(0, "noise", part)
    labels = torch.randint(0, 10, (count,), generator=source)
    images = coarse.repeat_interleave(4, 3)[labels]
    return images + 0.5 * torch.randn(images.shape, generator=source), labels


def new_network(name: str, seed: int) -> nn.Module:
    """Return a network with the initial weights of the sparse variational dropout paper's code; torch's for an LSTM."""
    with GlobalStream(seed):
        network = NETWORKS[name]()
        init_for_sparsity(network)
    return fast(network)


def fast(network: nn.Module) -> nn.Module:
    """Put the kernels of convolutions into the memory format in which they run fastest on a CPU."""
    return network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]  # torch's stubs lack it


@torch.no_grad()
def error_percent(network: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    """Return the share of wrong classes of a network, in per cent."""
    images, labels = data
    wrong = [(network(x).argmax(1) != y).sum() for x, y in zip(images.split(1000), labels.split(1000), strict=True)]
    return 100 * float(torch.stack(wrong).sum()) / len(labels)


@dataclass(frozen=True)
class Course:
    """How a network is trained. The learning rate falls linearly to zero."""

    epochs: int
    batch_size: int
    learning_rate: float
    optimiser: Literal["adam", "sgd"] = "sgd"
    """Adam takes its steps in one kernel, which saves a quarter of the time of a small network."""
    weight_decay: float = 0.0
    bfloat16: bool = False
    """Whether passes are in half precision, which takes half of the time on a CPU that has it."""


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


def byte_batches(
    images: Tensor, labels: Tensor, batch_size: int, prepare: Prepare, seed: int
) -> Callable[[int], Iterator[tuple[Tensor, Tensor]]]:
    """Return batches of bytes for `bb.train`, prepared when they are read, in a new order in each epoch."""

    def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        random = generator(seed, "transforms", epoch)
        for rows in shuffled_batches(len(images), batch_size, seed, epoch):
            yield prepare(images[rows], random), labels[rows]

    return batches


def train_on_bytes(
    network: nn.Module, images: Tensor, labels: Tensor, recipe: Course, prepare: Prepare, seed: int
) -> float:
    """Train a network in place on images (N, C, H, W). Return its mean loss in the last epoch."""
    size = min(recipe.batch_size, len(images))
    batches = byte_batches(images, labels, size, prepare, seed)
    optimiser = partial(torch.optim.Adam, fused=True) if recipe.optimiser == "adam" else recipe.optimiser
    config = bb.TrainingConfig(recipe.epochs, size, recipe.learning_rate, recipe.weight_decay, optimiser, seed)
    steps = recipe.epochs * (len(images) // size)

    def slow_down(step: Step) -> None:
        step.set_learning_rate(recipe.learning_rate * (1 - step.number / steps))

    objective = supervised(cross_entropy)

    def in_half(own: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return objective(own, batch)

    return bb.train(network, batches, in_half if recipe.bfloat16 else objective, config, after_step=slow_down)[-1]


def trained(train_data: Examples, config: bb.TrainingConfig, width: int, dropout: float = 0.0) -> nn.Module:
    """Return a small network that was trained in the ordinary way."""
    network = made(partial(SmallVGG, width=width, dropout=dropout), config.seed)
    bb.train(network, shuffled(*train_data, config.batch_size, config.seed), supervised(cross_entropy), config)
    return network


def dropout_network(train_data: Examples, config: bb.TrainingConfig, width: int) -> bb.Posterior:
    """Train a network with dropout of a half before its last layer, and return the draws of its masks."""
    return bb.mc_dropout(trained(train_data, config, width, dropout=0.5))


def variance_network(train_data: Examples, config: bb.TrainingConfig, width: int) -> bb.Posterior:
    """Train a network whose hidden dense layer has weights with zero means."""
    network = made(partial(SmallVGG, width=width), config.seed)
    random = bb.noisy(network, bb.Variance(), layers=["dense"], start="fresh", seed=config.seed)
    batches = shuffled(*train_data, config.batch_size, config.seed)
    bb.fit_noisy(random, batches, bb.categorical(), config, num_examples=len(train_data[0]))
    return random.posterior()
