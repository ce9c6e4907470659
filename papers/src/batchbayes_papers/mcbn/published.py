"""The numbers that the MCBN paper prints in its tables 4 to 11.

`crps_norm` and `pll_norm` are percentages: 0 means constant uncertainty, and 100 means the optimum at every point.
`crps` and `rmse` are in the unit of the target, and `pll` is in nats. In table 4 the p-value of MCBN on protein is a
misprint.
"""

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class PublishedValue:
    """One number of the paper."""

    table: int
    dataset: str
    method: str
    metric: str
    value: float
    standard_error: float | None
    p_value: float | None
    batch_size: int | None
    passes: int | None


@cache
def published_values() -> tuple[PublishedValue, ...]:
    """Return all numbers of tables 4 to 11, without the cells that are empty in the paper."""
    with Path(__file__).with_name("published.csv").open(newline="") as file:
        rows: list[dict[str, Any]] = [row for row in csv.DictReader(file) if row["value"]]
    kinds = {"table": int, "value": float, "standard_error": float, "p_value": float, "batch_size": int, "passes": int}
    for row in rows:
        row.update({name: kind(row[name]) if row[name] else None for name, kind in kinds.items()})
    return tuple(PublishedValue(**row) for row in rows)


def published_value(
    table: int, dataset: str, method: str, metric: str, batch_size: int | None = None, passes: int | None = None
) -> PublishedValue | None:
    """Return one number of the paper, or None if the paper does not have it.

    >>> published_value(7, "boston", "MCBN", "rmse").value
    2.75
    """
    key = (table, dataset, method, metric, batch_size, passes)
    return next(
        (p for p in published_values() if (p.table, p.dataset, p.method, p.metric, p.batch_size, p.passes) == key), None
    )
