"""MCBN loses its uncertainty in networks trained with large batches, and tuning restores it.

Mukhoti, Dokania, Torr and Gal, "On Batch Normalisation for Approximate Bayesian Inference" (2021), train networks at
several batch sizes M. The mutual information of MCBN vanishes as M grows, both in and out of distribution. Here the
same networks then get the batch size with the highest likelihood of held-out images, without further training. We scale
the noise of the batches that they were trained with, or the noise of small batches of the same training images. The
noise of small batches is less Gaussian. Novelty is a detector that needs no noise, so it has nothing to lose.

Differences from the paper: In the preset `quick` a small network and 10,000 images of Fashion-MNIST replace VGG-16,
ResNet-50 and all images. Adam replaces SGD with drops: so few images give only four steps in each epoch at M = 2048,
and SGD does not converge in them. For CIFAR-10 the public ResNet-20 and ResNet-32 are fine-tuned at each M, and for
Fashion-MNIST a ResNet-20 that is trained here. The preset `paper` trains a ResNet-20 at each M, on all images. Each
draw is shared by all test inputs and centred on the running statistics, so all methods have the same mean function and
differ only in their spread. All predictions are exact draws. Tuning takes the network as linear in its statistics, and
one column of the table says how well this holds at the batch size that it finds.
"""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

from batchbayes.tools import Figure
from batchbayes_papers.data.folder import DataFolder
from batchbayes_papers.image_networks import Course
from batchbayes_papers.runner.experiment import Results, Unit, warnings_ignored
from batchbayes_papers.runner.figures import BatchSizeSweep, collapse_figure
from batchbayes_papers.runner.records import pack_weights, unpack_weights
from batchbayes_papers.runner.tables import CellValue, ResultTable, mean_of
from batchbayes_papers.sbn.collapse_networks import (
    AS_TRAINED,
    DETERMINISTIC,
    REFITTED,
    TUNED,
    CollapseConfig,
    CollapseRow,
    is_colour,
    is_residual,
    load_images,
    network_rows,
    new_network,
    train_residual,
)

DATASETS = ("fashion", "fashion-resnet", "cifar10", "cifar10-deeper")
TITLES = {
    "fashion": "Fashion-MNIST, MNIST unseen",
    "fashion-resnet": "Fashion-MNIST by a ResNet, MNIST unseen",
    "cifar10": "CIFAR-10, SVHN unseen",
    "cifar10-deeper": "CIFAR-10 by a ResNet-32, SVHN unseen",
    "synthetic": "patterns",
}
FASHION_ACCURACY = {
    "ResNet-50": {32: 0.9343, 64: 0.9377, 128: 0.9386, 256: 0.9396, 512: 0.9359, 1024: 0.9365, 2048: 0.9387},
    "VGG-16": {32: 0.9429, 64: 0.9436, 128: 0.9437, 256: 0.9427, 512: 0.9438, 1024: 0.9450, 2048: 0.9486},
}
CIFAR_ACCURACY = {"ResNet-50": {32: 0.9366, 64: 0.9459, 128: 0.9517, 256: 0.9547, 512: 0.9545}}
PUBLISHED = {
    "fashion": FASHION_ACCURACY,
    "fashion-resnet": FASHION_ACCURACY,
    "cifar10": CIFAR_ACCURACY,
    "cifar10-deeper": CIFAR_ACCURACY,
}
"""Table 1 of the paper: the accuracy of MCBN by the batch size of the training."""
ALL_SIZES = (32, 64, 128, 256, 512, 1024, 2048)
FINE_TUNED: dict[str, Any] = {
    "batch_sizes": ALL_SIZES[:5], "seeds": (0,), "num_train": 50_000, "num_held_out": 500, "num_test": 1000,
    "epochs": 1, "learning_rate": 1e-2, "num_samples": 20, "public": True, "bfloat16": True, "refit": False,
}  # fmt: skip
STARTED = FINE_TUNED | {
    "batch_sizes": ALL_SIZES, "num_train": 55_000, "num_held_out": 2000, "epochs": 2, "public": False,
    "start": Course(10, 128, 0.1, weight_decay=5e-4, bfloat16=True),
}  # fmt: skip
"""Two epochs, because one of M = 2048 has 26 steps only."""
TRAINED: dict[str, Any] = {"seeds": (0,), "num_test": 5000, "num_samples": 20, "learning_rate": 0.1, "refit": False}
PRESETS = {
    "smoke": CollapseConfig(
        ("synthetic",),
        batch_sizes=(16, 256),
        seeds=(0,),
        num_train=512,
        num_held_out=200,
        num_test=100,
        epochs=20,
        learning_rate=1e-2,
        num_samples=16,
    ),
    "quick": CollapseConfig(
        DATASETS,
        changes={"fashion-resnet": STARTED, "cifar10": FINE_TUNED, "cifar10-deeper": FINE_TUNED | {"depth": 32}},
    ),
    "paper": CollapseConfig(
        ("fashion-resnet", "cifar10"),
        changes={
            "fashion-resnet": {**TRAINED, "batch_sizes": ALL_SIZES, "num_train": 55_000, "num_held_out": 5000,
                               "epochs": 100},
            "cifar10": {**TRAINED, "batch_sizes": ALL_SIZES[:5], "num_train": 50_000, "num_held_out": 5000,
                        "epochs": 350},
        },
    ),
}  # fmt: skip


