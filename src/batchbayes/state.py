"""What a file holds of a dataclass: each of its fields, by what the field is.

Tensors, and mappings of tensors under the name and a dot, stand among the tensors. Numbers, names and tuples of these
stand in a header of JSON values. Of a network only the output that counts is written, because the user passes the
network again. A field that is none of these has a `Codec` of its own, by `field(metadata=coded(...))`. What is absent
from a file has the default of the field, and null stands for infinity if that is the default.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Self, TypeVar

from torch import Tensor, nn

from batchbayes._common.files import under
from batchbayes.errors import BatchbayesError
from batchbayes.network.function import Network, as_network

T = TypeVar("T")
State = tuple[dict[str, Any], dict[str, Tensor]]
"""A header of JSON values, and tensors."""
_CODEC = "codec"


@dataclass(frozen=True)
class File:
    """What is read from: a header, tensors, the user's network, and the fields that were read before this one."""

    header: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    model: nn.Module
    known: dict[str, Any]

    @property
    def network(self) -> Network:
        """The network, if the first field is one."""
        return self.known["network"]


@dataclass(frozen=True)
class Codec:
    """How a field is written, given its value and the object, and how it is read."""

    write: Callable[[Any, Any], State]
    read: Callable[[File], Any]


def several(name: str, prefix: str) -> Codec:
    """Return the codec of a tuple of states: their headers in a list, and their tensors after their numbers."""
    return Codec(
        lambda states, _: (
            {name: [header for header, _ in states]},
            {f"{prefix}{n}.{key}": each for n, (_, own) in enumerate(states) for key, each in own.items()},
        ),
        lambda file: tuple((own, under(file.tensors, f"{prefix}{n}.")) for n, own in enumerate(file.header[name])),
    )


def nested(kind: type[Any], tensors: str = "", header: str = "") -> Codec:
    """Return the codec of a dataclass inside another one, or of None: what its names begin with in the file."""

    def read(file: File) -> Any:
        own = under(file.tensors, tensors)
        return from_file(kind, under(file.header, header), own, file.model) if own else None

    def write(value: Any, _: Any) -> State:
        own, found = ({}, {}) if value is None else to_file(value)
        return {header + name: each for name, each in own.items()}, {
            tensors + name: each for name, each in found.items()
        }

    return Codec(write, read)


def coded(codec: Codec) -> dict[str, Codec]:
    """Return the metadata of a field of a dataclass that is written and read by a codec."""
    return {_CODEC: codec}


def to_file(kept: Any) -> State:
    """Return what a file must hold to bring an object back.

    >>> import torch
    >>> @dataclass
    ... class Scaled:
    ...     scale: float
    ...     weights: Tensor
    >>> to_file(Scaled(2.0, torch.ones(1)))
    ({'scale': 2.0}, {'weights': tensor([1.])})
    """
    header: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for each in fields(kept):
        name, value = each.name, getattr(kept, each.name)
        if codec := each.metadata.get(_CODEC):
            own_header, own_tensors = codec.write(value, kept)
            header, tensors = header | own_header, tensors | own_tensors
        elif isinstance(value, Network):
            header["output"] = value.output
        elif isinstance(value, Tensor):
            tensors[name] = value
        elif isinstance(value, Mapping):
            tensors |= {f"{name}.{key}": tensor for key, tensor in value.items()}
        elif isinstance(value, str | bool | int | float | list | tuple):
            value = None if value == each.default == math.inf else value  # JSON has no infinity
            header[name] = list(value) if isinstance(value, tuple) else value
        elif value is not None:
            raise BatchbayesError(
                expected=f"a field {name} that a file can hold: a number, text, a tensor, a network",
                got=f"a {type(value).__name__} in {type(kept).__name__}",
                fix="give the class methods state() and restore() of its own",
            )
    return header, tensors


def from_file(kind: type[T], header: Mapping[str, Any], tensors: Mapping[str, Tensor], model: nn.Module) -> T:
    """Build an object from what `to_file` returned and the user's network."""
    known: dict[str, Any] = {}
    for each in fields(kind):  # type: ignore[arg-type]
        name = each.name
        if codec := each.metadata.get(_CODEC):
            known[name] = codec.read(File(header, tensors, model, known))
        elif name == "network":
            known[name] = as_network(model, header["output"])
        elif name in tensors:
            known[name] = tensors[name]
        elif name in header and not (header[name] is None and each.default == math.inf):
            known[name] = tuple(header[name]) if isinstance(header[name], list) else header[name]
        elif own := under(tensors, f"{name}."):
            known[name] = own
        elif each.default is MISSING and each.default_factory is MISSING:
            raise KeyError(name)
    return kind(**known)


class Saved:
    """What can be written to a file and read again."""

    def state(self) -> State:
        """Return what a file must hold to bring the object back: a header of JSON values, and tensors.

        It is made of the fields of a dataclass, as `state.py` says. Other classes have a method of their own.
        """
        return to_file(self)

    @classmethod
    def restore(cls, header: Mapping[str, Any], tensors: Mapping[str, Tensor], model: nn.Module) -> Self:
        """Build it from what `state` returned and the user's network.

        Raises:
            BatchbayesError: if it does not belong to this network.
            KeyError, TypeError, ValueError, RuntimeError: if header and tensors do not fit together.
        """
        found = from_file(cls, header, tensors, model)
        found.require_sound()
        return found

    def require_sound(self) -> None:
        """Raise a ValueError or TypeError if what was read from a file does not fit together."""
