"""The page: read an output folder, and write report.html into it. The best of each column of a table is marked.

The points of the interactive chart, and the cards of single examples, from the rows of predictions.csv.
"""

import csv
import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from batchbayes._common.files import atomic_path
from batchbayes._common.page import data_address, page_style, template

PAGE = Path(__file__).parent


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
        galleries=galleries(metrics, rows),
        pictures=pictures,
        row_count=len(rows),
        chart={"points": shown, "explorer": metrics["explorer"], "thumbnails": metrics["thumbnails"]},
        style=page_style(),
        script=(PAGE / "script.js").read_text(encoding="utf-8"),
    )


class Cell(NamedTuple):
    """The text of a cell, and whether it reads the same as the best of its column."""

    text: str
    best: bool = False


def metric_tables(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a table for each group of columns: its title, its columns, and a row for each method."""
    tables, methods = [], metrics["methods"]
    for title in dict.fromkeys(column["group"] for column in metrics["columns"]):
        columns = [column for column in metrics["columns"] if column["group"] == title]
        cells = [column_cells(column, [each["metrics"].get(column["key"]) for each in methods]) for column in columns]
        rows = [
            {"name": each["name"], "cells": row} for each, row in zip(methods, zip(*cells, strict=True), strict=True)
        ]
        tables.append({"title": title, "columns": columns, "rows": rows})
    return tables


def column_cells(column: Mapping[str, Any], values: Sequence[float | None]) -> list[Cell]:
    """Return the values of a column as text. All that read the same as the best are marked as the best.

    >>> column = {"better": "lower", "digits": 2, "percent": False, "target": None}
    >>> [(cell.text, cell.best) for cell in column_cells(column, [0.501, 0.499, 0.6, None])]
    [('0.50', True), ('0.50', True), ('0.60', False), ('–', False)]
    """
    known = [value for value in values if value is not None]
    worse = {"lower": lambda v: v, "higher": lambda v: -v, "target": lambda v: abs(v - column["target"])}
    best = written(column, min(known, key=worse[column["better"]])) if len(known) > 1 else None
    texts = [written(column, value) for value in values]
    return [Cell(text, text == best and value is not None) for text, value in zip(texts, values, strict=True)]


def written(column: Mapping[str, Any], value: float | None) -> str:
    """Write a number with the digits of its column."""
    if value is None:
        return "–"
    shown = round(100 * value if column["percent"] else value, column["digits"]) + 0.0  # no minus before a zero
    return f"{shown:.{column['digits']}f}" + (" %" if column["percent"] else "")


MOST_POINTS = 400
"""Of each source, if none of its rows has a picture or details."""
LEAST_CERTAIN = 24
ALIKE = 100
"""Number of test answers that an answer is compared with: those of nearest confidence, or a fifth of all."""
MOST_NOVEL = 6
MEASURES = {
    "entropy": "entropy",
    "mutual_information": "mutual information",
    "epistemic_std": "spread of the draws",
    "novelty": "p-value of novelty",
}

CsvRow = Mapping[str, str]


def points(metrics: Mapping[str, Any], rows: Sequence[CsvRow]) -> list[dict[str, Any]]:
    """Return a few hundred points in the order of uncertainty, if possible of rows with a picture or details."""
    explorer = metrics["explorer"]
    if explorer is None:
        return []
    card, x, y = cards(metrics, rows), explorer["x"], explorer["y"]
    chosen = []
    for source in ("test",) if y in ("error", "error_rate") else ("test", "ood"):
        own = [row for row in rows if row["source"] == source]
        known = [row for row in own if card(row)["picture"] is not None or _key(row) in metrics["details"]]
        chosen += known or own[:: max(1, -(-len(own) // MOST_POINTS))]
    chosen = sorted(chosen, key=lambda row: float(row[x]))
    return [card(row) | {"x": float(row[x]), "y": _height(row, y)} for row in chosen]


def galleries(metrics: Mapping[str, Any], rows: Sequence[CsvRow]) -> dict[str, list[dict[str, Any]]]:
    """Return cards of the test rows that are most uncertain, and of those that are least like the training data."""
    tested, explorer = [row for row in rows if row["source"] == "test"], metrics["explorer"]
    uncertain = sorted(tested, key=lambda row: -float(row[explorer["x"]])) if explorer else []
    novel = sorted((row for row in tested if row.get("novelty")), key=lambda row: float(row["novelty"]))
    shown = {"Least certain": uncertain[:LEAST_CERTAIN], "Least like the training data": novel[:MOST_NOVEL]}
    return {title: list(map(cards(metrics, rows), chosen)) for title, chosen in shown.items()}


def cards(metrics: Mapping[str, Any], rows: Sequence[CsvRow]) -> Callable[[CsvRow], dict[str, Any]]:
    """Return a function that tells what is known about one row: a title, lines, the place of its picture or None."""
    pictured = {key: i for i, key in enumerate((metrics["thumbnails"] or {"keys": []})["keys"])}
    alike, unit = answers_alike(rows), metrics["data"].get("unit", "")

    def card(row: CsvRow) -> dict[str, Any]:
        return {
            "kind": kind(row),
            "title": title(row, unit),
            "lines": [*alike(row), *lines(row), *metrics["details"].get(_key(row), [])],
            "picture": pictured.get(_key(row)),
        }

    return card


def answers_alike(rows: Sequence[CsvRow]) -> Callable[[CsvRow], list[str]]:
    """Return a function that says how many answers are right that are as certain as that of a row."""
    known = sorted(filter(_is_answer, rows), key=_confidence)  # equal ones stay in the order of the rows
    count = min(ALIKE, len(known) // 5)

    def alike(row: CsvRow) -> list[str]:
        if not count or not _is_answer(row):  # nothing is known about answers to strange inputs
            return []
        ends = (find(known, _confidence(row), key=_confidence) for find in (bisect_left, bisect_right))
        start = max(0, min((sum(ends) - count) // 2, len(known) - count))
        right = sum(each["prediction"] == each["target"] for each in known[start : start + count])
        return [f"of {count} answers as certain as this one {right} are right"]

    return alike


def _confidence(row: CsvRow) -> float:
    return float(row["confidence"])


def _is_answer(row: CsvRow) -> bool:
    return row["source"] == "test" and bool(row.get("prediction"))


def _key(row: CsvRow) -> str:
    return f"{row['source']}-{row['row']}"


def _height(row: CsvRow, name: str) -> float:
    if name == "error":
        return abs(float(row["target"]) - float(row["mean"]))
    return 1 - float(row["confidence"]) if name == "doubt" else float(row[name])


def kind(row: CsvRow) -> str:
    """Return what a point stands for: right, wrong, strange (out of distribution), or plain."""
    if row["source"] == "ood":
        return "strange"
    if "prediction" in row:
        return "right" if row["prediction"] == row["target"] else "wrong"
    return "plain"


def title(row: CsvRow, unit: str = "") -> str:
    """Say what was predicted, and what is true."""
    after = f" {unit}" if unit else ""
    if "prediction" in row:
        said = f"says {row['prediction']} ({100 * float(row['confidence']):.0f} %)"
    elif "mean" in row:
        said = f"predicts {_short(row['mean'])}{after}, 90 % from {_short(row['lower'])} to {_short(row['upper'])}"
    else:
        said = f"{100 * float(row['accuracy']):.1f} % right" if row["accuracy"] else "not labelled"
    return said + (f"; is {_short(row['target'])}{after}" if row.get("target") else "")


def lines(row: CsvRow) -> list[str]:
    """Return the name of a row, and its numbers in words."""
    where = "strange" if row["source"] == "ood" else row["source"]
    found = [*([row["id"]] if row.get("id") else []), f"row {row['row']} of the {where} data"]
    found += [f"{words} {_short(row[key])}" for key, words in MEASURES.items() if row.get(key)]
    return found + ([f"flagged as {row['why']}"] if row["flag"] == "1" else [])


def _short(text: str) -> str:
    try:
        return f"{float(text):.3g}"
    except ValueError:
        return text
