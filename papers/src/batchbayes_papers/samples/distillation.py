"""A deep ensemble distilled into one network: how much of its gain a student keeps, at the cost of one pass.

A student learns the mean prediction of the ensemble, and another one also its uncertainty, on the training images and
on shifted views of them. The expected order is single network, student, ensemble.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean
from typing import Any

from torch.nn.functional import cross_entropy

import batchbayes as bb
from batchbayes.tools import Figure, count, made
from batchbayes_papers.data.folder import DataFolder
from batchbayes_papers.data.mnist import Source, load_grey_images
from batchbayes_papers.models.small_vgg import SmallVGG
from batchbayes_papers.runner.experiment import Results, Unit, warnings_ignored
from batchbayes_papers.runner.figures import seeds_figure
from batchbayes_papers.runner.tables import ResultTable, with_error

SINGLE, STUDENT, DIRICHLET, ENSEMBLE = "single network", "student", "Dirichlet student", "ensemble"
METHODS = SINGLE, STUDENT, DIRICHLET, ENSEMBLE


@dataclass(frozen=True)
class DistillationConfig:
    """A configuration. The defaults are those of the preset `quick`."""

    data: Source = "fashion_mnist"
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    num_train: int = 3000
    num_test: int = 2000
    epochs: int = 10
    """Of each member. A student sees as many images in its training as two members."""
    batch_size: int = 64
    learning_rate: float = 2e-3
    width: int = 8
    """Channels of the first convolution."""
    num_members: int = 6
    num_views: int = 3


PRESETS = {
    "smoke": DistillationConfig("synthetic", (0,), 256, 100, epochs=4, num_members=3, num_views=1),
    "quick": DistillationConfig(),
    "paper": DistillationConfig(num_train=50_000, num_test=10_000, epochs=60, width=16, num_members=10),
}


@dataclass(frozen=True)
class StudentRow:
    """The scores of one method."""

    seed: int
    method: str
    passes: int
    accuracy: float
    nll: float
    information_agreement: float | None
    """The rank correlation of mutual information with that of the ensemble."""


def units(config: DistillationConfig) -> list[Unit]:
    """Return one unit for each seed."""
    return [Unit(f"seed {seed}", {"seed": seed}) for seed in config.seeds]


def work(
    config: DistillationConfig, unit: Unit, needed: Results, data_folder: DataFolder = None
) -> list[dict[str, Any]]:
    """Train the ensemble and both students, and return their rows."""
    seed = unit.arguments["seed"]
    images = load_grey_images(config.data, (config.num_train, 0, config.num_test), seed, data_folder)
    training = bb.TrainingConfig(config.epochs, config.batch_size, config.learning_rate, seed=seed)
    (inputs, labels), make = images.test, partial(SmallVGG, width=config.width)
    with warnings_ignored():
        teacher = bb.deep_ensemble(make, images.train, cross_entropy, training, num_members=config.num_members)
        students = {}
        for head in ("mean", "dirichlet"):
            students[head] = made(make, seed)
            epochs = max(1, 2 * config.epochs // (1 + config.num_views))
            own = bb.TrainingConfig(epochs, config.batch_size, config.learning_rate, seed=seed)
            views = bb.RandomCrop(padding=2, fill=float(images.train[0].min()))
            options: Any = {"head": head, "transform": views, "num_views": config.num_views, "seed": seed}
            bb.distill.train_student(teacher, students[head], images.train[0], bb.categorical(), own, **options)
        found = {
            SINGLE: bb.predict(bb.deterministic(teacher.member(0)), inputs, bb.categorical()),
            STUDENT: bb.predict(bb.deterministic(students["mean"]), inputs, bb.categorical()),
            DIRICHLET: bb.distill.dirichlet_predictive(students["dirichlet"], inputs),
            ENSEMBLE: bb.predict(teacher, inputs, bb.categorical()),
        }
    information = found[DIRICHLET].mutual_information, found[ENSEMBLE].mutual_information
    scored = []
    for method, own in found.items():
        passes = config.num_members if method == ENSEMBLE else 1
        nll = bb.metrics.negative_log_likelihood(own.log_prob(labels))
        agreement = bb.metrics.rank_correlation(*information) if method == DIRICHLET else None
        scored.append(StudentRow(seed, method, passes, bb.metrics.accuracy(own.probs, labels), nll, agreement))
    return [asdict(row) for row in scored]


def rows(config: DistillationConfig, results: Results) -> list[StudentRow]:
    """Return the rows of all finished units."""
    return [StudentRow(**record) for unit in units(config) for record in results.get(unit.name, [])]


def kept_gain(found: Sequence[StudentRow], method: str) -> list[float]:
    """Return for each seed the share of the ensemble's gain in NLL over a single network that a student keeps."""
    nll = {(row.seed, row.method): row.nll for row in found}
    seeds = dict.fromkeys(row.seed for row in found)
    return [(nll[seed, SINGLE] - nll[seed, method]) / (nll[seed, SINGLE] - nll[seed, ENSEMBLE]) for seed in seeds]


def tables(config: DistillationConfig, results: Results) -> list[ResultTable]:
    """Return means over seeds, and the share of the gain that students keep."""
    found, lines = rows(config, results), []
    for method in METHODS if found else ():
        own = [row for row in found if row.method == method]
        shares = kept_gain(found, method)
        agreements = [row.information_agreement for row in own if row.information_agreement is not None]
        lines.append((
            method, own[0].passes, with_error([row.accuracy for row in own], ".4f"),
            with_error([row.nll for row in own], ".4f"), fmean(shares),
            " ".join(f"{share:.0%}" for share in shares), fmean(agreements) if agreements else None,
        ))  # fmt: skip
    return [
        ResultTable(
            "A student of a deep ensemble",
            ("method", "passes", "accuracy", "NLL", "gain kept", "each seed", "agreement on MI"),
            tuple(lines),
            ("", "", "", "", ".0%", "", ".2f"),
            (
                "Gain kept: the share of the ensemble's gain in NLL over a single network.",
                "Behind ±: two standard errors.",
            ),
        )
    ]


def figures(config: DistillationConfig, results: Results) -> dict[str, Figure]:
    """Show the NLL of each method, seed by seed."""
    found = rows(config, results)
    lines = {m: (config.seeds, [row.nll for row in found if row.method == m]) for m in METHODS}
    figure = seeds_figure(lines, xlabel="seed", ylabel="NLL on test images")
    figure.axes[0].set_xticks(config.seeds)
    return {"NLL-of-each-seed": figure}


def notes(config: DistillationConfig) -> list[str]:
    """Say what was trained."""
    return [
        f"{config.num_members} small networks with batch norm, {config.num_train:,} training images.",
        f"Students see the training images and {count(config.num_views, 'shifted view')} of each.",
    ]
