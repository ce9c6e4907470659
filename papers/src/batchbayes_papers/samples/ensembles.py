"""What every method is worth in networks of a deep ensemble, and what it costs in forward passes.

Ashukha, Lyzhov, Molchanov and Vetrov, "Pitfalls of In-Domain Uncertainty Estimation and Ensembling in Deep Learning"
(ICLR 2020), compare methods by the calibrated log-likelihood: each method first gets its best temperature. The
deep-ensemble equivalent of a method is the number of independently trained networks that reach the same value.

Differences from the paper: Small networks and few images replace VGG and ResNets on CIFAR. The temperature is tuned on
held-out images, and not by cross-validation on the test images, and it scales the logits of each draw.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import batchbayes as bb
from batchbayes.methods.samples.schedules import Cyclical
from batchbayes.tools import Figure, house_style, new_figure, shuffled, summarised
from batchbayes_papers.data.folder import DataFolder
from batchbayes_papers.data.mnist import Images, Source, load_grey_images
from batchbayes_papers.image_networks import dropout_network, trained, variance_network
from batchbayes_papers.models.small_vgg import SmallVGG
from batchbayes_papers.runner.experiment import Results, Unit, warnings_ignored
from batchbayes_papers.runner.figures import seeds_figure
from batchbayes_papers.runner.tables import ResultTable

DEEP = "deep ensemble"
PANELS = {"one training": (0, 1), "one network, trained for longer": (1, 2), "many trainings": (2, math.inf)}
"""Methods whose training costs more than the first and at most the second number of trainings share a panel."""


@dataclass(frozen=True)
class MethodCurve:
    """How good a method is after some numbers of forward passes."""

    seed: int
    method: str
    passes: Sequence[int]
    nll: Sequence[float]
    calibrated_nll: Sequence[float]
    """With the temperature that is best on held-out images."""
    accuracy: Sequence[float]
    trainings: float
    """What its training costs, in trainings of one network."""


Curves = Mapping[str, Sequence[MethodCurve]]
"""By method, one for each seed."""


@dataclass(frozen=True)
class EnsemblesConfig:
    """A configuration. The defaults are those of the preset `quick`."""

    data: Source = "fashion_mnist"
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    num_train: int = 3000
    """Few, so that a single network is too certain, as large networks are."""
    num_held_out: int = 1000
    num_test: int = 2000
    epochs: int = 10
    batch_size: int = 64
    learning_rate: float = 2e-3
    width: int = 8
    """Channels of the first convolution."""
    num_members: int = 6
    """Networks of the deep ensemble."""
    passes: tuple[int, ...] = (1, 2, 4, 8)


PRESETS = {
    "smoke": EnsemblesConfig("synthetic", (0,), 192, 100, 100, epochs=4, num_members=3, passes=(1, 2, 3)),
    "quick": EnsemblesConfig(),
    "paper": EnsemblesConfig(
        num_train=50_000, num_held_out=10_000, num_test=10_000, epochs=60, width=16, num_members=20
    ),
}


def units(config: EnsemblesConfig) -> list[Unit]:
    """Return one unit for each seed and family of methods."""
    efforts = {"networks": config.num_members}
    return [
        Unit(f"seed {seed}, {family}", {"seed": seed, "family": family}, effort=efforts.get(family, 2.0))
        for seed in config.seeds
        for family in FAMILIES
    ]


def work(config: EnsemblesConfig, unit: Unit, needed: Results, data_folder: DataFolder = None) -> list[dict[str, Any]]:
    """Return the curves of one family of methods."""
    seed, family = unit.arguments["seed"], unit.arguments["family"]
    images = load_grey_images(config.data, (config.num_train, config.num_held_out, config.num_test), seed, data_folder)
    with warnings_ignored():
        posteriors = FAMILIES[family](config, seed, images)
        return [asdict(curve(config, seed, images, name, *found)) for name, found in posteriors.items()]


Found = dict[str, tuple[bb.Posterior, float]]
"""Posteriors by the names of their methods, with the cost of their training."""


def _network(config: EnsemblesConfig) -> Callable[[], nn.Module]:
    return partial(SmallVGG, width=config.width)


def _training(config: EnsemblesConfig, seed: int, **changes: Any) -> bb.TrainingConfig:
    usual = bb.TrainingConfig(config.epochs, config.batch_size, config.learning_rate, seed=seed)
    return replace(usual, **changes)


def _from_networks(config: EnsemblesConfig, seed: int, images: Images) -> Found:
    """Independent trainings: one of them with every method that needs no other training, and all of them together."""
    members = bb.deep_ensemble(
        _network(config), images.train, cross_entropy, _training(config, seed), num_members=config.num_members
    )
    network = members.member(0)
    around: Any = {"batch_size": config.batch_size, "center": "running", "seed": seed}
    fitted = bb.mcbn(network, images.train[0], **around)
    tuned = bb.tune_batch_size(fitted, [images.held_out], bb.categorical(), num_samples=32, seed=seed).posterior
    noisy = members.with_noise(lambda member: bb.mcbn(member, images.train[0], **around, num_samples=16))
    views = bb.RandomCrop(padding=2, fill=float(images.train[0].min()))
    laplace = bb.last_layer_laplace(network, images.train[0], bb.categorical(), held_out=images.held_out)
    cost = float(config.num_members)
    return {
        "network": (bb.deterministic(network), 1.0),
        "MCBN, tuned": (tuned, 1.0),
        "stochastic BN": (bb.stochastic_bn(network, images.train[0], **around), 1.0),
        "correlated BN": (bb.correlated_bn(network, images.train[0], **around), 1.0),
        "last-layer Laplace": (laplace, 1.0),
        "views": (bb.with_views(bb.deterministic(network), views), 1.0),
        DEEP: (members, cost),
        f"{DEEP} with MCBN": (noisy, cost),
        f"{DEEP} with views": (bb.with_views(members, views), cost),
    }


def _from_snapshots(config: EnsemblesConfig, seed: int, images: Images) -> Found:
    cycles = max(2, config.num_members // 2)
    training = _training(config, seed, epochs=2 * config.epochs)
    return {
        "snapshots": (bb.snapshots(_network(config), images.train, cross_entropy, training, num_members=cycles), 2.0)
    }


def _after_training(config: EnsemblesConfig, seed: int, images: Images) -> Found:
    """Go on training one network for half as long again."""
    training = _training(config, seed)
    network = trained(images.train, training, config.width)
    further = max(2, config.epochs // 2)
    cycling = _training(config, seed, epochs=further)
    constant = _training(config, seed, epochs=further, optimiser="sgd", learning_rate=0.01)
    statistics = shuffled(*images.train, 256, seed)(0)
    geometric = bb.fast_geometric(network, images.train, cross_entropy, cycling, num_members=further)
    gaussian = bb.swag(
        network, images.train, cross_entropy, constant, num_members=max(config.passes), statistics=list(statistics)
    )
    return {"fast geometric ensemble": (geometric, 1.5), "SWAG": (gaussian, 1.5)}


def _from_cycles(config: EnsemblesConfig, seed: int, images: Images) -> Found:
    """Sample the posterior under a prior N(0, 0.1) in cosine cycles, at temperature 1 and much colder."""
    cycles = max(2, config.num_members // 2)
    found: Found = {}
    for temperature, name in ((1.0, "cyclical SGLD"), (0.01, "cyclical SGLD, T = 0.01")):
        training = _training(config, seed, epochs=2 * config.epochs, learning_rate=0.1)
        samples = bb.sg_mcmc(
            _network(config), images.train, cross_entropy, training, schedule=Cyclical(cycles, exploring=0.7),
            prior_precision=10.0, temperature=temperature, num_samples=min(4 * cycles, max(config.passes)),
        )  # fmt: skip
        found[name] = (samples, 2.0)
    return found


def _random_weights(config: EnsemblesConfig, seed: int, images: Images) -> Found:
    """Train with noise in the weights: from the start, or for half as long again after an ordinary training.

    After so short a training the full KL leaves a mean field too wide, so it is also weighed by a tenth.
    """
    training = _training(config, seed)
    network, batches = trained(images.train, training, config.width), shuffled(*images.train, config.batch_size, seed)
    options: Any = {"epochs": max(2, config.epochs // 2), "learning_rate": config.learning_rate, "seed": seed}
    mean_field, tenth = bb.MeanField(prior_std=None, initial_std=0.03), bb.Schedule(temperature=0.1)
    return {
        "MC dropout": (dropout_network(images.train, training, config.width), 1.0),
        "variance layer": (variance_network(images.train, training, config.width), 1.0),
        "mean field": (bb.variational(network, batches, mean_field, **options), 1.5),
        "mean field, KL / 10": (bb.variational(network, batches, mean_field, schedule=tenth, **options), 1.5),
        "sparse VD, KL / 10": (bb.variational(network, batches, bb.SparseVD(), schedule=tenth, **options), 1.5),
    }


FAMILIES: dict[str, Callable[[EnsemblesConfig, int, Images], Found]] = {
    "networks": _from_networks,
    "snapshots": _from_snapshots,
    "after training": _after_training,
    "cyclical SGLD": _from_cycles,
    "random weights": _random_weights,
}
"""One unit each: what is made from independent trainings, and from one training of a special kind."""


def curve(
    config: EnsemblesConfig, seed: int, images: Images, name: str, posterior: bb.Posterior, trainings: float
) -> MethodCurve:
    """Score a method after 1, 2, 4, ... forward passes. Each pass is one draw."""
    held_out, test = (
        bb.predict(
            posterior, part[0], bb.categorical(), num_samples=max(config.passes), seed=seed, keep_draws=True
        ).draws
        for part in (images.held_out, images.test)
    )
    passes = sorted({*(count for count in config.passes if count < len(test)), len(test)})
    if name == DEEP:
        passes = list(range(1, len(test) + 1))  # what the others are measured by
    scores = [_scores(held_out[:count], test[:count], images) for count in passes]
    nll, calibrated, accuracies = zip(*scores, strict=True)
    return MethodCurve(seed, name, tuple(passes), nll, calibrated, accuracies, trainings)


def _scores(held_out: Tensor, test: Tensor, images: Images) -> tuple[float, float, float]:
    """Return NLL as it is, NLL at the best temperature, and accuracy, of draws (S, N, K)."""
    labels = images.test[1]
    plain, unseen = (summarised(bb.categorical().summary(), draws) for draws in (test, held_out))
    best = bb.calibrate.tune_temperature(unseen, images.held_out[1])
    tuned = summarised(bb.categorical(temperature=best).summary(), test)
    return (
        bb.metrics.negative_log_likelihood(plain.log_prob(labels)),
        bb.metrics.negative_log_likelihood(tuned.log_prob(labels)),
        bb.metrics.accuracy(plain.probs, labels),
    )


def curves(config: EnsemblesConfig, results: Results) -> dict[str, list[MethodCurve]]:
    """Return the curves of all finished units by method, one for each seed."""
    found: dict[str, list[MethodCurve]] = {}
    for unit in units(config):
        for record in results.get(unit.name, []):
            found.setdefault(record["method"], []).append(MethodCurve(**record))
    return found


def tables(config: EnsemblesConfig, results: Results) -> list[ResultTable]:
    """Return means over seeds with all passes of each method, and its deep-ensemble equivalent."""
    return [methods_table(curves(config, results), config.num_members)]


def figures(config: EnsemblesConfig, results: Results) -> dict[str, Figure]:
    """Show the calibrated NLL against forward passes."""
    return {"calibrated-NLL-against-passes": passes_figure(curves(config, results), config.passes)}


def notes(config: EnsemblesConfig) -> list[str]:
    """Say how this differs from the paper."""
    return [
        f"A small network with batch norm and {config.num_train:,} training images, {config.epochs} epochs of Adam.",
        f"Means over {len(config.seeds)} seeds, {config.num_test:,} test images.",
        "Figure: methods that are much worse than a single network are left out; the table has them.",
    ]


def methods_table(found: Curves, num_members: int) -> ResultTable:
    """Return means over seeds with all passes of each method, and its equivalent in a deep ensemble."""
    ensembles, lines = {own.seed: own for own in found.get(DEEP, [])}, []
    for method, each in found.items():
        paired = [own for own in each if own.seed in ensembles]
        groups = [paired, *([own] for own in paired)] if paired else []  # all seeds, then each of them
        together, *alone = [equivalent(own, [ensembles[one.seed] for one in own]) for own in groups] or [None]
        lines.append((
            method, each[0].trainings, each[0].passes[-1],
            fmean(own.accuracy[-1] for own in each), fmean(own.nll[-1] for own in each),
            fmean(own.calibrated_nll[-1] for own in each),
            _shown(together, num_members), " ".join(_shown(value, num_members) for value in alone),
        ))  # fmt: skip
    return ResultTable(
        "Every method with all its passes",
        ("method", "trainings", "passes", "accuracy", "NLL", "calibrated NLL", "equivalent", "each seed"),
        tuple(lines),
        ("", ".1f", "", ".4f", ".4f", ".4f", "", ""),
        ("Calibrated NLL: with the temperature that is best on held-out images.",
         "Equivalent: the number of networks of a deep ensemble with the same calibrated NLL, by the mean curve. "
         f"{num_members}+ is better than all of them."),
    )  # fmt: skip


def equivalent(own: Sequence[MethodCurve], ensembles: Sequence[MethodCurve]) -> float:
    """Return the deep-ensemble equivalent by means over seeds. It is infinite beyond the largest ensemble."""
    value = -fmean(each.calibrated_nll[-1] for each in own)
    mean_curve = [-fmean(column) for column in zip(*(each.calibrated_nll for each in ensembles), strict=True)]
    return bb.metrics.deep_ensemble_equivalent(
        value, torch.tensor(ensembles[0].passes), torch.tensor(mean_curve, dtype=torch.float64)
    )


def _shown(value: float | None, most: int) -> str:
    return "" if value is None else f"{most}+" if value == math.inf else f"{value:.1f}"


def passes_figure(found: Curves, ticks: Sequence[int]) -> Figure:
    """Show the calibrated NLL against forward passes, in a panel for each price of training.

    Methods that are much worse than a single network are left out.
    """
    deep = [fmean(column) for column in zip(*(own.calibrated_nll for own in found[DEEP]), strict=True)]
    room = 0.5 * (deep[0] - deep[-1])
    seen = {m: each for m, each in found.items() if fmean(own.calibrated_nll[-1] for own in each) < deep[0] + room}
    with house_style():
        figure, panels = new_figure(len(PANELS), 1, (7.2, 9.0))
        for panel, (title, (above, most)) in zip(panels[:, 0], PANELS.items(), strict=True):
            own = {DEEP: found[DEEP]} | {m: each for m, each in seen.items() if above < each[0].trainings <= most}
            lines = {m: (each[0].passes, [one.calibrated_nll for one in each]) for m, each in own.items()}
            seeds_figure(lines, xlabel="forward passes", ylabel="calibrated NLL", xscale="log", ax=panel)
            panel.set(title=title, xticks=ticks, xticklabels=ticks)
            panel.minorticks_off()
        panels[0, 0].set_ylim(deep[-1] - room, deep[0] + room)
    return figure
