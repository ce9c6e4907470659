"""The command line: `batchbayes COMMAND`. What a command needs is imported when it runs, so that --help is quick."""

import argparse
import codecs
import io
import os
import select
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchbayes import __version__
from batchbayes.errors import BatchbayesError

BAD_INPUT, INTERRUPTED, NO_READER = 2, 130, 141
"""Exit codes: argparse also ends with 2; shells report 130 after Ctrl-C, and 141 where nobody reads on (`| head`)."""
PLAIN = {"±": "+-", "−": "-", "≥": ">=", "≤": "<=", "…": "..."}
"""For output that has no such letters."""

DATA_HELP = """\
data (T, X, V, O and the input of predict):
  FILE.npz              arrays X and y (whole numbers are classes), optionally class_names
  FILE.csv, .parquet    a table with column names; --target names the target, all others are inputs
  FOLDER                images, in a sub-folder for each class; RGB from 0 to 1, all of one size
  pkg.module:function   called without arguments; returns a DataLoader, a data set or tensors (x, y)

A model factory and a data function are code: they are imported from the current folder or PYTHONPATH and EXECUTED.
Weights are safetensors files; no pickle is ever loaded.
"""
EXIT_CODES = "exit codes: 0 done; 2 bad input, with one line that says what to do; 130 interrupted, nothing written"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code, whatever becomes of the output."""
    codecs.register_error("plain", _in_plain_letters)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="plain")
    try:
        try:
            return _run(arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        closed = _without_reader()
        if not closed:
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number in closed:  # otherwise Python complains at its end
            os.dup2(nowhere, number)
        os.close(nowhere)
        return NO_READER


def _in_plain_letters(error: UnicodeError) -> tuple[str, int]:
    """A handler of `codecs`: what stands for letters that the output cannot have."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(PLAIN.get(letter, "?") for letter in error.object[error.start : error.end]), error.end


def _without_reader() -> list[int]:
    """Which of the standard outputs, by number, are pipes that nobody reads any more."""
    if not hasattr(select, "poll"):
        return []
    poll = select.poll()
    for number in (1, 2):
        poll.register(number, select.POLLOUT)
    return [number for number, event in poll.poll(0) if event & (select.POLLERR | select.POLLHUP)]


