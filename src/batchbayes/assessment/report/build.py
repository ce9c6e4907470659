"""The page: read an output folder, and write report.html into it."""

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchbayes._common.atomic import atomic_path
from batchbayes._common.page import data_address, page_style, template
from batchbayes.assessment.report.cells import metric_tables
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
