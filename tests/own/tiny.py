"""A very short experiment for tests that kill, resume and share runs: parts, and sums of them."""

import math
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchbayes_papers.runner.experiment import Unit
from batchbayes_papers.runner.tables import ResultTable

from batchbayes.errors import BatchbayesError, warn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DATASETS = ("first", "second", "third")


@dataclass(frozen=True)
class Config:
    datasets: tuple[str, ...] = ("first", "second")
    count: int = 3
    seconds: float = 0.0
    size: int = 1
    """The number of values in a result."""
    trouble: str = ""


PRESETS = {
    "smoke": Config(),
    "some": Config(count=12, seconds=0.1),
    "quick": Config(count=40, seconds=0.1),
    "large": Config(count=40, size=3000),
    "bad": Config(trouble="bad input"),
    "bug": Config(trouble="bug"),
    "killed": Config(trouble="killed once"),
    "deadly": Config(trouble="killed"),
    "warning": Config(trouble="warning"),
    "threads": Config(trouble="threads"),
    "object": Config(trouble="object"),
}


def units(config: Config) -> list[Unit]:
    found = []
    for dataset in config.datasets:
        parts = [
            Unit(f"{dataset}, part {i}", {"dataset": dataset, "seed": i}, effort=1 + i % 3) for i in range(config.count)
        ]
        found += [Unit(f"{dataset}, sum", {"dataset": dataset}, tuple(part.name for part in parts)), *parts]
    return found


def work(config: Config, unit: Unit, needed: Mapping[str, Any], data_folder: str | os.PathLike[str] | None) -> Any:
    if data_folder is not None:
        with (Path(data_folder) / "log").open("a") as log:
            log.write(f"{unit.name}\t{os.getppid()}\n")
    time.sleep(config.seconds)
    if needed:
        return [math.fsum(value for values in needed.values() for value in values), *[0.0] * (config.size - 1)]
    if unit.name == "second, part 1":
        return trouble(config, data_folder)
    return [math.sin(1000.1 * i + unit.arguments["seed"] + len(unit.arguments["dataset"])) for i in range(config.size)]


def trouble(config: Config, data_folder: str | os.PathLike[str] | None) -> Any:
    match config.trouble:
        case "bad input":
            raise BatchbayesError(expected="a", got="b", fix="c")
        case "bug":
            return 1 / 0
        case "object":
            return [{1, 2}]
        case "threads":
            import torch

            return [torch.get_num_threads()]
        case "warning":
            warn("Doubtful <b>.")
        case "killed once" | "killed":
            marker = Path(data_folder or ".") / "killed"
            if config.trouble == "killed" or not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
    return [float("nan")]


def tables(config: Config, results: Mapping[str, Any]) -> list[ResultTable]:
    rows = [(unit.name, results[unit.name][0] if unit.name in results else None) for unit in units(config)]
    sums = [row for row in rows if row[0].endswith("sum")]
    return [
        ResultTable("Parts & <sums>", ("unit", "value"), tuple(rows), ("", ".3f"), ("A <note>.",)),
        ResultTable("Sums", ("unit", "value"), tuple(sums), ("", ".3f")),
    ]


def figures(config: Config, results: Mapping[str, Any]) -> "dict[str, Figure]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1, 1))
    figure.subplots().plot([results[unit.name][0] for unit in units(config)])
    return {"all-units": figure}


def notes(config: Config) -> list[str]:
    return ["No paper <has> this."]
