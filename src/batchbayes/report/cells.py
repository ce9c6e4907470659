"""The table of methods and metrics as cells of text, with the best of each column marked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cell:
    """What stands in a cell, and whether it is among the best of its column as far as it is written."""

    text: str
    best: bool = False


def metric_rows(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row a method: its name, and a cell for each column."""
    methods, columns = metrics["methods"], metrics["columns"]
    by_column = [
        column_cells(column, [method["metrics"].get(column["key"]) for method in methods]) for column in columns
    ]
    return [
        {"name": method["name"], "about": method["about"], "cells": [cells[i] for cells in by_column]}
        for i, method in enumerate(methods)
    ]


def column_cells(column: Mapping[str, Any], values: Sequence[float | None]) -> list[Cell]:
    """Write the values of a column; those that read the same as the best are all the best.

    >>> column = {"better": "lower", "digits": 2, "percent": False, "target": None}
    >>> [(cell.text, cell.best) for cell in column_cells(column, [0.501, 0.499, 0.6, None])]
    [('0.50', True), ('0.50', True), ('0.60', False), ('–', False)]
    """
    texts = [written(column, value) for value in values]
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return [Cell(text) for text in texts]
    if column["better"] == "target":
        best = min(known, key=lambda value: abs(value - column["target"]))
    else:
        best = min(known) if column["better"] == "lower" else max(known)
    return [
        Cell(text, value is not None and text == written(column, best))
        for text, value in zip(texts, values, strict=True)
    ]


def written(column: Mapping[str, Any], value: float | None) -> str:
    """A number with the digits of its column."""
    if value is None:
        return "–"
    return f"{100 * value:.{column['digits']}f} %" if column["percent"] else f"{value:.{column['digits']}f}"
