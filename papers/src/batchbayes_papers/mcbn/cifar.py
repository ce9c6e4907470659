"""MCBN on CIFAR-10: the likelihood of test images against the number of passes, table 2 of the MCBN paper.

Teye, Azizpour and Smith, "Bayesian Uncertainty Estimation for Batch Normalized Deep Networks" (ICML 2018). The paper
trains a ResNet-32 with batches of 32; the baseline normalises by moving averages of decay 0.9. Here there are up to
three networks: the public ResNet-32 of akamaster, trained with batches of 128; a ResNet that is trained here with
batches of 32; and, in the presets `fine-tuned` and `paper`, the public one after more epochs with batches of 32. Every
curve is a mean over disjoint groups of passes, so that its value for one pass is known as well as that for 128.

Beyond the paper: running and population statistics as baselines, the linear engine, views, a tuned batch size, and
three ways to put a test image together with training images (`query`).
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import batchbayes as bb
from batchbayes.methods.batchnorm.omega import is_mean
from batchbayes.tools import EngineName, Figure, GlobalStream
from batchbayes_papers.data.cifar10 import augmented_batches, standardise
from batchbayes_papers.data.folder import DataFolder, data_file
from batchbayes_papers.image_networks import Course, Source, augmented, fast, load_colour, train_on_bytes
from batchbayes_papers.mcbn.cifar_tables import (
    BATCH_SIZES,
    BOTH,
    FINE_TUNED,
    LINEAR,
    MCBN,
    MOVING,
    MOVING_ENDS,
    OWN,
    POPULATION,
    PUBLIC,
    RUNNING,
    TUNED,
    VIEWS,
    PassesCurve,
    methods_table,
    passes_figure,
    passes_table,
)
from batchbayes_papers.mcbn.query import query_rows, query_table
from batchbayes_papers.models.cifar_resnet import CifarResNet
from batchbayes_papers.models.pretrained import cifar_resnet
from batchbayes_papers.runner.experiment import Results, Unit, warnings_ignored
from batchbayes_papers.runner.records import pack_weights, unpack_weights
from batchbayes_papers.runner.tables import ResultTable

PARTS = ("MCBN", "views", "tuning", "query")
DECAY = 0.9

OWN_RECIPE = Course(epochs=3, batch_size=32, learning_rate=0.05, weight_decay=2e-4)
"""The weight decay is that of the authors' code."""
FINE_TUNING = Course(epochs=10, batch_size=32, learning_rate=0.01, weight_decay=1e-4)
"""The weight decay is that of the public network."""


@dataclass(frozen=True)
class CifarConfig:
    """A configuration. The defaults are those of the preset `quick`."""

    data: Source = "cifar10"
    networks: tuple[str, ...] = (PUBLIC, OWN)
    num_test: int = 500
    num_held_out: int = 500
    """Test images that follow those of the test. They choose the batch size of "tuned"."""
    passes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    few_passes: int = 32
    """The passes of views and of the tuned batch size."""
    num_population: int = 500
    """Training images for the population statistics: there is a pass over them for each layer."""
    depth: int = 20
    width: int = 8
    num_train: int = 25_000
    recipe: Course = OWN_RECIPE
    fine_tuning: Course = FINE_TUNING
    """For the public network, with all training images."""
    num_query: int = 48
    """Test images that are predicted inside and outside of their batches."""
    query_passes: int = 32


PRESETS = {
    "smoke": CifarConfig(
        "synthetic", (OWN,), num_test=40, num_held_out=40, passes=(1, 2, 4, 8), few_passes=4, num_population=64,
        depth=8, width=4, num_train=320, recipe=Course(3, 32, 0.05), num_query=4, query_passes=6,
    ),
    "quick": CifarConfig(),
    "fine-tuned": CifarConfig(
        networks=(FINE_TUNED,),
        num_test=2000,
        num_train=50_000,
        fine_tuning=replace(FINE_TUNING, epochs=3, bfloat16=True),
    ),
    "paper": CifarConfig(
        num_test=5000, few_passes=128, num_population=50_000, depth=32, width=16, num_train=50_000,
        networks=(PUBLIC, FINE_TUNED, OWN), recipe=Course(58, 32, 0.1, weight_decay=2e-4), num_query=500,
        query_passes=128,
    ),
}  # fmt: skip


def units(config: CifarConfig) -> list[Unit]:
    """Return the trainings, and for each network one unit for each part of the comparison."""
    trainings = {name: f"training, {name}" for name in (OWN, FINE_TUNED) if name in config.networks}
    made = [Unit(unit, {"network": name, "part": "training"}, effort=8.0) for name, unit in trainings.items()]
    parts = {PUBLIC: PARTS[:-1], FINE_TUNED: PARTS[:1], OWN: PARTS}
    for network in config.networks:
        needs = (trainings[network],) if network in trainings else ()
        for part in parts[network]:
            arguments = {"network": network, "part": part}
            made.append(Unit(f"{network}, {part}", arguments, needs, effort=1.0 if network == OWN else 5.0))
    return made