def units(config: CollapseConfig) -> list[Unit]:
    """Return one unit for each data set, seed and batch size: a network, used by four methods. Some share a start."""
    made = []
    for dataset, own in ((dataset, config.of(dataset)) for dataset in config.datasets):
        for seed in own.seeds:
            needs = ()
            if own.start:
                needs = (f"{dataset}, seed {seed}, start",)
                made.append(Unit(*needs, {"dataset": dataset, "seed": seed}, effort=own.num_train * own.start.epochs))
            for size in own.batch_sizes:
                arguments = {"dataset": dataset, "seed": seed, "batch_size": size}
                name = f"{dataset}, seed {seed}, M = {size}"
                made.append(Unit(name, arguments, needs, effort=own.num_train * own.epochs))
    return made


def work(config: CollapseConfig, unit: Unit, needed: Results, data_folder: DataFolder = None) -> Any:
    """Return the rows of one network, or the weights that several of them start with."""
    own, seed = config.of(unit.arguments["dataset"]), unit.arguments["seed"]
    data, network = load_images(own, seed, data_folder), new_network(own, seed, data_folder)
    if own.start and not unit.needs:
        loss = train_residual(own.start, seed, data, network)
        return {"weights": pack_weights(network), "training_loss": loss}
    if unit.needs:
        network = unpack_weights(network, needed[unit.needs[0]]["weights"])
    with warnings_ignored():
        return [asdict(row) for row in network_rows(own, seed, unit.arguments["batch_size"], data, network)]


def collapse_rows(config: CollapseConfig, results: Results, dataset: str) -> list[CollapseRow]:
    """Return the rows of all finished units of a data set, by seed and batch size."""
    own = [unit for unit in units(config) if unit.arguments["dataset"] == dataset and "batch_size" in unit.arguments]
    return [CollapseRow(**record) for unit in own for record in results.get(unit.name, [])]


COLUMNS = {
    "accuracy": ("accuracy", ".3f"),
    "NLL": ("nll", ".3f"),
    "MI in": ("information_in", ".2g"),
    "MI out": ("information_out", ".2g"),
    "AUROC by entropy": ("auroc_entropy", ".3f"),
    "AUROC by MI": ("auroc_information", ".3f"),
    "AUROC by novelty": ("auroc_novelty", ".3f"),
}
"""The headings of the table, with their fields and formats."""


def tables(config: CollapseConfig, results: Results) -> list[ResultTable]:
    """Return for each data set the scores by training batch size and method, and the accuracy beside the paper's."""
    made = []
    for dataset in config.datasets:
        own, rows = config.of(dataset), collapse_rows(config, results, dataset)
        made.append(_scores_table(own, rows, TITLES[dataset]))
        if published := PUBLISHED.get(dataset):
            made.append(_accuracy_table(own, rows, published, TITLES[dataset]))
    return made


def _scores_table(config: CollapseConfig, rows: Sequence[CollapseRow], title: str) -> ResultTable:
    """Return means over seeds, and notes that compare the ends of the range."""
    lines = []
    for size, method in product(config.batch_sizes, config.methods):
        group = [row for row in rows if (row.batch_size, row.method) == (size, method)]
        cells: list[CellValue] = [size, method, " ".join(dict.fromkeys(_each(group, "noise_batch_size", ".4g")))]
        cells += [mean_of(group, name) for name, _ in COLUMNS.values()]
        cells += [" ".join(_each(group, "auroc_information", ".3f")), mean_of(group, "unexplained")]
        lines.append(tuple(cells))
    return ResultTable(
        f"Uncertainty of networks by training batch size M: {title}",
        ("trained at M", "method", "noise of M", *COLUMNS, "AUROC by MI, each seed", "not linear"),
        tuple(lines),
        ("", "", "", *(form for _, form in COLUMNS.values()), "", ".0%"),
        tuple(comparison(config, rows)),
    )


