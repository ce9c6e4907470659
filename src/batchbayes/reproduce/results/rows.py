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
    """Fields in which two configurations in JSON differ, with both values; data sets have no order.

    >>> config_differences('{"a": 1, "b": [2]}', '{"a": 1, "b": [3]}')
    [('b', '[2]', '[3]')]
    >>> config_differences('{"datasets": ["a", "b"]}', '{"datasets": ["b", "a"]}')
    []
    """
    first, second = json.loads(wanted), json.loads(found)
    names = [name for name in dict.fromkeys([*first, *second]) if _compared(name, first) != _compared(name, second)]
    return [(name, _shown(name, first), _shown(name, second)) for name in names]


def _shown(name: str, config: Mapping[str, Any]) -> str:
    return to_json(config[name]) if name in config else "nothing"


def _compared(name: str, config: Mapping[str, Any]) -> Any:
    """What of a field counts, as text; None where there is none."""
    if name not in config:
        return None
    value = config[name]
    return to_json(sorted(value, key=to_json) if name == "datasets" and isinstance(value, list) else value)
