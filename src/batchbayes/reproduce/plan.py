"""Which experiment, with which configuration: from names to a plan."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from batchbayes.errors import BatchbayesError, unknown_name
from batchbayes.reproduce.experiment import ABOUT, Experiment, Unit, load_experiment
from batchbayes.reproduce.results import Finished, Run, to_json
from batchbayes.reproduce.results.rows import config_differences


@dataclass(frozen=True, eq=False)
class Plan:
    """An experiment and what is to be done for it."""

    experiment: Experiment
    config: Any
    units: tuple[Unit, ...]
    run: Run
    """What a file of its results is about."""

    @property
    def about(self) -> str:
        """What it shows, in a line."""
        return ABOUT.get(self.run.experiment, (self.experiment.__doc__ or "").strip().partition("\n")[0])


def make_plan(name: str, preset: str, datasets: Sequence[str] | None = None) -> Plan:
    """The plan of a preset; `datasets`, in any order, are used instead of all of its own."""
    experiment = load_experiment(name)
    if preset not in experiment.PRESETS:
        raise unknown_name(f"a preset of {name}", preset, experiment.PRESETS)
    config = experiment.PRESETS[preset]
    if datasets is not None:
        config = _with_datasets(name, experiment, config, datasets)
    units = tuple(experiment.units(config))
    _require_order(name, units)
    chosen = None if datasets is None else config.datasets
    return Plan(experiment, config, units, Run(name, preset, chosen, to_json(asdict(config))))


def plan_of(name: str, found: Run) -> Plan:
    """The plan that a file of results was made by. The name is the user's: that in a file is only compared."""
    if found.experiment != name:
        raise BatchbayesError(
            expected=f"results of {name}", got=f"those of {found.experiment}", fix="name that one, or another folder"
        )
    plan = make_plan(name, found.preset, found.datasets)
    differences = config_differences(plan.run.config, found.config)
    if differences:
        texts = [f"{field} {theirs} instead of {ours}" for field, ours, theirs in differences]
        raise BatchbayesError(
            expected=f"results of {name}, preset {found.preset}, as it is now",
            got=f"results with {'; '.join(texts)}",
            fix="use the batchbayes that wrote them, or run it again to another folder",
        )
    return plan


def require_fitting(plan: Plan, finished: dict[str, Finished]) -> None:
    """Rows must be of units that the plan has, with the same arguments: otherwise the program has changed."""
    arguments = {unit.name: to_json(unit.arguments) for unit in plan.units}
    for name, row in finished.items():
        if arguments.get(name) != row.arguments:
            raise BatchbayesError(
                expected=f"results of the units that {plan.run.experiment} has now",
                got=f"one of {name!r} with {row.arguments}, made by batchbayes {row.versions['batchbayes']}",
                fix="use the batchbayes that wrote it, or choose another folder",
            )


def _with_datasets(name: str, experiment: Experiment, config: Any, datasets: Sequence[str]) -> Any:
    if "datasets" not in {field.name for field in fields(config)}:
        raise BatchbayesError(
            expected="--datasets for an experiment that has several",
            got=f"{name}, which has not",
            fix="leave --datasets out",
        )
    known = tuple(getattr(experiment, "DATASETS", ()))
    for dataset in datasets:
        if dataset not in known:
            raise unknown_name(f"a data set of {name}", dataset, known)
    if not datasets or len(set(datasets)) < len(datasets):
        raise BatchbayesError(
            expected="data sets, each once", got=repr(",".join(datasets)), fix=f"choose from {', '.join(known)}"
        )
    return replace(config, datasets=tuple(dataset for dataset in known if dataset in datasets))


def _require_order(name: str, units: Sequence[Unit]) -> None:
    """Names are unique, and needs can be met: a slip here would let a run wait for ever."""
    left, met = {unit.name: set(unit.needs) for unit in units}, set()
    while ready := {unit for unit, needs in left.items() if needs <= met}:
        met |= ready
        left = {unit: needs for unit, needs in left.items() if unit not in ready}
    if left or len(met) < len(units):
        raise BatchbayesError(
            expected=f"units of {name} with a name each, and needs that other units meet",
            got="; ".join(sorted(left)) or "a name twice",
            fix="correct the experiment's units()",
        )
