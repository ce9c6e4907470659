"""The points of the interactive chart, and the cards of single examples, from the rows of predictions.csv."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MOST_POINTS = 400
"""Of each source, if none of its rows has a picture or details."""
LEAST_CERTAIN = 24
ALIKE = 100
"""An answer is compared with so many test answers whose confidence is nearest to its own, or with a fifth of all."""
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
    card = cards(metrics, rows)
    has_truth = explorer["y"] in ("error", "error_rate")
    chosen = []
    for source in ("test",) if has_truth else ("test", "ood"):
        own = [row for row in rows if row["source"] == source]
        known = [row for row in own if card(row)["picture"] is not None or _key(row) in metrics["details"]]
        chosen += known or own[:: max(1, -(-len(own) // MOST_POINTS))]
    return [
        card(row) | {"x": float(row[explorer["x"]]), "y": _height(row, explorer["y"])}
        for row in sorted(chosen, key=lambda row: float(row[explorer["x"]]))
    ]


def least_certain(metrics: Mapping[str, Any], rows: Sequence[CsvRow]) -> list[dict[str, Any]]:
    """Return cards of the most uncertain test rows."""
    if metrics["explorer"] is None:
        return []
    tested = [row for row in rows if row["source"] == "test"]
    ordered = sorted(tested, key=lambda row: -float(row[metrics["explorer"]["x"]]))[:LEAST_CERTAIN]
    return list(map(cards(metrics, rows), ordered))


def most_novel(metrics: Mapping[str, Any], rows: Sequence[CsvRow]) -> list[dict[str, Any]]:
    """Return cards of the test rows that are least like the training data."""
    tested = [row for row in rows if row["source"] == "test" and row.get("novelty")]
    ordered = sorted(tested, key=lambda row: float(row["novelty"]))[:MOST_NOVEL]
    return list(map(cards(metrics, rows), ordered))


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
        if not count or not row.get("prediction"):
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
        said = f"{100 * float(row['accuracy']):.1f} % of pixels right" if row["accuracy"] else "not labelled"
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
