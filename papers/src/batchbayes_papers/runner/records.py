"""The records that a results file holds: the settings of the run, and the outcome of each unit.

A result is JSON. So that it can hold a trained network or predictions, tensors become text: a safetensors file in base
64. Reading it executes no code.
"""

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn


@dataclass(frozen=True)
class RunSettings:
    """The settings that all results in one file belong to."""

    experiment: str
    preset: str
    datasets: tuple[str, ...] | None
    """The data sets that the user chose; None for all data sets of the preset."""
    config: str
    """The configuration that follows from these settings, as JSON."""


@dataclass(frozen=True)
class UnitOutcome:
    """The result of a unit, and how it was made."""

    result: str
    """JSON text."""
    warnings: tuple[str, ...]
    seconds: float
    versions: Mapping[str, str]
    """The versions of batchbayes, torch, numpy and python."""
    cores: int


@dataclass(frozen=True)
class FinishedUnit(UnitOutcome):
    """A finished unit, as one row of the file."""

    name: str
    arguments: str
    """JSON text."""
    finished: str
    """The time at which the unit was finished, in UTC."""


def to_json(value: Any) -> str:
    """Return a value as JSON with sorted keys, so that equal values give equal texts.

    Floats keep every bit. NaN and the infinities are allowed, since a training that diverges is a result too.

    >>> to_json({"b": (0.1, float("nan")), "a": None})
    '{"a": null, "b": [0.1, NaN]}'
    """
    return json.dumps(value, sort_keys=True)


def config_differences(wanted: str, found: str) -> list[str]:
    """Say in which fields two configurations (as JSON) differ.

    The order of data sets does not matter.

    >>> config_differences('{"a": 1, "b": [2]}', '{"a": 1, "b": [3]}')
    ['b [3] instead of [2]']
    >>> config_differences('{"datasets": ["a", "b"]}', '{"datasets": ["b", "a"]}')
    []
    """
    first, second = ({name: to_json(value) for name, value in json.loads(text).items()} for text in (wanted, found))
    return [
        f"{name} {second.get(name, 'nothing')} instead of {first.get(name, 'nothing')}"
        for name in dict.fromkeys([*first, *second])
        if _comparable(name, first.get(name)) != _comparable(name, second.get(name))
    ]


def _comparable(name: str, text: str | None) -> Any:
    value = json.loads(text) if name == "datasets" and text else None
    return sorted(map(to_json, value)) if isinstance(value, list) else text


def pack_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return tensors as text.

    >>> import torch
    >>> unpack_tensors(pack_tensors({"a": torch.arange(3)}))["a"]
    tensor([0, 1, 2])
    """
    return base64.b64encode(save({name: tensor.contiguous() for name, tensor in tensors.items()})).decode("ascii")


def unpack_tensors(text: str) -> dict[str, Tensor]:
    """Return the tensors of a text that `pack_tensors` made. A damaged text is a ValueError."""
    try:
        return load(base64.b64decode(text, validate=True))
    except (SafetensorError, binascii.Error) as error:
        raise ValueError(f"tensors that cannot be read: {error}") from error


def pack_weights(network: nn.Module) -> str:
    """Return the weights and buffers of a network as text."""
    return pack_tensors(network.state_dict())


def unpack_weights(network: nn.Module, text: str) -> nn.Module:
    """Load weights from a text into a network, and set it to evaluation mode."""
    network.load_state_dict(unpack_tensors(text))
    return network.eval()
