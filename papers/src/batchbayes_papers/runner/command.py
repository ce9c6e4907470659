"""The commands `reproduce` and `table`: from command line options to results and printed tables."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from textwrap import shorten

from batchbayes import BatchbayesError
from batchbayes._common.cluster import PACKAGES, Cluster, ClusterWorkers, find_cluster
from batchbayes.tools import count, hidden_progress, require_packages
from batchbayes_papers.data.folder import DataFolder
from batchbayes_papers.runner.experiment import EXPERIMENTS, load_experiment
from batchbayes_papers.runner.outputs import (
    explained_write_errors,
    mixed_versions,
    shown_run,
    tables_with_notes,
    write_gallery,
    write_outputs,
)
from batchbayes_papers.runner.plan import Plan, make_plan, plan_of_results, require_known_units, some_units
from batchbayes_papers.runner.records import to_json
from batchbayes_papers.runner.run import UnitError, run_units, some_names
from batchbayes_papers.runner.store import ResultStore, read_results
from batchbayes_papers.runner.tables import FORMATS, ResultTable, to_terminal
from batchbayes_papers.runner.unit_progress import UnitProgress
from batchbayes_papers.runner.workers import local_workers

RESULTS_FILE = "results.sqlite"
MOST_WORKERS = 8
"""The most workers by default: each worker is a process with its own copy of torch in memory."""


def reproduce_command(options: argparse.Namespace) -> None:
    """Run an experiment or all of them, or print the list of experiments."""
    if options.list:
        print("\n".join(experiment_list()))
        return
    if options.all:
        _reproduce_all(options)
        return
    if options.name is None:
        where = ", and give it before --datasets" if options.datasets else ""
        raise BatchbayesError(
            expected="the name of an experiment", got="none", fix=f"choose one from the output of --list{where}"
        )
    datasets = None
    if options.datasets is not None:
        datasets = [name.strip() for text in options.datasets for name in text.split(",") if name.strip()]
    plan = make_plan(options.name, options.preset, datasets)
    out = options.out or _default_folder(plan, datasets or ())
    workers, cluster = _find_workers(options)
    with hidden_progress(options.quiet):
        tables = reproduce(plan, out, only=options.unit, workers=workers, data_folder=options.data_dir, cluster=cluster)
    if not options.quiet:
        print("\n\n".join(map(to_terminal, tables)))
        print(f"\nTables, figures and a page: {out / 'index.html'}")


def _find_workers(options: argparse.Namespace) -> tuple[int, Cluster | None]:
    """Return the number of processes, and the cluster if one was named."""
    cluster = find_cluster(options.cluster, options.scheduler_file)
    if cluster and options.workers:
        raise BatchbayesError(expected="--workers or a cluster", got="both", fix="a cluster has workers of its own")
    return options.workers or min(MOST_WORKERS, os.cpu_count() or 1), cluster


def _reproduce_all(options: argparse.Namespace) -> None:
    """Run every experiment in its own folder, and write a gallery of all of them. What fails does not stop the rest."""
    if given := options.name or options.datasets or options.unit:
        raise BatchbayesError(
            expected="no name, no --datasets and no --unit beside --all", got=str(given), fix="leave it out"
        )
    out = options.out or Path("runs") / f"all-{options.preset}"
    runs, missing, (workers, cluster) = [], {}, _find_workers(options)
    with hidden_progress(options.quiet):
        for name in EXPERIMENTS:
            try:
                plan = make_plan(name, options.preset)
                reproduce(plan, out / name, workers=workers, data_folder=options.data_dir, cluster=cluster)
            except BatchbayesError as error:
                missing[name] = " ".join(str(error).split())
                continue
            except UnitError as error:
                print(error, file=sys.stderr)
                first, *_, last = str(error).strip().splitlines()
                missing[name] = f"{first} {last}"
                continue
            finished = read_results(out / name / RESULTS_FILE)[1]
            runs.append(shown_run(plan, finished, sorted((out / name / "figures").glob("*.png"))))
    write_gallery(options.preset, runs, missing, out / "index.html")
    if not options.quiet:
        print(f"{count(len(runs), 'experiment')} in one page: {out / 'index.html'}")
    if missing:
        raise BatchbayesError(
            expected=f"all {len(EXPERIMENTS)} experiments to be run",
            got="; ".join(f"{name}: {reason}" for name, reason in missing.items()),
            fix="give the same command again after that: what is finished is kept",
        )


def _default_folder(plan: Plan, as_given: Sequence[str]) -> Path:
    """Return a folder named after the run. An existing folder with the data sets in the user's order is used too."""
    names = [
        Path("runs") / "-".join([plan.settings.experiment, plan.settings.preset, *datasets])
        for datasets in (as_given, plan.settings.datasets or ())
    ]
    return next((folder for folder in names if folder.exists()), names[-1])


