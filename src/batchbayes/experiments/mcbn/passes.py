"""Tables 10 and 11 of the MCBN paper: normalised scores of MCBN against the number of draws, at batch size 128.

No code was published for these tables; the weight decay and the number of epochs are chosen by the protocol of the main
tables (`protocol`). Fewer draws are the first of the many, in tuning and in testing.
"""

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from batchbayes.data.uci import SETS
from batchbayes.errors import BatchbayesWarning
from batchbayes.experiments.mcbn.batch_size import PRESETS as BATCH_SIZE
from batchbayes.experiments.mcbn.methods import chosen_mcbn
from batchbayes.experiments.mcbn.protocol import Protocol, load_split
from batchbayes.experiments.mcbn.scores import Drawn, scored
from batchbayes.experiments.mcbn.tables import sweep_tables
from batchbayes.experiments.mcbn.uci import PRESETS as MAIN
from batchbayes.experiments.mcbn.uci import notes_beside
from batchbayes.reproduce.experiment import Unit
from batchbayes.reproduce.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DATASETS = tuple(SETS)
PASSES = (50, 100, 250, 500)

PRESETS = {
    "smoke": replace(MAIN["smoke"], batch_sizes=(64,), num_samples=100),
    "quick": replace(BATCH_SIZE["quick"], batch_sizes=(128,), num_samples=500),
    "paper": replace(MAIN["paper"], splits=3, batch_sizes=(128,)),
}


def units(config: Protocol) -> list[Unit]:
    """One for each data set and split."""
    return [
        Unit(f"{dataset}, split {split}", {"dataset": dataset, "split": split})
        for dataset in config.datasets
        for split in range(1, config.of(dataset).splits + 1)
    ]


def work(
    config: Protocol, unit: Unit, needed: Mapping[str, Any], data_folder: str | os.PathLike[str] | None
) -> dict[str, Any]:
    """Choose, train, draw as often as the largest number says, and score the first so many."""
    dataset, own = unit.arguments["dataset"], config.of(unit.arguments["dataset"])
    split = load_split(dataset, unit.arguments["split"], data_folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BatchbayesWarning)  # the tables show how good each setting is
        candidate, folds, tests = chosen_mcbn(own, dataset, split, own.batch_sizes[0])
    counts = [count for count in PASSES if count <= own.num_samples]
    runs = {
        str(count): scored(first_draws(folds, count), first_draws(tests, count), split.precisions) for count in counts
    }
    return {"chosen": asdict(candidate), "runs": runs}


def first_draws(predicted: Sequence[Drawn], count: int) -> list[Drawn]:
    """The same predictions by fewer draws."""
    return [Drawn(each.draws[:count], each.truth) for each in predicted]


def tables(config: Protocol, results: Mapping[str, Any]) -> list[Table]:
    """Ours beside the published ones."""
    runs: dict[tuple[str, int], list[Mapping[str, float]]] = {}
    for unit in units(config):
        for count, found in results[unit.name]["runs"].items() if unit.name in results else ():
            runs.setdefault((unit.arguments["dataset"], int(count)), []).extend(found)
    return sweep_tables(config.datasets, runs, PASSES, "passes", (10, 11))


def figures(config: Protocol, results: Mapping[str, Any]) -> "dict[str, Figure]":
    """None: the paper has tables only."""
    return {}


def notes(config: Protocol) -> list[str]:
    """What is less than in the paper: 3 splits, 5 seeds, batch size 128."""
    return notes_beside(PRESETS["paper"], config, dropout=False)
