"""What a data set of a user knows about its examples: their names, and the names of their classes."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import Subset


def ids_of(dataset: Any) -> tuple[str, ...] | None:
    """Return the names of the examples of a data set, if it has one for each.

    They are in one of the attributes `ids`, `paths`, `files`, or `samples` with (path, label), as torchvision has it.
    """
    if isinstance(dataset, Subset):
        whole = ids_of(dataset.dataset)
        return None if whole is None else tuple(whole[index] for index in dataset.indices)
    for name in ("ids", "paths", "files", "samples") if hasattr(dataset, "__len__") else ():
        found = getattr(dataset, name, None)
        if isinstance(found, Sequence | np.ndarray) and len(found) == len(dataset):
            names = [item[0] if name == "samples" and isinstance(item, tuple) else item for item in found]
            if all(isinstance(item, str | os.PathLike | int | np.integer) for item in names):
                return tuple(map(str, names))
    return None


def attribute_of(dataset: Any, name: str, kind: Any) -> Any:
    """Return an attribute of this kind of a data set, or of the data set that it is a part of."""
    while isinstance(dataset, Subset) and not hasattr(dataset, name):
        dataset = dataset.dataset
    found: Any = getattr(dataset, name, None)
    return found if isinstance(found, kind) and len(found) else None
