"""The output folder. It is written under another name, and moved to its place when it is complete."""

import csv
import json
import math
import os
import platform
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from batchbayes import __version__
from batchbayes._common.checks import require_packages
from batchbayes._common.files import atomic_path, words_for_disk_errors
from batchbayes.errors import BatchbayesError
from batchbayes.plots import save_figure
from batchbayes.report.compare.rows import Rows
from batchbayes.report.compare.tuning import paired_difference
from batchbayes.report.options import AssessOptions, Settings
from batchbayes.report.result import Assessment, Thumbnails
from batchbayes.saving import save

NOVELTY = "novelty.safetensors"
"""Name of the file with the detector of novelty, beside that of the posterior."""
SPRITE_COLUMNS = 20
TEXT_COLUMNS = ("source", "id", "why")
FORMULAS = ("=", "+", "-", "@", "\t", "\r")


def require_place(out: Path, overwrite: bool) -> None:
    """Raise an error unless the folder is new, empty or may be overwritten, and can be written to."""
    with words_for_disk_errors(out):
        if out.is_file() or (out.is_dir() and any(out.iterdir()) and not overwrite):
            raise BatchbayesError(
                expected="an output folder that does not exist yet",
                got=f"{out}, which {'is a file' if out.is_file() else 'has files in it'}",
                fix="choose another --out, or pass --overwrite",
            )
        out.parent.mkdir(parents=True, exist_ok=True)
        with _stage(out):
            pass


def _stage(out: Path) -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.")


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """Give a folder to fill. Move its files to `out` if the block ends well; otherwise leave nothing behind."""
    with _stage(out) as name:
        stage = Path(name) / "whole"
        stage.mkdir()
        yield stage
        if not out.exists():
            stage.replace(out)
            return
        for path in sorted(stage.rglob("*")):
            place = out / path.relative_to(stage)
            if path.is_dir():
                place.mkdir(exist_ok=True)
            else:
                path.replace(place)


def require_new_file(path: Path) -> None:
    """Raise an error if a file exists already or cannot be written."""
    with words_for_disk_errors(path):
        if path.exists():
            raise BatchbayesError(
                expected="an output file that does not exist yet", got=str(path), fix="choose another --out"
            )
        if not path.parent.is_dir():
            raise BatchbayesError(
                expected="a folder to write to", got=f"nothing at {path.parent}", fix="make it, or choose another --out"
            )
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.", suffix=".partial-file"):
            pass  # its name is as long as that of the file while it is written


def require_extras(*, parquet: bool = False) -> None:
    """Raise an error if a package that the report needs is not installed."""
    require_packages("the report", "report", matplotlib="matplotlib", jinja2="jinja2", PIL="pillow")
    if parquet:
        require_packages("Parquet", "parquet", pyarrow="pyarrow")


def save_assessment(found: Assessment, out: Path, *, overwrite: bool, parquet: bool) -> Path:
    """Write an assessment to a folder, whole or not at all, and return the path of the report."""
    from batchbayes.report.page.build import build_report

    require_extras(parquet=parquet)
    require_place(out, overwrite)
    with words_for_disk_errors(out), staged(out) as folder:
        write_files(folder, found, parquet)
        build_report(folder)
    return out / "report.html"


def write_files(folder: Path, found: Assessment, parquet: bool) -> None:
    """Write everything but the report."""
    (folder / "figures").mkdir()
    for name, (figure, _) in found.figures.items():
        save_figure(figure, folder / "figures" / f"{name}.png")
    if found.thumbnails is not None:
        _save_sprite(found.thumbnails, folder / "figures" / "thumbnails.jpg")
    write_rows(folder / "predictions.csv", found.rows)
    if parquet:
        content = parquet_bytes(found.rows, {"batchbayes": __version__, "task": found.case.task})
        (folder / "predictions.parquet").write_bytes(content)
    if found.novelty is not None:
        save(found.novelty, folder / NOVELTY)
    save(found.posterior, folder / "posterior.safetensors", notes={**found.notes, "novelty": found.novelty is not None})
    write_json(folder / "metrics.json", document(found))


