"""What a case is: a command that works, and what a right answer is."""

import contextlib
import csv
import io
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from batchbayes import cli

HELPERS = "helpers.assess_cases"
JUNK = [
    "",
    " ",
    "-1",
    "0",
    "1.5",
    "nan",
    "inf",
    "1e9",
    "10**3",
    "abc",
    "１",
    "\n",
    "0x10",
    "1_0",
    "--",
    "é",
    "a,b",
    "None",
]
ANSWER = {"classification": "confidence", "regression": "mean", "images": "confidence"}
NONE = object()
"""The expected answer of a file without a clear meaning: only a refusal is right."""
ANY = object()
"""The expected answer where several are right: no traceback, and no cells that are NaN or infinite."""


@dataclass
class Command:
    """Arguments that work, as a dict, the command, and what a right answer is."""

    name: str
    options: dict[str, object]
    expected: object
    """For each row the number in the column `answer`; or NONE or ANY."""
    answer: str = "mean"

    def words(self):
        given = [w for k, v in self.options.items() if v is not None for w in ((k,) if v is True else (k, str(v)))]
        return [self.name, *given]


@dataclass
class Base:
    """What an assessment of a plain case left behind."""

    folder: Path
    options: dict[str, object]
    """Options of `predict`, without the input."""
    inputs: np.ndarray
    answers: np.ndarray
    assess: list[str]


def run(words):
    """Run a command in this process. Return the exit code, what it printed, and its errors."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            code = cli.main([str(word) for word in words])
        except SystemExit as exit:  # argparse
            code = exit.code
    return code, out.getvalue(), err.getvalue()


def numbers(text, column):
    rows = list(csv.DictReader(io.StringIO(text)))
    return np.array([float(row[column]) for row in rows])
