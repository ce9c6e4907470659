"""The commands `batchbayes reproduce`, `table` and `demo`, which batchbayes finds by an entry point."""

import argparse
import re
from pathlib import Path
from typing import Any


def add_commands(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the commands of this package to those of batchbayes."""
    _add_reproduce(commands)
    _add_table(commands)
    _add_demo(commands)


def positive(text: str) -> int:
    """Read a whole number of at least 1. Python itself accepts more, such as 1_0 and digits of other scripts."""
    if not re.fullmatch("[0-9]{1,18}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def _add_reproduce(commands: "argparse._SubParsersAction[Any]") -> None:
    command = commands.add_parser(
        "reproduce",
        help="run a published experiment again; write its tables, figures and a page",
        description="Run a published experiment again. Writes results.sqlite, table.md, tables/*.csv, figures/*.png "
        "and index.html to DIR. If a run was stopped, give the same command again: it continues. Several processes "
        "may work on one DIR.",
        epilog="exit codes: 0 done; 2 bad input or a full disk, with one line that says what to do; 130 interrupted; "
        "finished results are kept in each case",
    )
    command.add_argument(
        "name", nargs="?", metavar="NAME", help="which one; with a dot: a module of your own, which is EXECUTED"
    )
    command.add_argument("--all", action="store_true", help="run all of them, and write one page (runs/all-PRESET)")
    command.add_argument("--list", action="store_true", help="list the experiments and their presets, and stop")
    command.add_argument("--preset", default="quick", help="smoke (seconds, no data needed), quick, ... (quick)")
    command.add_argument("--out", type=Path, metavar="DIR", help="where the results go (runs/NAME-PRESET)")
    command.add_argument("--datasets", "--data", nargs="+", action="extend", metavar="A,B,...",
                         help="only these (default: all of the preset)")  # fmt: skip
    command.add_argument("--unit", action="append", metavar="TEXT", help="only units with TEXT in their names, and the "
                         "units that these need; can be given again (figures need all units)")  # fmt: skip
    command.add_argument("--workers", type=positive, metavar="N", help="processes (default: the cores, at most 8)")
    command.add_argument("--cluster", metavar="WHERE", help="do the work on a dask cluster: the address of its "
                         "scheduler (tcp://HOST:PORT), or local:N to start N workers here")  # fmt: skip
    command.add_argument("--scheduler-file", type=Path, metavar="F", help="the scheduler file of a dask cluster")
    command.add_argument("--data-dir", type=Path, metavar="DIR", help="where the data sets are (BATCHBAYES_DATA)")
    command.add_argument("--quiet", action="store_true", help="show no progress and no tables")
    command.set_defaults(run="batchbayes_papers.runner.command:reproduce_command", options=None)


def _add_table(commands: "argparse._SubParsersAction[Any]") -> None:
    about = "print the tables of an experiment from its results, also of an unfinished run"
    command = commands.add_parser("table", help=about, description=about.capitalize() + ".")
    command.add_argument("name", metavar="NAME", help="which experiment")
    command.add_argument("folder", type=Path, metavar="DIR", help="the --out folder of its run")
    formats = ("terminal", "csv", "markdown", "latex")
    command.add_argument("--format", choices=formats, default="terminal", help="(terminal)")
    command.set_defaults(run="batchbayes_papers.runner.command:table_command", options=None)


def _add_demo(commands: "argparse._SubParsersAction[Any]") -> None:
    about = "train two small networks, fit MCBN to both, print a table and write two figures"
    command = commands.add_parser("demo", help=about, description=about.capitalize() + ".")
    command.add_argument("--out", type=Path, default=Path("demo"), metavar="DIR", help="where the figures go (demo)")
    command.add_argument(
        "--seed", type=int, default=0, help="the first of five seeds, of the data, the training and the draws (0)"
    )
    command.set_defaults(run="batchbayes_papers.demo:demo_command", options=None)
