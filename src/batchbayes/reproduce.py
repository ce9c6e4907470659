"""Run an experiment and write what came of it to a folder."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchbayes.errors import BatchbayesError
from batchbayes.experiments import Experiment, Unit, load_experiment
from batchbayes.files import atomic_path
from batchbayes.tables import to_markdown, to_terminal


def reproduce(name: str, preset: str, out: Path, data_folder: str | os.PathLike[str] | None = None) -> str:
    """Write `table.md` and `figures/*.png` to `out`, each whole or not at all; returns the tables for a terminal."""
    from batchbayes.plots import save_figure

    experiment = load_experiment(name)
    if preset not in experiment.PRESETS:
        raise BatchbayesError(
            expected=f"a preset of {name}, one of: {', '.join(experiment.PRESETS)}",
            got=repr(preset),
            fix="choose one of them",
        )
    try:
        (out / "figures").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BatchbayesError(
            expected="a folder for the results", got=f"{out} ({error.strerror})", fix="choose another --out"
        ) from error
    config = experiment.PRESETS[preset]
    results = run_units(experiment, config, data_folder)
    tables = experiment.tables(config, results)
    with atomic_path(out / "table.md") as partial:
        partial.write_text("\n\n".join(map(to_markdown, tables)) + "\n", encoding="utf-8")
    for stem, figure in experiment.figures(config, results).items():
        save_figure(figure, out / "figures" / f"{stem}.png")
    return "\n\n".join(map(to_terminal, tables))


def run_units(experiment: Experiment, config: Any, data_folder: str | os.PathLike[str] | None) -> Mapping[str, Any]:
    """All units, one after the other, in the order of their needs."""
    from batchbayes.training.loop import one_thread

    results: dict[str, Any] = {}
    waiting: list[Unit] = experiment.units(config)
    with one_thread():
        while waiting:
            unit = next(unit for unit in waiting if all(name in results for name in unit.needs))
            waiting.remove(unit)
            results[unit.name] = experiment.work(config, unit, {n: results[n] for n in unit.needs}, data_folder)
    return results
