"""Predictions of data of any size: part by part, in memory that does not grow, here or on a dask cluster.

A part is some consecutive rows of one file. Its predictions become one file, which is there whole or not at all. So a
run may be killed at any moment, and the same command continues it. Parts do not depend on each other, nor on who makes
them: the files are the same, bit for bit, if all workers have one thread and the same versions.
"""

import hashlib
import io
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from batchbayes import __version__
from batchbayes._common.checks import require_packages
from batchbayes._common.cluster import PACKAGES, TICK_SECONDS, Cluster, ClusterWorkers, find_cluster
from batchbayes._common.files import atomic_path, words_for_disk_errors
from batchbayes._common.progress import Progress
from batchbayes._common.text import count
from batchbayes.errors import BatchbayesError, warn
from batchbayes.report.options import PredictOptions
from batchbayes.report.predict import Predictor
from batchbayes.report.read.examples import READ_SIZE, Examples
from batchbayes.report.read.images import visible
from batchbayes.report.read.sources import ARRAYS, READ_IN_PART, example_shape, is_function
from batchbayes.report.read.tables import TABLES
from batchbayes.report.running import noted_warnings, running
from batchbayes.report.write import NOVELTY, parquet_bytes, print_rows, write_json

PLAN, POSTERIOR, WEIGHTS = "parts.json", "posterior.safetensors", "weights-"
PARQUET_PLAN = f"_{PLAN}"
"""Programs that read a folder of Parquet files leave out what begins so."""
PART_NUMBERS = 2**22
"""Largest number of input numbers of a part (16 MiB). It has at least the rows that are read together."""


@dataclass(frozen=True)
class Part:
    """Some rows of a source, and the file of their predictions."""

    file: str
    source: str
    start: int
    stop: int


def parts_command(options: PredictOptions) -> None:
    """Predict all parts that are not there yet, and say where they are."""
    assert options.parts is not None
    if options.out or options.maps:
        raise BatchbayesError(expected="--parts alone", got="--out or --maps beside it", fix="leave them out")
    if options.parquet:
        require_packages("Parquet", "parquet", pyarrow="pyarrow")
    cluster = find_cluster(options.cluster, options.scheduler_file)
    with running(options), noted_warnings(), words_for_disk_errors(options.parts):
        parts = predict_parts(options, cluster)
    total = sum(part.stop - part.start for part in parts)
    if options.json:
        print(json.dumps({"folder": str(options.parts), "parts": len(parts), "predictions": total}))
    elif not options.quiet:
        print(f"{total} predictions in {count(len(parts), 'part')}: {options.parts}")


def predict_parts(options: PredictOptions, cluster: Cluster | None = None) -> list[Part]:
    """Make all parts that are not in the folder yet. Return all parts."""
    assert options.parts is not None
    folder, predictor = options.parts, Predictor.load(options)
    suffix = ".parquet" if options.parquet else ".csv"
    parts = cut_into_parts(find_sources(options.input), predictor, options.part_rows, suffix)
    _start(folder, parts, options, predictor.notes)
    missing = [part for part in parts if not (folder / part.file).exists()]
    warned: set[str] = set()
    with Progress("predicting parts", len(missing), lines=True) as shown:
        if len(missing) < len(parts):
            shown.say(f"{len(parts) - len(missing)} of {count(len(parts), 'part')} were made before")
        shown.advance(0)
        made = _made_here(predictor, missing) if cluster is None else _made_there(options, missing, cluster, shown)
        for part, (content, warnings) in made:
            with atomic_path(folder / part.file) as path:
                path.write_bytes(content)
            for warning in set(warnings) - warned:
                warn(f"{part.source}: {warning}")
            warned |= set(warnings)
            shown.advance()
    return parts


def find_sources(inputs: Sequence[str]) -> list[Path]:
    """Return the files to predict, in the order of their names. Each folder of data files stands for its files."""
    found = []
    for path in map(Path, inputs):
        if is_function(str(path)):
            raise BatchbayesError(
                "files or folders beside --parts", f"a data function {path}", "write the inputs to files"
            )
        if not path.exists():
            raise BatchbayesError(expected="a data file or folder", got=f"nothing at {path}", fix="check the path")
        is_plain = path.is_dir() and path.suffix.lower() not in ARRAYS
        files = [each for each in visible(path) if each.suffix.lower() in (*ARRAYS, *TABLES)] if is_plain else []
        found += sorted(files) or [path]
    return found


