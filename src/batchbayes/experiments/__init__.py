"""Experiments: one file a table or figure of a paper, all of one shape, and imported only when they are run."""

import csv
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from batchbayes.errors import BatchbayesError
from batchbayes.files import atomic_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ABOUT = {
    "batch-size-collapse": "MCBN loses its uncertainty in networks trained with large batches, and tuning restores it",
}
"""What each experiment shows, in a line; `some-name` is the module `some_name` of this package."""


class Experiment(Protocol):
    """What a module in this package has."""

    PRESETS: Mapping[str, Any]
    """Frozen configurations by name; "smoke" takes seconds and no data folder."""

    def run(self, config: Any, data_folder: str | os.PathLike[str] | None = None) -> list[Any]:
        """The work: rows, which are frozen dataclasses."""
        ...

    def table(self, rows: Sequence[Any]) -> str:
        """The rows in Markdown."""
        ...

    def figure(self, rows: Sequence[Any]) -> "Figure":
        """The rows as a picture."""
        ...


def load_experiment(name: str) -> Experiment:
    """The module of an experiment."""
    if name not in ABOUT:
        raise BatchbayesError(
            expected=f"the name of an experiment, one of: {', '.join(ABOUT)}", got=repr(name), fix="choose one of them"
        )
    return cast(Experiment, import_module(f"{__name__}.{name.replace('-', '_')}"))


def reproduce(name: str, preset: str, out: Path, data_folder: str | os.PathLike[str] | None = None) -> str:
    """Run an experiment; write `table.md`, `rows.csv` and `figure.png` to `out`, each whole or not at all.

    Returns the table.
    """
    from batchbayes.plots import save_figure

    experiment = load_experiment(name)
    if preset not in experiment.PRESETS:
        raise BatchbayesError(
            expected=f"a preset of {name}, one of: {', '.join(experiment.PRESETS)}",
            got=repr(preset),
            fix="choose one of them",
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BatchbayesError(
            expected="a folder for the results", got=f"{out} ({error.strerror})", fix="choose another --out"
        ) from error
    rows = experiment.run(experiment.PRESETS[preset], data_folder)
    write_rows(rows, out / "rows.csv")
    with atomic_path(out / "table.md") as partial:
        partial.write_text(experiment.table(rows) + "\n")
    save_figure(experiment.figure(rows), out / "figure.png")
    return experiment.table(rows)


def write_rows(rows: Sequence[Any], path: Path) -> None:
    """Frozen dataclasses as CSV; what is None stays empty."""
    records = [asdict(row) for row in rows]
    with atomic_path(path) as partial, partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
