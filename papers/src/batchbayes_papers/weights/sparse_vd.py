"""Sparse variational dropout on MNIST: error and compression of two LeNets and an LSTM, beside dense and pruned ones.

Molchanov, Ashukha and Vetrov, "Variational Dropout Sparsifies Deep Neural Networks" (ICML 2017), table 1. Each network
is trained from scratch with the recipe of the authors' code. The test error is that of the means, without the weights
that are pruned. As a comparison a dense network is trained, loses its smallest weights in each layer until it is as
sparse, and is trained further. A last network of each kind loses whole units instead of single weights
(`bb.StructuredSparsity`), with the same recipe. A recurrent network, which the lecture names, reads images row by row:
all steps of a sequence share one draw of the weights. No figures for it are published in the sources.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import batchbayes as bb
from batchbayes.tools import Figure, GlobalStream, shuffled
from batchbayes.training.loop import Step, supervised
from batchbayes_papers.data.folder import DataFolder
from batchbayes_papers.image_networks import NETWORKS, ImageData, error_percent, fast, load_images, new_network
from batchbayes_papers.runner.experiment import Results, Unit
from batchbayes_papers.runner.figures import Line, lines_figure
from batchbayes_papers.runner.tables import CellValue, ResultTable
from batchbayes_papers.weights.left_weights import DRAWN, left_weights, weights_figure
from batchbayes_papers.weights.propagation import compression, sparsity

PUBLISHED = {
    "LeNet-300-100": {"dense": (1.64, 1.0), "pruned": (1.59, 12.0), "DNS": (1.99, 56.0), "SWS": (1.94, 23.0),
                      "sparse VD": (1.92, 68.0)},
    "LeNet-5": {"dense": (0.80, 1.0), "pruned": (0.77, 12.0), "DNS": (0.91, 111.0), "SWS": (0.97, 200.0),
                "sparse VD": (0.75, 280.0)},
    "LSTM": dict.fromkeys(("dense", "pruned", "sparse VD"), (None, None)),
}  # fmt: skip
"""Test error in per cent and compression, from table 1. The published pruning (Han et al.) chose its own sparsity. DNS
(dynamic network surgery) and SWS (soft weight sharing) are other methods of the table, which are not repeated."""
PUBLISHED_SPARSITY = {
    "LeNet-300-100": (98.9, 97.2, 62.0),
    "LeNet-5": (67.0, 98.0, 99.8, 95.0),
    "LSTM": (None, None, None),
}
"""In per cent, layer by layer. The first two weights of the LSTM are those of its inputs and of its state."""


@dataclass(frozen=True)
class SparseConfig:
    """A configuration. The defaults are those of the paper."""

    data: Literal["mnist", "synthetic"] = "mnist"
    networks: tuple[str, ...] = tuple(NETWORKS)
    epochs: tuple[int, ...] = (200, 200, 200)
    """For each network."""
    decay_from: tuple[int, ...] = (100, 0, 100)
    """For each network the epoch from which the learning rate falls to zero."""
    kl_from: tuple[int, ...] = (5, 5, 5)
    kl_full: tuple[int, ...] = (20, 20, 20)
    """For each network the epochs between which the weight of the KL rises."""
    learning_rate: tuple[float, ...] = (1e-3, 1e-3, 1e-3)
    """For each network. That of the dense ones is 1e-3."""
    dense_epochs: int = 30
    """Of the dense networks; half as many follow after pruning."""
    batch_size: int = 100
    num_train: int = 60_000
    num_test: int = 10_000
    looks: int = 20
    """How often error and compression are looked at during training."""


PRESETS = {
    "smoke": SparseConfig(
        "synthetic", epochs=(24, 2, 2), decay_from=(12, 0, 0), kl_from=(1, 0, 0), kl_full=(4, 1, 1), dense_epochs=2,
        learning_rate=(1e-2, 1e-2, 1e-2), batch_size=50, num_train=200, num_test=100, looks=2,
    ),
    "quick": SparseConfig(
        epochs=(40, 60, 10), decay_from=(20, 0, 4), kl_from=(1, 2, 1), kl_full=(4, 8, 3),
        learning_rate=(3e-3, 5e-3, 3e-3), batch_size=200, dense_epochs=5,
    ),
    "paper": SparseConfig(),
}  # fmt: skip


def units(config: SparseConfig) -> list[Unit]:
    """Return three units for each LeNet: sparse, without whole units, and dense but pruned to the same sparsity."""
    found = []
    for name, epochs in zip(config.networks, config.epochs, strict=True):
        steps = epochs * (3 if name == "LeNet-5" else 1)
        found.append(Unit(f"{name}, sparse VD", {"network": name, "method": "sparse VD"}, effort=steps))
        if name != "LSTM":  # whole units of a state take part in several weights
            found.append(Unit(f"{name}, structured", {"network": name, "method": "structured"}, effort=steps))
        dense = {"network": name, "method": "pruned"}
        found.append(Unit(f"{name}, dense", dense, needs=(f"{name}, sparse VD",), effort=steps / 5))
    return found


def work(config: SparseConfig, unit: Unit, needed: Results, data_folder: DataFolder = None) -> dict[str, Any]:
    """Train one network, and return its errors and its sparsity."""
    name = unit.arguments["network"]
    data = load_images(config.data, config.num_train, config.num_test, data_folder)
    if unit.arguments["method"] == "sparse VD":
        posterior, found = variational_result(config, name, data, bb.SparseVD())
        return {**found, "sparsity": list(sparsity(posterior).values()), "weights": left_weights(posterior)}
    if unit.arguments["method"] == "structured":
        posterior, found = variational_result(config, name, data, bb.StructuredSparsity())
        kept = [each.mean.transpose(0, 1).flatten(1).any(1) for each in posterior.distributions.values()]
        return {**found, "units": [len(each) for each in kept], "kept": [int(each.sum()) for each in kept]}
    return pruned_result(config, name, data, needed[f"{name}, sparse VD"]["sparsity"])


def variational_result(
    config: SparseConfig, name: str, data: ImageData, family: bb.SparseVD | bb.StructuredSparsity
) -> tuple[bb.WeightsPosterior, dict[str, Any]]:
    """Train with random weights, and return the posterior with its error and compression."""
    number = config.networks.index(name)
    training = bb.TrainingConfig(config.epochs[number], config.batch_size, config.learning_rate[number])
    schedule = bb.Schedule(config.kl_from[number], config.kl_full[number], decay_from=config.decay_from[number])
    network = bb.noisy(new_network(name, seed=0), family)
    batches = shuffled(*data.train, config.batch_size, seed=0)
    every = max(1, training.epochs // config.looks) * len(batches)  # type: ignore[arg-type]
    history = []

    def look(step: Step) -> None:
        if step.number % every == 0:
            history.append({"epoch": step.epoch + 1, "objective": step.objective, **seen(network, data)})

    count = len(data.train[0])
    bb.fit_noisy(network, batches, bb.categorical(), training, num_examples=count, schedule=schedule, after_step=look)
    return network.posterior(), {**seen(network, data), "history": history}


def seen(network: bb.Noisy, data: ImageData) -> dict[str, float]:
    """Return the test error of the means without the pruned weights, and the compression."""
    posterior = network.posterior()
    point = fast(posterior.network.module)
    point.load_state_dict(posterior.means())
    return {"error": error_percent(point, data.test), "compression": compression(posterior)}


def pruned_result(config: SparseConfig, name: str, data: ImageData, target: list[float]) -> dict[str, Any]:
    """Train a dense network, leave out its smallest weights, and train the rest further."""
    with GlobalStream(0):
        network = fast(NETWORKS[name]())
    batches = shuffled(*data.train, config.batch_size, seed=0)
    objective = supervised(cross_entropy)
    bb.train(network, batches, objective, bb.TrainingConfig(config.dense_epochs, config.batch_size))
    dense = error_percent(network, data.test)
    weights = [parameter for parameter in network.parameters() if parameter.ndim > 1]
    masks = [largest(weight.detach(), share) for weight, share in zip(weights, target, strict=True)]

    def prune(_: Step | None = None) -> None:
        with torch.no_grad():
            for weight, mask in zip(weights, masks, strict=True):
                weight.mul_(mask)

    prune()
    further = bb.TrainingConfig(-(-config.dense_epochs // 2), config.batch_size, seed=1)
    bb.train(network, batches, objective, further, after_step=prune)
    count = sum(weight.numel() for weight in weights)
    return {
        "dense_error": dense,
        "error": error_percent(network, data.test),
        "compression": count / max(1, sum(int(mask.sum()) for mask in masks)),
    }


def largest(weight: Tensor, share_of_zeros: float) -> Tensor:
    """Return ones for the largest weights and zeros for a share of the smallest, in the shape of the weight.

    >>> largest(torch.tensor([[0.1, -3.0, 2.0, -0.2]]), 0.5)
    tensor([[0., 1., 1., 0.]])
    """
    kept = weight.numel() - round(share_of_zeros * weight.numel())
    order = weight.abs().flatten().argsort(descending=True)
    mask = torch.zeros(weight.numel()).index_fill_(0, order[:kept], 1.0)
    return mask.view_as(weight)


def tables(config: SparseConfig, results: Results) -> list[ResultTable]:
    """Return errors and compression beside the published ones, the sparsity of each layer, and the units it keeps."""
    return [error_table(config, results), sparsity_table(config, results), units_table(config, results)]


def error_table(config: SparseConfig, results: Results) -> ResultTable:
    rows: list[tuple[CellValue, ...]] = []
    for name in config.networks:
        sparse, dense = results.get(f"{name}, sparse VD", {}), results.get(f"{name}, dense", {})
        ours = {
            "dense": (dense.get("dense_error"), 1.0 if dense else None),
            "pruned": (dense.get("error"), dense.get("compression")),
            "sparse VD": (sparse.get("error"), sparse.get("compression")),
        }
        for method, published in PUBLISHED[name].items():
            error, times = ours.get(method, (None, None))
            rows.append((name, method, error, published[0], times, published[1]))
    return ResultTable(
        "Test error and compression",
        ("network", "method", "error %", "published", "compression", "published "),
        tuple(rows),
        ("", "", ".2f", ".2f", ".0f", ".0f"),
        ("Compression is the number of weights for each one that is not zero. Our pruned networks are as sparse as "
         "those of sparse VD in each layer. The published pruning (Han et al.) is much less sparse.",),
    )  # fmt: skip


def sparsity_table(config: SparseConfig, results: Results) -> ResultTable:
    rows: list[tuple[CellValue, ...]] = []
    for name in config.networks:
        ours = results.get(f"{name}, sparse VD", {}).get("sparsity", [])
        for number, published in enumerate(PUBLISHED_SPARSITY[name]):
            rows.append((name, number + 1, 100 * ours[number] if ours else None, published))
    return ResultTable(
        "Sparsity of each layer under sparse VD",
        ("network", "layer", "zeros %", "published"),
        tuple(rows),
        ("", "", ".1f", ".1f"),
    )


def units_table(config: SparseConfig, results: Results) -> ResultTable:
    rows: list[tuple[CellValue, ...]] = []
    for name in config.networks:
        if found := results.get(f"{name}, structured"):
            kept, units = (" - ".join(map(str, found[key])) for key in ("kept", "units"))
            rows.append((name, found["error"], found["compression"], kept, units))
    return ResultTable(
        "Structured sparsity: input units and channels that are left",
        ("network", "error %", "compression", "left in each layer", "of"),
        tuple(rows),
        ("", ".2f", ".1f", "", ""),
    )


def figures(config: SparseConfig, results: Results) -> dict[str, Figure]:
    """Show error and compression during training, and the weights that are left."""
    found = {name: results.get(f"{name}, sparse VD", {}) for name in config.networks}
    panels = {}
    for what, label in (("error", "test error, %"), ("compression", "compression")):
        panels[label] = [
            Line(name, [h["epoch"] for h in each["history"]], [h[what] for h in each["history"]])
            for name, each in found.items()
            if each
        ]
    drawn = {"error-and-compression-in-training": lines_figure(panels, "epoch")}
    if weights := {name: each["weights"] for name, each in found.items() if name in DRAWN and "weights" in each}:
        drawn["weights-before-and-after"] = weights_figure(weights)
    return drawn


def notes(config: SparseConfig) -> list[str]:
    """Say how this differs from the paper."""
    found = [
        "The noise of pruned weights stays in all layers; in the authors' code it stays in dense layers alone.",
        f"The dense networks are trained for {config.dense_epochs} epochs and half as many after pruning.",
        "The LSTM is not in the paper; what it has of a recipe here is that of LeNet-300-100 in the preset paper.",
    ]
    paper = SparseConfig()
    for number, name in enumerate(config.networks):
        if config.epochs[number] != paper.epochs[number]:
            found.append(
                f"{name} is trained for {config.epochs[number]} epochs instead of 200, in batches of "
                f"{config.batch_size} instead of 100, at a learning rate of {config.learning_rate[number]:g} instead "
                f"of 0.001 that falls from epoch {config.decay_from[number]} on. The weight of the KL rises between "
                f"epochs {config.kl_from[number]} and {config.kl_full[number]} instead of 5 and 20."
            )
    return found
