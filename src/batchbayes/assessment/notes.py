"""The notes of an assessment that lie beside its posterior, checked: a file may be damaged or written by others."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from batchbayes.errors import BatchbayesError

Check = Callable[[Any], bool]


def _whole(value: Any, least: float = -math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _number(value: Any, above: float = -math.inf) -> bool:
    """Whether a value is a number above another one. Thresholds may be infinite, NaN is refused."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > above


def _positive(value: Any) -> bool:
    return _number(value, 0) and value < math.inf


def _several(check: Check) -> Check:
    return lambda value: isinstance(value, list) and bool(value) and all(map(check, value))


def _one_or_several(check: Check) -> Check:
    return lambda value: check(value) or _several(check)(value)


def _names(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(name, str) for name in value))


COMMON: dict[str, Check] = {
    "draws": lambda value: _whole(value, 1),
    "seed": _whole,
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
    "segmentation": COMMON | CLASSES | {"classes": lambda value: _whole(value, 1)},
    "regression": COMMON
    | {
        "precision": _one_or_several(_positive),
        "conformal_width": _several(lambda width: _number(width) and width >= 0),
        "outputs": lambda value: _whole(value, 1),
    },
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
    return dict(notes)


def require_outputs(notes: Mapping[str, Any], outputs: Tensor) -> None:
    """Raise an error unless the notes are about as many outputs as the network has, (n, K, ...)."""
    count = outputs.shape[1] if outputs.ndim > 1 else 1
    if notes["task"] == "regression":
        count = outputs[0].numel()
        counts = {name: notes[name] for name in ("conformal_width", "threshold", "precision")}
        fits = notes["outputs"] == count and all(len(v) == count for v in counts.values() if isinstance(v, list))
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
