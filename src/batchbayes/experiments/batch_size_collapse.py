"""The published failure of MCBN with large training batches, and its cure.

Mukhoti, Dokania, Torr and Gal, "On Batch Normalisation for Approximate Bayesian Inference" (2021), train networks at
several batch sizes M and find that the mutual information of MCBN vanishes as M grows, in and out of distribution.
Here the same networks then get the batch size that makes held-out images most likely, without any further training:
by scaling the noise of the batches that they were trained with, or that of small batches of the same training images,
which is less Gaussian.

Where we differ from the paper: a small network and 10,000 training images in place of VGG-16, ResNet-50 and all
60,000; 40 epochs of Adam at one learning rate in place of 100 of SGD with drops, since so few images give only four
steps an epoch at M = 2048, in which SGD does not converge; 64 draws instead of 20, each shared by all test inputs, and
centred on the running statistics, so that one network's rows have the same mean function and differ in spread alone.
All predictions are exact draws; tuning takes the network as linear in its statistics, and a column says how well that
holds at the batch size that it finds.
"""

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from batchbayes._common.rng import GlobalStream, generator
from batchbayes.data.digits import pixel_shuffled
from batchbayes.data.mnist import load_mnist
from batchbayes.engines.linearity import measure_linearity
from batchbayes.errors import BatchbayesWarning
from batchbayes.likelihoods import categorical
from batchbayes.methods.batchnorm.mcbn import mcbn
from batchbayes.methods.batchnorm.posterior import BatchNormPosterior
from batchbayes.methods.batchnorm.tuning.batch_size import tune_batch_size
from batchbayes.methods.point import deterministic
from batchbayes.metrics import accuracy, area_under_roc, count_by_score, mean_score, negative_log_likelihood
from batchbayes.models.vgg import SmallVGG
from batchbayes.plots import BatchSizeSweep, collapse_figure
from batchbayes.posterior import Posterior
from batchbayes.prediction import predict
from batchbayes.reproduce.experiment import Unit
from batchbayes.reproduce.tables import Cell, Table
from batchbayes.training.batches import shuffled
from batchbayes.training.loop import TrainingConfig, supervised, train

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DETERMINISTIC, AS_TRAINED, TUNED, REFITTED = "deterministic", "MCBN", "tuned MCBN", "tuned MCBN, small batches"
METHODS = DETERMINISTIC, AS_TRAINED, TUNED, REFITTED
PIXEL_MEAN, PIXEL_STD = 0.2860, 0.3530
"""Of the Fashion-MNIST training images; MNIST, the stranger, is scaled the same way."""
NOISE_STD = 6.0
"""Of the pixels of synthetic images, whose patterns have a standard deviation of one."""


@dataclass(frozen=True)
class Config:
    """One preset. The defaults are those of `quick`."""

    data: Literal["fashion", "synthetic"] = "fashion"
    """Fashion-MNIST against MNIST, or noisy patterns against the same with their pixels shuffled."""
    batch_sizes: tuple[int, ...] = (32, 128, 512, 2048)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    num_train: int = 10_000
    """So few that the network learns them by heart in the time: a network that is not sure of itself needs no noise."""
    num_held_out: int = 2000
    num_test: int = 2000
    """Of each kind, in and out of distribution."""
    epochs: int = 40
    """The same for each M, as in the paper; the training loss ends below 0.04 at all of them."""
    learning_rate: float = 2e-3
    """Not scaled with M, as in the paper."""
    num_samples: int = 64


PRESETS = {
    "smoke": Config(
        data="synthetic",
        batch_sizes=(16, 256),
        seeds=(0,),
        num_train=512,
        num_held_out=200,
        num_test=100,
        epochs=20,
        learning_rate=1e-2,
        num_samples=16,
    ),
    "quick": Config(),
}


@dataclass(frozen=True)
class Row:
    """One way to predict with one trained network."""

    seed: int
    batch_size: int
    """M of the training."""
    training_loss: float
    """Mean over the last epoch."""
    method: str
    noise_batch_size: float | None
    """M of the noise: that of the training, or the tuned one."""
    unexplained: float | None
    """Share of the exact deviations that a network linear in its statistics would miss, on 32 images of each kind."""
    accuracy: float
    nll: float
    information_in: float | None
    """Mean mutual information on test images of the kind that the network was trained on, in nats."""
    information_out: float | None
    """The same on images of another kind."""
    auroc_information: float | None
    """How well mutual information tells the two kinds apart."""
    auroc_entropy: float


Measures = tuple[float, float, float | None, float | None, float | None, float]
"""The last six columns of a row, from accuracy on."""


@dataclass(frozen=True, eq=False)
class Data:
    """Images (N, 1, H, W) and labels (N,) of one seed."""

    train: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    strange: Tensor


def units(config: Config) -> list[Unit]:
    """A network for each seed and batch size, used in four ways."""
    return [
        Unit(f"seed {seed}, M = {size}", {"seed": seed, "batch_size": size})
        for seed in config.seeds
        for size in config.batch_sizes
    ]


