"""Which examples to label next: by mutual information, by entropy, or at random.

Houlsby et al. (2011) label where draws of the posterior disagree (BALD); Gal, Islam and Ghahramani, "Deep Bayesian
Active Learning with Image Data" (ICML 2017), do so on MNIST with MC dropout. Here a small network learns the labels so
far, draws of its dropout score a part of a pool, and the best examples get their labels. The table says how many labels
each choice needs for an accuracy.

Differences from the paper: images are shifted in training, the network goes on from the weights of the round before,
and 25 labels are added at a time instead of 10.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import batchbayes as bb
from batchbayes.tools import Figure, generator, made, stream_seed
from batchbayes.training.loop import Step, supervised
from batchbayes_papers.data.folder import DataFolder
from batchbayes_papers.data.mnist import Source, load_grey_images
from batchbayes_papers.models.lenet import SmallLeNet
from batchbayes_papers.runner.experiment import Results, Unit, warnings_ignored
from batchbayes_papers.runner.figures import seeds_figure
from batchbayes_papers.runner.tables import ResultTable, with_error
from batchbayes_papers.samples.acquisition import choose_to_label

RANDOM = "random"
CHOICES: dict[str, Any] = {
    RANDOM: {},
    "entropy": {"by": "entropy"},
    "mutual information": {"by": "mutual_information"},
    "mutual information, jointly": {"by": "mutual_information", "jointly": True},
}


@dataclass(frozen=True)
class ActiveConfig:
    """A configuration. The defaults are those of the preset `quick`."""

    data: Source = "mnist"
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    choices: tuple[str, ...] = (RANDOM, "entropy", "mutual information")
    """A joint choice takes several times as long as all the rest."""
    num_pool: int = 10_000
    num_test: int = 2000
    first: int = 50
    """Labels of the first network, chosen at random."""
    batch: int = 25
    """Labels that are added in each round."""
    rounds: int = 20
    first_steps: int = 300
    """Training steps with the first labels."""
    steps: int = 100
    """Training steps of each further round. In a trial with 40 steps mutual information was no better than chance."""
    batch_size: int = 32
    learning_rate: float = 3e-3
    """Of Adam. It falls to zero in each round."""
    num_candidates: int = 2000
    """Number of random examples of the pool that are scored in each round."""
    num_samples: int = 16
    target: float = 0.95


PRESETS = {
    "smoke": ActiveConfig(
        "synthetic", (0,), tuple(CHOICES), 300, 100, 20, 10, rounds=2, first_steps=10, steps=5, num_candidates=50,
        num_samples=4, target=0.1,
    ),
    "quick": ActiveConfig(),
    "paper": ActiveConfig(
        choices=tuple(CHOICES), num_pool=50_000, num_test=10_000, first=20, batch=10, rounds=100, num_candidates=10_000
    ),
}  # fmt: skip


def units(config: ActiveConfig) -> list[Unit]:
    """Return one unit for each seed and way to choose."""
    return [
        Unit(f"seed {s}, {choice}", {"seed": s, "choice": choice}) for s in config.seeds for choice in config.choices
    ]


def work(config: ActiveConfig, unit: Unit, needed: Results, data_folder: DataFolder = None) -> dict[str, Any]:
    """Return the numbers of labels and the accuracies of one learning curve."""
    seed, choice = unit.arguments["seed"], unit.arguments["choice"]
    images = load_grey_images(config.data, (config.num_pool, 0, config.num_test), seed, data_folder)
    pool, labels = images.train
    labelled = torch.arange(config.first)  # the pool is shuffled
    network: Any = made(SmallLeNet, seed)
    counts, accuracies = [], []
    with warnings_ignored():
        for number in range(config.rounds + 1):
            if number:
                chosen = _chosen(config, stream_seed(seed, "round", number), choice, network, pool, labelled)
                labelled = torch.cat([labelled, chosen])
            _train(
                config, network, pool[labelled], labels[labelled], stream_seed(seed, "training", number), number == 0
            )
            test = bb.predict(bb.deterministic(network), images.test[0], bb.categorical())
            counts.append(len(labelled))
            accuracies.append(bb.metrics.accuracy(test.probs, images.test[1]))
    return {"counts": counts, "accuracies": accuracies}


def _train(config: ActiveConfig, network: Any, inputs: Tensor, labels: Tensor, seed: int, is_first: bool) -> None:
    """Go on training a network in place."""
    steps = config.first_steps if is_first else config.steps

    def slow_down(step: Step) -> None:
        step.set_learning_rate(config.learning_rate * (1 - step.number / steps))

    batches = partial(_shifted_batches, inputs, labels, steps, config.batch_size, seed)
    training = bb.TrainingConfig(1, config.batch_size, config.learning_rate, seed=seed)
    bb.train(network, batches, supervised(cross_entropy), training, after_step=slow_down)


def _shifted_batches(
    inputs: Tensor, labels: Tensor, steps: int, size: int, seed: int, _: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a batch for each step, in which all examples come equally often. It is shifted by up to two pixels."""
    random, shift = generator(seed, "batches"), bb.RandomCrop(padding=2, fill=float(inputs.min()))
    times = -(-steps * size // len(inputs))
    order = torch.cat([torch.randperm(len(inputs), generator=random) for _ in range(times)])
    for rows in order[: steps * size].split(size):
        yield shift.apply(inputs[rows], torch.rand(2, generator=random)), labels[rows]


@torch.no_grad()
def _chosen(config: ActiveConfig, seed: int, choice: str, network: Any, pool: Tensor, labelled: Tensor) -> Tensor:
    """Return the positions of the examples to label next."""
    is_free = torch.ones(len(pool), dtype=torch.bool)
    is_free[labelled] = False
    free = is_free.nonzero()[:, 0]
    candidates = free[torch.randperm(len(free), generator=generator(seed, "candidates"))[: config.num_candidates]]
    if choice == RANDOM:  # they are in random order
        return candidates[: config.batch]
    features = network.features(pool[candidates])  # without noise, so once for all draws
    masks, count = bb.mc_dropout(network.head), config.num_samples
    found = bb.predict(masks, features, bb.categorical(), num_samples=count, seed=seed, keep_draws=True)
    return candidates[choose_to_label(found, config.batch, **CHOICES[choice], seed=seed)]


def curves(config: ActiveConfig, results: Results) -> dict[str, tuple[list[int], list[list[float]]]]:
    """Return for each choice the numbers of labels, and the accuracies of each finished seed."""
    found = {}
    for choice in config.choices:
        own = [results[name] for s in config.seeds if (name := f"seed {s}, {choice}") in results]
        if own:
            found[choice] = (own[0]["counts"], [each["accuracies"] for each in own])
    return found


def tables(config: ActiveConfig, results: Results) -> list[ResultTable]:
    """Return how many labels each choice needs, and the last accuracy."""
    lines, baseline = [], None
    for choice, (counts, each) in curves(config, results).items():
        needed = [labels_needed(torch.tensor(counts), torch.tensor(values), config.target) for values in each]
        count = labels_needed(torch.tensor(counts), torch.tensor(each).mean(0), config.target)
        baseline = count if choice == RANDOM else baseline
        share = count / baseline if count is not None and baseline is not None else None
        reached = [value for value in needed if value is not None]
        mean = with_error(reached, ".0f") if len(reached) == len(needed) else ""
        shown = " ".join("-" if value is None else f"{value:.0f}" for value in needed)
        lines.append((choice, len(each), count, share, mean, shown, fmean(values[-1] for values in each)))
    last = f"accuracy at {config.first + config.batch * config.rounds}"
    return [
        ResultTable(
            f"Labels that are needed for {config.target:.0%} accuracy",
            ("choice", "seeds", "labels", "share of random", "mean of seeds", "each seed", last),
            tuple(lines),
            ("", "", ".0f", ".0%", "", "", ".4f"),
            ("Labels: where the mean learning curve over seeds reaches the accuracy. Behind ±: two standard "
             "errors.",),
        )
    ]  # fmt: skip


def figures(config: ActiveConfig, results: Results) -> dict[str, Figure]:
    """Show the learning curves."""
    return {
        "accuracy-against-labels": seeds_figure(
            curves(config, results), xlabel="labels", ylabel="accuracy on test images"
        )
    }


def notes(config: ActiveConfig) -> list[str]:
    """Say what was trained."""
    return [
        f"A small network goes on learning for {config.steps} steps in each round; MC dropout with "
        f"{config.num_samples} draws scores {config.num_candidates:,} examples of a pool of {config.num_pool:,}.",
    ]


def labels_needed(counts: Tensor, accuracies: Tensor, target: float) -> float | None:
    """Return with how many labels a learning curve first reaches an accuracy, by linear interpolation.

    >>> round(labels_needed(torch.tensor([10, 20, 30]), torch.tensor([0.5, 0.9, 0.96]), 0.93), 2)
    25.0
    """
    order = counts.argsort()
    counts, accuracies = counts[order], accuracies[order]
    reached = (accuracies >= target).nonzero()
    if not len(reached):
        return None
    place = int(reached[0])
    if place == 0:
        return float(counts[0])
    low, high = accuracies[place - 1 : place + 1].double()
    few, many = counts[place - 1 : place + 1].double()
    return round(float(few + (many - few) * (target - low) / (high - low)), 6)
