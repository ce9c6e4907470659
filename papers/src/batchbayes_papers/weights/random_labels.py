"""Random labels: dropout memorises them, and sparse variational dropout refuses to.

Zhang et al., "Understanding Deep Learning Requires Rethinking Generalization" (ICLR 2017), found that networks with
dropout fit labels that have nothing to do with the images. Molchanov, Ashukha and Vetrov (ICML 2017), table 3, train
sparse variational dropout on such labels: it removes all weights and predicts a constant, because a constant needs the
fewest nats.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import batchbayes as bb
from batchbayes.tools import GlobalStream, generator, shuffled
from batchbayes.training.loop import supervised
from batchbayes_papers.data.folder import DataFolder
from batchbayes_papers.image_networks import ImageData, error_percent, load_images, new_network
from batchbayes_papers.runner.experiment import Results, Unit
from batchbayes_papers.runner.tables import CellValue, ResultTable, interleaved
from batchbayes_papers.weights.propagation import compression

PUBLISHED = {"binary dropout": (100.0, 10.0, None), "sparse VD": (10.0, 10.0, 100.0)}
"""Accuracy on training and test images, and sparsity, in per cent."""


@dataclass(frozen=True)
class RandomLabelsConfig:
    """A configuration. The defaults are those of the paper as far as it gives them."""

    data: Literal["mnist", "synthetic"] = "mnist"
    num_train: int = 60_000
    num_test: int = 10_000
    epochs: int = 200
    width: int = 1024
    """Units in both hidden layers of the network with dropout."""
    dropout: float = 0.2
    batch_size: int = 100
    learning_rate: float = 1e-3
    sparse_epochs: int = 200
    """Of sparse VD, which needs longer to remove its last weights than dropout to memorise."""
    sparse_learning_rate: float = 1e-3


PRESETS = {
    "smoke": RandomLabelsConfig(
        "synthetic",
        100,
        100,
        epochs=30,
        width=200,
        dropout=0.1,
        learning_rate=3e-3,
        sparse_epochs=30,
        sparse_learning_rate=3e-3,
    ),
    "quick": RandomLabelsConfig(
        num_train=3000, epochs=100, batch_size=50, learning_rate=2e-3, sparse_epochs=140, sparse_learning_rate=4e-3
    ),
    "paper": RandomLabelsConfig(),
}


def units(config: RandomLabelsConfig) -> list[Unit]:
    """Return one unit for each method."""
    return [Unit(method, {"method": method}) for method in PUBLISHED]


def work(config: RandomLabelsConfig, unit: Unit, needed: Results, data_folder: DataFolder = None) -> dict[str, Any]:
    """Train a network on random labels, and return its accuracy on them and on the true labels of test images."""
    data = load_images(config.data, config.num_train, config.num_test, data_folder)
    labels = torch.randint(0, 10, (config.num_train,), generator=generator(0, "labels"))
    random = ImageData((data.train[0], labels), data.test)
    method = dropout_result if unit.arguments["method"] == "binary dropout" else sparse_result
    return method(config, random)


def dropout_result(config: RandomLabelsConfig, data: ImageData) -> dict[str, Any]:
    """Train a network with binary dropout in its hidden layers."""
    with GlobalStream(0):
        network = nn.Sequential(
            nn.Flatten(),
            nn.Linear(784, config.width), nn.ReLU(), nn.Dropout(config.dropout),
            nn.Linear(config.width, config.width), nn.ReLU(), nn.Dropout(config.dropout),
            nn.Linear(config.width, 10),
        )  # fmt: skip
    training = bb.TrainingConfig(config.epochs, config.batch_size, config.learning_rate)
    bb.train(network, shuffled(*data.train, config.batch_size, seed=0), supervised(cross_entropy), training)
    return {**accuracies(network, data), "sparsity": None}


def sparse_result(config: RandomLabelsConfig, data: ImageData) -> dict[str, Any]:
    """Train LeNet-300-100 by sparse variational dropout."""
    network = bb.noisy(new_network("LeNet-300-100", seed=0), bb.SparseVD())
    training = bb.TrainingConfig(config.sparse_epochs, config.batch_size, config.sparse_learning_rate)
    schedule = bb.Schedule(kl_from=5, kl_full=20, decay_from=config.sparse_epochs // 2)
    batches = shuffled(*data.train, config.batch_size, seed=0)
    bb.fit_noisy(network, batches, bb.categorical(), training, num_examples=config.num_train, schedule=schedule)
    posterior = network.posterior()
    point = posterior.network.module
    point.load_state_dict(posterior.means())
    return {**accuracies(point, data), "sparsity": 100 - 100 / compression(posterior)}


def accuracies(network: nn.Module, data: ImageData) -> dict[str, float]:
    """Return the accuracies of a network in evaluation mode, in per cent."""
    return {"train": 100 - error_percent(network, data.train), "test": 100 - error_percent(network, data.test)}


def tables(config: RandomLabelsConfig, results: Results) -> list[ResultTable]:
    """Return our accuracies beside the published ones."""
    rows: list[tuple[CellValue, ...]] = []
    for method, published in PUBLISHED.items():
        found = results.get(method, {})
        ours = (found.get("train"), found.get("test"), found.get("sparsity"))
        rows.append((method, *interleaved(ours, published)))
    columns = ("training accuracy %", "published", "test accuracy %", "published ", "zeros %", "published  ")
    return [ResultTable("Random labels", ("method", *columns), tuple(rows), ("", *[".1f", ".0f"] * 3))]


def notes(config: RandomLabelsConfig) -> list[str]:
    """Say how this differs from the paper."""
    found = [
        f"The network with dropout has two hidden layers of {config.width} units and drops a share of "
        f"{config.dropout:g}; sparse VD is LeNet-300-100. The paper does not give its network.",
        f"{config.epochs} epochs of Adam at {config.learning_rate:g} for dropout and {config.sparse_epochs} at "
        f"{config.sparse_learning_rate:g} for sparse VD, in batches of {config.batch_size}.",
    ]
    if config.num_train != 60_000:
        found.append(f"{config.num_train:,} training images instead of 60,000.")
    return found
