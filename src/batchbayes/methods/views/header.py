"""Transforms in files: names and parameters, never code."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from batchbayes.errors import BatchbayesError, unknown_name
from batchbayes.methods.views.images import RandomCrop, RandomFlip, RandomShiftScale
from batchbayes.methods.views.tables import TableJitter
from batchbayes.methods.views.transform import Compose, Transform

READY: dict[str, type[Any]] = {each.__name__: each for each in (RandomCrop, RandomFlip, RandomShiftScale, TableJitter)}
"""The transforms that a file can name, beside `Compose`."""


def to_header(transform: Transform) -> list[dict[str, Any]]:
    """Return names and parameters of a transform, or of the parts of a composition, as JSON values."""
    if isinstance(transform, Compose):
        return [part for each in transform.transforms for part in to_header(each)]
    if type(transform) not in READY.values():
        raise BatchbayesError(
            expected=f"a transform that a file can name: {', '.join([*READY, 'Compose'])}",
            got=type(transform).__name__,
            fix="pass a function (inputs, generator) to with_views instead of a class of your own",
        )
    return [{"name": type(transform).__name__, **asdict(transform)}]  # type: ignore[call-overload]


def from_header(parts: list[Mapping[str, Any]]) -> Transform:
    """Build a transform from what `to_header` returned."""
    found = []
    for part in parts:
        name, values = part["name"], {key: value for key, value in part.items() if key != "name"}
        if name not in READY:
            raise unknown_name("a transform", name, READY)
        found.append(READY[name](**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}))
    return found[0] if len(found) == 1 else Compose(*found)