def reproduce(
    plan: Plan,
    out: Path,
    *,
    only: Sequence[str] | None = None,
    workers: int = 1,
    data_folder: DataFolder = None,
    cluster: Cluster | None = None,
) -> list[ResultTable]:
    """Do the units that are not finished in `out`, write tables, figures and a page there, and return the tables.

    `only` chooses units by parts of their names. Figures are not drawn while others are missing.
    """
    require_packages("figures and the page", "report", matplotlib="matplotlib", jinja2="jinja2")
    if data_folder is not None and not os.path.isdir(data_folder):
        raise BatchbayesError(
            expected="a folder with the data sets (--data-dir)",
            got=f"no folder at {os.fspath(data_folder)}",
            fix="check the name, or leave it out: data sets are then searched in BATCHBAYES_DATA or downloaded",
        )
    if out.exists() and not out.is_dir():
        raise BatchbayesError(expected="a folder for the results (--out)", got=f"the file {out}", fix="choose another")
    chosen = plan if only is None else some_units(plan, only)
    with explained_write_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    with ResultStore(out / RESULTS_FILE, plan.settings) as store:
        before = store.finished()
        require_known_units(plan, before)
        done = before.keys() & {unit.name for unit in chosen.units}
        workers = min(workers, max(1, len(chosen.units) - len(done)))
        with UnitProgress({unit.name: unit.effort for unit in chosen.units}) as shown:
            make_workers = partial(local_workers, workers)
            if cluster:
                packages, say = (*PACKAGES, "batchbayes_papers"), partial(shown.say, always=True)
                make_workers = partial(ClusterWorkers, cluster, packages=packages, say=say)
            if done:
                shown.say(f"{len(done)} of {count(len(chosen.units), 'unit')} were finished before")
            folder = None if data_folder is None else os.fspath(data_folder)
            run_units(chosen, store, make_workers, folder, shown)
        finished = store.finished()
    return write_outputs(plan, finished, out)


def table_command(options: argparse.Namespace) -> None:
    """Print the tables of a run, also of an unfinished one."""
    load_experiment(options.name)  # report a wrong name before a wrong folder
    found, finished = read_results(options.folder / RESULTS_FILE)
    plan = plan_of_results(options.name, found)
    require_known_units(plan, finished)
    missing = [unit.name for unit in plan.units if unit.name not in finished]
    if missing:
        print(
            f"not finished: {len(missing)} of {count(len(plan.units), 'unit')}: {some_names(missing)}", file=sys.stderr
        )
    tables = tables_with_notes(plan, finished)
    texts = [FORMATS[options.format](table) for table in tables]
    if options.format == "csv":  # CSV has no titles and no notes
        for note in mixed_versions(finished):
            print(note, file=sys.stderr)
        if len(tables) > 1:
            texts = [f"# {table.title}\n{text}" for table, text in zip(tables, texts, strict=True)]
    print("\n\n".join(text.rstrip("\n") for text in texts))


def experiment_list() -> list[str]:
    """Return lines that describe each experiment, its presets and its data sets."""
    lines = []
    for name in EXPERIMENTS:
        experiment = load_experiment(name)
        lines.append(f"{name}: {(experiment.__doc__ or '').partition(chr(10))[0]}")
        for preset, config in experiment.PRESETS.items():
            fields = ", ".join(f"{field} {to_json(value)}" for field, value in asdict(config).items())
            lines.append(f"  --preset {preset}: {count(len(experiment.units(config)), 'unit')}; {shorten(fields, 160)}")
        if datasets := getattr(experiment, "DATASETS", ()):
            lines.append(f"  --datasets {','.join(datasets)}")
    return lines
