"""Which examples to label next: by mutual information, by entropy, or at random.

Houlsby et al. (2011) label where draws of the posterior disagree (BALD). A network is trained from scratch on the
labels so far, MCBN makes a posterior of it, and the best examples of a pool get their labels. The table says how many
labels each choice needs for an accuracy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from batchbayes._common.rng import generator
from batchbayes.data.folder import DataFolder
from batchbayes.decisions import choose_to_label, labels_needed
from batchbayes.experiments.samples.images import Source, load_images
from batchbayes.likelihoods import categorical
from batchbayes.methods.batchnorm.mcbn import mcbn
from batchbayes.methods.point import deterministic
from batchbayes.methods.samples.deep_ensemble import made
from batchbayes.metrics import accuracy
from batchbayes.models.vgg import SmallVGG
from batchbayes.plots import seeds_figure
from batchbayes.plots.style import Figure
from batchbayes.prediction import predict
from batchbayes.reproduce.experiment import Results, Unit, warnings_ignored
from batchbayes.reproduce.tables import ResultTable
from batchbayes.training.batches import shuffled
from batchbayes.training.loop import TrainingConfig, supervised, train

CHOICES: dict[str, Any] = {
    "random": {},
    "entropy": {"by": "entropy"},
    "mutual information": {"by": "mutual_information"},
    "mutual information, jointly": {"by": "mutual_information", "jointly": True},
}


@dataclass(frozen=True)
class ActiveConfig:
    """A configuration. The defaults are those of the preset `quick`."""

    data: Source = "mnist"
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    num_pool: int = 5000
    num_test: int = 2000
    first: int = 40
    """Labels of the first network, chosen at random, as many of each class as comes."""
    batch: int = 40
    """Labels that are added in each round."""
    rounds: int = 18
    steps: int = 150
    """Training steps of each network, the same for all numbers of labels."""
    width: int = 8
    """Channels of the first convolution."""
    num_candidates: int = 1000
    """So many examples of the pool, at random, are scored in each round."""
    num_samples: int = 16
    target: float = 0.95


PRESETS = {
    "smoke": ActiveConfig(
        "synthetic", (0,), 300, 100, 20, 10, 2, steps=10, num_candidates=50, num_samples=4, target=0.1
    ),
    "quick": ActiveConfig(),
    "paper": ActiveConfig(num_pool=50_000, num_test=10_000, first=20, batch=10, rounds=100, steps=1000, width=16),
}


def units(config: ActiveConfig) -> list[Unit]:
    """Return one unit for each seed and way to choose."""
    return [Unit(f"seed {s}, {choice}", {"seed": s, "choice": choice}) for s in config.seeds for choice in CHOICES]


def work(config: ActiveConfig, unit: Unit, needed: Results, data_folder: DataFolder = None) -> dict[str, Any]:
    """Return the numbers of labels and the accuracies of one learning curve."""
    seed, choice = unit.arguments["seed"], unit.arguments["choice"]
    images = load_images(config.data, (config.num_pool, 0, config.num_test), seed, data_folder)
    pool, labels = images.train
    labelled = torch.arange(config.first)  # the pool is shuffled
    counts, accuracies = [], []
    with warnings_ignored():
        for round_number in range(config.rounds + 1):
            network = _trained(config, seed, pool[labelled], labels[labelled])
            test = predict(deterministic(network), images.test[0], categorical())
            counts.append(len(labelled))
            accuracies.append(accuracy(test.probs, images.test[1]))
            if round_number < config.rounds:
                labelled = _with_more(config, seed, round_number, choice, network, pool, labelled)
    return {"counts": counts, "accuracies": accuracies}


def _trained(config: ActiveConfig, seed: int, inputs: Tensor, labels: Tensor) -> Any:
    network = made(partial(SmallVGG, width=config.width), seed)
    size = min(32, len(inputs))
    epochs = max(1, round(config.steps / (len(inputs) // size)))
    training = TrainingConfig(epochs, size, 2e-3, weight_decay=1e-4, seed=seed)
    train(network, shuffled(inputs, labels, size, seed), supervised(cross_entropy), training)
    return network


def _with_more(
    config: ActiveConfig, seed: int, round_number: int, choice: str, network: Any, pool: Tensor, labelled: Tensor
) -> Tensor:
    """Return the positions of the labelled examples with those that are chosen next."""
    free = torch.ones(len(pool), dtype=torch.bool)
    free[labelled] = False
    rest = free.nonzero()[:, 0]
    order = torch.randperm(len(rest), generator=generator(seed, "candidates", round_number))
    candidates = rest[order[: config.num_candidates]]
    if choice == "random":  # they are in random order
        return torch.cat([labelled, candidates[: config.batch]])
    posterior = mcbn(
        network, pool[labelled], batch_size=min(32, len(labelled) // 2), num_samples=config.num_samples, seed=seed,
        center="running",
    )  # fmt: skip
    found = predict(
        posterior, pool[candidates], categorical(), num_samples=config.num_samples, seed=seed, keep_draws=True
    )
    chosen = choose_to_label(found, config.batch, **CHOICES[choice], seed=seed)
    return torch.cat([labelled, candidates[chosen]])


def curves(config: ActiveConfig, results: Results) -> dict[str, tuple[list[int], list[list[float]]]]:
    """Return for each choice the numbers of labels, and the accuracies of each finished seed."""
    found = {}
    for choice in CHOICES:
        own = [results[name] for s in config.seeds if (name := f"seed {s}, {choice}") in results]
        if own:
            found[choice] = (own[0]["counts"], [each["accuracies"] for each in own])
    return found


def tables(config: ActiveConfig, results: Results) -> list[ResultTable]:
    """Return how many labels the mean learning curve of each choice needs, and the last accuracy."""
    found, lines = curves(config, results), []
    last = f"accuracy at {config.first + config.batch * config.rounds}"
    needed = {
        choice: labels_needed(torch.tensor(counts), torch.tensor(each).mean(0), config.target)
        for choice, (counts, each) in found.items()
    }
    for choice, (counts, each) in found.items():
        own = [labels_needed(torch.tensor(counts), torch.tensor(values), config.target) for values in each]
        baseline, count = needed.get("random"), needed[choice]
        share = count / baseline if count is not None and baseline is not None else None
        shown = " ".join("-" if value is None else f"{value:.0f}" for value in own)
        lines.append((choice, len(each), count, share, shown, _mean([values[-1] for values in each])))
    return [
        ResultTable(
            f"Labels that are needed for {config.target:.0%} accuracy",
            ("choice", "seeds", "labels", "share of random", "each seed", last),
            tuple(lines),
            ("", "", ".0f", ".0%", "", ".4f"),
            ("Labels: where the mean learning curve over seeds reaches the accuracy.",),
        )
    ]  # fmt: skip


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def figures(config: ActiveConfig, results: Results) -> dict[str, Figure]:
    """Show the learning curves."""
    return {"curves": seeds_figure(curves(config, results), xlabel="labels", ylabel="accuracy on test images")}


def notes(config: ActiveConfig) -> list[str]:
    """Say what was trained."""
    return [
        f"A small network from scratch in each round, {config.steps} steps; MCBN with {config.num_samples} draws "
        f"scores {config.num_candidates:,} examples of a pool of {config.num_pool:,}.",
        *(["Noisy patterns replace images, only to test the program."] if config.data == "synthetic" else []),
    ]
