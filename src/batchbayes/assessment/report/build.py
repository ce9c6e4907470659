"""The page: read an output folder, and write report.html into it. The best of each column of a table is marked."""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchbayes._common.atomic import atomic_path
from batchbayes._common.page import data_address, page_style, template
from batchbayes.assessment.report.points import least_certain, most_novel, points

PAGE = Path(__file__).parent / "page"


def build_report(folder: Path) -> Path:
    """Write `report.html`. The page is self-contained: it fetches nothing when it is opened."""
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    with (folder / "predictions.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    pictures = {
        name: data_address(folder / name)
        for name in [figure["file"] for figure in metrics["figures"]]
        + ([metrics["thumbnails"]["file"]] if metrics["thumbnails"] else [])
    }
    with atomic_path(folder / "report.html") as partial:
        partial.write_text(render(metrics, rows, pictures), encoding="utf-8")
    return folder / "report.html"


def render(metrics: Mapping[str, Any], rows: list[dict[str, str]], pictures: Mapping[str, str]) -> str:
    """Return the page as text. The template escapes everything that comes from data or names."""
    shown = points(metrics, rows)
    return template(PAGE / "report.html").render(
        metrics=metrics,
        verdict={key: text for key, text in metrics["verdict"].items() if key != "headline"},
        tables=metric_tables(metrics),
        galleries={
            "Least certain": least_certain(metrics, rows),
            "Least like the training data": most_novel(metrics, rows),
        },
        pictures=pictures,
        row_count=len(rows),
        chart={"points": shown, "explorer": metrics["explorer"], "thumbnails": metrics["thumbnails"]},
        style=page_style(),
        script=(PAGE / "script.js").read_text(encoding="utf-8"),
    )


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
