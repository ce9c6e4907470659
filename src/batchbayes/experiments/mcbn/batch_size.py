"""Tables 8 and 9 of the MCBN paper: normalised scores of MCBN against the batch size, with 100 draws.

The batch size is that of training and of prediction. No code was published for these tables; here the weight decay and
the number of epochs are chosen at each batch size by the protocol of the main tables (`protocol`).
"""

import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from batchbayes.data.uci import SETS
from batchbayes.errors import BatchbayesWarning
from batchbayes.experiments.mcbn.methods import chosen_mcbn
from batchbayes.experiments.mcbn.protocol import SYNTHETIC, Protocol, load_split
from batchbayes.experiments.mcbn.scores import scored
from batchbayes.experiments.mcbn.tables import sweep_tables
from batchbayes.experiments.mcbn.uci import PRESETS as MAIN
from batchbayes.experiments.mcbn.uci import notes_beside
from batchbayes.experiments.published import mcbn_value
from batchbayes.reproduce.experiment import Unit
from batchbayes.reproduce.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DATASETS = tuple(SETS)
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
SMALL = ("boston", "concrete", "energy", "wine", "yacht")

PRESETS = {
    "smoke": replace(MAIN["smoke"], batch_sizes=(16, 64)),
    "quick": replace(
        MAIN["quick"],
        datasets=SMALL,
        splits=1,
        weight_decays=(1e-2, 1e-4),
        batch_sizes=SIZES,
        num_samples=100,
        reductions={},
    ),
    "paper": replace(MAIN["paper"], splits=3, batch_sizes=SIZES, num_samples=100),
}


def units(config: Protocol) -> list[Unit]:
    """One for each data set, split and batch size that leaves some rows out of a batch, or that the paper has."""
    made = []
    for dataset in config.datasets:
        own = config.of(dataset)
        rows = SETS[dataset].num_rows if dataset != SYNTHETIC else 300
        for split in range(1, own.splits + 1):
            for size in own.batch_sizes:
                if size >= int(0.64 * rows) and mcbn_value(8, dataset, "MCBN", "crps_norm", batch_size=size) is None:
                    continue
                arguments = {"dataset": dataset, "split": split, "batch_size": size}
                effort = rows * len(own.weight_decays) * own.max_epochs * (1 + 32 / size)
                made.append(Unit(f"{dataset}, split {split}, batch {size}", arguments, effort=effort))
    return made


def work(
    config: Protocol, unit: Unit, needed: Mapping[str, Any], data_folder: str | os.PathLike[str] | None
) -> dict[str, Any]:
    """Choose, train and test at one batch size."""
    dataset = unit.arguments["dataset"]
    split = load_split(dataset, unit.arguments["split"], data_folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BatchbayesWarning)  # the tables show how good each setting is
        candidate, folds, tests = chosen_mcbn(config.of(dataset), dataset, split, unit.arguments["batch_size"])
    return {"chosen": asdict(candidate), "runs": scored(folds, tests, split.precisions)}


def tables(config: Protocol, results: Mapping[str, Any]) -> list[Table]:
    """Ours beside the published ones."""
    runs: dict[tuple[str, int], list[Mapping[str, float]]] = {}
    for unit in units(config):
        if unit.name in results:
            key = unit.arguments["dataset"], unit.arguments["batch_size"]
            runs.setdefault(key, []).extend(results[unit.name]["runs"])
    return sweep_tables(config.datasets, runs, config.batch_sizes, "batch_size", (8, 9))


def figures(config: Protocol, results: Mapping[str, Any]) -> "dict[str, Figure]":
    """None: the paper has tables only."""
    return {}


def notes(config: Protocol) -> list[str]:
    """What is less than in the paper: 3 splits, 5 seeds, 100 draws."""
    return [
        *notes_beside(PRESETS["paper"], config, dropout=False),
        "A batch that holds all rows has no noise: concrete at 1024, and while folds are left out energy at 512 and "
        "wine at 1024.",
    ]
