"""Numbers as printed in the papers, to stand beside ours.

mcbn.csv: tables 4 to 11 of Teye, Azizpour, Smith, "Bayesian Uncertainty Estimation for Batch Normalized Deep Networks",
ICML 2018. `crps_norm` and `pll_norm` are per cent, 0 for constant uncertainty and 100 for the optimum of every point;
`crps` and `rmse` are in the unit of the target, `pll` in nats. Table 4's p-value of MCBN on protein is a misprint.
"""

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class Published:
    """One number of a paper."""

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
def mcbn_tables() -> tuple[Published, ...]:
    """All numbers of tables 4 to 11; cells that the paper leaves empty are left out."""
    with (files(__name__) / "mcbn.csv").open() as file:
        return tuple(
            Published(
                int(row["table"]),
                row["dataset"],
                row["method"],
                row["metric"],
                float(row["value"]),
                float(row["standard_error"]) if row["standard_error"] else None,
                float(row["p_value"]) if row["p_value"] else None,
                int(row["batch_size"]) if row["batch_size"] else None,
                int(row["passes"]) if row["passes"] else None,
            )
            for row in csv.DictReader(file)
            if row["value"]
        )


def mcbn_value(
    table: int, dataset: str, method: str, metric: str, batch_size: int | None = None, passes: int | None = None
) -> Published | None:
    """One of them, or None.

    >>> mcbn_value(7, "boston", "MCBN", "rmse").value
    2.75
    """
    key = (table, dataset, method, metric, batch_size, passes)
    return next(
        (p for p in mcbn_tables() if (p.table, p.dataset, p.method, p.metric, p.batch_size, p.passes) == key), None
    )
