"""The commands `reproduce` and `table`: from parsed options to work, and from results to what is printed."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten

from batchbayes._common.progress import UnitProgress, hidden_progress
from batchbayes._common.text import count
from batchbayes.errors import BatchbayesError
from batchbayes.reproduce.experiment import ABOUT, load_experiment
from batchbayes.reproduce.plan import Plan, make_plan, plan_of, require_fitting
from batchbayes.reproduce.results import Results, read_results, to_json
from batchbayes.reproduce.run import do_units
from batchbayes.reproduce.tables import FORMATS, Table, to_terminal
from batchbayes.reproduce.workers import local_workers
from batchbayes.reproduce.write import all_tables, mixed_versions, room_for, write_outputs

RESULTS = "results.sqlite"
MOST_WORKERS = 8
"""By default: each is a process with a copy of torch in memory."""


def reproduce_command(options: argparse.Namespace) -> None:
    """Run an experiment, or say which there are."""
    if options.list:
        print("\n".join(listed()))
        return
    if options.name is None:
        where = ", and give it before --datasets" if options.datasets else ""
        raise BatchbayesError(
            expected="the name of an experiment", got="none", fix=f"choose one that --list names{where}"
        )
    datasets = None
    if options.datasets is not None:
        datasets = [name.strip() for text in options.datasets for name in text.split(",") if name.strip()]
    plan = make_plan(options.name, options.preset, datasets)
    out = options.out or _default_folder(plan, datasets or ())
    workers = options.workers or min(MOST_WORKERS, os.cpu_count() or 1)
    with hidden_progress(options.quiet):
        tables = reproduce(plan, out, workers=workers, data_folder=options.data_dir)
    if not options.quiet:
        print("\n\n".join(map(to_terminal, tables)))
        print(f"\nTables, figures and a page: {out / 'index.html'}")


def _default_folder(plan: Plan, as_given: Sequence[str]) -> Path:
    """Data sets in their own order, unless there is a folder with them as they were given."""
    names = [
        Path("runs") / "-".join([plan.run.experiment, plan.run.preset, *datasets])
        for datasets in (as_given, plan.run.datasets or ())
    ]
    return next((folder for folder in names if folder.exists()), names[-1])


def reproduce(
    plan: Plan, out: Path, *, workers: int = 1, data_folder: str | os.PathLike[str] | None = None
) -> list[Table]:
    """Do the units that are not finished in `out`, then write tables, figures and a page there; returns the tables."""
    _require_extras()
    if data_folder is not None and not os.path.isdir(data_folder):
        raise BatchbayesError(
            expected="a folder with the data sets (--data-dir)",
            got=f"no folder at {os.fspath(data_folder)}",
            fix="check the name, or leave it out to have data sets looked for in BATCHBAYES_DATA and downloaded",
        )
    if out.exists() and not out.is_dir():
        raise BatchbayesError(expected="a folder for the results (--out)", got=f"the file {out}", fix="choose another")
    with room_for(out):
        out.mkdir(parents=True, exist_ok=True)
    with Results(out / RESULTS, plan.run) as results:
        before = results.finished()
        require_fitting(plan, before)
        workers = min(workers, max(1, len(plan.units) - len(before)))
        with UnitProgress({unit.name: unit.effort for unit in plan.units}, workers) as shown:
            if before:
                shown.say(f"{len(before)} of {count(len(plan.units), 'unit')} were done already")
            folder = None if data_folder is None else os.fspath(data_folder)
            do_units(plan, results, partial(local_workers, workers), workers, folder, shown)
        finished = results.finished()
    write_outputs(plan, finished, out)
    return all_tables(plan, finished)


def table_command(options: argparse.Namespace) -> None:
    """Print the tables of a run that is finished, or as far as it is."""
    load_experiment(options.name)  # a wrong name is said before a wrong folder
    found, finished = read_results(options.folder / RESULTS)
    plan = plan_of(options.name, found)
    require_fitting(plan, finished)
    missing = [unit.name for unit in plan.units if unit.name not in finished]
    if missing:
        print(
            f"not finished: {len(missing)} of {count(len(plan.units), 'unit')}: {_shortened(missing)}", file=sys.stderr
        )
    tables = all_tables(plan, finished)
    for note in mixed_versions(finished) if options.format == "csv" else ():  # which has no notes
        print(note, file=sys.stderr)
    texts = [FORMATS[options.format](table) for table in tables]
    if options.format == "csv" and len(tables) > 1:
        texts = [f"# {table.title}\n{text}" for table, text in zip(tables, texts, strict=True)]
    print("\n\n".join(text.rstrip("\n") for text in texts))


def listed() -> list[str]:
    """The experiments, each with its presets and what they do."""
    lines = []
    for name, about in ABOUT.items():
        experiment = load_experiment(name)
        lines.append(f"{name}: {about}")
        for preset, config in experiment.PRESETS.items():
            fields = ", ".join(f"{field} {to_json(value)}" for field, value in asdict(config).items())
            lines.append(f"  --preset {preset}: {count(len(experiment.units(config)), 'unit')}; {shorten(fields, 160)}")
        if datasets := getattr(experiment, "DATASETS", ()):
            lines.append(f"  --datasets {','.join(datasets)}")
    return lines


def _shortened(names: Sequence[str], most: int = 3) -> str:
    """
    >>> _shortened(["a", "b", "c", "d"])
    'a; b; c; and 1 more'
    """
    return "; ".join([*names[:most], *([f"and {len(names) - most} more"] if len(names) > most else [])])


def _require_extras() -> None:
    """Before the work, not after it."""
    missing = [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]
    if missing:
        raise BatchbayesError(
            expected="matplotlib and jinja2 for figures and the page",
            got=f"no {' and no '.join(missing)}",
            fix="pip install 'batchbayes[report]'",
        )
