"""Fitted estimators as JSON values and tensors, for files: numbers, text, arrays and the records below, never code."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchbayes_tables.columns import Column, Columns
from batchbayes_tables.crossfit import Candidate, CrossFit
from batchbayes_tables.forest import Boosting, Forest
from batchbayes_tables.linear import Linear
from batchbayes_tables.spread import Spread
from batchbayes_tables.stack.stack import Layer, Stack
from batchbayes_tables.targets import Targets

RECORDS = {
    kind.__name__: kind
    for kind in (Boosting, Candidate, Column, Columns, CrossFit, Forest, Layer, Linear, Spread, Stack, Targets)
}


def packed(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return a JSON value that stands for a fitted value. Its tensors and arrays are added to `tensors`.

    >>> tensors = {}
    >>> unpacked(packed({"a": (1, np.array(["x"])), "b": torch.ones(2)}, tensors), tensors)
    {'a': (1, array(['x'], dtype='<U1')), 'b': tensor([1., 1.])}
    """
    if isinstance(value, Tensor) or (isinstance(value, np.ndarray) and value.dtype.kind in "fib"):
        name = str(len(tensors))
        tensors[name] = torch.as_tensor(value)
        return ["tensor" if isinstance(value, Tensor) else "array", name]
    if isinstance(value, np.ndarray):
        return ["text", value.dtype.str, (value.astype(str) if value.dtype.kind == "M" else value).tolist()]
    if isinstance(value, Mapping):
        return ["mapping", [[packed(each, tensors) for each in pair] for pair in value.items()]]
    if isinstance(value, list | tuple):
        return [type(value).__name__, [packed(each, tensors) for each in value]]
    if (name := type(value).__name__) in RECORDS:
        own = {field.name: getattr(value, field.name) for field in fields(value)}
        return ["record", name, packed(own, tensors)]
    return value.item() if isinstance(value, np.generic) else value


def unpacked(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return what `packed` was given."""
    if not isinstance(value, list):
        return value
    kind, *rest = value
    if kind in ("tensor", "array"):
        return tensors[rest[0]] if kind == "tensor" else tensors[rest[0]].numpy()
    if kind == "text":
        return np.array(rest[1], dtype=rest[0])
    if kind == "mapping":
        return {unpacked(key, tensors): unpacked(each, tensors) for key, each in rest[0]}
    if kind == "record":
        return RECORDS[rest[0]](**unpacked(rest[1], tensors))
    found = [unpacked(each, tensors) for each in rest[0]]
    return tuple(found) if kind == "tuple" else found
