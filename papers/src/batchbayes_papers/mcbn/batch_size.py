"""MCBN with batch sizes from 8 to 1024 in training and prediction: tables 8 and 9 of the MCBN paper.

The tables show normalised scores with 100 draws. The authors published no code for these tables. Here the weight decay
and the number of epochs are chosen at each batch size, as for the main tables (`protocol`).
"""

from dataclasses import asdict, replace
from typing import Any

from batchbayes_papers.data.folder import DataFolder
from batchbayes_papers.data.uci import SETS
from batchbayes_papers.mcbn.methods import chosen_mcbn
from batchbayes_papers.mcbn.protocol import UciProtocol
from batchbayes_papers.mcbn.published import published_value
from batchbayes_papers.mcbn.scores import score_runs
from batchbayes_papers.mcbn.splits import load_split
from batchbayes_papers.mcbn.tables import runs_by_method, sweep_tables, with_published
from batchbayes_papers.mcbn.uci import PRESETS as MAIN
from batchbayes_papers.mcbn.uci import num_rows, reduction_notes
from batchbayes_papers.runner.experiment import Results, Unit, warnings_ignored
from batchbayes_papers.runner.tables import ResultTable

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


def units(config: UciProtocol) -> list[Unit]:
    """Return one unit for each data set, split and batch size.

    A batch size that would hold all training rows of a fold is left out, unless the paper has it.
    """
    made = []
    for dataset in config.datasets:
        own, rows = config.of(dataset), num_rows(dataset)
        for split in range(1, own.splits + 1):
            for size in own.batch_sizes:
                published = published_value(8, dataset, "MCBN", "crps_norm", batch_size=size) is not None
                if size < int(0.64 * rows) or published:
                    arguments = {"dataset": dataset, "split": split, "batch_size": size}
                    effort = rows * len(own.weight_decays) * own.max_epochs * (1 + 32 / size)
                    made.append(Unit(f"{dataset}, split {split}, batch {size}", arguments, effort=effort))
    return made


def work(config: UciProtocol, unit: Unit, needed: Results, data_folder: DataFolder) -> dict[str, Any]:
    """Choose, train and test at one batch size."""
    dataset = unit.arguments["dataset"]
    split = load_split(dataset, unit.arguments["split"], data_folder)
    with warnings_ignored():
        candidate, folds, tests = chosen_mcbn(config.of(dataset), dataset, split, unit.arguments["batch_size"])
    return {"chosen": asdict(candidate), "runs": score_runs(folds, tests, split.precisions)}


def tables(config: UciProtocol, results: Results) -> list[ResultTable]:
    """Return our scores beside the published ones."""
    made = units(config)
    sizes = {unit.name: str(unit.arguments["batch_size"]) for unit in made}
    by_size = {name: {"runs": {sizes[name]: found["runs"]}} for name, found in results.items()}
    runs = runs_by_method(config.datasets, made, by_size)
    datasets = with_published(config.datasets)
    shown = SIZES if datasets != config.datasets else config.batch_sizes
    return sweep_tables(datasets, runs, shown, "batch_size", (8, 9))


def notes(config: UciProtocol) -> list[str]:
    """Say what the preset reduces. The paper has 3 splits, 5 seeds and 100 draws."""
    return [
        *reduction_notes(PRESETS["paper"], config, dropout=False),
        "A batch that holds all rows has no noise. This is so for concrete at 1024, and during cross-validation for "
        "energy at 512 and wine at 1024.",
    ]