def _run(arguments: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = build_parser().parse_args(given)
    options.line = shlex.join(["batchbayes", *given])
    try:
        options.run(options)
    except BatchbayesError as error:
        if options.debug:
            raise
        print(f"batchbayes {options.command}: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print(f"batchbayes {options.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each brings `run`, a function of the parsed options."""
    parser = argparse.ArgumentParser(
        prog="batchbayes",
        description="The uncertainty that a batch-normalised network already has.",
        epilog=f"batchbayes COMMAND --help says more. {EXIT_CODES}.",
    )
    parser.add_argument("--version", action="version", version=f"batchbayes {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    _add_assess(commands)
    _add_predict(commands)
    _add_demo(commands)
    _add_reproduce(commands)
    _add_table(commands)
    for command in commands.choices.values():
        command.add_argument("--debug", action="store_true", help="show where in the program an error came from")
    return parser


def _add_assess(commands: "argparse._SubParsersAction[Any]") -> None:
    command = commands.add_parser(
        "assess",
        help="a trained network and its data in, a report on its uncertainty out",
        description="Say how good a trained network is, how honest, when not to trust it, and which method to use. "
        "Writes report.html, metrics.json, predictions.csv, posterior.safetensors and figures/*.png to DIR.",
        epilog=f"{DATA_HELP}\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_network(command)
    command.add_argument("--train", required=True, metavar="T", help="training data, with the training-time transforms")
    command.add_argument("--test", required=True, metavar="X", help="test data, with targets")
    command.add_argument("--out", required=True, type=Path, metavar="DIR", help="a folder that does not exist yet")
    command.add_argument("--validation", metavar="V", help="data for tuning (default: a random third of the test data)")
    command.add_argument("--ood", metavar="O", help="inputs that the network should not be sure about")
    command.add_argument("--task", choices=("classification", "regression", "segmentation"), help="(default: guessed)")
    command.add_argument("--target", metavar="NAME", help="target column of tables, or array of .npz files")
    command.add_argument("--class-names", metavar="A,B,...", help="names of the classes, in order")
    command.add_argument("--ignore-label", type=int, metavar="K", help="label of pixels that do not count")
    command.add_argument("--batch-size", type=int, metavar="M", help="that of training (default: the loader's)")
    command.add_argument(
        "--method", default="mcbn", metavar="A,B,...", help="mcbn (default), stochastic-bn, correlated-bn"
    )
    command.add_argument("--center", choices=("running", "batches"), default="running",
                         help="where draws scatter around: the network's own running statistics (default) or the mean "
                         "over batches, as in the MCBN paper")  # fmt: skip
    _add_running(command)
    command.add_argument("--overwrite", action="store_true", help="replace the files of an earlier assessment in DIR")
    command.add_argument("--parquet", action="store_true", help="write predictions.parquet too (needs pyarrow)")
    command.set_defaults(run=_assess)


def _add_predict(commands: "argparse._SubParsersAction[Any]") -> None:
    command = commands.add_parser(
        "predict",
        help="predict new data with an assessed posterior, without the training data",
        description="Predict new data with the posterior.safetensors of an assessment: the same columns as its "
        "predictions.csv.",
        epilog=f"{DATA_HELP}\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_network(command)
    command.add_argument(
        "--posterior", required=True, type=Path, metavar="P", help="posterior.safetensors of an assessment"
    )
    command.add_argument("--input", required=True, metavar="I", help="inputs; targets, if any, are ignored")
    command.add_argument("--target", metavar="NAME", help="a column of the input table that is no input")
    command.add_argument(
        "--out", type=Path, metavar="FILE", help="a .csv file that does not exist yet (default: printed)"
    )
    _add_running(command, draws=None)
    command.set_defaults(run=_predict)


def _add_network(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", required=True, metavar="pkg.module:factory",
                         help="a function without arguments that builds the network; it is executed")  # fmt: skip
    command.add_argument("--weights", type=Path, metavar="W.safetensors", help="unless the factory loads them itself")


def _add_running(command: argparse.ArgumentParser, draws: int | None = 64) -> None:
    shown = draws or "as in the assessment"
    command.add_argument("--engine", choices=("auto", "sample", "linear"), default="auto" if draws else None,
                         help="how draws are made: exact, linear, or auto: linear where that is accurate "
                         f"({'auto' if draws else shown})")  # fmt: skip
    command.add_argument("--draws", type=_positive, default=draws, metavar="S", help=f"networks to average ({shown})")
    command.add_argument("--seed", type=int, default=0 if draws else None, help="of splits and draws (0)")
    command.add_argument("--device", default="cpu", help="such as cpu or cuda:0 (cpu)")
    command.add_argument("--threads", type=_positive, metavar="N", help="of torch (default: as torch decides)")
    command.add_argument("--quiet", action="store_true", help="no progress, no summary")
    command.add_argument("--json", action="store_true", help="print the result as JSON")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 or more, and not {text!r}")
    return int(text)


def _add_demo(commands: "argparse._SubParsersAction[Any]") -> None:
    about = "train two small networks, fit MCBN to both, print a table and write two figures"
    command = commands.add_parser("demo", help=about, description=about.capitalize() + ".")
    command.add_argument("--out", type=Path, default=Path("demo"), metavar="DIR", help="where the figures go (demo)")
    command.add_argument("--seed", type=int, default=0, help="of the data, the training and the draws (0)")
    command.set_defaults(run=_demo)


def _assess(options: argparse.Namespace) -> None:
    from batchbayes.assess.command import assess_command

    assess_command(options)


def _predict(options: argparse.Namespace) -> None:
    from batchbayes.assess.command import predict_command

    predict_command(options)


def _demo(options: argparse.Namespace) -> None:
    from batchbayes.demo import run_demo

    run_demo(options.out, options.seed)


def _add_reproduce(commands: "argparse._SubParsersAction[Any]") -> None:
    command = commands.add_parser(
        "reproduce",
        help="run a published experiment again; write its tables, figures and a page",
        description="Run a published experiment again. Writes results.sqlite, table.md, tables/*.csv, figures/*.png "
        "and index.html to DIR. A run that was ended in any way goes on when the same command is given again; several "
        "processes may work on one DIR.",
        epilog="exit codes: 0 done; 2 bad input or a full disk, with one line that says what to do; 130 interrupted; "
        "what is finished is kept in each case",
    )
    command.add_argument(
        "name", nargs="?", metavar="NAME", help="which one; with a dot: a module of your own, which is EXECUTED"
    )
    command.add_argument("--list", action="store_true", help="say which experiments and presets there are, and stop")
    command.add_argument("--preset", default="quick", help="smoke (seconds, no data needed), quick, ... (quick)")
    command.add_argument("--out", type=Path, metavar="DIR", help="where the results go (runs/NAME-PRESET)")
    command.add_argument("--datasets", nargs="+", action="extend", metavar="A,B,...",
                         help="only these (default: all of the preset)")  # fmt: skip
    command.add_argument("--workers", type=_positive, metavar="N", help="processes (default: the cores, at most 8)")
    command.add_argument("--data-dir", type=Path, metavar="DIR", help="where the data sets lie (BATCHBAYES_DATA)")
    command.add_argument("--quiet", action="store_true", help="no progress, no tables")
    command.set_defaults(run=_reproduce)


def _add_table(commands: "argparse._SubParsersAction[Any]") -> None:
    about = "print the tables of an experiment from its results, also of an unfinished run"
    command = commands.add_parser("table", help=about, description=about.capitalize() + ".")
    command.add_argument("name", metavar="NAME", help="which experiment")
    command.add_argument("folder", type=Path, metavar="DIR", help="the --out folder of its run")
    formats = ("terminal", "csv", "markdown", "latex")
    command.add_argument("--format", choices=formats, default="terminal", help="(terminal)")
    command.set_defaults(run=_table)


def _reproduce(options: argparse.Namespace) -> None:
    from batchbayes.reproduce.command import reproduce_command

    reproduce_command(options)


def _table(options: argparse.Namespace) -> None:
    from batchbayes.reproduce.command import table_command

    table_command(options)
