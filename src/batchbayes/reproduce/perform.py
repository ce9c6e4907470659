"""Do one unit, inside a worker. Only plain values go in and come out, so any kind of worker can be used."""

import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from platform import python_version
from typing import Any

from batchbayes import __version__
from batchbayes._common.progress import hidden_progress
from batchbayes.errors import BatchbayesError, BatchbayesWarning
from batchbayes.reproduce.experiment import Results, Unit, load_experiment
from batchbayes.reproduce.records import UnitOutcome, to_json


@dataclass(frozen=True)
class UnitFailure:
    """Why a unit has no result."""

    error: BatchbayesError | None
    """The message about bad input; None for any other error."""
    trace: str

    @property
    def reason(self) -> str:
        """The reason in one line."""
        return " ".join(str(self.error).split()) if self.error else self.trace.strip().rpartition("\n")[2]


def perform(name: str, config: Any, unit: Unit, needed: Results, data_folder: str | None) -> UnitOutcome | UnitFailure:
    """Do a unit of the experiment `name`. Return errors, since some exceptions cannot be sent between processes."""
    start = time.perf_counter()
    try:
        with hidden_progress(), _collected_warnings() as texts:
            result = to_json(load_experiment(name).work(config, unit, needed, data_folder))
    except Exception as error:
        return UnitFailure(error if isinstance(error, BatchbayesError) else None, traceback.format_exc())
    versions = {package: version(package) for package in ("torch", "numpy")}
    versions |= {"batchbayes": __version__, "python": python_version()}
    return UnitOutcome(result, tuple(texts), time.perf_counter() - start, versions, os.cpu_count() or 1)


@contextmanager
def _collected_warnings() -> Iterator[list[str]]:
    """Collect the warnings of batchbayes, which are part of the result. Show other warnings as usual."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", BatchbayesWarning)
        yield texts
    for warning in caught:
        if not issubclass(warning.category, BatchbayesWarning):
            place = warning.filename, warning.lineno
            sys.stderr.write(warnings.formatwarning(warning.message, warning.category, *place))
        elif str(warning.message) not in texts:
            texts.append(str(warning.message))
