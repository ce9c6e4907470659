"""Data that a user passes in Python, or that a data function returns: loaders, data sets, batches, tensors."""

import copy
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, SequentialSampler, Subset, default_collate

from batchbayes.errors import BatchbayesError
from batchbayes.network.inputs import Inputs, Picker, pick_inputs
from batchbayes.network.source import SHUFFLING
from batchbayes.report.read.examples import Examples, from_dataset, from_tensors, tensor_or_not
from batchbayes.report.read.packing import Packing


def from_object(name: str, made: Any, *, may_shuffle: bool = False) -> Examples:
    """Return examples from the result of a data function: a loader, a data set, a list of batches, or tensors (x, y).

    A data set may have the attributes `name`, `classes`, and `ids` or those that `ids_of` knows.
    """
    made = tuple(map(tensor_or_not, made)) if isinstance(made, tuple) else tensor_or_not(made)
    is_pair = isinstance(made, tuple) and made and isinstance(made[0], Tensor | np.ndarray)
    odd = [part for part in made if not isinstance(part, Tensor)] if is_pair else []
    if odd:
        raise BatchbayesError(
            expected=f"{name} as arrays of numbers",
            got=f"an array of {odd[0].dtype}" if isinstance(odd[0], np.ndarray) else f"a {type(odd[0]).__name__}",
            fix="number classes from 0, as in numpy.unique(y, return_inverse=True)[1], and name them by class_names=",
        )
    if isinstance(made, Tensor):
        return from_tensors(name, made)
    if isinstance(made, tuple) and len(made) == 2 and all(isinstance(part, Tensor) for part in made):
        return from_tensors(name, *made)
    dataset = made if isinstance(made, Dataset) else getattr(made, "dataset", made)
    name = attribute_of(dataset, "name", str) or name
    names = attribute_of(dataset, "classes", Sequence | np.ndarray)
    known: dict[str, Any] = {"class_names": None if names is None else tuple(map(str, names))}
    if isinstance(made, Dataset) and hasattr(made, "__getitem__"):
        return from_dataset(name, made, source_ids=ids_of(made), **known)
    sampler = getattr(made, "sampler", None)
    if isinstance(sampler, SHUFFLING) and not may_shuffle:
        raise BatchbayesError(
            expected=f"the examples of {name} in the same order each time",
            got="a loader that shuffles",
            fix="make it with shuffle=False; only the training data may be shuffled",
        )
    if not isinstance(made, Iterable) or iter(made) is made:
        raise BatchbayesError(
            expected=f"{name} as a DataLoader, a data set, a list of batches or two tensors",
            got=f"a {type(made).__name__}",
            fix="return something that can be read several times",
        )
    in_order = isinstance(made, DataLoader) and isinstance(sampler, SequentialSampler) and made.batch_size is not None
    return Examples(name, made, source_ids=ids_of(dataset) if in_order else None, **known)


def loaders_of(train: Any, test: Any, calibration: Any) -> tuple[Any, Any, Any]:
    """Return the loaders of a LightningDataModule, where others were not given; other data as it is."""
    if callable(getattr(train, "train_dataloader", None)):
        for name, stages in (("prepare_data", [()]), ("setup", [("fit",), ("test",)])):
            for stage in stages if hasattr(train, name) else ():
                getattr(train, name)(*stage)
        module, train = train, train.train_dataloader()
        test = module.test_dataloader() if test is None else test
        if calibration is None:
            with suppress(NotImplementedError, AttributeError, RuntimeError):  # Lightning raises one if it has none
                calibration = module.val_dataloader()
    if test is None:
        raise BatchbayesError("test data with targets", "none", "pass it after the training data")
    return train, test, calibration


def picked_pairs(data: Any, inputs: Picker, targets: Picker, packing: Packing) -> Any:
    """Return data with batches (inputs, targets), if it was said where these are in its batches.

    Several inputs become one tensor, by `packing`.
    """
    if data is None or (inputs is None and targets is None):
        return data
    split = partial(_pair, inputs=inputs, targets=targets, packing=packing)
    if isinstance(data, DataLoader):
        loader = copy.copy(data)
        loader.collate_fn = lambda items: split(data.collate_fn(items))
        return loader
    if isinstance(data, Dataset):
        return _Pairs(data, split)
    return split(data) if isinstance(data, Mapping) else [split(batch) for batch in data]


def _pair(batch: Any, inputs: Picker, targets: Picker, packing: Packing) -> tuple[Tensor, ...]:
    found = pick_inputs(batch, inputs)
    found = packing.packed(found) if isinstance(found, Inputs) else found
    if not isinstance(found, Tensor):
        raise BatchbayesError(
            expected="inputs that are rows of examples, for an assessment",
            got=f"{found}",
            fix="use bb.predict and bb.metrics, which take batches that go whole to the network",
        )
    last = None if isinstance(batch, Mapping) or len(batch) < 2 else -1
    where = last if targets is None else targets
    absent = where is None or (isinstance(where, str) and isinstance(batch, Mapping) and where not in batch)
    return (found,) if absent else (found, pick_inputs(batch, where))


class _Pairs(Dataset[Any]):
    """A data set with the parts of its examples that count."""

    def __init__(self, dataset: Any, split: Callable[[Any], tuple[Tensor, ...]]) -> None:
        self._dataset, self._split = dataset, split

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, row: int) -> tuple[Tensor, ...]:
        return tuple(part[0] for part in self._split(default_collate([self._dataset[row]])))


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