def _accuracy_table(
    config: CollapseConfig, rows: Sequence[CollapseRow], published: dict[str, dict[int, float]], title: str
) -> ResultTable:
    """Return the accuracy of MCBN and the training loss by batch size, beside table 1 of the paper."""
    lines = []
    for size in sorted({*config.batch_sizes, *(size for own in published.values() for size in own)}):
        group = [row for row in rows if (row.batch_size, row.method) == (size, AS_TRAINED)]
        paper = [own.get(size) for own in published.values()]
        lines.append((size, mean_of(group, "accuracy"), *paper, mean_of(group, "training_loss")))
    return ResultTable(
        f"Table 1: accuracy of MCBN by training batch size, {title}",
        ("trained at M", "here", *(f"paper, {name}" for name in published), "training loss, here"),
        tuple(lines),
        ("", ".4f", *[".4f"] * len(published), ".3f"),
    )


def comparison(config: CollapseConfig, rows: Sequence[CollapseRow]) -> list[str]:
    """Say how the AUROC of tuned posteriors at the largest M differs from that at the smallest M, for each seed."""
    small, large = min(config.batch_sizes), max(config.batch_sizes)
    auroc = {(row.seed, row.batch_size, row.method): row.auroc_information or 0.0 for row in rows}
    seeds = [s for s in config.seeds if (s, small, TUNED) in auroc and (s, large, TUNED) in auroc]
    lines = []
    tuned = [method for method in config.methods if method in (TUNED, REFITTED)]
    for method, other in product(tuned, (AS_TRAINED, TUNED)) if seeds else ():
        gaps = [auroc[seed, large, method] - auroc[seed, small, other] for seed in seeds]
        each = " ".join(f"{gap:+.3f}" for gap in gaps)
        mean = sum(gaps) / len(gaps)
        lines.append(f"AUROC by MI, {method} at M = {large} minus {other} at M = {small}: {mean:+.3f} ({each})")
    return lines


def notes(config: CollapseConfig) -> list[str]:
    """Say how this differs from the paper, for each data set."""
    return [_note(config.of(dataset), TITLES[dataset]) for dataset in config.datasets]


def _note(own: CollapseConfig, title: str) -> str:
    """Say how one data set differs."""
    images = f"{own.num_train:,} training images"
    draws = f"{own.num_samples} draws, shared by all test inputs and centred on the running statistics."
    if not is_residual(own):
        return (
            f"{title}: a network of four batch-norm layers and {images}, instead of VGG-16, ResNet-50 and all images; "
            f"{own.epochs} epochs of Adam with a learning rate of {own.learning_rate:g}, instead of SGD with drops; "
            f"{draws}"
        )
    before = "with public weights, fine-tuned" if own.public else "trained from new weights"
    if own.start:
        rate = f"at a learning rate that falls to zero from {own.start.learning_rate:g}"
        before = f"trained for {own.start.epochs} epochs at M = {own.start.batch_size} {rate}, and then fine-tuned"
    epochs = "one epoch" if own.epochs == 1 else f"{own.epochs} epochs"
    half = "; trained in bfloat16" if own.bfloat16 else ""
    held_out = "test images that follow those of the test" if is_colour(own) else "other training images"
    return (
        f"{title}: a ResNet-{own.depth} {before} at each M for {epochs} of SGD on {images}, with a learning rate that "
        f"falls to zero from {own.learning_rate:g}{half}, instead of a ResNet-50 or VGG-16 trained at each M; M is "
        f"tuned on {own.num_held_out:,} {held_out}; {draws}"
    )


def _each(rows: Sequence[CollapseRow], name: str, form: str) -> list[str]:
    return [format(value, form) for row in rows if (value := getattr(row, name)) is not None]


def figures(config: CollapseConfig, results: Results) -> dict[str, Figure]:
    """Show mutual information against M, as trained and tuned, and how well strange images are detected."""
    made = {}
    for dataset in config.datasets:
        rows = collapse_rows(config, results, dataset)
        made[f"mutual-information-against-batch-size-on-{dataset}"] = _figure(config.of(dataset), rows)
    return made


def _figure(config: CollapseConfig, rows: Sequence[CollapseRow]) -> Figure:
    sizes = sorted(config.batch_sizes)

    def column(method: str, name: str) -> list[list[float]]:
        """Return one column of the rows as (seeds, batch sizes)."""
        chosen = {(row.seed, row.batch_size): getattr(row, name) for row in rows if row.method == method}
        return [[chosen[seed, size] for size in sizes] for seed in config.seeds]

    names = ("information_in", "information_out", "auroc_information")
    titles = {
        AS_TRAINED: "MCBN at the training M",
        TUNED: "M tuned afterwards",
        REFITTED: f"batches of {sizes[0]}, M tuned",
    }
    sweeps = [
        BatchSizeSweep(title, *(column(method, name) for name in names))
        for method, title in titles.items()
        if method in config.methods
    ]
    return collapse_figure(sizes, sweeps, novelty=column(DETERMINISTIC, "auroc_novelty"))
