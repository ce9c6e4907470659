"""Stochastic batch normalisation: error and NLL on known classes, entropy on unknown ones; table 1 of the paper.

Atanov, Ashukha, Molchanov, Neklyudov and Vetrov, "Uncertainty Estimation via Stochastic Batch Normalization" (2018):
LeNet-5 on MNIST meets the letters of notMNIST; VGG-11 and ResNet-18 on five classes of CIFAR-10 meet the other five.
Single networks, deep ensembles and dropout are compared without and with stochastic BN (SBN). A curve of the entropy of
unknown images that lies lower is better: the network is less sure of what it cannot know.

Paper and code leave some choices open, and a table shows what each does: the estimator of the moments (exact, or the
moving average of the code), the statistics of a network without SBN (running, or the geometric mean of the code), and
whether the dense batch norm of LeNet-5 is random (paper) or not (code). Beyond the paper are correlated SBN, MCBN, a
tuned batch size, views, and novelty.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from batchbayes.tools import Figure, count
from batchbayes_papers.data.folder import DataFolder
from batchbayes_papers.image_networks import Course, train_on_bytes
from batchbayes_papers.runner.experiment import Results, Unit, warnings_ignored
from batchbayes_papers.runner.records import pack_tensors, pack_weights, unpack_weights
from batchbayes_papers.runner.tables import ResultTable
from batchbayes_papers.sbn.networks import (
    LENET,
    RESNET,
    VGG,
    NetworkSetting,
    Probabilities,
    dropout_probabilities,
    load_sbn,
    member_probabilities,
    new_network,
    novelty_auroc,
    prepare_for,
    variant_probabilities,
)
from batchbayes_papers.sbn.tables import sbn_figures, sbn_tables

DATASETS = (LENET, VGG, RESNET)


@dataclass(frozen=True)
class SbnConfig:
    """A configuration."""

    datasets: tuple[str, ...]
    """The networks."""
    settings: Mapping[str, NetworkSetting]
    data: Literal["real", "synthetic"] = "real"


TINY: dict[str, Any] = {
    "num_train": 96, "num_held_out": 40, "num_known": 60, "num_unknown": 40, "passes": 3, "num_batches": 6,
}  # fmt: skip
PAPER: dict[str, Any] = {"num_held_out": 0, "num_known": 5000, "num_unknown": 5000, "num_train": 25_000}
PRESETS = {
    "smoke": SbnConfig(
        (LENET, VGG),
        {
            LENET: NetworkSetting(Course(1, 16, 1e-3, "adam"), Course(1, 16, 1e-3, "adam"), members=2, **TINY),
            VGG: NetworkSetting(Course(1, 16, 1e-3, "adam"), None, members=2, width=2, **TINY),
        },
        "synthetic",
    ),
    "quick": SbnConfig(
        DATASETS,
        {
            LENET: NetworkSetting(
                Course(20, 16, 1e-3, "adam"), Course(14, 16, 1e-3, "adam"), members=4, num_train=59_000,
                num_held_out=1000, num_unknown=2000, passes=12, num_batches=400,
            ),
            VGG: NetworkSetting(
                Course(3, 16, 2e-3, "adam"), Course(4, 16, 2e-3, "adam"), members=3, width=8, num_train=24_000,
                num_held_out=1000, num_known=2000, num_unknown=1000, passes=12, num_batches=400,
            ),
            RESNET: NetworkSetting(
                Course(3, 16, 2e-3, "adam"), members=3, width=8, num_train=10_000, num_held_out=1000,
                num_known=2000, num_unknown=1000, passes=12, num_batches=200,
            ),
        },
    ),
    "paper": SbnConfig(
        DATASETS,
        {
            LENET: NetworkSetting(Course(50, 16, 1e-3, "adam"), Course(50, 16, 1e-3, "adam")),
            VGG: NetworkSetting(Course(200, 16, 1e-3, "adam"), Course(200, 16, 1e-3, "adam"), **PAPER),
            RESNET: NetworkSetting(Course(200, 16, 1e-3, "adam"), **PAPER),
        },
    ),
}  # fmt: skip


def units(config: SbnConfig) -> list[Unit]:
    """Return for each network the trainings, the predictions of each trained network, and the variants of the first."""
    made: list[Unit] = []
    for name in config.datasets:
        setting = config.settings[name]
        cost = setting.num_train * setting.recipe.epochs * (3 if name == RESNET else 1) / 1e4
        trained = [f"member {number}" for number in range(setting.members)]
        trained += ["dropout"] if setting.dropout_recipe else []
        for number, which in enumerate(trained):
            arguments = {"network": name, "which": which, "seed": number}
            training = Unit(f"{name}, {which}, training", {**arguments, "step": "training"}, effort=cost)
            needs = (training.name,)
            made += [training, Unit(f"{name}, {which}", {**arguments, "step": "predict"}, needs, effort=cost / 10)]
        needs = (f"{name}, member 0, training",)
        arguments = {"network": name, "which": "member 0", "seed": 0, "step": "variants"}
        made.append(Unit(f"{name}, variants", arguments, needs, effort=cost / 2))
    return made


def work(config: SbnConfig, unit: Unit, needed: Results, data_folder: DataFolder = None) -> Any:
    """Train a network, or return what methods with a trained network predict."""
    name, which, seed = (unit.arguments[key] for key in ("network", "which", "seed"))
    setting, dropout = config.settings[name], which == "dropout"
    data = load_sbn(name, config.data, setting, data_folder)
    network = new_network(name, setting, seed, dropout=dropout)
    if unit.arguments["step"] == "training":
        recipe = setting.dropout_recipe if dropout and setting.dropout_recipe else setting.recipe
        loss = train_on_bytes(network, *data.train, recipe, prepare_for(name), seed)
        return {"weights": pack_weights(network), "training_loss": loss}
    unpack_weights(network, needed[unit.needs[0]]["weights"])
    with warnings_ignored():
        if unit.arguments["step"] == "variants":
            seen = variant_probabilities(name, network, data, setting)
            return {**packed(seen, data.known[1]), "novelty": novelty_auroc(network, data)}
        predicted = dropout_probabilities if dropout else member_probabilities
        return packed(predicted(name, network, data, setting), data.known[1])


def packed(seen: Mapping[str, Probabilities], labels: Tensor) -> dict[str, Any]:
    """Return predictions as texts, by method, with the labels of the known images."""
    texts = {
        method: pack_tensors({"known": known.float(), "unknown": unknown.float()})
        for method, (known, unknown) in seen.items()
    }
    return {"methods": texts, "labels": pack_tensors({"labels": labels.to(torch.uint8)})}


def tables(config: SbnConfig, results: Results) -> list[ResultTable]:
    """Return error and NLL beside the published ones, pairs without and with SBN, entropies, and the variants."""
    return sbn_tables(config, units(config), results)


def figures(config: SbnConfig, results: Results) -> dict[str, Figure]:
    """Show the entropy of unknown images beside the published readings."""
    return sbn_figures(config, units(config), results)


def notes(config: SbnConfig) -> list[str]:
    """Say how this differs from the paper, for each network."""
    lines, full = [], PRESETS["paper"].settings
    for name in config.datasets:
        own, paper = asdict(config.settings[name]), asdict(full[name])
        differs = [
            f"{key.replace('_', ' ')} {_shown(value)} (paper {_shown(paper[key])})"
            for key, value in own.items()
            if value != paper[key] and key != "num_held_out" and not (key == "width" and name == LENET)
        ]
        if differs:
            lines.append(f"{name}: {'; '.join(differs)}.")
    return [
        *lines,
        "The learning rate falls linearly to zero from the first step, and not from the second epoch.",
        "Masks of dropout are shared by all images of a pass. VGG-11 has dropout rates of 0.5 and 0.3, which the paper "
        "does not give.",
    ]


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return count(value["epochs"], "epoch")
    return "none" if value is None else f"{value:,}"