def cut_into_parts(sources: Sequence[Path], predictor: Predictor, most_rows: int, suffix: str) -> list[Part]:
    """Return the parts of all sources. The batches inside of them are those in which a whole file is read."""
    ranges: list[tuple[Path, range]] = []
    for source in sources:
        with noted_warnings(quiet=True):  # they come again when the parts are read
            size, *shape = example_shape(source, predictor.reading)
        rows = min(most_rows, PART_NUMBERS // max(1, math.prod(shape)))
        rows = max(1, rows // READ_SIZE) * READ_SIZE
        ranges += [(source, range(start, min(start + rows, size))) for start in range(0, size, rows)]
    return [
        Part(f"part-{number:05}{suffix}", str(source), rows.start, rows.stop)
        for number, (source, rows) in enumerate(ranges)
    ]


def _start(folder: Path, parts: Sequence[Part], options: PredictOptions, notes: Mapping[str, Any]) -> None:
    """Make the folder and write the plan, or require that an earlier run had the same plan."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = {
        **_origin(notes),
        "posterior": hashlib.sha256(options.posterior.read_bytes()).hexdigest(),
        "changed": {part.source: os.stat(part.source).st_mtime_ns for part in parts},
        "parts": [asdict(part) for part in parts],
    }
    path = folder / (PARQUET_PLAN if options.parquet else PLAN)
    if not path.exists():
        if any(folder.iterdir()):
            raise BatchbayesError(
                "a new folder for the parts", f"{folder}, which has files in it", "choose another --parts"
            )
        write_json(path, plan)
    elif json.loads(path.read_text(encoding="utf-8")) != plan:
        raise BatchbayesError(
            expected=f"the same posterior, inputs, draws, seed, engine and version as those of {path}",
            got="others",
            fix="choose another --parts, or give the command that was stopped",
        )
    for unfinished in folder.glob(".part-*.partial"):
        unfinished.unlink()


def _origin(notes: Mapping[str, Any]) -> dict[str, Any]:
    return {"batchbayes": __version__, **{name: notes[name] for name in ("task", "draws", "seed", "engine")}}


@dataclass
class PartMaker:
    """A predictor that makes parts. It keeps the last file that it had to read whole."""

    predictor: Predictor
    last: tuple[str, Examples] | None = None

    def make(self, part: Part, path: str) -> tuple[bytes, list[str]]:
        """Return the file of a part, and warnings. All Parquet files have the same columns, also without ids."""
        text, rows = io.StringIO(), range(part.start, part.stop)
        with noted_warnings(quiet=True) as warnings:
            found = self.predictor.rows(self._read(path, rows), part.source) | {"row": list(rows)}
        if part.file.endswith(".parquet"):
            first = {"source": found["source"], "row": found["row"], "id": [""] * len(rows)}
            return parquet_bytes(first | found, _origin(self.predictor.notes)), list(warnings)
        print_rows(text, found)
        return text.getvalue().encode(), list(warnings)

    def _read(self, path: str, rows: range) -> Examples:
        if Path(path).suffix.lower() in READ_IN_PART:
            return self.predictor.read(path, rows)
        if self.last is None or self.last[0] != path:
            self.last = path, self.predictor.read(path)
        return self.last[1].between(rows)


Made = Iterator[tuple[Part, tuple[bytes, list[str]]]]


def _made_here(predictor: Predictor, parts: Sequence[Part]) -> Made:
    maker = PartMaker(predictor)
    return ((part, maker.make(part, part.source)) for part in parts)


def _made_there(options: PredictOptions, parts: Sequence[Part], cluster: Cluster, shown: Progress) -> Made:
    """Yield parts as workers finish them. Each worker has one part in work and one that waits."""
    left, kit = list(parts), _packed(options)
    packages = (*PACKAGES, "pyarrow") if options.parquet else PACKAGES
    running: dict[Future[Any], Part] = {}
    with ClusterWorkers(cluster, kit, packages, partial(shown.say, always=True)) as workers:
        while left or running:
            room = max(0, 2 * workers.size - len(running))
            running |= {workers.submit(make_part, part, os.path.abspath(part.source)): part for part in left[:room]}
            left, shown.about = left[room:], workers.about
            shown.advance(0)
            for future in wait(running, TICK_SECONDS, FIRST_COMPLETED).done:
                try:
                    yield running.pop(future), future.result()
                except BrokenExecutor as error:
                    raise BatchbayesError(
                        expected="workers that live until their work is done",
                        got=f"workers that ended again and again ({error})",
                        fix="check whether memory is short; finished parts are kept, and the same command continues",
                    ) from error


@dataclass(frozen=True)
class Kit:
    """What a worker needs: the options, and the files that they name. It is unpacked once in each worker process."""

    options: PredictOptions
    files: Mapping[str, bytes]

    @cached_property
    def maker(self) -> PartMaker:
        """The predictor, which is loaded when it is first needed."""
        with TemporaryDirectory() as name:
            folder = Path(name)
            for file, content in self.files.items():
                (folder / file).write_bytes(content)
            weights = [folder / file for file in self.files if file.startswith(WEIGHTS)] or None
            here = replace(self.options, weights=weights, posterior=folder / POSTERIOR)
            return PartMaker(Predictor.load(here))


def _packed(options: PredictOptions) -> Kit:
    """Read the posterior, the detector beside it, and the weights."""
    named = {f"{WEIGHTS}{number}{path.suffix}": path for number, path in enumerate(options.weights or ())}
    named |= {POSTERIOR: options.posterior, NOVELTY: options.posterior.with_name(NOVELTY)}
    return Kit(options, {name: path.read_bytes() for name, path in named.items() if name != NOVELTY or path.is_file()})


def make_part(kit: Kit, part: Part, path: str) -> tuple[bytes, list[str]]:
    """Make a part, in a worker."""
    return kit.maker.make(part, path)