def work(config: CifarConfig, unit: Unit, needed: Results, data_folder: DataFolder = None) -> Any:
    """Train a network, or return the curves of one part of the comparison."""
    name, part = unit.arguments["network"], unit.arguments["part"]
    data = _Data.load(config, data_folder)
    network = _new_network(config) if name == OWN else _public_network(data_folder)
    if part == "training":
        images, recipe = (data.train, data.train_labels), config.recipe
        if name == FINE_TUNED:
            images, recipe = load_colour(config.data, "train", data_folder), config.fine_tuning
        loss = train_on_bytes(network, *images, recipe, augmented, seed=0)
        return {"weights": pack_weights(network), "training_loss": loss}
    if unit.needs:
        network = unpack_weights(network, needed[unit.needs[0]]["weights"])
    with warnings_ignored():
        if part == "query":
            images, labels = data.test[0][: config.num_query], data.test[1][: config.num_query]
            return query_rows(network, data.train, (images, labels), BATCH_SIZES[OWN], config.query_passes)
        curves = {"MCBN": _mcbn_curves, "views": _view_curves, "tuning": _tuned_curves}[part]
        return [asdict(curve) for curve in curves(config, name, network, data)]


@dataclass(frozen=True, eq=False)
class _Data:
    """Training images as bytes, and standardised test and held-out images with labels."""

    train: Tensor
    train_labels: Tensor
    test: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]

    @classmethod
    def load(cls, config: CifarConfig, folder: DataFolder) -> "_Data":
        train, labels = load_colour(config.data, "train", folder, config.num_train)
        images, targets = load_colour(config.data, "test", folder, config.num_test + config.num_held_out)
        inputs, end = standardise(images), config.num_test
        return cls(train, labels, (inputs[:end], targets[:end]), (inputs[end:], targets[end:]))


def _new_network(config: CifarConfig) -> nn.Module:
    with GlobalStream(0):
        return fast(CifarResNet(config.depth, width=config.width))


def _public_network(data_folder: DataFolder) -> nn.Module:
    return cifar_resnet(32, data_file("weights/resnet32_cifar10_akamaster.safetensors", data_folder))


def _mcbn_curves(config: CifarConfig, name: str, network: nn.Module, data: _Data) -> list[PassesCurve]:
    """Score MCBN by exact draws and by the linear engine, and the network with three kinds of fixed statistics."""
    most, size = max(config.passes), BATCH_SIZES[name]
    posterior = bb.mcbn(network, augmented_batches(data.train, size), num_samples=most, center="batches")
    found = [
        curve_of(config, name, MCBN, posterior, data, most),
        curve_of(config, name, LINEAR, posterior, data, most, engine="linear"),
        curve_of(config, name, RUNNING, bb.deterministic(network), data, 1),
    ]
    ends = [moving_average(posterior, seed) for seed in range(MOVING_ENDS)]
    scored = [curve_of(config, name, MOVING, end, data, 1) for end in ends]
    pll = torch.tensor([curve.pll[0] for curve in scored])
    examples = torch.tensor([curve.examples for curve in scored]).mean(0)
    rate = sum(curve.accuracy for curve in scored) / len(scored)
    spread = float(pll.std())
    found.append(PassesCurve(name, MOVING, (1,), (float(pll.mean()),), rate, tuple(examples.tolist()), spread))
    seen = next(augmented_batches(data.train, min(config.num_population, len(data.train)), seed=1))
    found.append(curve_of(config, name, POPULATION, bb.population(network, seen), data, 1))
    return found


def _view_curves(config: CifarConfig, name: str, network: nn.Module, data: _Data) -> list[PassesCurve]:
    """Score random crops and flips of the test images, without and with the noise of batches."""
    black = tuple(standardise(torch.zeros(1, 3, 1, 1, dtype=torch.uint8)).flatten().tolist())
    look = bb.Compose(bb.RandomCrop(4, black), bb.RandomFlip())
    noisy = bb.mcbn(
        network, augmented_batches(data.train, BATCH_SIZES[name]), num_samples=config.few_passes, center="batches"
    )
    hosts = {VIEWS: bb.deterministic(network), BOTH: noisy}
    return [
        curve_of(config, name, method, bb.with_views(host, look), data, config.few_passes)
        for method, host in hosts.items()
    ]


def _tuned_curves(config: CifarConfig, name: str, network: nn.Module, data: _Data) -> list[PassesCurve]:
    """Score MCBN at the batch size that held-out images choose."""
    batches, count = augmented_batches(data.train, BATCH_SIZES[name]), config.few_passes
    fitted = bb.mcbn(network, batches, num_samples=count, center="running")
    tuned = bb.tune_batch_size(fitted, [data.held_out], bb.categorical(), num_samples=count).posterior
    return [replace(curve_of(config, name, TUNED, tuned, data, count), batch_size=tuned.batch_size)]


