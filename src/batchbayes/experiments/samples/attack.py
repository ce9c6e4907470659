"""How many steps of an attack a prediction withstands: a network, MCBN, MC dropout, variance layers, an ensemble.

Neklyudov, Molchanov, Ashukha and Vetrov, "Variance Networks" (ICLR 2019), show the share of successful attacks against
the number of gradient updates for five kinds of networks. The paper states neither the attack nor its step nor the
data; here it is the iterated gradient sign, with gradients averaged over as many draws as predict, new ones for each
update. The step is chosen so that half of the attacks on the deterministic network succeed after about 11 updates, as
in the figure. An attack succeeds when the averaged prediction changes from right to wrong.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy

from batchbayes._common.text import count
from batchbayes.attacks import gradient_sign_steps
from batchbayes.data.folder import DataFolder
from batchbayes.decisions import detection_auroc
from batchbayes.experiments.samples.images import Images, Source, load_images
from batchbayes.experiments.samples.noisy_networks import dropout_network, trained, variance_network
from batchbayes.likelihoods import categorical
from batchbayes.methods.batchnorm.mcbn import mcbn
from batchbayes.methods.point import deterministic
from batchbayes.methods.samples.deep_ensemble import deep_ensemble
from batchbayes.models.vgg import SmallVGG
from batchbayes.plots import seeds_figure
from batchbayes.plots.style import Figure
from batchbayes.posterior import Posterior
from batchbayes.prediction import predict
from batchbayes.predictive import CategoricalPredictive
from batchbayes.reproduce.experiment import Results, Unit, warnings_ignored
from batchbayes.reproduce.tables import ResultTable
from batchbayes.training.loop import TrainingConfig

PUBLISHED_UPDATES = (10, 25, 50, 75, 100, 125, 150, 175, 198)
PUBLISHED = {
    "network": (46.7, 73.0, 87.3, 92.8, 95.5, 97.0, 97.9, 98.4, 98.7),
    "MC dropout": (27.3, 59.8, 80.1, 88.3, 92.7, 94.7, 95.9, 96.7, 97.1),
    "variance layer": (19.2, 43.0, 62.1, 71.0, 76.2, 79.6, 81.9, 83.9, 84.9),
    "deep ensemble": (16.9, 46.7, 71.2, 82.5, 88.3, 91.8, 93.9, 95.3, 96.4),
}
"""Successful attacks in percent, read off the published figure."""
METHODS = ("network", "MCBN", "MC dropout", "variance layer", "deep ensemble")


@dataclass(frozen=True)
class AttackConfig:
    """A configuration. The defaults are those of the preset `quick`."""

    data: Source = "mnist"
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    num_train: int = 3000
    num_attacked: int = 200
    epochs: int = 8
    width: int = 8
    """Channels of the first convolution."""
    step: float = 0.009
    """In the unit of standardised pixels."""
    epsilon: float = 3.0
    """So large that it does not stop the attack, as in the figure, where almost all attacks succeed in the end."""
    updates: tuple[int, ...] = (1, 2, 5, 10, 15, 20, 25, 30, 40, 50)
    num_samples: int = 5
    """Draws that predict, and whose gradients are averaged; also the networks of the ensemble."""


PRESETS = {
    "smoke": AttackConfig("synthetic", (0,), 128, 20, epochs=3, updates=(1, 10), num_samples=2),
    "quick": AttackConfig(),
    "paper": AttackConfig(
        num_train=50_000, num_attacked=1000, epochs=40, width=16, updates=(10, 25, 50, 75, 100, 150, 200)
    ),
}


def units(config: AttackConfig) -> list[Unit]:
    """Return one unit for each seed and method."""
    return [Unit(f"seed {seed}, {m}", {"seed": seed, "method": m}) for seed in config.seeds for m in METHODS]


def work(config: AttackConfig, unit: Unit, needed: Results, data_folder: DataFolder = None) -> dict[str, Any]:
    """Attack one method, and return the share of successful attacks after each number of updates."""
    seed = unit.arguments["seed"]
    images = load_images(config.data, (config.num_train, 0, config.num_attacked), seed, data_folder)
    inputs, labels = images.test
    options: Any = {"num_samples": config.num_samples, "seed": seed}
    with warnings_ignored():
        posterior = _posterior(config, seed, unit.arguments["method"], images)
        clean = predict(posterior, inputs, categorical(), **options)
        right = _classes(clean) == labels
        success, path = [], gradient_sign_steps(
            posterior, inputs, labels, categorical(), epsilon=config.epsilon, step=config.step, **options
        )  # fmt: skip
        attacked = clean
        for number in range(1, max(config.updates) + 1):
            moved = next(path)
            if number in config.updates:
                attacked = predict(posterior, moved, categorical(), **options)
                success.append(float(((_classes(attacked) != labels) & right).sum() / right.sum()))
    return {
        "accuracy": float(right.double().mean()),
        "success": success,
        "detection_by_entropy": detection_auroc(clean.entropy, attacked.entropy),
        "detection_by_information": detection_auroc(clean.mutual_information, attacked.mutual_information),
    }


def _classes(predictive: CategoricalPredictive) -> Tensor:
    return predictive.log_probs.argmax(-1)


def _posterior(config: AttackConfig, seed: int, method: str, images: Images) -> Posterior:
    training = TrainingConfig(config.epochs, 64, 2e-3, seed=seed)
    if method == "deep ensemble":
        return deep_ensemble(
            partial(SmallVGG, width=config.width), images.train, cross_entropy, training, num_members=config.num_samples
        )
    if method == "MC dropout":
        return dropout_network(images.train, training, config.width)
    if method == "variance layer":
        return variance_network(images.train, training, config.width)
    network = trained(images.train, training, config.width)
    return deterministic(network) if method == "network" else mcbn(network, images.train[0], batch_size=64, seed=seed)


def tables(config: AttackConfig, results: Results) -> list[ResultTable]:
    """Return means over seeds of the share of successful attacks, and how well attacks are detected."""
    lines, columns = [], []
    for number in config.updates:
        columns += [count(number, "update"), *(["published"] if number in PUBLISHED_UPDATES else [])]
    for method in METHODS:
        own = [results[name] for seed in config.seeds if (name := f"seed {seed}, {method}") in results]
        if own:
            shares = []
            for i, number in enumerate(config.updates):
                shares.append(_mean([each["success"][i] for each in own]))
                shares += [_published(method, number)] if number in PUBLISHED_UPDATES else []
            names = ("accuracy", "detection_by_entropy", "detection_by_information")
            lines.append((method, *shares, *(_mean([each[name] for each in own]) for name in names)))
    return [
        ResultTable(
            "Successful attacks",
            ("method", *columns, "accuracy", "AUROC by entropy", "AUROC by MI"),
            tuple(lines),
            ("", *[".0%"] * len(columns), ".3f", ".2f", ".2f"),
            (
                "AUROC: how well a score separates clean images from those after all updates.",
                "Published: read off a figure.",
            ),
        )
    ]


def _mean(values: Sequence[float]) -> float | None:
    """Return the mean, or None if a network was never right, so that no attack was possible."""
    mean = sum(values) / len(values)
    return None if math.isnan(mean) else mean


def _published(method: str, updates: int) -> float | None:
    """Return the published share of successful attacks after some updates."""
    return PUBLISHED[method][PUBLISHED_UPDATES.index(updates)] / 100 if method in PUBLISHED else None


def figures(config: AttackConfig, results: Results) -> dict[str, Figure]:
    """Show the share of successful attacks against the number of updates, beside the published readings."""
    lines = {m: (config.updates, [results[f"seed {seed}, {m}"]["success"] for seed in config.seeds]) for m in METHODS}
    near = [number for number in PUBLISHED_UPDATES if number <= max(config.updates)]
    shown = {m: (near, [share / 100 for share in shares[: len(near)]]) for m, shares in PUBLISHED.items() if near}
    labels: Any = {"xlabel": "gradient updates", "ylabel": "share of successful attacks"}
    return {"attack": seeds_figure(lines, published=shown, **labels)}


def notes(config: AttackConfig) -> list[str]:
    """Say how this differs from the paper."""
    return [
        "The paper does not state attack, step and data. Here: iterated gradient sign with a step of "
        f"{config.step:g} standard deviations of a pixel, gradients averaged over {config.num_samples} draws.",
        f"A small network with batch norm, {config.num_train:,} training images. The hidden dense layer is the "
        "variance layer; the ensemble of variance networks of the paper is not repeated.",
        *(["Noisy patterns replace images, only to test the program."] if config.data == "synthetic" else []),
    ]
