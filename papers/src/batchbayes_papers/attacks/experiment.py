"""How many steps of an attack a prediction withstands: a network, MCBN, MC dropout, variance layers, ensembles.

Neklyudov, Molchanov, Ashukha and Vetrov, "Variance Networks" (ICLR 2019), show the share of successful attacks against
the number of gradient updates for five kinds of networks. The paper states neither the attack nor its step nor the
data. Here two kinds of updates are tried: along the sign of the gradient, and along the gradient itself, which is small
where a prediction is sure. Gradients are averaged over as many draws as predict, new ones for each update. Both steps
are chosen so that half of the attacks on the deterministic network succeed after about 11 updates, as in the figure. An
attack succeeds when the averaged prediction changes from right to wrong.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from statistics import fmean
from typing import Any

from torch.nn.functional import cross_entropy

import batchbayes as bb
from batchbayes.tools import Figure, member_seed
from batchbayes_papers.attacks import attacks
from batchbayes_papers.data.folder import DataFolder
from batchbayes_papers.data.mnist import Images, Source, load_grey_images
from batchbayes_papers.image_networks import dropout_network, trained, variance_network
from batchbayes_papers.models.small_vgg import SmallVGG
from batchbayes_papers.runner.experiment import Results, Unit, warnings_ignored
from batchbayes_papers.runner.figures import seeds_figure
from batchbayes_papers.runner.tables import ResultTable, with_error

PUBLISHED_UPDATES = (10, 25, 50, 75, 100, 125, 150, 175, 198)
PUBLISHED = {
    "network": (46.7, 73.0, 87.3, 92.8, 95.5, 97.0, 97.9, 98.4, 98.7),
    "MC dropout": (27.3, 59.8, 80.1, 88.3, 92.7, 94.7, 95.9, 96.7, 97.1),
    "variance layer": (19.2, 43.0, 62.1, 71.0, 76.2, 79.6, 81.9, 83.9, 84.9),
    "deep ensemble": (16.9, 46.7, 71.2, 82.5, 88.3, 91.8, 93.9, 95.3, 96.4),
    "variance ensemble": (12.3, 34.3, 54.8, 65.8, 72.9, 77.6, 80.9, 83.3, 84.9),
}
"""Successful attacks in percent, read off the published figure."""
METHODS = ("network", "MCBN", "MC dropout", "variance layer", "deep ensemble", "variance ensemble")
UPDATES: tuple[attacks.Along, ...] = ("gradient", "sign")


@dataclass(frozen=True)
class AttackConfig:
    """A configuration. The defaults are those of the preset `quick`."""

    data: Source = "mnist"
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    num_train: int = 3000
    num_attacked: int = 100
    epochs: int = 8
    width: int = 8
    """Channels of the first convolution."""
    gradient_step: float = 3.0
    """In the unit of standardised pixels, for a gradient of the log probability."""
    sign_step: float = 0.0065
    """In the unit of standardised pixels."""
    epsilon: float = 3.0
    """So large that it does not stop the attack, as in the figure, where almost all attacks succeed in the end."""
    updates: tuple[int, ...] = (1, 2, 5, 10, 15, 20, 25, 35, 50)
    num_samples: int = 5
    """Draws that predict, and whose gradients are averaged; also the networks of the ensemble."""


PRESETS = {
    "smoke": AttackConfig("synthetic", (0,), 128, 20, epochs=3, updates=(1, 3), num_samples=2),
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
    images = load_grey_images(config.data, (config.num_train, 0, config.num_attacked), seed, data_folder)
    with warnings_ignored():
        posterior = _posterior(config, seed, unit.arguments["method"], images)
        return {along: _attacked(config, seed, posterior, images, along) for along in UPDATES}


def _attacked(
    config: AttackConfig, seed: int, posterior: bb.Posterior, images: Images, along: attacks.Along
) -> dict[str, Any]:
    inputs, labels = images.test
    options: Any = {"num_samples": config.num_samples, "seed": seed}
    clean = bb.predict(posterior, inputs, bb.categorical(), **options)
    right, attacked, success = clean.log_probs.argmax(-1) == labels, clean, []
    step = config.sign_step if along == "sign" else config.gradient_step
    path = attacks.attack_steps(
        posterior, inputs, labels, bb.categorical(), epsilon=config.epsilon, step=step, along=along, **options
    )
    for number, moved in enumerate(islice(path, max(config.updates)), 1):
        if number in config.updates:
            attacked = bb.predict(posterior, moved, bb.categorical(), **options)
            wrong = attacked.log_probs.argmax(-1) != labels
            success.append(float((wrong & right).sum() / right.sum()))
    return {
        "accuracy": float(right.double().mean()),
        "success": success,
        "detection_by_entropy": bb.metrics.ood_auroc(clean.entropy, attacked.entropy),
        "detection_by_information": bb.metrics.ood_auroc(clean.mutual_information, attacked.mutual_information),
    }


def _posterior(config: AttackConfig, seed: int, method: str, images: Images) -> bb.Posterior:
    training = bb.TrainingConfig(config.epochs, 64, 2e-3, seed=seed)
    if method == "deep ensemble":
        return bb.deep_ensemble(
            partial(SmallVGG, width=config.width), images.train, cross_entropy, training, num_members=config.num_samples
        )
    if method == "MC dropout":
        return dropout_network(images.train, training, config.width)
    if method == "variance layer":
        return variance_network(images.train, training, config.width)
    if method == "variance ensemble":
        each = [replace(training, seed=member_seed(seed, number)) for number in range(config.num_samples)]
        return bb.ensemble([variance_network(images.train, own, config.width) for own in each])
    network = trained(images.train, training, config.width)
    if method == "MCBN":
        return bb.mcbn(network, images.train[0], batch_size=64, seed=seed, center="batches")
    return bb.deterministic(network)


def _results(config: AttackConfig, results: Results, method: str, along: attacks.Along) -> list[dict[str, Any]]:
    return [results[name][along] for seed in config.seeds if (name := f"seed {seed}, {method}") in results]


def tables(config: AttackConfig, results: Results) -> list[ResultTable]:
    """Return for each kind of update the shares of successful attacks, and how well attacks are detected."""
    return [_table(config, results, along) for along in UPDATES]


def _share(successes: list[float]) -> str:
    """Return the mean share of successful attacks in per cent. It is not known if no prediction was right before."""
    known = [100 * share for share in successes if not math.isnan(share)]
    return with_error(known, ".0f") if known else ""


def _table(config: AttackConfig, results: Results, along: attacks.Along) -> ResultTable:
    lines: list[tuple[Any, ...]] = []
    for method in METHODS:
        if own := _results(config, results, method, along):
            shares = [_share([each["success"][i] for each in own]) for i in range(len(config.updates))]
            names = ("accuracy", "detection_by_entropy", "detection_by_information")
            lines.append((method, *shares, *(fmean(each[name] for each in own) for name in names)))
        if method in PUBLISHED:
            readings = dict(zip(PUBLISHED_UPDATES, PUBLISHED[method], strict=True))
            shown = [f"{readings[count]:.0f}" if count in readings else "" for count in config.updates]
            lines.append((f"{method}, published", *shown, None, None, None))
    return ResultTable(
        f"Successful attacks in percent, by steps along the {'sign of the ' if along == 'sign' else ''}gradient",
        ("method", *map(str, config.updates), "accuracy", "AUROC by entropy", "AUROC by MI"),
        tuple(lines),
        ("", *[""] * len(config.updates), ".3f", ".2f", ".2f"),
        ("Columns: the number of updates. Behind ±: two standard errors over seeds. Empty: no attacked image had been "
         "right before.",
         "AUROC: how well a score separates clean images from those after all updates."),
    )  # fmt: skip


def figures(config: AttackConfig, results: Results) -> dict[str, Figure]:
    """Show the share of successful attacks against the number of updates, beside the published readings."""
    near = [i for i, count in enumerate(PUBLISHED_UPDATES) if count <= max(config.updates)]
    published = {
        m: ([PUBLISHED_UPDATES[i] for i in near], [shares[i] / 100 for i in near]) for m, shares in PUBLISHED.items()
    }
    labels: Any = {"xlabel": "gradient updates", "ylabel": "share of successful attacks"}
    found = {}
    for along in UPDATES:
        own = {m: [each["success"] for each in _results(config, results, m, along)] for m in METHODS}
        lines = {m: (config.updates, shares) for m, shares in own.items() if shares}
        found[f"success-of-attacks-along-the-{along}"] = seeds_figure(lines, published=published, **labels)
    return found


def notes(config: AttackConfig) -> list[str]:
    """Say how this differs from the paper."""
    return [
        "The paper does not state attack, step and data. Here: steps of "
        f"{config.gradient_step:g} times the gradient of the log probability, and of {config.sign_step:g} standard "
        f"deviations of a pixel along its sign; gradients averaged over {config.num_samples} draws.",
        f"A small network with batch norm, {config.num_train:,} training images, {config.num_attacked} attacked ones. "
        "The hidden dense layer is the variance layer.",
    ]
