"""The VGG-like network on CIFAR-10: sparse VD against its width, random labels, and variance layers.

Molchanov, Ashukha and Vetrov, "Variational Dropout Sparsifies Deep Neural Networks" (ICML 2017): error and compression
against the width of the network, and table 3. Neklyudov et al., "Variance Networks" (ICLR 2019): accuracies on
CIFAR-10. As in the authors' code, sparse VD starts from a dense network that was trained with dropout, and sees images
without crops and flips. Where we differ: inputs are standardised instead of whitened. In the table of accuracies, the
network with dropout is the dense network of the first table, and the ordinary layers of the variance network start at
it; the authors train both from the start, without dropout between the last layers.
"""

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import batchbayes as bb
from batchbayes.tools import Figure, generator, made
from batchbayes.training.loop import Step
from batchbayes_papers.data.cifar10 import standardise
from batchbayes_papers.data.folder import DataFolder
from batchbayes_papers.image_networks import (
    Course,
    Source,
    augmented,
    byte_batches,
    error_percent,
    fast,
    load_colour,
    train_on_bytes,
)
from batchbayes_papers.models.vgg_like import VGGLike
from batchbayes_papers.runner.experiment import Results, Unit
from batchbayes_papers.runner.records import pack_weights, unpack_weights
from batchbayes_papers.runner.tables import ResultTable
from batchbayes_papers.weights.propagation import compression, sparsity
from batchbayes_papers.weights.random_labels import PUBLISHED as RANDOM_LABELS
from batchbayes_papers.weights.variance_networks import draw_accuracies
from batchbayes_papers.weights.vgg_tables import (
    accuracies_table,
    random_labels_table,
    training_figure,
    widths_figure,
    widths_table,
)

VARIANCE_LAYERS = slice(10, 14)
"""The last three convolutions and the hidden dense layer have no means."""
DENSE, SPARSE = Course(200, 100, 1e-3, "adam", 1e-5), Course(200, 100, 1e-5, "adam")
VARIANCE, LABELS = Course(550, 100, 1e-3, "adam"), Course(200, 100, 1e-3, "adam")


@dataclass(frozen=True)
class VGGConfig:
    """A configuration. The defaults are those of the papers, as far as their code gives them."""

    data: Source = "cifar10"
    widths: tuple[float, ...] = (0.25, 0.5, 1.0, 1.5)
    num_train: int = 50_000
    num_test: int = 10_000
    dropout: tuple[float, float] = (1.0, 1.0)
    """Of dense networks, as shares of the published rates: in convolutions, and before dense layers."""
    dense: Course = DENSE
    sparse: Course = SPARSE
    decay_from: int = 100
    """The epoch from which the learning rate of sparse VD falls to zero."""
    kl_full: float = 20.0
    """The epoch from which the KL has its full weight. It rises from a quarter of it."""
    initial_log_var: float = -15.0
    variance_width: float = 1.0
    variance: Course = VARIANCE
    num_samples: int = 100
    draw_test: int = 10_000
    """Test images for accuracies of draws."""
    labels_width: float = 1.0
    labels_train: int = 50_000
    """Images with random labels."""
    labels_dropout: Course = LABELS
    labels_sparse: Course = LABELS


