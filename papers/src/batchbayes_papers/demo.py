"""The demonstration: train two small networks with batch normalisation, then fit MCBN to each of them."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import batchbayes as bb
from batchbayes import datasets as toy
from batchbayes._common.files import words_for_disk_errors
from batchbayes._common.machine import single_threaded
from batchbayes.datasets import Digits, inverted, load_digits, pixel_shuffled
from batchbayes.models import MLP, ConvNet
from batchbayes.tools import GlobalStream, TargetLikelihood, progress, shuffled
from batchbayes.training.loop import Loss, supervised

# The batches are small because the spread of batch statistics is proportional to one over the square root of the batch
# size. With 600 epochs the toy network predicts new points near the data better than with 300: an RMSE of 0.15 instead
# of 0.18 (mean of five seeds).
TOY_TRAINING = bb.TrainingConfig(epochs=600, batch_size=32)
DIGITS_TRAINING = bb.TrainingConfig(epochs=15, batch_size=32)
OOD_COLUMNS = ("inverted MI", "inverted H", "shuffled MI", "shuffled H")


@dataclass(frozen=True)
class DemoConfig:
    """How to train, and how many draws to take."""

    toy: bb.TrainingConfig = TOY_TRAINING
    digits: bb.TrainingConfig = DIGITS_TRAINING
    toy_draws: int = 500  # as many as in the MCBN paper, for a smooth band
    digits_draws: int = 64
    seeds: int = 5
    """Each seed trains new networks. Another machine rounds otherwise, which acts like another seed."""


@dataclass(frozen=True)
class Row:
    """One line of the table for one seed. `auroc` has only the columns that exist for this task and method."""

    task: str
    method: str
    error: float
    """The RMSE, or the share of wrong answers in percent."""
    nll: float
    auroc: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Method:
    """A posterior, and how many draws to take from it."""

    name: str
    posterior: bb.Posterior
    num_samples: int
    seed: int

    def predict(self, inputs: Tensor, likelihood: Any) -> Any:
        """Predict by these draws."""
        return bb.predict(self.posterior, inputs, likelihood, num_samples=self.num_samples, seed=self.seed)


def run_demo(out: Path, seed: int = 0, config: DemoConfig | None = None) -> list[list[Row]]:
    """Train, fit and compare on both tasks for some seeds, print the table, and write figures of the first seed.

    Returns:
        The rows of each seed. The figures are `toy.png` and `digits.png` in the folder `out`.
    """
    config = config or DemoConfig()
    with words_for_disk_errors(out):  # before training, so that a bad path costs no time
        out.mkdir(parents=True, exist_ok=True)
    with single_threaded():  # networks as small as these run slower on several threads
        runs = []
        for each in progress(range(seed, seed + config.seeds), "demo", config.seeds):
            toy_figure, digits_figure = (out / "toy.png", out / "digits.png") if each == seed else (None, None)
            runs.append(toy_rows(toy_figure, each, config) + digits_rows(digits_figure, each, config))
    print(format_table(runs))
    print(f"\nFigures: {out / 'toy.png'} and {out / 'digits.png'}")
    return runs


def demo_command(parsed: argparse.Namespace) -> None:
    """Run the demonstration with what the command line says."""
    run_demo(parsed.out, parsed.seed)


def both_methods(network: nn.Module, inputs: Tensor, batch_size: int, num_samples: int, seed: int) -> list[Method]:
    """Return the network as it is, and MCBN fitted to it with the batch size of the training."""
    fitted = bb.mcbn(network, inputs, batch_size=batch_size, num_samples=num_samples, seed=seed)
    return [Method("deterministic", bb.deterministic(network), 1, seed), Method("MCBN", fitted, num_samples, seed)]


def _train(network: nn.Module, inputs: Tensor, targets: Tensor, loss: Loss, config: bb.TrainingConfig) -> None:
    bb.train(network, shuffled(inputs, targets, config.batch_size, config.seed), supervised(loss), config)


def toy_rows(figure_path: Path | None, seed: int, config: DemoConfig) -> list[Row]:
    """Compare on one-dimensional regression: near the training data, and in the gap and beyond."""
    inputs, targets = toy.noisy_points(100, seed, "train")
    with GlobalStream(seed):
        network = MLP(1, [30, 30, 30], 1)
    _train(network, inputs, targets, mse_loss, replace(config.toy, seed=seed))
    methods = both_methods(network, inputs, config.toy.batch_size, config.toy_draws, seed)
    new_inputs, new_targets = toy.noisy_points(100, seed, "held out")
    likelihoods = [
        bb.gaussian(bb.calibrate.tune_precision(method.predict(new_inputs, bb.gaussian(1.0)), new_targets))
        for method in methods
    ]
    rows = []
    for task, intervals in (("toy, near the data", toy.SUPPORT), ("toy, gap and beyond", toy.BEYOND)):
        test_inputs, test_targets = toy.noisy_points(500, seed, "test", intervals)
        for method, likelihood in zip(methods, likelihoods, strict=True):
            seen = method.predict(test_inputs, likelihood)
            error = bb.metrics.root_mean_squared_error(seen.mean, test_targets)
            rows.append(Row(task, method.name, error, bb.metrics.negative_log_likelihood(seen.log_prob(test_targets))))
    if figure_path is not None:
        _save_toy_figure(figure_path, methods, likelihoods, (inputs, targets))
    return rows


def _save_toy_figure(
    path: Path, methods: Sequence[Method], likelihoods: Sequence[TargetLikelihood], data: tuple[Tensor, Tensor]
) -> None:
    grid = torch.linspace(toy.BEYOND[0][0], toy.BEYOND[-1][1], 401)[:, None]
    bands = []
    for method, likelihood in zip(methods, likelihoods, strict=True):
        seen = method.predict(grid, likelihood)
        kind = "one variance for all inputs" if method.num_samples == 1 else f"{method.num_samples} draws"
        bands.append(bb.plots.Band(f"{method.name}: {kind}", seen.mean[:, 0], seen.std[:, 0]))
    truth = toy.true_function(grid)[:, 0]
    bb.plots.save_figure(
        bb.plots.band_figure(grid[:, 0], bands[::-1], data=data, truth=truth, support=toy.SUPPORT), path
    )


def digits_rows(figure_path: Path | None, seed: int, config: DemoConfig) -> list[Row]:
    """Compare on handwritten digits; inverted digits and digits with shuffled pixels are out of distribution."""
    data = load_digits(seed)
    with GlobalStream(seed):
        network = ConvNet(num_classes=10)
    _train(network, data.train_images, data.train_labels, cross_entropy, replace(config.digits, seed=seed))
    own, bayesian = both_methods(network, data.train_images, config.digits.batch_size, config.digits_draws, seed)
    seen = bayesian.predict(data.test_images, bb.categorical())
    if figure_path is not None:
        figure = bb.plots.certainty_figure(
            data.test_images,
            data.test_labels,
            seen.probs.argmax(-1),
            entropy=seen.entropy,
            mutual_information=seen.mutual_information,
        )
        bb.plots.save_figure(figure, figure_path)
    return [_digits_row(own, own.predict(data.test_images, bb.categorical()), data), _digits_row(bayesian, seen, data)]


def _digits_row(method: Method, familiar: bb.CategoricalPredictive, data: Digits) -> Row:
    error = 100 - 100 * bb.metrics.accuracy(familiar.probs, data.test_labels)
    auroc = {}
    for name, images in (
        ("inverted", inverted(data.test_images)),
        ("shuffled", pixel_shuffled(data.test_images, method.seed)),
    ):
        strange = method.predict(images, bb.categorical())
        auroc[f"{name} H"] = bb.metrics.ood_auroc(familiar.entropy, strange.entropy)
        if method.num_samples > 1:  # a single draw has no mutual information
            auroc[f"{name} MI"] = bb.metrics.ood_auroc(familiar.mutual_information, strange.mutual_information)
    return Row(
        "digits", method.name, error, bb.metrics.negative_log_likelihood(familiar.log_prob(data.test_labels)), auroc
    )


def format_table(runs: Sequence[Sequence[Row]]) -> str:
    """Return the means of the runs, and their standard deviations, as a table of aligned text.

    >>> print(format_table([[Row("digits", "MCBN", 1.0, 0.03, {"inverted MI": 0.97})] for _ in range(2)]))
                                          AUROC of strange digits, by mutual information or entropy H
    task    method      error        NLL  inverted MI  inverted H  shuffled MI  shuffled H
    digits  MCBN    1.0±0.0 %  0.03±0.00    0.97±0.00         n/a          n/a         n/a
    """
    cells = [["task", "method", "error", "NLL", *OOD_COLUMNS]]
    for rows in zip(*runs, strict=True):
        first, errors = rows[0], [row.error for row in rows]
        error = f"{_spread(errors, 1)} %" if first.task == "digits" else f"RMSE {_spread(errors, 2)}"
        columns = [[row.auroc[name] for row in rows if name in row.auroc] for name in OOD_COLUMNS]
        auroc = [_spread(values, 2) if values else "n/a" for values in columns]
        cells.append([first.task, first.method, error, _spread([row.nll for row in rows], 2), *auroc])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for line in cells:
        words = [w.ljust(n) if i < 2 else w.rjust(n) for i, (w, n) in enumerate(zip(line, widths, strict=True))]
        lines.append("  ".join(words))
    above = " " * (sum(widths[:4]) + 8) + "AUROC of strange digits, by mutual information or entropy H"
    return "\n".join([above, *lines])


def _spread(values: Sequence[float], digits: int) -> str:
    """Write the mean and the standard deviation of some values.

    >>> _spread([1.0, 2.0, 3.0], 1)
    '2.0±1.0'
    """
    return f"{mean(values):.{digits}f}±{stdev(values) if len(values) > 1 else 0:.{digits}f}"