def document(found: Assessment) -> dict[str, Any]:
    """Return the contents of metrics.json."""
    case, settings = found.case, found.case.settings
    return {
        "format": 1,
        "task": case.task,
        "verdict": dict(found.verdict),
        "usable": found.is_usable,
        "call": predict_call(settings, case.task),
        "terms": dict(found.terms),
        "recommended": found.recommended.name,
        "caveats": list(found.caveats),
        "methods": [
            {
                "name": c.name,
                "about": c.about,
                "metrics": dict(c.metrics),
                "settings": c.settings,
                "behind": paired_difference(c.losses, found.recommended.losses),
            }
            for c in found.contenders
        ],
        "columns": [asdict(column) for column in found.columns],
        "figures": [{"file": f"figures/{name}.png", "caption": text} for name, (_, text) in found.figures.items()],
        "thumbnails": None if found.thumbnails is None else _sprite_layout(found.thumbnails),
        "details": dict(found.details),
        "explorer": found.explorer,
        "data": {
            "test": case.test.name,
            "train": case.train.name,
            "ood": case.ood.name if case.ood else None,
            "calibration": "a random third of the test data" if case.split_off else case.calibration.name,
            "split_off": case.split_off,
            **found.facts,
        },
        "made": {
            "command": settings.command if isinstance(settings, AssessOptions) else "",
            "seed": settings.seed,
            "draws": found.recommended.num_samples,
            "engine": settings.engine,
            "budget": settings.budget,
            "seconds": round(found.seconds, 1),
            "network": type(case.network).__name__,
            "versions": {
                "batchbayes": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        },
    }


def predict_call(options: Settings, task: str) -> str:
    """Return what predicts new data with the recommended method: a command, or Python."""
    if not isinstance(options, AssessOptions):
        ends = "; found.intervals.ends(seen.mean, seen.std)" if task == "regression" else ""
        return f"seen = found.predict(new_inputs){ends}"
    weights = ["--weights", *map(str, options.weights[:1])] if options.weights else []
    saved = ["--posterior", str(options.out / "posterior.safetensors")]
    return (
        shlex.join(["batchbayes", "predict", "--model", options.model, *weights, *saved]) + " --input NEW --out new.csv"
    )


def _sprite_layout(thumbnails: Thumbnails) -> dict[str, Any]:
    return {
        "file": "figures/thumbnails.jpg",
        "columns": SPRITE_COLUMNS,
        "size": [thumbnails.images.shape[3], thumbnails.images.shape[2]],
        "keys": list(thumbnails.keys),
    }


def write_json(path: Path, content: Any) -> None:
    """Write a file of strict JSON."""
    with atomic_path(path) as partial:
        partial.write_text(strict_json(content, indent=1) + "\n", encoding="utf-8")


def strict_json(content: Any, indent: int | None = None) -> str:
    """Return JSON that all programs can read: a number that is not finite becomes null."""
    return json.dumps(_plain(content), indent=indent, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_rows(path: Path, rows: Rows) -> None:
    """Write a .csv file."""
    with (
        words_for_disk_errors(path),
        atomic_path(path) as partial,
        partial.open("w", newline="", encoding="utf-8") as file,
    ):
        print_rows(file, rows)


def print_rows(file: TextIO, rows: Rows) -> None:
    """Write rows as CSV. A text that a spreadsheet would run as a formula gets an apostrophe before it."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(rows)
    for cells in zip(*rows.values(), strict=True):
        writer.writerow([f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULAS) else cell for cell in cells])


def parquet_bytes(rows: Rows, origin: Mapping[str, Any]) -> bytes:
    """Return rows as the content of a .parquet file. An empty cell is null; an empty column holds numbers or texts."""
    import pyarrow  # pyright: ignore[reportMissingImports]
    from pyarrow import parquet  # pyright: ignore[reportMissingImports]

    columns = {}
    for name, column in rows.items():
        cells = [None if cell == "" else cell for cell in column]
        empty = None if any(cell is not None for cell in cells) else pyarrow.float64()
        columns[name] = pyarrow.array(cells, pyarrow.string() if name in TEXT_COLUMNS else empty)
    table = pyarrow.table(columns).replace_schema_metadata({key: str(value) for key, value in origin.items()})
    parquet.write_table(table, content := pyarrow.BufferOutputStream())
    return content.getvalue().to_pybytes()


def _save_sprite(thumbnails: Thumbnails, path: str | os.PathLike[str]) -> None:
    """Write all thumbnails as one picture, row by row."""
    from PIL import Image

    count, _, height, width = thumbnails.images.shape
    rows = -(-count // SPRITE_COLUMNS)
    sheet = np.zeros((rows * height, SPRITE_COLUMNS * width, 3), dtype=np.uint8)
    for number, image in enumerate((255 * thumbnails.images).round().byte().numpy()):
        top, left = number // SPRITE_COLUMNS * height, number % SPRITE_COLUMNS * width
        sheet[top : top + height, left : left + width] = image.transpose(1, 2, 0)
    with atomic_path(path) as partial:
        Image.fromarray(sheet).save(partial, format="JPEG", quality=85)