def work(
    config: Config, unit: Unit, needed: Mapping[str, Any], data_folder: str | os.PathLike[str] | None = None
) -> list[dict[str, Any]]:
    """The rows of one network."""
    seed, batch_size = unit.arguments["seed"], unit.arguments["batch_size"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BatchbayesWarning)  # the table shows how linear each network is
        return [asdict(row) for row in network_rows(config, seed, batch_size, load(config, seed, data_folder))]


def rows_of(config: Config, results: Mapping[str, Any]) -> list[Row]:
    """All rows that there are, by seed and batch size."""
    return [Row(**record) for unit in units(config) for record in results.get(unit.name, [])]


def load(config: Config, seed: int, data_folder: str | os.PathLike[str] | None = None) -> Data:
    """The images of one seed, which chooses those to train on and those to hold out."""
    if config.data == "synthetic":
        pool, labels = noisy_patterns(config.num_train + config.num_held_out, seed, "train")
        test, test_labels = noisy_patterns(config.num_test, seed, "test")
        strange = pixel_shuffled(test, seed)
    else:
        pool, labels = load_mnist("fashion_mnist", "train", data_folder)
        test, test_labels = load_mnist("fashion_mnist", "test", data_folder, config.num_test)
        strange, _ = load_mnist("mnist", "test", data_folder, config.num_test)
    order = torch.randperm(len(pool), generator=generator(seed, "split"))
    own, held_out = order[: config.num_train], order[config.num_train :][: config.num_held_out]
    return Data(
        (standardise(pool[own]), labels[own]),
        (standardise(pool[held_out]), labels[held_out]),
        (standardise(test), test_labels),
        standardise(strange),
    )


def standardise(images: Tensor) -> Tensor:
    """Bytes to about zero mean and unit variance; what is not bytes stays."""
    return images if images.is_floating_point() else (images.float() / 255 - PIXEL_MEAN) / PIXEL_STD


def noisy_patterns(count: int, seed: int, part: str) -> tuple[Tensor, Tensor]:
    """Ten coarse patterns (28 x 28) under so much noise that a network cannot always tell them apart."""
    patterns = torch.randn(10, 1, 7, 7, generator=generator(seed, "patterns")).repeat_interleave(4, 2)
    source = generator(seed, "noise", part)
    labels = torch.randint(0, 10, (count,), generator=source)
    images = patterns.repeat_interleave(4, 3)[labels]
    return images + NOISE_STD * torch.randn(images.shape, generator=source), labels


def network_rows(config: Config, seed: int, batch_size: int, data: Data) -> list[Row]:
    """Train at one batch size; then the network by itself, MCBN at that batch size, and MCBN tuned in two ways."""
    network, loss = trained_network(config, seed, batch_size, data)

    def fitted(size: int) -> BatchNormPosterior:
        images, count = data.train[0], config.num_samples
        return mcbn(network, images, batch_size=size, num_samples=count, seed=seed, center="running")

    def tuned(posterior: BatchNormPosterior) -> BatchNormPosterior:
        images, count = [data.held_out], config.num_samples
        return tune_batch_size(posterior, images, categorical(), num_samples=count, seed=seed).posterior

    as_trained, smallest = fitted(batch_size), min(config.batch_sizes)
    own = measure(deterministic(network), 1, seed, data)
    rows = [Row(seed, batch_size, loss, DETERMINISTIC, None, None, *own)]
    posteriors = {AS_TRAINED: as_trained, TUNED: tuned(as_trained)}
    if batch_size > smallest:
        posteriors[REFITTED] = tuned(fitted(smallest))
    for method, posterior in posteriors.items():
        seen = measure(posterior, config.num_samples, seed, data)
        both = torch.cat([data.test[0][:32], data.strange[:32]])
        linearity = measure_linearity(posterior, both, num_draws=16, max_examples=len(both), seed=seed)
        rows.append(Row(seed, batch_size, loss, method, posterior.batch_size, linearity.unexplained, *seen))
    return rows if batch_size > smallest else [*rows, replace(rows[-1], method=REFITTED)]


def trained_network(config: Config, seed: int, batch_size: int, data: Data) -> tuple[nn.Module, float]:
    """A network and its mean training loss in the last epoch. The seed sets the start, whatever the batch size."""
    with GlobalStream(seed):
        network = SmallVGG()
    network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]  # faster; torch's stubs lack it
    training = TrainingConfig(config.epochs, batch_size, config.learning_rate, seed=seed)
    batches = shuffled(*data.train, batch_size, seed)
    return network, train(network, batches, supervised(cross_entropy), training)[-1]


def measure(posterior: Posterior, num_samples: int, seed: int, data: Data) -> Measures:
    """Compare familiar with strange images, by exact draws."""
    images, labels = data.test
    familiar, strange = (
        predict(posterior, inputs, categorical(), num_samples=num_samples, seed=seed)
        for inputs in (images, data.strange)
    )
    inside, outside = familiar.mutual_information, strange.mutual_information
    informed = num_samples > 1  # one function cannot disagree with itself
    return (
        accuracy(familiar.probs, labels),
        negative_log_likelihood(familiar.log_prob(labels)),
        mean_score(inside) if informed else None,
        mean_score(outside) if informed else None,
        ood_auroc(inside, outside) if informed else None,
        ood_auroc(familiar.entropy, strange.entropy),
    )


