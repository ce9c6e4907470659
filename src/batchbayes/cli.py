"""The command line: `batchbayes COMMAND`. A command imports what it needs when it runs, so that --help is quick."""

import argparse
import codecs
import io
import os
import select
import shlex
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields
from functools import partial
from importlib.metadata import entry_points
from typing import Any

from batchbayes import __version__
from batchbayes.errors import BatchbayesError
from batchbayes.methods.table import resolve
from batchbayes.report.options import AssessOptions, CommonOptions, ExportOptions, PredictOptions, reader_of

BAD_INPUT, INTERRUPTED, NO_READER = 2, 130, 141
"""Exit codes. Argparse also ends with 2. Shells report 130 after Ctrl-C, and 141 if nobody reads on (`| head`)."""
PLAIN = {"±": "+-", "−": "-", "≥": ">=", "≤": "<=", "…": "..."}
"""What is printed if the output cannot have these letters."""

DATA_HELP = """\
data (T, X, V, O and the input of predict):
  FILE.npz, .zarr       arrays X and y (whole numbers are classes), optionally class_names
  FILE.csv, .parquet    a table with column names; --target names the target, --id the ids, all others are inputs;
                        columns are found by name, and classes may be words
  FOLDER                images, in a sub-folder for each class; RGB from 0 to 1, all of one size unless --resize
  FOLDER                images/ and masks/ for a segmentation
  pkg.module:function   called without arguments; returns a DataLoader, a data set or tensors (x, y)

A model factory and a data function are code: they are imported from the current folder or PYTHONPATH and EXECUTED.
Files are only read: code in a file of weights (.safetensors, .pt, .pth) is never executed.
"""
COLUMNS_HELP = """\
columns: prediction, confidence and entropy of classes; mean, std and a 90 % interval of values. novelty is the share of
ordinary inputs that are at least as unusual; it is empty if this could not be measured. flag is 1 if the answer is
uncertain or the input is novel, and why says which. mutual_information, epistemic_std and the std of a class say how
far the draws differ; they are empty if the recommended method makes no draws.
"""
ELSEWHERE = {
    "reproduce": ("batchbayes-papers", "run a published experiment again; write its tables, figures and a page"),
    "table": ("batchbayes-papers", "print the tables of an experiment from its results"),
    "demo": ("batchbayes-papers", "train two small networks, fit MCBN to both, print a table and write two figures"),
    "serve": ("batchbayes-serve", "serve an exported file over HTTP, with metrics, limits and a watch for drift"),
}
"""Commands of packages of their own: name, package and help."""
EXIT_CODES = "exit codes: 0 done; 2 bad input, with one line that says what to do; 130 interrupted, nothing written"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
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
        for number in closed:  # otherwise Python prints an error when it ends
            os.dup2(nowhere, number)
        os.close(nowhere)
        return NO_READER


