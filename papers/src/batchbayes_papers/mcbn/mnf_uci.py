"""The MNF columns of tables 1 and 4 to 7 of the MCBN paper: multiplicative normalising flows on eight data sets.

The paper trains networks of two hidden layers of 50 units, also on protein, with batches of 100 and the loss
0.5 (f - y)^2 + KL / N on standardised targets. That is a likelihood with a noise variance of one, as large as that of
the targets themselves: the posterior stays wide, and errors are large where the data has little noise. So the
experiment has a second method whose noise is matched: its precision is the inverse of the mean squared error that unit
noise leaves on held-out rows.

As in the published code, one fifth of the rows for training is held out. After each epoch the network predicts these
rows with the means of its weights, and training stops 200 epochs after the lowest squared error. The posterior of that
epoch predicts the held-out rows by draws, which tunes the precision of the scores. The networks for the test are
trained on all rows for as many epochs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import batchbayes as bb
from batchbayes.models import MLP
from batchbayes.tools import Figure, GlobalStream, shuffled
from batchbayes.training.loop import Step
from batchbayes_papers.data.folder import DataFolder
from batchbayes_papers.data.uci import SETS
from batchbayes_papers.mcbn.methods import points_of
from batchbayes_papers.mcbn.scores import DrawnPredictions, draw_predictions, score_runs
from batchbayes_papers.mcbn.splits import SYNTHETIC, StandardisedPart, load_split
from batchbayes_papers.mcbn.tables import MADE_UP, normalised_table, raw_table, runs_by_method, with_published
from batchbayes_papers.mcbn.uci import error_figures
from batchbayes_papers.runner.experiment import Results, Unit
from batchbayes_papers.runner.tables import ResultTable

DATASETS = tuple(SETS)
UNIT, MATCHED = METHODS = ("MNF", "MNF, matched noise")
"""The names of both methods. The paper has the first one, with unit noise."""
BATCH_SIZE = 100
WIDTH = 50


@dataclass(frozen=True)
class FlowConfig:
    """A configuration. The defaults are those of the paper."""

    datasets: tuple[str, ...]
    splits: int = 5
    seeds: int = 5
    max_epochs: int = 2000
    max_steps: float = math.inf
    """Training with held-out rows stops at the end of the epoch in which it reaches this number of steps."""
    patience: int = 200
    """The number of epochs without a lower error on held-out rows after which training stops."""
    learning_rate: float = 1e-3
    num_samples: int = 100


PRESETS = {
    "smoke": FlowConfig((SYNTHETIC,), splits=1, seeds=1, max_epochs=30, num_samples=8),
    "quick": FlowConfig(DATASETS, seeds=1, max_steps=2500, learning_rate=3e-3),
    "paper": FlowConfig(DATASETS),
}


def units(config: FlowConfig) -> list[Unit]:
    """Return one unit for each data set and split."""
    return [
        Unit(f"{dataset}, split {split}", {"dataset": dataset, "split": split})
        for dataset in config.datasets
        for split in range(1, config.splits + 1)
    ]


def work(config: FlowConfig, unit: Unit, needed: Results, data_folder: DataFolder = None) -> dict[str, Any]:
    """Train with unit noise and with matched noise, and score both on the test rows."""
    split = load_split(unit.arguments["dataset"], unit.arguments["split"], data_folder)
    fold, precision = split.folds[0], 1.0  # of standardised targets
    runs, epochs, points = {}, {}, {}
    for method in METHODS:
        best = stop_early(config, fold, precision)
        held_out = predicted(config, fold, best.posterior, seed=1)
        tests = [
            predicted(config, split.whole, train(config, split.whole, precision, best.epochs, seed).posterior(), seed)
            for seed in range(1, config.seeds + 1)
        ]
        runs[method], epochs[method] = score_runs([held_out], tests, split.precisions), best.epochs
        if method == UNIT and unit.arguments["split"] == 1:
            points[method] = points_of(tests[0], runs[method][0])
        precision = fold.scale**2 / float((held_out.mean - held_out.truth).square().mean())
    return {"runs": runs, "epochs": epochs, "points": points}


@dataclass
class BestEpoch:
    """The epoch of a training after which the means of the weights predict the held-out rows of a part best."""

    part: StandardisedPart
    patience: int
    error: float = math.inf
    epochs: int = 0
    posterior: bb.WeightsPosterior = field(init=False)

    def look(self, step: Step) -> bool:
        """Measure the error at the end of an epoch. Return whether it has not fallen for too long."""
        if step.number % steps_in_epoch(self.part):
            return False
        assert isinstance(step.network, bb.Noisy)
        posterior = step.network.posterior()
        means = {name: each.mean for name, each in posterior.distributions.items()}
        outputs = self.part.in_units(posterior.network(self.part.others, tensors=means))
        error = float((outputs - self.part.truth).square().mean())
        if error < self.error:
            self.error, self.epochs, self.posterior = error, step.epoch + 1, posterior
        return step.epoch + 1 - self.epochs >= self.patience


def stop_early(config: FlowConfig, part: StandardisedPart, precision: float) -> BestEpoch:
    """Train on a part until the error on its other rows has stopped falling."""
    best = BestEpoch(part, config.patience)
    train(config, part, precision, most_epochs(config, part), seed=1, after_step=best.look)
    return best


def most_epochs(config: FlowConfig, part: StandardisedPart) -> int:
    """Return the number of epochs after which training stops in any case."""
    return math.ceil(min(config.max_epochs, config.max_steps / steps_in_epoch(part)))


def steps_in_epoch(part: StandardisedPart) -> int:
    """Return the number of batches of a part, without the one that is left over."""
    return max(1, len(part.inputs) // BATCH_SIZE)


def train(
    config: FlowConfig,
    part: StandardisedPart,
    precision: float,
    epochs: int,
    seed: int,
    after_step: Callable[[Step], bool | None] | None = None,
) -> bb.Noisy:
    """Train on a part, with observation noise of this precision for standardised targets."""
    with GlobalStream(seed):
        network = bb.noisy(MLP(part.inputs.shape[1], [WIDTH, WIDTH], 1, norm=False), bb.MultiplicativeFlow(), seed=seed)
    batches = shuffled(part.inputs, part.targets, BATCH_SIZE, seed)
    training = bb.TrainingConfig(epochs, BATCH_SIZE, config.learning_rate, seed=seed)
    count = len(part.inputs)
    bb.fit_noisy(network, batches, bb.gaussian(precision), training, num_examples=count, after_step=after_step)
    return network


def predicted(
    config: FlowConfig, part: StandardisedPart, posterior: bb.WeightsPosterior, seed: int
) -> DrawnPredictions:
    """Predict the other rows of a part by draws."""
    return draw_predictions(posterior, part.others, part.truth, part.in_units, config.num_samples, seed)


def tables(config: FlowConfig, results: Results) -> list[ResultTable]:
    """Return our scores beside the published ones, and the numbers of epochs."""
    runs, shown = runs_by_method(config.datasets, units(config), results), with_published(config.datasets)
    return [
        raw_table("RMSE (table 7 of the paper)", shown, runs, METHODS, 7, "rmse"),
        normalised_table("Normalised CRPS, per cent (tables 1 and 4)", shown, runs, 4, "crps_norm", METHODS),
        normalised_table("Normalised PLL, per cent (tables 1 and 5)", shown, runs, 5, "pll_norm", METHODS),
        raw_table("CRPS (table 6)", shown, runs, METHODS, 6, "crps"),
        raw_table("PLL (table 6)", shown, runs, METHODS, 6, "pll"),
        epochs_table(config, results),
    ]


def epochs_table(config: FlowConfig, results: Results) -> ResultTable:
    """Return the epochs that the held-out rows have chosen, for each split."""
    rows = tuple(
        (dataset, method, *(results.get(f"{dataset}, split {split}", {"epochs": {}})["epochs"].get(method)
                            for split in range(1, config.splits + 1)))
        for dataset, method in product(config.datasets, METHODS)
    )  # fmt: skip
    heads = (f"split {split}" for split in range(1, config.splits + 1))
    return ResultTable("Epochs chosen by held-out rows", ("data set", "method", *heads), rows)


def figures(config: FlowConfig, results: Results) -> dict[str, Figure]:
    """Show errors against predicted uncertainty, for the first split and seed."""
    return error_figures(units(config), results)


def notes(config: FlowConfig) -> list[str]:
    """Say how this differs from the paper."""
    limit = f"{config.max_epochs:,} epochs"
    if config.max_steps < math.inf:
        limit += f" or {config.max_steps:,} steps"
    return [
        f"Training with held-out rows stops after {config.patience} epochs without a lower error, and at the latest "
        f"after {limit} (paper: 200 and 2,000 epochs). The learning rate is {config.learning_rate:g} (paper: 0.001).",
        "MNF has unit noise, as in the paper. Matched noise is ours.",
        "Biases are not random.",
        f"Splits: {config.splits}; seeds: {config.seeds} (paper: 5 and 5).",
        *([MADE_UP] if config.datasets == (SYNTHETIC,) else []),
    ]
