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

from batchbayes import BatchbayesError, BatchbayesWarning
from batchbayes.tools import Figure, unknown_name
from batchbayes_papers.data.folder import DataFolder
from batchbayes_papers.runner.tables import ResultTable

EXPERIMENTS = {
    "mcbn-uci": "batchbayes_papers.mcbn.uci",
    "mcbn-batch-size": "batchbayes_papers.mcbn.batch_size",
    "mcbn-passes": "batchbayes_papers.mcbn.passes",
    "mcbn-toy": "batchbayes_papers.mcbn.toy",
    "mcbn-normality": "batchbayes_papers.mcbn.normality",
    "mcbn-cifar": "batchbayes_papers.mcbn.cifar",
    "mcbn-camvid": "batchbayes_papers.mcbn.camvid",
    "sbn": "batchbayes_papers.sbn.sbn",
    "batch-size-collapse": "batchbayes_papers.sbn.batch_size_collapse",
    "elbo-batch-size": "batchbayes_papers.sbn.elbo_batch_size",
    "random-labels": "batchbayes_papers.weights.random_labels",
    "variance-networks": "batchbayes_papers.weights.variance_networks",
    "variance-claims": "batchbayes_papers.weights.variance_claims",
    "mean-propagation": "batchbayes_papers.weights.mean_propagation",
    "mnf-uci": "batchbayes_papers.mcbn.mnf_uci",
    "gradient-variance": "batchbayes_papers.weights.gradient_variance",
    "sparse-vd": "batchbayes_papers.weights.sparse_vd",
    "vgg-like": "batchbayes_papers.weights.vgg_like",
    "ensembles": "batchbayes_papers.samples.ensembles",
    "distillation": "batchbayes_papers.samples.distillation",
    "active-learning": "batchbayes_papers.samples.active_learning",
    "attack": "batchbayes_papers.attacks.experiment",
    "online": "batchbayes_papers.online.experiment",
    "sg-mcmc": "batchbayes_papers.samples.sg_mcmc",
    "rl": "batchbayes_papers.rl.experiment",
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
            fix="define them as in batchbayes_papers.runner.experiment.Experiment",
        )
    return cast(Experiment, module)


@contextmanager
def warnings_ignored() -> Iterator[None]:
    """Ignore the warnings of batchbayes in the block, where the tables show the quality of each method anyway."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BatchbayesWarning)
        yield
