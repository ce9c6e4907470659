"""Predictions for new data, from the posterior file of an assessment and the network. No training data is needed.

The notes of an assessment that lie beside its posterior, checked: a file may be damaged or written by others.
"""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from batchbayes.errors import BatchbayesError, warn
from batchbayes.methods.table import resolve
from batchbayes.novelty.detector import Novelty
from batchbayes.posterior import Posterior
from batchbayes.report.assess import noted_warnings, running
from batchbayes.report.compare.intervals import Intervals
from batchbayes.report.compare.rows import Rows, predict_rows
from batchbayes.report.options import PredictOptions
from batchbayes.report.read.case import trial
from batchbayes.report.read.data_check import UNFAMILIAR, outside_ranges, unfamiliar
from batchbayes.report.read.examples import Examples
from batchbayes.report.read.factories import build_network, named_method
from batchbayes.report.read.reading import Reading
from batchbayes.report.read.sources import read_source
from batchbayes.report.write import NOVELTY, map_writer, print_rows, require_new_file, strict_json, write_rows
from batchbayes.saving import load, load_notes


@dataclass(frozen=True, eq=False)
class Predictor:
    """A network with the posterior of its assessment, ready to predict."""

    network: nn.Module
    posterior: Posterior
    notes: Mapping[str, Any]
    novelty: Novelty | None
    reading: Reading

    @classmethod
    def load(cls, options: PredictOptions) -> "Predictor":
        """Read the network and the posterior that the options name."""
        if options.method:
            named_method(options.method)
        notes = checked_notes(load_notes(options.posterior))
        given = {"draws": options.draws, "seed": options.seed, "engine": options.engine}
        notes |= {key: value for key, value in given.items() if value is not None}
        reading = Reading.from_json(notes["reading"], options.target, options.id)
        network = reading.in_target_units(build_network(options.model, options.weights, options.device))
        posterior = load(options.posterior, network)
        return cls(network, posterior, notes, _novelty(options.posterior, notes, network), reading)

    def read(self, source: str, rows: range | None = None) -> Examples:
        """Read inputs as those of the training data were read."""
        return read_source(source, self.reading, "the inputs", inputs_only=True, rows=rows)

    def rows(self, data: Examples, source: str, maps: Path | None = None) -> Rows:
        """Return the rows of predictions.csv for new inputs. Warn if they are unlike the training data."""
        notes = self.notes
        require_outputs(notes, trial(self.network, data))
        if reason := unfamiliar(self.network, data, classes=notes["task"] != "regression"):
            warn(f"{UNFAMILIAR} {reason}")
        if problem := outside_ranges(data, self.reading.schema):
            warn(problem)
        show = None if maps is None else map_writer(maps, notes["task"], notes.get("classes", 1))
        return predict_rows(self.posterior, data, notes, source, self.novelty, show)


def _novelty(posterior: Path, notes: Mapping[str, Any], network: nn.Module) -> Novelty | None:
    """Return the detector of novelty that was saved beside the posterior, if there is one."""
    if not notes.get("novelty"):
        return None
    path = posterior.with_name(NOVELTY)
    if not path.is_file():
        raise BatchbayesError(
            expected=f"{NOVELTY} in the folder of {posterior.name}, as the assessment wrote it",
            got=f"nothing at {path}",
            fix="copy both files together",
        )
    return load(path, network)


def predict_command(options: PredictOptions) -> None:
    """Write predictions of new data to a file, or print them."""
    if options.parts is not None:
        resolve("batchbayes.report.parts:parts_command")(options)
        return
    if len(options.input) > 1 or options.cluster or options.scheduler_file or options.parquet:
        expected = "--parts DIR beside several inputs, a cluster or --parquet"
        raise BatchbayesError(expected=expected, got="none", fix="name a folder for the parts")
    if options.out is not None:
        require_new_file(options.out)
    with running(options), noted_warnings():
        predictor = Predictor.load(options)
        rows = predictor.rows(predictor.read(options.input[0]), "new", options.maps)
    cells = list(zip(*rows.values(), strict=True))
    if options.out is not None:
        write_rows(options.out, rows)
    if options.json:
        print(strict_json([dict(zip(rows, each, strict=True)) for each in cells]))
    elif options.out is None:
        print_rows(sys.stdout, rows)
    elif not options.quiet:
        print(f"{len(cells)} predictions: {options.out}")


