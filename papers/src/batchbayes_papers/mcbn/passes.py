"""MCBN with 50, 100, 250 and 500 draws: tables 10 and 11 of the MCBN paper.

The tables show normalised scores at batch size 128. The authors published no code for these tables. Here the weight
decay and the number of epochs are chosen as for the main tables (`protocol`). A smaller number of draws takes the first
draws of the largest number, in tuning and in testing.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from batchbayes_papers.data.folder import DataFolder
from batchbayes_papers.data.uci import SETS
from batchbayes_papers.mcbn.batch_size import PRESETS as BATCH_SIZE
from batchbayes_papers.mcbn.methods import chosen_mcbn
from batchbayes_papers.mcbn.protocol import UciProtocol
from batchbayes_papers.mcbn.scores import DrawnPredictions, score_runs
from batchbayes_papers.mcbn.splits import load_split
from batchbayes_papers.mcbn.tables import runs_by_method, sweep_tables, with_published
from batchbayes_papers.mcbn.uci import PRESETS as MAIN
from batchbayes_papers.mcbn.uci import reduction_notes
from batchbayes_papers.runner.experiment import Results, Unit, warnings_ignored
from batchbayes_papers.runner.tables import ResultTable

DATASETS = tuple(SETS)
PASSES = (50, 100, 250, 500)

PRESETS = {
    "smoke": replace(MAIN["smoke"], batch_sizes=(64,), num_samples=100),
    "quick": replace(
        BATCH_SIZE["quick"], datasets=DATASETS, splits=3, seeds=5, batch_sizes=(128,), num_samples=500,
        reductions={
            "kin8nm": {"weight_decays": (1e-3, 1e-5), "max_epochs": 400},
            "power": {"weight_decays": (1e-3, 1e-5), "max_epochs": 400},
            "protein": {"weight_decays": (1e-5,), "max_epochs": 300},
        },
    ),
    "paper": replace(MAIN["paper"], splits=3, batch_sizes=(128,)),
}  # fmt: skip


def units(config: UciProtocol) -> list[Unit]:
    """Return one unit for each data set and split."""
    return [
        Unit(f"{dataset}, split {split}", {"dataset": dataset, "split": split})
        for dataset in config.datasets
        for split in range(1, config.of(dataset).splits + 1)
    ]


def work(config: UciProtocol, unit: Unit, needed: Results, data_folder: DataFolder) -> dict[str, Any]:
    """Choose, train, predict with the largest number of draws, and score the first draws for each number."""
    dataset, own = unit.arguments["dataset"], config.of(unit.arguments["dataset"])
    split = load_split(dataset, unit.arguments["split"], data_folder)
    with warnings_ignored():
        candidate, folds, tests = chosen_mcbn(own, dataset, split, own.batch_sizes[0])
    counts = [count for count in PASSES if count <= own.num_samples]
    runs = {
        str(count): score_runs(first_draws(folds, count), first_draws(tests, count), split.precisions)
        for count in counts
    }
    return {"chosen": asdict(candidate), "runs": runs}


def first_draws(predicted: Sequence[DrawnPredictions], count: int) -> list[DrawnPredictions]:
    """Return the same predictions with the first `count` draws only."""
    return [DrawnPredictions(each.draws[:count], each.truth) for each in predicted]


def tables(config: UciProtocol, results: Results) -> list[ResultTable]:
    """Return our scores beside the published ones."""
    runs = runs_by_method(config.datasets, units(config), results)
    return sweep_tables(with_published(config.datasets), runs, PASSES, "passes", (10, 11))


def notes(config: UciProtocol) -> list[str]:
    """Say what the preset reduces. The paper has 3 splits, 5 seeds and batch size 128."""
    return reduction_notes(PRESETS["paper"], config, dropout=False)
