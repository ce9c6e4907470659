"""A plan: an experiment, its configuration and the units to do."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from batchbayes import BatchbayesError
from batchbayes.tools import unknown_name
from batchbayes_papers.runner.experiment import Experiment, Unit, load_experiment
from batchbayes_papers.runner.records import FinishedUnit, RunSettings, config_differences, to_json


@dataclass(frozen=True, eq=False)
class Plan:
    """An experiment, its configuration and all of its units."""

    experiment: Experiment
    config: Any
    units: tuple[Unit, ...]
    settings: RunSettings

    @property
    def about(self) -> str:
        """One line that says what the experiment shows."""
        return (self.experiment.__doc__ or "").strip().partition("\n")[0]

    @property
    def notes(self) -> list[str]:
        """What the experiment says about its preset, and whether the data is made up."""
        note = ["The data is made up, only to test the program."] if self.is_made_up else []
        return [*self.experiment.notes(self.config), *note]

    @property
    def is_made_up(self) -> bool:
        """Whether the data stands in for data that the experiment would read from a folder."""
        named = [getattr(self.config, field, ()) for field in ("data", "dataset", "datasets")]
        return any("synthetic" in source for source in named)

    @property
    def preset_words(self) -> str:
        """One line that says what the preset is good for. It stands first on the page."""
        if self.settings.preset != "smoke":
            return f"Preset {self.settings.preset}."
        data = "The data is made up, and n" if self.is_made_up else "N"
        return f"Preset smoke, which only tests the program. {data}etworks are hardly trained: its numbers say nothing."


def make_plan(name: str, preset: str, datasets: Sequence[str] | None = None) -> Plan:
    """Return the plan of a preset. `datasets`, in any order, replace all data sets of the preset."""
    experiment = load_experiment(name)
    if preset not in experiment.PRESETS:
        raise unknown_name(f"a preset of {name}", preset, experiment.PRESETS)
    config = experiment.PRESETS[preset]
    if datasets is not None:
        config = _with_datasets(name, experiment, config, datasets)
    units = tuple(experiment.units(config))
    _require_possible_order(name, units)
    chosen = None if datasets is None else config.datasets
    return Plan(experiment, config, units, RunSettings(name, preset, chosen, to_json(asdict(config))))


def plan_of_results(name: str, found: RunSettings) -> Plan:
    """Return the plan that a results file belongs to.

    The name comes from the user. The name in the file is only compared with it, since a name can be that of a module,
    whose code is executed.
    """
    if found.experiment != name:
        raise BatchbayesError(
            expected=f"results of {name}",
            got=f"results of {found.experiment}",
            fix="give the name of that experiment, or another folder",
        )
    plan = make_plan(name, found.preset, found.datasets)
    differences = config_differences(plan.settings.config, found.config)
    if differences:
        raise BatchbayesError(
            expected=f"results of {name} with the present preset {found.preset}",
            got=f"results with {'; '.join(differences)}",
            fix="use the batchbayes version that wrote them, or run the experiment again with another folder",
        )
    return plan


def require_known_units(plan: Plan, finished: dict[str, FinishedUnit]) -> None:
    """Require that every finished unit is in the plan, with the same arguments. If not, the program has changed."""
    arguments = {unit.name: to_json(unit.arguments) for unit in plan.units}
    for name, row in finished.items():
        if arguments.get(name) != row.arguments:
            raise BatchbayesError(
                expected=f"results of the units that {plan.settings.experiment} has now",
                got=f"a result of {name!r} with {row.arguments}, made by batchbayes {row.versions['batchbayes']}",
                fix="use the batchbayes version that wrote it, or choose another folder",
            )


def some_units(plan: Plan, texts: Sequence[str]) -> Plan:
    """Return a plan of the units whose names contain one of the texts, and of those that they need."""
    known = {unit.name: unit for unit in plan.units}
    wanted: set[str] = set()
    for text in texts:
        if not (found := {name for name in known if text in name}):
            raise unknown_name(f"a unit of {plan.settings.experiment} or a part of its name", text, known)
        wanted |= found
    while more := {need for name in wanted for need in known[name].needs} - wanted:
        wanted |= more
    return replace(plan, units=tuple(unit for unit in plan.units if unit.name in wanted))


def _with_datasets(name: str, experiment: Experiment, config: Any, datasets: Sequence[str]) -> Any:
    if "datasets" not in {field.name for field in fields(config)}:
        raise BatchbayesError(
            expected="an experiment with several data sets, if --datasets is given",
            got=f"{name}, which has only one",
            fix="leave --datasets out",
        )
    known = tuple(getattr(experiment, "DATASETS", ()))
    for dataset in datasets:
        if dataset not in known:
            raise unknown_name(f"a data set of {name}", dataset, known)
    if not datasets or len(set(datasets)) < len(datasets):
        raise BatchbayesError(
            expected="one or more data sets, each once",
            got=repr(",".join(datasets)),
            fix=f"choose from {', '.join(known)}",
        )
    return replace(config, datasets=tuple(dataset for dataset in known if dataset in datasets))


def _require_possible_order(name: str, units: Sequence[Unit]) -> None:
    """Require unique names, and needs that can be met in some order. Otherwise a run could wait for ever."""
    left, met = {unit.name: set(unit.needs) for unit in units}, set()
    while ready := {unit for unit, needs in left.items() if needs <= met}:
        met |= ready
        left = {unit: needs for unit, needs in left.items() if unit not in ready}
    if left or len(met) < len(units):
        raise BatchbayesError(
            expected=f"units of {name} with unique names, and with needs that other units can meet",
            got="; ".join(sorted(left)) or "the same name twice",
            fix="correct units() of the experiment",
        )
