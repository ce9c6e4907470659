"""What a worker does: one unit. Only plain values go in and come out, so that any engine can carry them."""

import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from platform import python_version
from typing import Any

from batchbayes import __version__
from batchbayes._common.progress import hidden_progress
from batchbayes.errors import BatchbayesError, BatchbayesWarning
from batchbayes.reproduce.experiment import Unit, load_experiment
from batchbayes.reproduce.results import Outcome, to_json


@dataclass(frozen=True)
class Failure:
    """Why there is no result."""

    error: BatchbayesError | None
    """Bad input, in words; None for any other error."""
    trace: str

    @property
    def reason(self) -> str:
        """In one line."""
        return " ".join(str(self.error).split()) if self.error else self.trace.strip().rpartition("\n")[2]


def perform(
    name: str, config: Any, unit: Unit, needed: Mapping[str, Any], data_folder: str | None
) -> Outcome | Failure:
    """Do a unit of the experiment `name`. An error is returned, since not every exception can leave a process."""
    start = time.perf_counter()
    try:
        with hidden_progress(), _noted() as notes:
            result = to_json(load_experiment(name).work(config, unit, needed, data_folder))
    except Exception as error:
        return Failure(error if isinstance(error, BatchbayesError) else None, traceback.format_exc())
    versions = {
        "batchbayes": __version__,
        "torch": version("torch"),
        "numpy": version("numpy"),
        "python": python_version(),
    }
    return Outcome(result, tuple(notes), time.perf_counter() - start, versions, os.cpu_count() or 1)


@contextmanager
def _noted() -> Iterator[list[str]]:
    """Our own warnings belong to the result; others are shown as ever."""
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", BatchbayesWarning)
        yield notes
    for warning in caught:
        if not issubclass(warning.category, BatchbayesWarning):
            place = warning.filename, warning.lineno
            sys.stderr.write(warnings.formatwarning(warning.message, warning.category, *place))
        elif str(warning.message) not in notes:
            notes.append(str(warning.message))
