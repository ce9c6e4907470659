"""The points of the interactive chart, and the least certain examples, from the rows of predictions.csv."""

from collections.abc import Mapping, Sequence
from typing import Any

MOST_POINTS = 900
LEAST_CERTAIN = 24

CsvRow = Mapping[str, str]


def points(metrics: Mapping[str, Any], rows: Sequence[CsvRow]) -> list[dict[str, Any]]:
    """Return a few hundred points in the order of uncertainty, if possible of rows with a picture or details."""
    explorer = metrics["explorer"]
    if explorer is None:
        return []
    pictured = {key: i for i, key in enumerate((metrics["thumbnails"] or {"keys": []})["keys"])}
    detailed = metrics["details"]
    known = [row for row in rows if _key(row) in pictured or _key(row) in detailed]
    chosen = known or rows[:: max(1, -(-len(rows) // MOST_POINTS))]
    shown = []
    for row in sorted(chosen, key=lambda row: float(row[explorer["x"]])):
        if row["source"] == "ood" and explorer["y"] not in row:
            continue
        shown.append(
            {
                "x": float(row[explorer["x"]]),
                "y": _height(row, explorer["y"]),
                "kind": kind(row),
                "title": title(row),
                "lines": lines(row) + list(detailed.get(_key(row), [])),
                "picture": pictured.get(_key(row)),
            }
        )
    return shown


def _key(row: CsvRow) -> str:
    return f"{row['source']}-{row['row']}"


def _height(row: CsvRow, name: str) -> float:
    return abs(float(row["target"]) - float(row["mean"])) if name == "error" else float(row[name])


def kind(row: CsvRow) -> str:
    """Return what a point stands for: right, wrong, strange (out of distribution), or plain."""
    if row["source"] == "ood":
        return "strange"
    if "prediction" in row:
        return "right" if row["prediction"] == row["target"] else "wrong"
    return "plain"


def title(row: CsvRow) -> str:
    """Say what was predicted, and what is true."""
    if "prediction" in row:
        said = f"says {row['prediction']} ({100 * float(row['confidence']):.0f} %)"
    elif "mean" in row:
        said = f"predicts {_short(row['mean'])} ± {_short(row['std'])}"
    else:
        said = f"{100 * float(row['accuracy']):.1f} % of pixels right"
    return said + (f", is {_short(row['target'])}" if row.get("target") else "")


def lines(row: CsvRow) -> list[str]:
    """Return the numbers of a row in words."""
    names = {
        "entropy": "entropy",
        "mutual_information": "mutual information",
        "epistemic_std": "spread of the draws",
    }
    where = "out-of-distribution" if row["source"] == "ood" else row["source"]
    found = [f"row {row['row']} of the {where} data", *([row["id"]] if row.get("id") else [])]
    found += [f"{words} {_short(row[key])}" for key, words in names.items() if row.get(key)]
    return found + (["flagged: look again"] if row["flag"] == "1" else [])


def _short(text: str) -> str:
    try:
        return f"{float(text):.4g}"
    except ValueError:
        return text


def least_certain(metrics: Mapping[str, Any], rows: Sequence[CsvRow]) -> list[dict[str, Any]]:
    """Return the most uncertain test rows, with their picture if they have one."""
    if metrics["explorer"] is None:
        return []
    pictured = {key: i for i, key in enumerate((metrics["thumbnails"] or {"keys": []})["keys"])}
    tested = [row for row in rows if row["source"] == "test"]
    ordered = sorted(tested, key=lambda row: -float(row[metrics["explorer"]["x"]]))[:LEAST_CERTAIN]
    return [
        {"title": title(row), "lines": lines(row), "kind": kind(row), "picture": pictured.get(_key(row))}
        for row in ordered
    ]
