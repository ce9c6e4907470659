"""The notes of an assessment beside its posterior: all that `batchbayes predict` has to know.

They are checked when they are read: a file may be damaged or written by others.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from batchbayes.engines.linear import Drawn
from batchbayes.errors import BatchbayesError
from batchbayes.report.compare.contenders import Contender
from batchbayes.report.compare.intervals import Intervals
from batchbayes.report.read.case import Case


def notes_for_prediction(case: Case, chosen: Contender, **more: Any) -> dict[str, Any]:
    """Return what one has to know to predict new data with the recommended posterior."""
    return {
        "task": case.task,
        **chosen.tuned,
        "seed": case.settings.seed,
        "draws": chosen.num_samples,
        "engine": "linear" if chosen.drawn is Drawn.LINEAR else "sample",  # what "auto" has chosen
        "reading": case.reading.to_json(),
        "unit": case.settings.unit,
        **more,
    }


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