def moving_average(posterior: bb.BatchNormPosterior, seed: int) -> bb.BatchNormPosterior:
    """Return the network with moving averages of means and variances, as after training on the rows in some order."""
    rows = posterior.center + posterior.deviations  # (R, D)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    mean = is_mean(posterior.sites)
    values = torch.where(mean, rows, (2 * rows).exp())[order]  # means, and variances with epsilon
    average = values[0]
    for value in values[1:]:
        average = DECAY * average + (1 - DECAY) * value
    center = torch.where(mean, average, 0.5 * average.log())
    return replace(posterior, center=center, deviations=torch.zeros_like(center)[None])


def curve_of(
    config: CifarConfig, network: str, method: str, posterior: bb.Posterior, data: _Data, most: int,
    engine: EngineName = "sample",
) -> PassesCurve:  # fmt: skip
    """Draw the logits of the test images `most` times, and score the draws for each number of passes."""
    images, labels = data.test
    draws = bb.predict(posterior, images, bb.categorical(), num_samples=most, engine=engine, keep_draws=True).draws
    passes = [count for count in config.passes if count <= len(draws)]
    each = [grouped_log_likelihood(draws, labels, count) for count in passes]
    answer = draws.double().softmax(-1).mean(0).argmax(-1)
    right = float((answer == labels).double().mean())
    return PassesCurve(
        network, method, tuple(passes), tuple(float(own.mean()) for own in each), right, tuple(each[-1].tolist())
    )


def grouped_log_likelihood(draws: Tensor, labels: Tensor, count: int) -> Tensor:
    """Return log mean probability of the labels over `count` draws of logits (S, N, K), (N,).

    It is a mean over as many disjoint groups of draws as there are.

    >>> draws = torch.tensor([[[0.0, 0.0]], [[0.0, 0.0]], [[9.0, 0.0]], [[9.0, 0.0]]])
    >>> labels = torch.tensor([0])
    >>> bool(grouped_log_likelihood(draws, labels, 4) > grouped_log_likelihood(draws, labels, 1))
    True
    """
    truth = draws.double().softmax(-1).gather(-1, labels.expand(len(draws), -1)[..., None])[..., 0]  # (S, N)
    groups = truth[: len(truth) // count * count].unflatten(0, (-1, count))  # (G, T, N)
    return groups.mean(1).log().mean(0)


def curves_of(config: CifarConfig, results: Results) -> dict[str, dict[str, PassesCurve]]:
    """Return the curves of all finished units, by network and method."""
    found: dict[str, dict[str, PassesCurve]] = {name: {} for name in config.networks}
    for unit in units(config):
        if unit.arguments["part"] in ("training", "query"):
            continue
        for record in results.get(unit.name, []):
            found[record["network"]][record["method"]] = PassesCurve(**record)
    return found


def tables(config: CifarConfig, results: Results) -> list[ResultTable]:
    """Return the log-likelihood against passes for each network, all methods with all their passes, and queries."""
    found = curves_of(config, results)
    made = [passes_table(config.passes, name, curves) for name, curves in found.items()]
    made.append(methods_table(found))
    if OWN in config.networks:
        made.append(query_table(results.get(f"{OWN}, query")))
    return made


def figures(config: CifarConfig, results: Results) -> dict[str, Figure]:
    """Show the log-likelihood against passes, with the published values and the baselines."""
    return {"log-likelihood-against-passes": passes_figure(config.passes, curves_of(config, results))}


def notes(config: CifarConfig) -> list[str]:
    """Say how this differs from the paper."""
    found = [
        f"The first {config.num_test:,} test images; the paper's script takes 5,000 of 10,000.",
        "The public ResNet-32 was trained with M = 128, and normalises after each convolution, not before.",
    ]
    if FINE_TUNED in config.networks:
        tuning = config.fine_tuning
        half = "; passes of the training in bfloat16" if tuning.bfloat16 else ""
        found.append(
            f"Fine-tuned at M = 32: {tuning.epochs} epochs of SGD on all training images, with a learning rate that "
            f"falls to zero from {tuning.learning_rate:g}{half}."
        )
    shared = "Each draw is shared by all test images, and takes M training images; the paper takes M - 1 for each anew."
    if OWN not in config.networks:
        return [*found, shared]
    return [
        *found,
        f"Trained here: a ResNet-{config.depth} of width {config.width} on {config.num_train:,} images for "
        f"{config.recipe.epochs} epochs of SGD, with a learning rate that falls to zero.",
        f"{shared} The last table compares the two.",
        f"Views and the tuned batch size: {config.few_passes} passes.",
    ]
