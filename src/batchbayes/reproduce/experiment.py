"""Experiments: one file a table or figure of a paper, all of one shape, and imported only when they are run.

An experiment is cut into units. Each is done whole or not at all, and its result is kept in a file, so that a run that
is killed goes on where it was, and workers share it. Tables and figures are made from those results alone.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from batchbayes.errors import BatchbayesError, unknown_name
from batchbayes.reproduce.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ABOUT = {
    "mcbn-uci": "MCBN and MC dropout on eight regression data sets: RMSE, CRPS and log-likelihood beside the paper",
    "mcbn-batch-size": "MCBN trained and predicting at batch sizes from 8 to 1024, on the same data sets",
    "mcbn-passes": "MCBN with 50, 100, 250 and 500 draws, on the same data sets",
    "mcbn-toy": "MCBN, MC dropout and an ensemble on one-dimensional regression: bands inside and outside the data",
    "mcbn-normality": "Are batch statistics Gaussian, and of the claimed variance? By layer, epoch and batch size",
    "batch-size-collapse": "MCBN loses its uncertainty in networks trained with large batches, and tuning restores it",
}
"""What each experiment shows, in a line; `some-name` is the module `batchbayes.experiments.some_name`,
and `mcbn-name` is `batchbayes.experiments.mcbn.name`."""


@dataclass(frozen=True)
class Unit:
    """A piece of work that is done whole or not at all."""

    name: str
    """Unique and readable: "boston, split 1, BN, batch 32"."""
    arguments: Mapping[str, Any]
    """JSON values: what `work` needs to know."""
    needs: tuple[str, ...] = ()
    """Names of units whose results it is given."""
    effort: float = 1.0
    """Relative cost: among units that are ready the expensive come first, and the time left goes by it."""


class Experiment(Protocol):
    """What a module in this package has; also DATASETS, a tuple of names, where its configs have a field `datasets`."""

    PRESETS: Mapping[str, Any]
    """Frozen dataclasses of JSON values by name; "smoke" takes seconds and no data folder."""

    def units(self, config: Any) -> list[Unit]:
        """All there is to do, in the order of the tables."""
        ...

    def work(
        self, config: Any, unit: Unit, needed: Mapping[str, Any], data_folder: str | os.PathLike[str] | None
    ) -> Any:
        """The result of a unit, as JSON values. It depends on the arguments alone: no clock, no global generator."""
        ...

    def tables(self, config: Any, results: Mapping[str, Any]) -> list[Table]:
        """Results by name of unit. Some may be missing, where a run is not finished: their cells are None."""
        ...

    def figures(self, config: Any, results: Mapping[str, Any]) -> "Mapping[str, Figure]":
        """Figures by stem of file. All results are there."""
        ...

    def notes(self, config: Any) -> list[str]:
        """Where a preset differs from the paper; printed under the tables."""
        ...


PARTS = ("PRESETS", "units", "work", "tables", "figures", "notes")


def load_experiment(name: str) -> Experiment:
    """The module of an experiment: one of ours, or one of the user's own by its dotted name.

    The latter is imported from the current folder or PYTHONPATH, and so is executed: a name must come from a person.
    """
    if name in ABOUT:
        where = name.replace("mcbn-", "mcbn.").replace("-", "_")
        return cast(Experiment, import_module(f"batchbayes.experiments.{where}"))
    if "." not in name:
        raise unknown_name("the name of an experiment", name, ABOUT)
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = import_module(name)
    except (ImportError, TypeError) as error:  # TypeError: a relative name
        raise BatchbayesError(
            expected=f"the name of an experiment ({', '.join(ABOUT)}), or of a module of your own",
            got=f"{name!r} ({error})",
            fix="check the name, and run in the folder that holds the module",
        ) from error
    missing = [part for part in PARTS if not hasattr(module, part)]
    if missing:
        raise BatchbayesError(
            expected=f"{', '.join(PARTS)} in the module {name}",
            got=f"none of {', '.join(missing)}",
            fix="write them as in batchbayes.reproduce.experiment.Experiment",
        )
    return cast(Experiment, module)
