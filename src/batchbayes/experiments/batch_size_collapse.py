"""MCBN loses its uncertainty in networks trained with large batches, and tuning restores it.

Mukhoti, Dokania, Torr and Gal, "On Batch Normalisation for Approximate Bayesian Inference" (2021), train networks at
several batch sizes M. The mutual information of MCBN vanishes as M grows, both in and out of distribution. Here the
same networks then get the batch size with the highest likelihood of held-out images, without further training. We scale
the noise of the batches that they were trained with, or the noise of small batches of the same training images. The
noise of small batches is less Gaussian.

Differences from the paper: A small network and 10,000 training images replace VGG-16, ResNet-50 and all 60,000 images.
40 epochs of Adam at one learning rate replace 100 epochs of SGD with drops: so few images give only four steps in each
epoch at M = 2048, and SGD does not converge in them. There are 64 draws instead of 20. Each draw is shared by all test
inputs and centred on the running statistics, so all methods have the same mean function and differ only in their
spread. All predictions are exact draws. Tuning takes the network as linear in its statistics, and one column of the
table says how well this holds at the batch size that it finds.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from batchbayes._common.rng import GlobalStream, generator
from batchbayes.data.digits import pixel_shuffled
from batchbayes.data.folder import DataFolder
from batchbayes.data.mnist import load_mnist
from batchbayes.engines.linear_check import measure_linearity
from batchbayes.likelihoods import categorical
from batchbayes.methods.batchnorm.mcbn import mcbn
from batchbayes.methods.batchnorm.posterior import BatchNormPosterior
from batchbayes.methods.batchnorm.tuning.batch_size import tune_batch_size
from batchbayes.methods.point import deterministic
from batchbayes.metrics import accuracy, mean_score, negative_log_likelihood, ood_auroc
from batchbayes.models.vgg import SmallVGG
from batchbayes.plots import BatchSizeSweep, collapse_figure
from batchbayes.plots.style import Figure
from batchbayes.posterior import Posterior
from batchbayes.prediction import predict
from batchbayes.reproduce.experiment import Results, Unit, warnings_ignored
from batchbayes.reproduce.tables import CellValue, ResultTable, mean_of
from batchbayes.training.batches import shuffled
from batchbayes.training.loop import TrainingConfig, supervised, train

DETERMINISTIC, AS_TRAINED, TUNED, REFITTED = "deterministic", "MCBN", "tuned MCBN", "tuned MCBN, small batches"
METHODS = DETERMINISTIC, AS_TRAINED, TUNED, REFITTED
PIXEL_MEAN, PIXEL_STD = 0.2860, 0.3530
"""The moments of the Fashion-MNIST training images. MNIST images are scaled in the same way."""
NOISE_STD = 6.0
"""The noise of the pixels of synthetic images. Their patterns have a standard deviation of one."""


@dataclass(frozen=True)
class CollapseConfig:
    """A configuration. The defaults are those of the preset `quick`."""

    data: Literal["fashion", "synthetic"] = "fashion"
    """Fashion-MNIST and MNIST, or noisy patterns and the same patterns with shuffled pixels."""
    batch_sizes: tuple[int, ...] = (32, 128, 512, 2048)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    num_train: int = 10_000
    """So few that the network memorises them: a network that is not overconfident needs no noise."""
    num_held_out: int = 2000
    num_test: int = 2000
    """The number of test images of each kind, in and out of distribution."""
    epochs: int = 40
    """The same for each M, as in the paper. The final training loss is below 0.04 for each of them."""
    learning_rate: float = 2e-3
    """Not scaled with M, as in the paper."""
    num_samples: int = 64


PRESETS = {
    "smoke": CollapseConfig(
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
    "quick": CollapseConfig(),
}


@dataclass(frozen=True)
class CollapseRow:
    """The scores of one method with one trained network."""

    seed: int
    batch_size: int
    """The batch size M of the training."""
    training_loss: float
    """The mean over the last epoch."""
    method: str
    noise_batch_size: float | None
    """The batch size M of the noise: that of the training, or the tuned one."""
    unexplained: float | None
    """The share of the exact deviations that the linear approximation misses, on 32 images of each kind."""
    accuracy: float
    nll: float
    information_in: float | None
    """The mean mutual information in nats, on test images of the kind that the network was trained on."""
    information_out: float | None
    """The same on images of another kind."""
    auroc_information: float | None
    """How well mutual information separates the two kinds."""
    auroc_entropy: float


@dataclass(frozen=True, eq=False)
class CollapseData:
    """The images (N, 1, H, W) and labels (N,) for one seed."""

    train: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    strange: Tensor
    """Images of another kind than those of the training."""


def units(config: CollapseConfig) -> list[Unit]:
    """Return one unit for each seed and batch size: a network, used by four methods."""
    return [
        Unit(f"seed {seed}, M = {size}", {"seed": seed, "batch_size": size})
        for seed in config.seeds
        for size in config.batch_sizes
    ]


def work(config: CollapseConfig, unit: Unit, needed: Results, data_folder: DataFolder = None) -> list[dict[str, Any]]:
    """Return the rows of one network."""
    seed, batch_size = unit.arguments["seed"], unit.arguments["batch_size"]
    with warnings_ignored():
        return [asdict(row) for row in network_rows(config, seed, batch_size, load_images(config, seed, data_folder))]


def collapse_rows(config: CollapseConfig, results: Results) -> list[CollapseRow]:
    """Return the rows of all finished units, by seed and batch size."""
    return [CollapseRow(**record) for unit in units(config) for record in results.get(unit.name, [])]


def load_images(config: CollapseConfig, seed: int, data_folder: DataFolder = None) -> CollapseData:
    """Load the images for one seed. The seed chooses the images to train on and the images to hold out."""
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
    return CollapseData(
        (scale_pixels(pool[own]), labels[own]),
        (scale_pixels(pool[held_out]), labels[held_out]),
        (scale_pixels(test), test_labels),
        scale_pixels(strange),
    )


def scale_pixels(images: Tensor) -> Tensor:
    """Scale bytes to about zero mean and unit variance. Images that are not bytes stay unchanged."""
    return images if images.is_floating_point() else (images.float() / 255 - PIXEL_MEAN) / PIXEL_STD


def noisy_patterns(count: int, seed: int, part: str) -> tuple[Tensor, Tensor]:
    """Return images and labels of ten coarse patterns, with too much noise to classify all of them correctly."""
    patterns = torch.randn(10, 1, 7, 7, generator=generator(seed, "patterns")).repeat_interleave(4, 2)
    source = generator(seed, "noise", part)
    labels = torch.randint(0, 10, (count,), generator=source)
    images = patterns.repeat_interleave(4, 3)[labels]
    return images + NOISE_STD * torch.randn(images.shape, generator=source), labels


def network_rows(config: CollapseConfig, seed: int, batch_size: int, data: CollapseData) -> list[CollapseRow]:
    """Train a network at one batch size, and score it without noise, by MCBN, and by MCBN tuned in two ways."""
    network, loss = trained_network(config, seed, batch_size, data)

    def fitted(size: int) -> BatchNormPosterior:
        images, count = data.train[0], config.num_samples
        return mcbn(network, images, batch_size=size, num_samples=count, seed=seed, center="running")

    def tuned(posterior: BatchNormPosterior) -> BatchNormPosterior:
        images, count = [data.held_out], config.num_samples
        return tune_batch_size(posterior, images, categorical(), num_samples=count, seed=seed).posterior

    as_trained, smallest = fitted(batch_size), min(config.batch_sizes)
    own = measure(deterministic(network), 1, seed, data)
    rows = [CollapseRow(seed, batch_size, loss, DETERMINISTIC, None, None, **own)]
    posteriors = {AS_TRAINED: as_trained, TUNED: tuned(as_trained)}
    if batch_size > smallest:
        posteriors[REFITTED] = tuned(fitted(smallest))
    for method, posterior in posteriors.items():
        seen = measure(posterior, config.num_samples, seed, data)
        both = torch.cat([data.test[0][:32], data.strange[:32]])
        linearity = measure_linearity(posterior, both, num_draws=16, max_examples=len(both), seed=seed)
        rows.append(CollapseRow(seed, batch_size, loss, method, posterior.batch_size, linearity.unexplained, **seen))
    return rows if batch_size > smallest else [*rows, replace(rows[-1], method=REFITTED)]


def trained_network(config: CollapseConfig, seed: int, batch_size: int, data: CollapseData) -> tuple[nn.Module, float]:
    """Return a network and its mean training loss in the last epoch. The seed alone sets the initial weights."""
    with GlobalStream(seed):
        network = SmallVGG()
    network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]  # faster; torch's stubs lack it
    training = TrainingConfig(config.epochs, batch_size, config.learning_rate, seed=seed)
    batches = shuffled(*data.train, batch_size, seed)
    return network, train(network, batches, supervised(cross_entropy), training)[-1]


def measure(posterior: Posterior, num_samples: int, seed: int, data: CollapseData) -> dict[str, Any]:
    """Compare familiar with strange images by exact draws. Return the fields of a row from accuracy on."""
    images, labels = data.test
    familiar, strange = (
        predict(posterior, inputs, categorical(), num_samples=num_samples, seed=seed)
        for inputs in (images, data.strange)
    )
    inside, outside = familiar.mutual_information, strange.mutual_information
    informed = num_samples > 1  # one function cannot disagree with itself
    return {
        "accuracy": accuracy(familiar.probs, labels),
        "nll": negative_log_likelihood(familiar.log_prob(labels)),
        "information_in": mean_score(inside) if informed else None,
        "information_out": mean_score(outside) if informed else None,
        "auroc_information": ood_auroc(inside, outside) if informed else None,
        "auroc_entropy": ood_auroc(familiar.entropy, strange.entropy),
    }


COLUMNS = {
    "accuracy": ("accuracy", ".3f"),
    "NLL": ("nll", ".3f"),
    "MI in": ("information_in", ".2g"),
    "MI out": ("information_out", ".2g"),
    "AUROC by entropy": ("auroc_entropy", ".3f"),
    "AUROC by MI": ("auroc_information", ".3f"),
}
"""The headings of the table, with their fields and formats."""


def tables(config: CollapseConfig, results: Results) -> list[ResultTable]:
    """Return means over seeds for each training batch size and method, and notes that compare the ends of the range."""
    rows = collapse_rows(config, results)
    lines = []
    for size, method in product(config.batch_sizes, METHODS):
        group = [row for row in rows if (row.batch_size, row.method) == (size, method)]
        cells: list[CellValue] = [size, method, " ".join(dict.fromkeys(_each(group, "noise_batch_size", ".4g")))]
        cells += [mean_of(group, name) for name, _ in COLUMNS.values()]
        cells += [" ".join(_each(group, "auroc_information", ".3f")), mean_of(group, "unexplained")]
        lines.append(tuple(cells))
    return [
        ResultTable(
            "Uncertainty of networks by training batch size M",
            ("trained at M", "method", "noise of M", *COLUMNS, "AUROC by MI, each seed", "not linear"),
            tuple(lines),
            ("", "", "", *(form for _, form in COLUMNS.values()), "", ".0%"),
            tuple(comparison(config, rows)),
        )
    ]


def comparison(config: CollapseConfig, rows: Sequence[CollapseRow]) -> list[str]:
    """Say how the AUROC of tuned posteriors at the largest M differs from that at the smallest M, for each seed."""
    small, large = min(config.batch_sizes), max(config.batch_sizes)
    auroc = {(row.seed, row.batch_size, row.method): row.auroc_information or 0.0 for row in rows}
    seeds = [s for s in config.seeds if (s, small, TUNED) in auroc and (s, large, TUNED) in auroc]
    lines = []
    for method, other in product((TUNED, REFITTED), (AS_TRAINED, TUNED)) if seeds else ():
        gaps = [auroc[seed, large, method] - auroc[seed, small, other] for seed in seeds]
        each = " ".join(f"{gap:+.3f}" for gap in gaps)
        mean = sum(gaps) / len(gaps)
        lines.append(f"AUROC by MI, {method} at M = {large} minus {other} at M = {small}: {mean:+.3f} ({each})")
    return lines


def notes(config: CollapseConfig) -> list[str]:
    """Say how this differs from the paper."""
    return [
        f"A network of four batch-norm layers and {config.num_train:,} training images, "
        "instead of VGG-16, ResNet-50 and all 60,000 images.",
        f"{config.epochs} epochs of Adam at a constant {config.learning_rate:g}, instead of 100 of SGD with drops.",
        f"{config.num_samples} draws, each shared by all test inputs and centred on the running statistics.",
        *(["Noisy patterns replace images, only to test the program."] if config.data == "synthetic" else []),
    ]


def _each(rows: Sequence[CollapseRow], name: str, form: str) -> list[str]:
    return [format(value, form) for row in rows if (value := getattr(row, name)) is not None]


def figures(config: CollapseConfig, results: Results) -> dict[str, Figure]:
    """Show mutual information against M, as trained and tuned, and how well it detects strange images."""
    sizes, rows = sorted(config.batch_sizes), collapse_rows(config, results)

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
