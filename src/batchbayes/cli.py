"""The command line: `batchbayes COMMAND`. What a command needs is imported when it runs, so that --help is quick."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchbayes import __version__
from batchbayes.errors import BatchbayesError

BAD_INPUT, INTERRUPTED = 2, 130
"""Exit codes: argparse also ends with 2; 130 is what shells report after Ctrl-C."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = build_parser().parse_args(arguments)
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
        prog="batchbayes", description="The uncertainty that a batch-normalised network already has."
    )
    parser.add_argument("--version", action="version", version=f"batchbayes {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    _add_demo(commands)
    for command in commands.choices.values():
        command.add_argument("--debug", action="store_true", help="show where in the program an error came from")
    return parser


def _add_demo(commands: "argparse._SubParsersAction[Any]") -> None:
    about = "train two small networks, fit MCBN to both, print a table and write two figures"
    command = commands.add_parser("demo", help=about, description=about.capitalize() + ".")
    command.add_argument("--out", type=Path, default=Path("demo"), metavar="DIR", help="where the figures go (demo)")
    command.add_argument("--seed", type=int, default=0, help="of the data, the training and the draws (0)")
    command.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> None:
    from batchbayes.demo import run_demo

    run_demo(options.out, options.seed)
