"""What all commands do: set threads, hide progress, and collect our own warnings."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from batchbayes._common.progress import hidden_progress
from batchbayes.errors import BatchbayesWarning
from batchbayes.report.options import CommonOptions


@contextmanager
def running(options: CommonOptions) -> Iterator[None]:
    """Set the number of threads and hide progress bars, as the options say, inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads or before)
    try:
        with hidden_progress(options.quiet):
            yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def noted_warnings(shown: bool = False, quiet: bool = False) -> Iterator[list[str]]:
    """Collect our own warnings, each once. They are printed, or `shown` as other warnings are, or only collected.

    What is shown goes by the filters of the caller, which may ignore warnings or raise them.
    """
    notes: list[str] = []
    usual, filters = warnings.showwarning, list(warnings.filters)

    def note(message: Any, category: type[Warning], file: str, line: int, *more: Any, **other: Any) -> None:
        ours = issubclass(category, BatchbayesWarning)
        if ours and str(message) in notes:
            return
        if ours:
            notes.append(str(message))
        if not ours:
            usual(message, category, file, line, *more, **other)
        elif shown:
            with warnings.catch_warnings():
                warnings.showwarning, warnings.filters[:] = usual, filters  # type: ignore[index]
                warnings.warn_explicit(message, category, file, line)
        elif not quiet:
            print(message if str(message).startswith("WARNING") else f"warning: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("always", BatchbayesWarning)
        warnings.showwarning = note
        yield notes
