"""Checks of arguments from the signature of a public function or dataclass, so that the code inside does not check.

An annotation says what is expected, and `checked` reads each argument by it before the call:

- `Count`, `Seed`, `Annotated[int, Least(2)]`: whole numbers, also of numpy, but no bools;
- `Share`, `Positive`, `Annotated[float, Between(0, 1)]`: finite numbers between two limits;
- `Literal["a", "b"]`: one of these names;
- `Tensor`, `Values`: tensors, and arrays and lists of numbers, which become tensors;
- `str | os.PathLike[str]`: a path, which becomes a `pathlib.Path`;
- `Annotated[X, reader]` with any `reader(name, value)` that returns the value to use, or raises an error.

None passes where the annotation has `| None`. Other annotations are not checked.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import numpy as np
from torch import Tensor

from batchbayes._common.checks import as_path, as_tensor, finite_number, require_option, whole_number
from batchbayes.errors import BatchbayesError

T = TypeVar("T", bound=Callable[..., Any])
Reader = Callable[[str, Any], Any]
"""Returns the value of an argument as the function wants it, given its name and what was passed."""


@dataclass(frozen=True)
class Least:
    """A whole number that is at least `limit`; any whole number if that is None."""

    limit: int | None = 1

    def __call__(self, name: str, value: Any) -> int:
        return whole_number(name, value, self.limit)


@dataclass(frozen=True)
class Between:
    """A number between two limits, both excluded."""

    above: float = -math.inf
    below: float = math.inf
    fix: str = "pass a finite number"

    def __call__(self, name: str, value: Any) -> float:
        return finite_number(name, value, above=self.above, below=self.below, fix=self.fix)


Count = Annotated[int, Least(1)]
Seed = Annotated[int, Least(None)]
Finite = Annotated[float, Between()]
Positive = Annotated[float, Between(0, fix="pass a positive number")]
Share = Annotated[float, Between(0, 1, fix="pass a number such as 0.9, which stands for 90 %")]


def checked(target: T) -> T:
    """Let a function, or the constructor of a class, read its arguments by their annotations.

    >>> @checked
    ... def spread(count: Count, center: Literal["mean", "median"] = "mean") -> int:
    ...     return count
    >>> spread(3)
    3
    >>> spread(3, center="middle")
    Traceback (most recent call last):
    batchbayes.errors.BatchbayesError: expected center="mean" or "median"; got 'middle'. Do this: choose one of them.
    """
    if isinstance(target, type):
        target.__init__ = checked(target.__init__)  # type: ignore[misc]
        return target  # type: ignore[return-value]
    names = list(signature(target).parameters)
    readers = {name: reader for name, kind in target.__annotations__.items() if (reader := _reader(kind))}
    has_tensors = any(kind is Tensor for kind in target.__annotations__.values())

    def read(name: str, value: Any) -> Any:
        if name in readers:
            return readers[name](name, value)
        return _real(name, as_tensor(value, name)) if has_tensors and isinstance(value, np.ndarray) else value

    @wraps(target)
    def checking(*args: Any, **kwargs: Any) -> Any:
        given = [read(name, value) for name, value in zip(names, args, strict=False)]
        return target(*given, *args[len(names) :], **{name: read(name, value) for name, value in kwargs.items()})

    return checking  # type: ignore[return-value]


def _reader(kind: Any) -> Reader | None:
    """Return what reads an argument with this annotation; None if it is not checked."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Tensor:
        return lambda name, value: _real(name, as_tensor(value, name))
    if origin is Literal:
        return lambda name, value: require_option(name, value, parts)
    if origin is Annotated:
        found = [_reader(parts[0]), *(part for part in parts[1:] if callable(part))]
        return _in_turn([reader for reader in found if reader])
    if origin in (Union, UnionType):
        kinds = [part for part in parts if part is not NoneType]
        readers = [reader for part in kinds if (reader := _reader(part))]
        if any(get_origin(part) is os.PathLike for part in kinds):
            readers, kinds = [lambda _, value: as_path(value)], [os.PathLike]
        if len(readers) == len(kinds) == 1:
            return _or_none(readers[0]) if NoneType in parts else readers[0]
    return None


def _in_turn(readers: list[Reader]) -> Reader | None:
    def read(name: str, value: Any) -> Any:
        for reader in readers:
            value = reader(name, value)
        return value

    return read if readers else None


def _or_none(reader: Reader) -> Reader:
    return lambda name, value: None if value is None else reader(name, value)


def _real(name: str, value: Tensor) -> Tensor:
    if value.is_complex():
        raise BatchbayesError(expected=f"real numbers in {name}", got=f"{value.dtype}", fix="take their real part")
    return value