FEW = Course(2, 20, 1e-3, "adam")
PRESETS = {
    "smoke": VGGConfig(
        "synthetic", (0.0625,), 60, 20, dense=FEW, sparse=FEW, decay_from=0, kl_full=0, initial_log_var=-6.0,
        variance_width=0.0625, variance=FEW, num_samples=2, draw_test=20, labels_width=0.0625, labels_train=40,
        labels_dropout=FEW, labels_sparse=FEW,
    ),
    "quick": VGGConfig(
        widths=(0.25,), dropout=(0.0, 0.5), dense=Course(60, 64, 2e-3, "adam", 1e-5), variance_width=0.25,
        sparse=Course(20, 100, 1e-4, "adam"), decay_from=10, kl_full=2.0,  # ten times faster than published
        variance=Course(20, 64, 2e-3, "adam"), num_samples=10, draw_test=2000, labels_width=0.25, labels_train=500,
        labels_dropout=Course(120, 50, 1e-3, "adam"), labels_sparse=Course(30, 50, 4e-3, "adam"),
    ),
    "paper": VGGConfig(),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Bytes:
    """Images as bytes and labels for training; inputs and labels for test."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def units(config: VGGConfig) -> list[Unit]:
    """Return three units for each width, of which one width has variance layers; and two for random labels."""
    found = []
    for width in config.widths:
        dense, sparse, draws = (f"width {width:g}, {part}" for part in ("dense", "sparse VD", "draws"))
        found += [
            Unit(dense, {"width": width, "part": "dense"}, effort=30 * width),
            Unit(sparse, {"width": width, "part": "sparse VD"}, (dense,), effort=30 * width),
        ]
        if width == config.variance_width:
            found.append(Unit(draws, {"width": width, "part": "draws"}, (dense,), effort=15 * width))
    return [*found, *(Unit(f"random labels, {method}", {"labels": method}, effort=4) for method in RANDOM_LABELS)]


def work(config: VGGConfig, unit: Unit, needed: Results, data_folder: DataFolder = None) -> dict[str, Any]:
    """Train a network, and return what it does on the test images."""
    if "labels" in unit.arguments:
        data = load(config, config.labels_train, data_folder)
        return random_labels_result(config, data, unit.arguments["labels"])
    data, part = load(config, config.num_train, data_folder), unit.arguments["part"]
    network = new_network(config, unit.arguments["width"], config.dropout)
    if part == "dense":
        train_on_bytes(network, *data.train, config.dense, augmented, seed=0)
        return {"weights": pack_weights(network), "error": error_percent(network, data.test)}
    unpack_weights(network, needed[unit.needs[0]]["weights"])
    return {"sparse VD": sparse_result, "draws": draws_result}[part](config, network, data)


def load(config: VGGConfig, num_train: int, data_folder: DataFolder) -> Bytes:
    """Load the first images of both parts of the data set."""
    train = load_colour(config.data, "train", data_folder, num_train)
    images, labels = load_colour(config.data, "test", data_folder, config.num_test)
    return Bytes(train, (standardise(images), labels))


def new_network(config: VGGConfig, width: float, dropout: tuple[float, float] = (0.0, 0.0)) -> nn.Module:
    return fast(made(partial(VGGLike, width, dropout), 0))


def sparse_result(config: VGGConfig, dense: nn.Module, data: Bytes) -> dict[str, Any]:
    """Train sparse VD from a dense network, without dropout, and look at it after each epoch."""
    network = bb.noisy(without_dropout(dense), bb.SparseVD(config.initial_log_var))
    history: list[dict[str, float]] = []

    def look(step: Step) -> None:
        if step.number % (len(data.train[0]) // config.sparse.batch_size) == 0:
            history.append({"epoch": step.epoch + 1, "objective": step.objective, **seen(network, data.test)})

    fit_sparse(config, network, config.sparse, data, look)
    return {**history[-1], "sparsity": list(sparsity(network.posterior()).values()), "history": history}


def without_dropout(network: nn.Module) -> nn.Module:
    """Return a copy with dropout switched off."""
    network = copy.deepcopy(network)
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return network


def fit_sparse(config: VGGConfig, network: bb.Noisy, recipe: Course, data: Bytes, look: Any = None) -> None:
    """Train a network with random weights on images as they are."""
    training = bb.TrainingConfig(recipe.epochs, recipe.batch_size, recipe.learning_rate)
    schedule = bb.Schedule(config.kl_full / 4, config.kl_full, decay_from=config.decay_from)
    batches = byte_batches(*data.train, recipe.batch_size, plain, seed=0)
    count = len(data.train[0])
    bb.fit_noisy(network, batches, bb.categorical(), training, num_examples=count, schedule=schedule, after_step=look)


def plain(images: Tensor, random: torch.Generator) -> Tensor:
    """Return bytes as inputs, without random transforms."""
    return standardise(images)


def at_means(network: bb.Noisy) -> tuple[nn.Module, bb.WeightsPosterior]:
    """Return the network at the means of its weights without the pruned ones, and its posterior."""
    posterior = network.posterior()
    point = fast(posterior.network.module)
    point.load_state_dict(posterior.means())
    return point, posterior


def seen(network: bb.Noisy, test: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Return the test error of the means without the pruned weights, and the compression."""
    point, posterior = at_means(network)
    return {"error": error_percent(point, test), "compression": compression(posterior)}


def draws_result(config: VGGConfig, dense: nn.Module, data: Bytes) -> dict[str, Any]:
    """Return accuracies of one draw, of the means and of the mean over draws: of dropout, and of a variance network."""
    test = data.test[0][: config.draw_test], data.test[1][: config.draw_test]
    posteriors = {"dropout": bb.mc_dropout(dense), "variance": variance_network(config, dense, data).posterior()}
    return {name: draw_accuracies(posterior, test, config.num_samples) for name, posterior in posteriors.items()}


def variance_network(config: VGGConfig, dense: nn.Module, data: Bytes) -> bb.Noisy:
    """Train a network whose last convolutions and hidden dense layer have no means. The others start at a dense one."""
    network = without_dropout(dense)
    layers = [name for name, module in network.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    random = bb.noisy(network, bb.Variance(), layers=layers[VARIANCE_LAYERS])
    recipe, count = config.variance, len(data.train[0])
    batches = byte_batches(*data.train, recipe.batch_size, augmented, seed=0)
    training = bb.TrainingConfig(recipe.epochs, recipe.batch_size, recipe.learning_rate)
    schedule = bb.Schedule(decay_from=0)
    bb.fit_noisy(random, batches, bb.categorical(), training, num_examples=count, schedule=schedule)
    return random


def random_labels_result(config: VGGConfig, data: Bytes, method: str) -> dict[str, Any]:
    """Train a network on random labels. Return its accuracy on them and on the true labels of test images."""
    labels = torch.randint(0, 10, (len(data.train[0]),), generator=generator(0, "labels"))
    data = Bytes((data.train[0], labels), data.test)
    zeros = None
    if method == "binary dropout":
        point = new_network(config, config.labels_width, config.dropout)
        train_on_bytes(point, *data.train, config.labels_dropout, plain, seed=0)
    else:
        network = bb.noisy(new_network(config, config.labels_width), bb.SparseVD())
        fit_sparse(config, network, config.labels_sparse, data)
        point, posterior = at_means(network)
        zeros = 100 - 100 / compression(posterior)
    memorised = error_percent(point, (standardise(data.train[0]), labels))
    return {"train": 100 - memorised, "test": 100 - error_percent(point, data.test), "sparsity": zeros}


def tables(config: VGGConfig, results: Results) -> list[ResultTable]:
    """Return error and compression by width, accuracies of draws, and those under random labels."""
    accuracies = accuracies_table(config.variance_width, results)
    return [widths_table(config.widths, results), accuracies, random_labels_table(results)]


def figures(config: VGGConfig, results: Results) -> dict[str, Figure]:
    """Show error and compression against the width, published and ours, and sparse VD in training."""
    return {
        "error-and-compression-by-width": widths_figure(config.widths, results),
        "sparse-VD-in-training": training_figure(config.widths, results),
    }


def notes(config: VGGConfig) -> list[str]:
    """Say how this differs from the papers."""
    found = [
        "Inputs are standardised; the authors whiten them (ZCA). The network with dropout is the dense one of the "
        "first table, and the variance network starts at it; the authors train both from the start.",
    ]
    if config != VGGConfig():
        found += [
            f"Dense: {said(config.dense)}; rates of dropout times {config.dropout[0]:g} in convolutions and "
            f"{config.dropout[1]:g} before dense layers. Sparse VD: {said(config.sparse)}; published 200 epochs.",
            f"The variance network: {said(config.variance)}; published 550 epochs. Means over "
            f"{config.num_samples} draws, on {config.draw_test:,} test images.",
            f"Random labels: {config.labels_train:,} images; dropout: {said(config.labels_dropout)}; sparse VD: "
            f"{said(config.labels_sparse)}.",
        ]
    return found


def said(recipe: Course) -> str:
    """Say a recipe in words.

    >>> said(Course(8, 128, 0.1))
    '8 epochs in batches of 128 at a learning rate of 0.1'
    """
    return f"{recipe.epochs} epochs in batches of {recipe.batch_size} at a learning rate of {recipe.learning_rate:g}"