Check = Callable[[Any], bool]


def _number(value: Any, least: float = -math.inf, *, kind: Any = int | float) -> bool:
    """Whether a value is a number of at least another one. Thresholds may be infinite, NaN is refused."""
    return isinstance(value, kind) and not isinstance(value, bool) and value >= least


def _positive(value: Any) -> bool:
    return _number(value) and 0 < value < math.inf


def _one_or_several(check: Check) -> Check:
    return lambda value: check(value) or (isinstance(value, list) and bool(value) and all(map(check, value)))


def _names(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(name, str) for name in value))


COUNT: Check = partial(_number, least=1, kind=int)
COMMON: dict[str, Check] = {
    "draws": COUNT,
    "seed": partial(_number, kind=int),
    "engine": lambda value: value in ("sample", "linear", "auto"),
    "threshold": _one_or_several(_number),
    "novelty_level": _number,
    "reading": lambda value: isinstance(value, dict) and _names(value.get("class_names")),
}
CLASSES: dict[str, Check] = {
    "temperature": _positive,
    "class_names": _names,
    "class_axis": lambda value: value is None or value == 1,
    "probabilities": lambda value: value in (None, True, False),
}
TASKS: dict[str, dict[str, Check]] = {
    "classification": COMMON | CLASSES,
    "segmentation": COMMON | CLASSES | {"classes": COUNT},
    "regression": COMMON | {"precision": _one_or_several(_positive), "outputs": COUNT},
}


def checked_notes(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the notes that say how to predict, or raise an error if one is missing or cannot be right."""
    if "task" not in notes:
        raise BatchbayesError(
            expected="a posterior written by batchbayes assess",
            got="one without its notes",
            fix="use bb.load and bb.predict",
        )
    checks = TASKS.get(notes["task"]) if isinstance(notes["task"], str) else None
    wrong = ["task"] if checks is None else [k for k, check in checks.items() if k not in notes or not check(notes[k])]
    if wrong:
        raise _damaged(f"{wrong[0]} {notes.get(wrong[0])!r}"[:200] if wrong[0] in notes else f"no {wrong[0]}")
    if notes["task"] == "regression":
        _require_intervals(notes)
    return dict(notes)


def _require_intervals(notes: Mapping[str, Any]) -> None:
    try:
        reaches = Intervals.from_notes(notes).outputs
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(f"intervals that cannot be read ({error!r})"[:200]) from error
    for reach in reaches:
        edges = [list(side) for side in zip(*reach.ramps, strict=True)]  # all starts, all stops
        fits = len(reach.below) == len(reach.above) == len(reach.ramps) + 1
        fits = fits and all(_number(edge) for side in edges for edge in side) and all(a <= b for a, b in reach.ramps)
        values = [*reach.below, *reach.above]
        if not fits or any(side != sorted(side) for side in edges) or not all(map(_number, values)) or sum(values) < 0:
            raise _damaged(f"intervals {reach}"[:200])


def require_outputs(notes: Mapping[str, Any], outputs: Tensor) -> None:
    """Raise an error unless the notes are about as many outputs as the network has, (n, K, ...)."""
    count = outputs.shape[notes.get("class_axis") or 1] if outputs.ndim > 1 else 1
    if notes["task"] == "regression":
        count = outputs[0].numel()
        counts = [notes["threshold"], notes["precision"], list(Intervals.from_notes(notes).outputs)]
        fits = notes["outputs"] == count and all(len(v) == count for v in counts if isinstance(v, list))
    else:
        names = notes["class_names"]
        is_one = notes["class_axis"] is None
        fits = is_one == (count == 1) and (names is None or len(names) >= (2 if is_one else count))
    if not fits:
        raise _damaged(f"notes about another number of outputs than {count}")


def _damaged(got: str) -> BatchbayesError:
    return BatchbayesError(
        expected="the notes of an assessment beside the posterior", got=got, fix="run batchbayes assess again"
    )
