"""The tables of metrics as cells of text. The best of each column is marked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cell:
    """The text of a cell, and whether it reads the same as the best of its column."""

    text: str
    best: bool = False


def metric_tables(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a table for each group of columns: its title, its columns, and a row for each method."""
    groups = dict.fromkeys(column["group"] for column in metrics["columns"])
    return [
        _table(group, [c for c in metrics["columns"] if c["group"] == group], metrics["methods"]) for group in groups
    ]


def _table(title: str, columns: Sequence[Mapping[str, Any]], methods: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    by_column = [
        column_cells(column, [method["metrics"].get(column["key"]) for method in methods]) for column in columns
    ]
    rows = [{"name": method["name"], "cells": [cells[i] for cells in by_column]} for i, method in enumerate(methods)]
    return {"title": title, "columns": columns, "rows": rows}


def column_cells(column: Mapping[str, Any], values: Sequence[float | None]) -> list[Cell]:
    """Return the values of a column as text. All that read the same as the best are marked as the best.

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
    """Write a number with the digits of its column."""
    if value is None:
        return "–"
    shown = round(100 * value if column["percent"] else value, column["digits"]) + 0.0  # no minus before a zero
    return f"{shown:.{column['digits']}f}" + (" %" if column["percent"] else "")