def ood_auroc(familiar: Tensor, strange: Tensor) -> float:
    """How often a strange input scores higher than a familiar one.

    >>> ood_auroc(torch.tensor([0.1, 0.2]), torch.tensor([0.15, 0.3]))
    0.75
    """
    is_strange = torch.arange(len(familiar) + len(strange)) >= len(familiar)
    return area_under_roc(count_by_score(torch.cat([familiar, strange]), is_strange))


COLUMNS = {
    "accuracy": ("accuracy", ".3f"),
    "NLL": ("nll", ".3f"),
    "MI in": ("information_in", ".2g"),
    "MI out": ("information_out", ".2g"),
    "AUROC by entropy": ("auroc_entropy", ".3f"),
    "AUROC by MI": ("auroc_information", ".3f"),
}
"""Headings of the table, the fields behind them and their format."""


def tables(config: Config, results: Mapping[str, Any]) -> list[Table]:
    """Means over seeds for each training batch size and method; below, the ends of the range of M, seed by seed."""
    rows = rows_of(config, results)
    groups: dict[tuple[int, str], list[Row]] = {
        (size, method): [row for row in rows if (row.batch_size, row.method) == (size, method)]
        for size in config.batch_sizes
        for method in METHODS
    }
    lines = []
    for (size, method), group in groups.items():
        cells: list[Cell] = [size, method, " ".join(dict.fromkeys(_each(group, "noise_batch_size", ".4g")))]
        cells += [_mean(group, name) for name, _ in COLUMNS.values()]
        cells += [" ".join(_each(group, "auroc_information", ".3f")), _mean(group, "unexplained")]
        lines.append(tuple(cells))
    return [
        Table(
            "Uncertainty of networks by training batch size M",
            ("trained at M", "method", "noise of M", *COLUMNS, "of each seed", "not linear"),
            tuple(lines),
            ("", "", "", *(form for _, form in COLUMNS.values()), "", ".0%"),
            tuple(comparison(config, rows)),
        )
    ]


def comparison(config: Config, rows: Sequence[Row]) -> list[str]:
    """How the AUROC of tuned posteriors at the largest M differs from those at the smallest, seed by seed."""
    small, large = min(config.batch_sizes), max(config.batch_sizes)
    auroc = {(row.seed, row.batch_size, row.method): row.auroc_information or 0.0 for row in rows}
    seeds = [s for s in config.seeds if (s, small, TUNED) in auroc and (s, large, TUNED) in auroc]
    lines = []
    for method, other in product((TUNED, REFITTED), (AS_TRAINED, TUNED)) if seeds else ():
        gaps = [auroc[seed, large, method] - auroc[seed, small, other] for seed in seeds]
        each = " ".join(f"{gap:+.3f}" for gap in gaps)
        mean = sum(gaps) / len(gaps)
        lines.append(f"AUROC by MI, {method} at M = {large} less {other} at M = {small}: {mean:+.3f} ({each})")
    return lines


def notes(config: Config) -> list[str]:
    """Where we differ from the paper."""
    return [
        f"A network of four batch-norm layers and {config.num_train:,} training images, "
        "in place of VGG-16, ResNet-50 and all 60,000.",
        f"{config.epochs} epochs of Adam at a constant {config.learning_rate:g}, in place of 100 of SGD with drops.",
        f"{config.num_samples} draws, each shared by all test inputs and centred on the running statistics.",
        *(["Noisy patterns in place of images: numbers to test the program by."] if config.data == "synthetic" else []),
    ]


def _each(rows: Sequence[Row], name: str, form: str) -> list[str]:
    return [format(value, form) for row in rows if (value := getattr(row, name)) is not None]


def _mean(rows: Sequence[Row], name: str) -> float | None:
    """None where the method has no such number."""
    values = [value for row in rows if (value := getattr(row, name)) is not None]
    return sum(values) / len(values) if values else None


def figures(config: Config, results: Mapping[str, Any]) -> "dict[str, Figure]":
    """Mutual information against M, as trained and tuned, and how well it finds what is out of distribution."""
    sizes, rows = sorted(config.batch_sizes), rows_of(config, results)

    def column(method: str, name: str) -> list[list[float]]:
        """(seeds, batch sizes)"""
        chosen = {(row.seed, row.batch_size): getattr(row, name) for row in rows if row.method == method}
        return [[chosen[seed, size] for size in sizes] for seed in config.seeds]

    names = ("information_in", "information_out", "auroc_information")
    titles = {
        AS_TRAINED: "MCBN at the training M",
        TUNED: "M tuned afterwards",
        REFITTED: f"batches of {sizes[0]}, M tuned",
    }
    sweeps = [BatchSizeSweep(title, *(column(method, name) for name in names)) for method, title in titles.items()]
    return {"collapse": collapse_figure(sizes, sweeps)}
