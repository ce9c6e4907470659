"""The output folder: written beside its place under another name, and moved there when it is whole."""

import csv
import json
import math
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from batchbayes._common.atomic import atomic_path
from batchbayes.assess.job import Assessment, Job, Loaded, Thumbnails
from batchbayes.errors import BatchbayesError
from batchbayes.plots import save_figure
from batchbayes.saving import save

SPRITE_COLUMNS = 20


def require_place(out: Path, overwrite: bool) -> None:
    """Before the work, not after it: a folder that is not there yet, or is empty, or may be overwritten."""
    if out.is_file() or (out.is_dir() and any(out.iterdir()) and not overwrite):
        raise BatchbayesError(
            expected="an output folder that does not exist yet",
            got=f"{out}, which {'is a file' if out.is_file() else 'has files in it'}",
            fix="choose another --out, or pass --overwrite",
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent):
            pass
    except OSError as error:
        raise BatchbayesError(
            expected="a place to write to", got=f"{out} ({error.strerror})", fix="choose another --out"
        ) from error


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """A folder to fill; when the block ends well its files are moved to `out`, otherwise nothing is left."""
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as name:
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


def write_files(
    folder: Path, job: Job, loaded: Loaded, found: Assessment, caveats: Sequence[str], seconds: float
) -> None:
    """Everything but the report."""
    (folder / "figures").mkdir()
    for name, (figure, _) in found.figures.items():
        save_figure(figure, folder / "figures" / f"{name}.png")
    if found.thumbnails is not None:
        _save_sprite(found.thumbnails, folder / "figures" / "thumbnails.jpg")
    write_table(folder / "predictions.csv", found.table)
    if job.parquet:
        write_parquet(folder / "predictions.parquet", found.table)
    save(found.posterior, folder / "posterior.safetensors", notes=found.notes)
    write_json(folder / "metrics.json", document(job, loaded, found, caveats, seconds))


def document(job: Job, loaded: Loaded, found: Assessment, caveats: Sequence[str], seconds: float) -> dict[str, Any]:
    """The contents of metrics.json."""
    from batchbayes import __version__

    thumbnails = found.thumbnails
    return {
        "format": 1,
        "task": found.task,
        "verdict": dict(found.verdict),
        "recommended": found.recommended,
        "caveats": list(caveats),
        "methods": [
            {"name": m.name, "about": m.about, "metrics": dict(m.metrics), "settings": dict(m.settings)}
            for m in found.scored
        ],
        "columns": [asdict(column) for column in found.columns],
        "figures": [{"file": f"figures/{name}.png", "caption": text} for name, (_, text) in found.figures.items()],
        "thumbnails": None
        if thumbnails is None
        else {
            "file": "figures/thumbnails.jpg",
            "columns": SPRITE_COLUMNS,
            "size": [thumbnails.images.shape[3], thumbnails.images.shape[2]],
            "keys": list(thumbnails.keys),
        },
        "details": dict(found.details),
        "explorer": dict(found.explorer),
        "data": {
            "test": loaded.test.name,
            "train": job.train,
            "ood": loaded.ood.name if loaded.ood else None,
            "calibration": "a random third of the test data" if loaded.split_off else loaded.calibration.name,
            "split_off": loaded.split_off,
            **found.facts,
        },
        "made": {
            "command": job.command,
            "seed": job.seed,
            "draws": job.num_samples,
            "engine": job.engine,
            "center": job.center,
            "seconds": round(seconds, 1),
            "network": type(loaded.network).__name__,
            "versions": {
                "batchbayes": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        },
    }


def write_json(path: Path, content: Any) -> None:
    """Strict JSON: a number that is not finite becomes null."""
    with atomic_path(path) as partial:
        partial.write_text(json.dumps(_plain(content), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_table(path: Path, table: Mapping[str, Sequence[object]]) -> None:
    """A .csv file."""
    with atomic_path(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(table)
        writer.writerows(zip(*table.values(), strict=True))


def write_parquet(path: Path, table: Mapping[str, Sequence[object]]) -> None:
    """A .parquet file; `require_parquet` has been asked before."""
    import pyarrow  # pyright: ignore[reportMissingImports]
    from pyarrow import parquet  # pyright: ignore[reportMissingImports]

    cells = {key: [None if cell == "" else cell for cell in column] for key, column in table.items()}
    with atomic_path(path) as partial:
        parquet.write_table(pyarrow.table(cells), partial)


def _save_sprite(thumbnails: Thumbnails, path: str | os.PathLike[str]) -> None:
    """All thumbnails in one picture, row by row."""
    from PIL import Image

    count, _, height, width = thumbnails.images.shape
    rows = -(-count // SPRITE_COLUMNS)
    sheet = np.zeros((rows * height, SPRITE_COLUMNS * width, 3), dtype=np.uint8)
    for number, image in enumerate((255 * thumbnails.images).round().byte().numpy()):
        top, left = number // SPRITE_COLUMNS * height, number % SPRITE_COLUMNS * width
        sheet[top : top + height, left : left + width] = image.transpose(1, 2, 0)
    with atomic_path(path) as partial:
        Image.fromarray(sheet).save(partial, format="JPEG", quality=85)
