"""What a file of results holds."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Run:
    """What a file of results is about."""

    experiment: str
    preset: str
    datasets: tuple[str, ...] | None
    """If not those of the preset."""
    config: str
    """The configuration that these give, as JSON."""


@dataclass(frozen=True)
class Outcome:
    """What came of a unit, and where it was made."""

    result: str
    """As JSON."""
    warnings: tuple[str, ...]
    seconds: float
    versions: Mapping[str, str]
    """Of batchbayes, torch, numpy and python."""
    cores: int


@dataclass(frozen=True)
class Finished(Outcome):
    """A row of the file."""

    name: str
    arguments: str
    """As JSON."""
    finished: str
    """When, in UTC."""


def to_json(value: Any) -> str:
    """One text for one value, whatever the order of its keys.

    >>> to_json({"b": (0.1, float("nan")), "a": None})
    '{"a": null, "b": [0.1, NaN]}'
    """
    return json.dumps(value, sort_keys=True)


def config_differences(wanted: str, found: str) -> list[tuple[str, str, str]]:
    """Fields in which two configurations in JSON differ, with both values.

    >>> config_differences('{"a": 1, "b": [2]}', '{"a": 1, "b": [3]}')
    [('b', '[2]', '[3]')]
    """
    first, second = json.loads(wanted), json.loads(found)
    names = dict.fromkeys([*first, *second])
    texts = [
        (name, *(to_json(side[name]) if name in side else "nothing" for side in (first, second))) for name in names
    ]
    return [(name, one, other) for name, one, other in texts if one != other]
