"""What an experiment is, and the list of the experiments that come with this package.

An experiment repeats tables or figures of a paper. It is a module that has all names in the class `Experiment`. Its
work is divided into units. The result of each finished unit is saved in a file, so an interrupted run can continue and
several processes can share one run. Tables and figures are made from the saved results only.
"""

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from batchbayes.data.folder import DataFolder
from batchbayes.errors import BatchbayesError, BatchbayesWarning, unknown_name
from batchbayes.plots.style import Figure
from batchbayes.reproduce.tables import ResultTable

EXPERIMENTS = {
    "mcbn-uci": "batchbayes.experiments.mcbn.uci",
    "mcbn-batch-size": "batchbayes.experiments.mcbn.batch_size",
    "mcbn-passes": "batchbayes.experiments.mcbn.passes",
    "mcbn-toy": "batchbayes.experiments.mcbn.toy",
    "mcbn-normality": "batchbayes.experiments.mcbn.normality",
    "mcbn-cifar": "batchbayes.experiments.images.cifar",
    "mcbn-camvid": "batchbayes.experiments.images.camvid",
    "sbn": "batchbayes.experiments.images.sbn",
    "batch-size-collapse": "batchbayes.experiments.batch_size_collapse",
    "random-labels": "batchbayes.experiments.weights.random_labels",
    "variance-networks": "batchbayes.experiments.weights.variance_networks",
    "mean-propagation": "batchbayes.experiments.weights.mean_propagation",
    "mnf-uci": "batchbayes.experiments.weights.mnf_uci",
    "gradient-variance": "batchbayes.experiments.weights.gradient_variance",
    "sparse-vd": "batchbayes.experiments.weights.sparse_vd",
    "ensembles": "batchbayes.experiments.samples.ensembles",
    "distillation": "batchbayes.experiments.samples.distillation",
    "active-learning": "batchbayes.experiments.samples.active_learning",
    "attack": "batchbayes.experiments.samples.attack",
    "online": "batchbayes.experiments.samples.online",
    "sg-mcmc": "batchbayes.experiments.samples.sg_mcmc",
    "rl": "batchbayes.experiments.samples.rl",
}
"""The modules of the experiments of this package. A module is imported only when its experiment is used."""


@dataclass(frozen=True)
class Unit:
    """A piece of work. Its result is saved as a whole or not at all."""

    name: str
    """A unique, readable name, for example "boston, split 1, BN, batch 32"."""
    arguments: Mapping[str, Any]
    """JSON values that `work` needs."""
    needs: tuple[str, ...] = ()
    """The names of the units whose results `work` needs."""
    effort: float = 1.0
    """The relative cost. Expensive units start first, and the estimate of the time left uses it."""


Results = Mapping[str, Any]
"""Results of units as JSON values, by the name of the unit."""


class Experiment(Protocol):
    """The names that the module of an experiment must have. The first line of its docstring says what it shows.

    Only `figures` may be left out. If its configurations have a field `datasets`, the module also has `DATASETS`: a
    tuple of all possible names.
    """

    PRESETS: Mapping[str, Any]
    """Configurations by name: frozen dataclasses of JSON values. "smoke" takes seconds and needs no data folder."""

    def units(self, config: Any) -> list[Unit]:
        """Return all units, in the order of the tables."""
        ...

    def work(self, config: Any, unit: Unit, needed: Results, data_folder: DataFolder) -> Any:
        """Do a unit and return its result as JSON values.

        The result depends on the arguments only, and not on the clock or on a global random generator. `needed` holds
        the results of the units that this unit needs.
        """
        ...

    def tables(self, config: Any, results: Results) -> list[ResultTable]:
        """Make tables. In an unfinished run some results are missing, and their cells are None."""
        ...

    def figures(self, config: Any, results: Results) -> Mapping[str, Figure]:
        """Make figures from the results of all units, if there are any. The keys are file names without an ending.

        Pages show them as captions, so they should say what is seen, as in "NLL-after-each-part".
        """
        ...

    def notes(self, config: Any) -> list[str]:
        """Return sentences that say how the preset differs from the paper. They are printed below the tables."""
        ...


PARTS = ("PRESETS", "units", "work", "tables", "notes")


def load_experiment(name: str) -> Experiment:
    """Import an experiment: one of this package by its name, or the user's own module by its dotted name.

    The user's module is imported from the current folder or PYTHONPATH, so its code is executed. Such a name must come
    from the user and never from a file.
    """
    if name in EXPERIMENTS:
        return cast(Experiment, import_module(EXPERIMENTS[name]))
    if "." not in name:
        raise unknown_name("the name of an experiment", name, EXPERIMENTS)
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = import_module(name)
    except (ImportError, TypeError) as error:  # TypeError: a relative name
        raise BatchbayesError(
            expected=f"the name of an experiment ({', '.join(EXPERIMENTS)}) or of your own module",
            got=f"{name!r} ({error})",
            fix="check the name, and run the command in the folder that holds the module",
        ) from error
    missing = [part for part in PARTS if not hasattr(module, part)]
    if missing:
        raise BatchbayesError(
            expected=f"{', '.join(PARTS)} in the module {name}",
            got=f"a module without {', '.join(missing)}",
            fix="define them as in batchbayes.reproduce.experiment.Experiment",
        )
    return cast(Experiment, module)


@contextmanager
def warnings_ignored() -> Iterator[None]:
    """Ignore the warnings of batchbayes in the block, where the tables show the quality of each method anyway."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BatchbayesWarning)
        yield
