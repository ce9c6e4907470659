r"""The batch size with the highest ELBO: it grows with the number of training examples.

Mukhoti, Dokania, Torr and Gal, "On Batch Normalisation for Approximate Bayesian Inference" (2021), call the batch size
M of MCBN a variational parameter, and say that its optimum goes to infinity with the number of examples N. The paper
has no table or figure of it. Here perceptrons are trained on N images, and the ELBO of each is computed over M.

Why the optimum is about proportional to N: to second order, noise of variance 1/M costs $c/M$ of the expected
log-likelihood of an example. The KL divergence of D statistics from their prior has the entropy of q, which is
$-\frac{D}{2}\log M$ but for a constant, and a part in 1/M. So $ELBO(M) = -Nc/M - \frac{D}{2}\log M$ but for constants,
with its optimum at $M = 2Nc/D$.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch.nn.functional import cross_entropy

import batchbayes as bb
from batchbayes.models import MLP
from batchbayes.tools import Figure, made, shuffled
from batchbayes.training.loop import supervised
from batchbayes_papers.data.folder import DataFolder
from batchbayes_papers.data.mnist import load_grey_images
from batchbayes_papers.runner.experiment import Results, Unit, warnings_ignored
from batchbayes_papers.runner.figures import Line, lines_figure
from batchbayes_papers.runner.tables import ResultTable


@dataclass(frozen=True)
class ElboConfig:
    """A configuration. The defaults are those of the preset `quick`."""

    data: Literal["fashion_mnist", "synthetic"] = "fashion_mnist"
    sizes: tuple[int, ...] = (250, 1000, 4000, 16_000)
    """Numbers of training examples N."""
    seeds: tuple[int, ...] = (0, 1, 2)
    widths: tuple[int, ...] = (50, 50)
    epochs: int = 20
    batch_size: int = 32
    weight_decay: float = 1e-4
    num_scored: int = 1000
    """Training images of which the expected log-likelihood is taken."""
    num_test: int = 2000
    num_samples: int = 64


PRESETS = {
    "smoke": ElboConfig("synthetic", (128, 1024), (0,), (8,), epochs=4, num_scored=200, num_test=100, num_samples=16),
    "quick": ElboConfig(),
    "paper": ElboConfig(sizes=(250, 1000, 4000, 16_000, 60_000), seeds=(0, 1, 2, 3, 4)),
}


def units(config: ElboConfig) -> list[Unit]:
    """Return one unit for each number of examples and seed: a network."""
    return [
        Unit(f"N = {size}, seed {seed}", {"num_examples": size, "seed": seed}, effort=size)
        for size in config.sizes
        for seed in config.seeds
    ]


def work(config: ElboConfig, unit: Unit, needed: Results, data_folder: DataFolder = None) -> dict[str, Any]:
    """Train a network, and return its ELBO over the batch size."""
    size, seed = unit.arguments["num_examples"], unit.arguments["seed"]
    data = load_grey_images(config.data, (size, 0, config.num_test), seed, data_folder)
    images, labels = data.train[0].flatten(1), data.train[1]
    network = made(partial(MLP, images.shape[1], config.widths, 10), seed)
    training = bb.TrainingConfig(config.epochs, config.batch_size, 1e-3, config.weight_decay, seed=seed)
    bb.train(network, shuffled(images, labels, config.batch_size, seed), supervised(cross_entropy), training)
    with warnings_ignored():
        count = config.num_samples
        posterior = bb.mcbn(network, images, batch_size=config.batch_size, num_samples=count, seed=seed)
        scored = images[: config.num_scored], labels[: config.num_scored]
        tuned = elbo_optimum(posterior, scored, size, config)
    with torch.no_grad():
        right = (network(data.test[0].flatten(1)).argmax(1) == data.test[1]).double().mean()
    return {
        "best": tuned.batch_size,
        "batch_sizes": tuned.curve.batch_sizes.tolist(),
        "elbo": tuned.curve.values.tolist(),
        "accuracy": float(right),
    }


def elbo_optimum(
    posterior: bb.BatchNormPosterior, examples: tuple[torch.Tensor, torch.Tensor], num_examples: int, config: ElboConfig
) -> Any:
    """Return the batch size with the highest ELBO of a training set of which some examples are given."""
    return bb.tune_batch_size(
        posterior,
        [examples],
        bb.categorical(),
        objective="elbo",
        num_examples=num_examples,
        weight_decay=config.weight_decay,
        num_samples=config.num_samples,
    )


def found_for(config: ElboConfig, results: Results, size: int) -> list[Any]:
    """Return the finished results for one number of examples, by seed."""
    names = [f"N = {size}, seed {seed}" for seed in config.seeds]
    return [results[name] for name in names if name in results]


def tables(config: ElboConfig, results: Results) -> list[ResultTable]:
    """Return the best batch size by the number of examples."""
    rows, before = [], None
    for size in config.sizes:
        found = found_for(config, results, size)
        best = [own["best"] for own in found]
        mean = float(torch.tensor(best).log().mean().exp()) if best else None
        accuracy = sum(own["accuracy"] for own in found) / len(found) if found else None
        growth = mean / before if mean and before else None
        rows.append(
            (size, mean, " ".join(f"{own:.3g}" for own in best), growth, mean / size if mean else None, accuracy)
        )
        before = mean
    return [
        ResultTable(
            "The batch size with the highest ELBO, by the number of training examples",
            ("N", "best M", "each seed", "times the one before", "M / N", "accuracy"),
            tuple(rows),
            ("", ".3g", "", ".2f", ".3f", ".3f"),
        )
    ]


def figures(config: ElboConfig, results: Results) -> dict[str, Figure]:
    """Show the ELBO over the batch size for each N, and its optimum against N."""
    curves, optima = [], []
    for size in config.sizes:
        own = found_for(config, results, size)[0]
        elbo = torch.tensor(own["elbo"])
        near = elbo > elbo.max() - 0.25
        curves.append(
            Line(f"N = {size:,}", torch.tensor(own["batch_sizes"])[near].tolist(), (elbo - elbo.max())[near].tolist())
        )
        optima += [(size, found["best"]) for found in found_for(config, results, size)]
    sizes, best = zip(*optima, strict=True)
    share = float(torch.tensor([own / size for size, own in optima]).log().mean().exp())
    ends = [min(config.sizes), max(config.sizes)]
    growth = [
        Line("each network", sizes, best, "points"),
        Line("proportional to N", ends, [share * end for end in ends], "level"),
    ]
    figure = lines_figure(
        {"ELBO per example, below its maximum": curves, "best batch size": growth},
        ["batch size M", "training examples N"],
        log_positions=True,
    )
    figure.axes[1].set_yscale("log")
    return {"ELBO-over-batch-size": figure}


def notes(config: ElboConfig) -> list[str]:
    """Say what was done."""
    widths = " and ".join(map(str, config.widths))
    return [
        f"Perceptrons with batch norm of {widths} units, {config.epochs} epochs of Adam in batches of "
        f"{config.batch_size} with a weight decay of {config.weight_decay:g}, the same for all N. The noise of such "
        "batches is scaled to each M; the network is not trained again. The best M of a row is a geometric mean.",
        f"The expected log-likelihood is that of {config.num_scored:,} training images at most, with "
        f"{config.num_samples} draws, by the linear engine. The prior is that which weight decay implies.",
        "The paper states the limit alone, without numbers.",
    ]
