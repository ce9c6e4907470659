"""Tables 1 and 4 to 7, and the uncertainty-error figures 2, 4 and 5, of the MCBN paper: eight regression data sets.

For each split: batch norm networks at every batch size and dropout networks at every rate are compared by
cross-validation (`protocol`); the chosen ones are trained again from several seeds and scored on the test rows
(`mcbn_methods`, `mcbn_scores`), and stand beside the published figures (`mcbn_tables`).
"""

import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from batchbayes.data.uci import SETS
from batchbayes.errors import BatchbayesWarning
from batchbayes.experiments.mcbn.methods import score_batch_norm, score_dropout
from batchbayes.experiments.mcbn.protocol import (
    DROPOUT_BATCH_SIZE,
    SYNTHETIC,
    WAYS,
    Kind,
    Protocol,
    best_candidate,
    choose,
    load_split,
)
from batchbayes.experiments.mcbn.tables import all_tables
from batchbayes.reproduce.experiment import Unit
from batchbayes.reproduce.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DATASETS = tuple(SETS)

LARGE = {"splits": 2, "weight_decays": (1e-3, 1e-5), "max_epochs": 400}
PRESETS = {
    "smoke": Protocol(
        (SYNTHETIC,),
        splits=1,
        seeds=2,
        weight_decays=(1e-3,),
        batch_sizes=(32,),
        dropout_rates=(0.02,),
        max_epochs=40,
        selection_draws=8,
        num_samples=16,
    ),
    "quick": Protocol(
        DATASETS,
        seeds=3,
        weight_decays=(1e-1, 1e-2, 1e-3, 1e-5),
        batch_sizes=(32, 128, 512),
        dropout_rates=(0.05, 0.01, 0.001),
        selection_draws=32,
        reductions={
            "kin8nm": LARGE,
            "power": LARGE,
            "protein": {"splits": 1, "weight_decays": (1e-5,), "dropout_rates": (0.01, 0.001), "max_epochs": 300},
            "yacht": {"selection_draws": 500, "batch_sizes": (32, 64, 128, 512)},  # its draws scatter widely
        },
    ),
    "paper": Protocol(DATASETS),
}


def units(config: Protocol) -> list[Unit]:
    """For each data set and split: a choice at each batch size, one over dropout rates, and a test of each kind."""
    made: list[Unit] = []
    for dataset in config.datasets:
        own = config.of(dataset)
        for split in range(1, own.splits + 1):
            for kind in ("BN", "DO"):
                sizes = own.batch_sizes if kind == "BN" else (DROPOUT_BATCH_SIZE,)
                choices = [_unit("choose", dataset, split, kind, own, batch_size=size) for size in sizes]
                test = _unit("test", dataset, split, kind, own)
                made += [*choices, replace(test, needs=tuple(choice.name for choice in choices))]
    return made


def _unit(step: str, dataset: str, split: int, kind: Kind, own: Protocol, **more: int) -> Unit:
    name = ", ".join([dataset, f"split {split}", kind, step, *(f"batch {size}" for size in more.values())])
    rows = SETS[dataset].num_rows if dataset in SETS else 300
    rates = len(own.dropout_rates) if kind == "DO" else 1
    networks = 5 * len(own.weight_decays) * rates if step == "choose" else 4 + 2 * own.seeds
    effort = networks * rows * min(own.max_epochs, 500) * (3 if dataset == "protein" else 1)
    return Unit(name, {"step": step, "dataset": dataset, "split": split, "kind": kind, **more}, effort=effort)


def work(
    config: Protocol, unit: Unit, needed: Mapping[str, Any], data_folder: str | os.PathLike[str] | None
) -> dict[str, Any]:
    """Choose by cross-validation, or test what was chosen."""
    dataset, kind = unit.arguments["dataset"], unit.arguments["kind"]
    own, split = config.of(dataset), load_split(dataset, unit.arguments["split"], data_folder)
    if unit.arguments["step"] == "choose":
        return choose(own, dataset, split.folds, kind, unit.arguments["batch_size"])
    chosen = {way: best_candidate([c for found in needed.values() for c in found[way]]) for way in WAYS[kind]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BatchbayesWarning)  # the tables show how good each method is
        score = score_batch_norm if kind == "BN" else score_dropout
        tested = score(own, dataset, split, *chosen.values(), keep_points=unit.arguments["split"] == 1)
    return {"chosen": {way: asdict(candidate) for way, candidate in chosen.items()}, **tested}


def tables(config: Protocol, results: Mapping[str, Any]) -> list[Table]:
    """Ours beside the published ones."""
    return all_tables(config.datasets, collected(config, results))


def collected(config: Protocol, results: Mapping[str, Any]) -> dict[str, dict[str, list[dict[str, float]]]]:
    """The runs of every data set and method, over all splits that are done."""
    runs: dict[str, dict[str, list[dict[str, float]]]] = {dataset: {} for dataset in config.datasets}
    for unit in units(config):
        if unit.arguments["step"] == "test" and unit.name in results:
            for method, found in results[unit.name]["runs"].items():
                runs[unit.arguments["dataset"]].setdefault(method, []).extend(found)
    return runs


def figures(config: Protocol, results: Mapping[str, Any]) -> "dict[str, Figure]":
    """Errors against predicted uncertainty, for MCBN and MC dropout: the first split and seed of each data set."""
    from batchbayes.plots import uncertainty_error_grid

    panels: dict[str, dict[str, Any]] = {}
    for unit in units(config):
        for method, points in results[unit.name].get("points", {}).items():
            drawn = points["std"], points["error"], points["constant_std"]
            panels.setdefault(f"errors-{method.lower()}", {})[unit.arguments["dataset"]] = drawn
    return {stem: uncertainty_error_grid(each) for stem, each in panels.items()}


REDUCIBLE = (
    "splits", "seeds", "weight_decays", "batch_sizes", "dropout_rates", "max_epochs", "selection_draws", "num_samples"
)  # fmt: skip
"""Fields of the protocol by which a preset does less than the paper."""


def notes(config: Protocol) -> list[str]:
    """What is less than in the paper, data set by data set."""
    return notes_beside(Protocol(()), config)


def notes_beside(full: Protocol, config: Protocol, *, dropout: bool = True) -> list[str]:
    """What is less than in a protocol, data set by data set."""
    lines = [
        "Weight decays from 1e-7 to 1e-15 of the paper stand in the grid as one 0; tau is found by a search in log tau."
    ]
    for dataset in config.datasets:
        own = config.of(dataset)
        less = [
            f"{name.replace('_', ' ')} {_shown(getattr(own, name))}"
            for name in REDUCIBLE
            if (dropout or name != "dropout_rates") and getattr(own, name) != getattr(full.of(dataset), name)
        ]
        if less:
            lines.append(f"{dataset}: {'; '.join(less)}.")
    return lines


def _shown(value: Any) -> str:
    return " ".join(f"{item:g}" for item in value) if isinstance(value, tuple | list) else f"{value:g}"
