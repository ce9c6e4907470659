"""MCBN and MC dropout on eight regression data sets, beside the MCBN paper's values in tables 1 and 4 to 7.

The figures of errors against uncertainty are the paper's figures 2, 4 and 5. For each split, cross-validation compares
batch norm networks of all batch sizes, and dropout networks of all rates (`protocol`). The chosen networks are trained
again with several seeds and scored on the test rows (`methods`, `scores`). The tables show them beside the published
scores (`tables`).
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from batchbayes.tools import Figure
from batchbayes_papers.data.folder import DataFolder
from batchbayes_papers.data.uci import SETS
from batchbayes_papers.mcbn.methods import score_batch_norm, score_dropout
from batchbayes_papers.mcbn.protocol import (
    DROPOUT_BATCH_SIZE,
    WAYS,
    NetworkKind,
    UciProtocol,
    best_candidate,
    cross_validate,
)
from batchbayes_papers.mcbn.splits import SYNTHETIC, SYNTHETIC_ROWS, load_split
from batchbayes_papers.mcbn.tables import MADE_UP, Runs, regression_tables, runs_by_method
from batchbayes_papers.runner.experiment import Results, Unit, warnings_ignored
from batchbayes_papers.runner.figures import uncertainty_error_grid
from batchbayes_papers.runner.tables import ResultTable

DATASETS = tuple(SETS)

LARGE = {"splits": 2, "weight_decays": (1e-3, 1e-5), "max_epochs": 400}
PRESETS = {
    "smoke": UciProtocol(
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
    "quick": UciProtocol(
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
    "paper": UciProtocol(DATASETS),
}


def units(config: UciProtocol) -> list[Unit]:
    """Return, for each data set and split, the choices at each batch size and over dropout rates, and two tests."""
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


def _unit(step: str, dataset: str, split: int, kind: NetworkKind, own: UciProtocol, **more: int) -> Unit:
    name = ", ".join([dataset, f"split {split}", kind, step, *(f"batch {size}" for size in more.values())])
    rates = len(own.dropout_rates) if kind == "DO" else 1
    networks = 5 * len(own.weight_decays) * rates if step == "choose" else 4 + 2 * own.seeds
    effort = networks * num_rows(dataset) * min(own.max_epochs, 500) * (3 if dataset == "protein" else 1)
    return Unit(name, {"step": step, "dataset": dataset, "split": split, "kind": kind, **more}, effort=effort)


def num_rows(dataset: str) -> int:
    """Return the number of rows of a data set."""
    return SYNTHETIC_ROWS if dataset == SYNTHETIC else SETS[dataset].num_rows


def work(config: UciProtocol, unit: Unit, needed: Results, data_folder: DataFolder) -> dict[str, Any]:
    """Choose hyper-parameters by cross-validation, or test the chosen ones."""
    dataset, kind = unit.arguments["dataset"], unit.arguments["kind"]
    own, split = config.of(dataset), load_split(dataset, unit.arguments["split"], data_folder)
    if unit.arguments["step"] == "choose":
        return cross_validate(own, dataset, split.folds, kind, unit.arguments["batch_size"])
    chosen = {way: best_candidate([c for found in needed.values() for c in found[way]]) for way in WAYS[kind]}
    with warnings_ignored():
        score = score_batch_norm if kind == "BN" else score_dropout
        tested = score(own, dataset, split, *chosen.values(), keep_points=unit.arguments["split"] == 1)
    return {"chosen": {way: asdict(candidate) for way, candidate in chosen.items()}, **tested}


def tables(config: UciProtocol, results: Results) -> list[ResultTable]:
    """Return our scores beside the published ones."""
    return regression_tables(config.datasets, tested_runs(config, results))


def tested_runs(config: UciProtocol, results: Results) -> Runs:
    """Return the runs of every data set and method, over all finished splits."""
    tests = [unit for unit in units(config) if unit.arguments["step"] == "test"]
    return runs_by_method(config.datasets, tests, results)


def figures(config: UciProtocol, results: Results) -> dict[str, Figure]:
    """Show errors against predicted uncertainty for MCBN and MC dropout, for the first split and seed."""
    return error_figures(units(config), results)


def error_figures(units: Sequence[Unit], results: Results) -> dict[str, Figure]:
    """Return a figure for each method, with a panel for each data set, of the units that have points to draw."""
    panels: dict[str, dict[str, Any]] = {}
    for unit in units:
        for method, points in results[unit.name].get("points", {}).items():
            drawn = points["std"], points["error"], points["constant_std"]
            panels.setdefault(f"errors-against-uncertainty-{method}", {})[unit.arguments["dataset"]] = drawn
    return {stem: uncertainty_error_grid(each) for stem, each in panels.items()}


REDUCIBLE = (
    "splits", "seeds", "weight_decays", "batch_sizes", "dropout_rates", "max_epochs", "selection_draws", "num_samples"
)  # fmt: skip
"""The fields in which a preset may do less than the paper."""


def notes(config: UciProtocol) -> list[str]:
    """Say what the preset reduces, for each data set."""
    return reduction_notes(UciProtocol(()), config)


def reduction_notes(full: UciProtocol, config: UciProtocol, *, dropout: bool = True) -> list[str]:
    """Say in which fields a protocol does less than the full one, for each data set."""
    lines = [
        "One weight decay of 0 replaces the paper's values from 1e-7 to 1e-15. A search in log tau finds the precision "
        "tau."
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
    return [*lines, MADE_UP] if config.datasets == (SYNTHETIC,) else lines


def _shown(value: Any) -> str:
    return " ".join(f"{item:g}" for item in value) if isinstance(value, tuple | list) else f"{value:g}"