def _in_plain_letters(error: UnicodeError) -> tuple[str, int]:
    """Replace letters that the output cannot have. This is an error handler of `codecs`."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(PLAIN.get(letter, "?") for letter in error.object[error.start : error.end]), error.end


def _without_reader() -> list[int]:
    """Return the numbers of those standard outputs that are pipes without a reader."""
    if not hasattr(select, "poll"):
        return []
    poll = select.poll()
    for number in (1, 2):
        poll.register(number, select.POLLOUT)
    return [number for number, event in poll.poll(0) if event & (select.POLLERR | select.POLLHUP)]


def _run(arguments: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = build_parser()
    parsed, unknown = parser.parse_known_args(given)
    if unknown and not hasattr(parsed, "is_missing"):  # nobody knows the options of a command that is not installed
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        resolve(parsed.run)(_options(parsed, shlex.join(["batchbayes", *given])))
    except (BatchbayesError, OSError) as error:
        if parsed.debug or isinstance(error, BrokenPipeError):
            raise
        print(f"batchbayes {parsed.command}: {' '.join(str(_in_words(error)).split())}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print(f"batchbayes {parsed.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def _in_words(error: BatchbayesError | OSError) -> BatchbayesError:
    """Return an error of the operating system as one of ours."""
    if isinstance(error, BatchbayesError):
        return error
    fix = "check the path, its permissions, and the space on the disk"
    return BatchbayesError(expected="a file or folder that can be used", got=str(error)[:300], fix=fix)


def _options(parsed: argparse.Namespace, line: str) -> Any:
    """Return the options as the dataclass of the command, or as argparse has them if there is none."""
    if parsed.options is None:
        return parsed
    given = {field.name: getattr(parsed, field.name) for field in fields(parsed.options) if field.metadata}
    return parsed.options(**given, **({"command": line} if parsed.options is AssessOptions else {}))


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. Each command sets `run`, a function of its options or "module:name"."""
    parser = argparse.ArgumentParser(
        prog="batchbayes",
        description="The uncertainty that a batch-normalised network already has.",
        epilog=f"batchbayes COMMAND --help says more. {EXIT_CODES}.",
    )
    parser.add_argument("--version", action="version", version=f"batchbayes {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    _add_on_data(commands)
    _add_commands_of_other_packages(commands)
    for command in commands.choices.values():
        command.add_argument("--debug", action="store_true", help="show where in the program an error came from")
    return parser


def _add_on_data(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the commands that take a network and data. Their options are the fields of a dataclass."""
    add = partial(commands.add_parser, formatter_class=argparse.RawDescriptionHelpFormatter)
    assess = add(
        "assess",
        help="a trained network and its data in, a report on its uncertainty out",
        description="Say how good a trained network is, how honest it is, when not to trust it, and which method\n"
        "to use. Writes report.html, metrics.json, predictions.csv, posterior.safetensors, novelty.safetensors\n"
        "and figures/*.png to DIR.",
        epilog=f"{DATA_HELP}\n{EXIT_CODES}",
    )
    _add_fields(assess, AssessOptions, "batchbayes.report.assess:assess_command")
    predict = add(
        "predict",
        help="predict new data with the posterior of an assessment, without the training data",
        description="Predict new data with the posterior.safetensors of an assessment, which holds the recommended\n"
        "method. The columns are those of predictions.csv.",
        epilog=f"{COLUMNS_HELP}\n{DATA_HELP}\n{EXIT_CODES}",
    )
    _add_fields(predict, PredictOptions, "batchbayes.report.predict:predict_command")
    export = add(
        "export",
        help="write the posterior of an assessment to one ONNX file, which predicts without Python",
        description="Write the recommended method of an assessment to one file that takes inputs and returns\n"
        "predictions, their uncertainty and a flag. Standardisation, temperature, intervals and views are inside.\n"
        "Images that an assessment resized must have that size. Draws are made as the assessment made them.",
        epilog=f"{DATA_HELP}\n{EXIT_CODES}",
    )
    _add_fields(export, ExportOptions, "batchbayes.export.command:export_command")


def _add_fields(command: argparse.ArgumentParser, options: type[CommonOptions], run: str) -> None:
    """Add an option for each field of a dataclass that has a help text. Required options come first."""
    command.set_defaults(run=run, options=options)
    for field in sorted(fields(options), key=lambda field: field.default is not MISSING):
        if not field.metadata:
            continue
        given, read = dict(field.metadata), reader_of(field.type)
        if callable(given["help"]):
            given["help"] = given["help"]()
        if field.default is False:
            given["action"] = "store_true"
        else:
            given |= {"choices": read} if isinstance(read, tuple) else {"type": read}
            given |= {"required": True} if field.default is MISSING else {"default": field.default}
        command.add_argument(f"--{field.name.replace('_', '-')}", **given)


def _add_commands_of_other_packages(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add what entry points offer, and say of a command whose package is missing how to install it."""
    for plugin in entry_points(group="batchbayes.commands"):
        plugin.load()(commands)
    for name, (package, about) in ELSEWHERE.items():
        if name not in commands.choices:
            command = commands.add_parser(name, help=f"{about} (needs {package})", add_help=False)
            command.set_defaults(run=partial(_require_package, package), options=None, is_missing=True)


def _require_package(package: str, parsed: argparse.Namespace) -> None:
    raise resolve("batchbayes._common.checks:missing_package")(package, f"the command `{parsed.command}`")
