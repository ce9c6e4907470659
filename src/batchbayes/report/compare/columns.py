"""The columns of the tables of metrics, for each task: `columns.csv` lists them."""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class MetricColumn:
    """A column of the tables of metrics: its label, which way is better, how it is written, what it means."""

    key: str
    label: str
    better: Literal["lower", "higher", "target"]
    digits: int
    meaning: str
    percent: bool = False
    target: float | None = None
    group: str = "How good and how honest"
    """Title of the table that the column is in."""


def _listed(name: str) -> tuple[MetricColumn, ...]:
    rows = csv.DictReader((Path(__file__).parent / "columns.csv").read_text(encoding="utf-8").splitlines())
    return tuple(
        MetricColumn(
            row["key"],
            row["label"],
            row["better"],  # type: ignore[arg-type]
            int(row["digits"]),
            row["meaning"],
            bool(row["percent"]),
            float(row["target"]) if row["target"] else None,
            row["group"],
        )
        for row in rows
        if row["listed"] == name
    )


CLASSES, STRANGE_CLASSES, PIXELS = _listed("classes"), _listed("strange_classes"), _listed("pixels")
VALUES, STRANGE_VALUES, JOINT = _listed("values"), _listed("strange_values"), _listed("joint")
"""Those of inputs that the network should be unsure about, and that of several outputs, are shown if there are any."""
