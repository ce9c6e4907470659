"""Tensors or a Dataset as the batches of a training."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import length_hint
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from batchbayes._common.checks import as_tensor, require_type, whole_number
from batchbayes._common.rng import generator
from batchbayes.errors import BatchbayesError
from batchbayes.network.inputs import are_arrays, require_finite
from batchbayes.network.source import Source


def shuffled(
    inputs: Tensor, targets: Tensor, batch_size: int, seed: int
) -> Callable[[int], Iterator[tuple[Tensor, Tensor]]]:
    """Return batches of tensors for `train`, in a new order in each epoch.

    The batch that is left over at the end of an epoch is discarded. If there are fewer examples than `batch_size`, they
    are one batch. The MCBN paper does both.

    >>> epoch = shuffled(torch.arange(10.0), torch.arange(10), batch_size=4, seed=0)
    >>> [targets.tolist() for inputs, targets in epoch(0)]
    [[6, 4, 2, 1], [8, 3, 5, 0]]
    """
    require_data(inputs, targets)
    return _Shuffled(inputs, targets, whole_number("batch_size", batch_size), seed)


def training_batches(data: Any, batch_size: int, seed: int) -> Any:
    """Return two tensors (inputs, targets) or a Dataset as batches in a new order in each epoch. Return others as are.

    >>> len(training_batches((torch.zeros(10, 2), torch.zeros(10)), batch_size=5, seed=0))
    2
    """
    if _is_pair(data):
        return shuffled(*two_tensors(data), batch_size, seed)
    if isinstance(data, Dataset):
        size = len(data) if hasattr(data, "__len__") else 0  # type: ignore[arg-type]
        one_left = size > 1 and size % batch_size == 1  # batch norm cannot train on one example
        # `train` seeds the global generator that this reads.
        return DataLoader(data, batch_size, shuffle=not isinstance(data, IterableDataset), drop_last=one_left)
    return data


def _is_pair(data: object) -> bool:
    return isinstance(data, tuple) and len(data) == 2 and are_arrays(data)


def two_tensors(data: Any) -> tuple[Tensor, Tensor]:
    """Return inputs and targets as two tensors, or refuse other data."""
    if not _is_pair(data):
        got = f"a {type(data).__name__}"
        raise BatchbayesError(expected="two tensors (inputs, targets)", got=got, fix="read all batches into memory")
    return as_tensor(data[0], "the inputs"), as_tensor(data[1], "the targets")


def known_size(data: Any) -> int | None:
    """Return the number of examples of training data, or None if the data does not tell.

    >>> known_size(DataLoader(torch.zeros(10, 2), sampler=range(4)))
    4
    """
    if isinstance(data, _Shuffled) or _is_pair(data):
        return len(data.inputs if isinstance(data, _Shuffled) else data[0])
    return Source(data).num_examples


def training_size(data: Any, num_examples: int | None = None) -> int:
    """Return the number of training examples: as it was passed, or as the data tells it.

    The number of batches is refused, because users pass `len(loader)`.
    """
    known = known_size(data)
    if num_examples is None and known is None:
        got = f"none, and a {type(data).__name__} that does not tell"
        fix = "pass the number of training examples, because it weighs the data against the prior"
        raise BatchbayesError("num_examples=, the size of the training set", got, fix)
    size = whole_number("num_examples", known if num_examples is None else num_examples)
    if known is not None and size == length_hint(data) != known and not isinstance(data, Dataset):
        got = f"{size}, the number of batches"
        fix = "leave it out, or pass len(loader.dataset)"
        raise BatchbayesError(f"num_examples={known}, the number of training examples", got, fix)
    return size


@dataclass(frozen=True, eq=False)
class _Shuffled:
    inputs: Tensor
    targets: Tensor
    batch_size: int
    seed: int

    def __len__(self) -> int:
        return max(1, len(self.inputs) // self.batch_size)

    def __call__(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in shuffled_batches(len(self.inputs), self.batch_size, self.seed, epoch):
            yield self.inputs[rows], self.targets[rows]


def shuffled_batches(num_examples: int, batch_size: int, seed: int, epoch: int) -> Iterator[Tensor]:
    """Yield the row numbers of each batch of an epoch, without the batch that is left over.

    >>> [len(rows) for rows in shuffled_batches(10, 4, seed=0, epoch=0)]
    [4, 4]
    """
    order, size = torch.randperm(num_examples, generator=generator(seed, "epoch", epoch)), min(batch_size, num_examples)
    for start in range(0, num_examples - size + 1, size):
        yield order[start : start + size]


def require_data(inputs: Tensor, targets: Tensor) -> None:
    """Refuse data that no network can be trained on."""
    for each in (inputs, targets):
        require_type(each, Tensor, expected="inputs and targets as two tensors", fix="convert them by torch.as_tensor")
    if len(inputs) != len(targets) or not len(inputs):
        got = f"{len(inputs)} inputs and {len(targets)} targets"
        fix = "check how the data was selected"
        raise BatchbayesError("as many targets as inputs, at least one", got, fix)
    require_finite(inputs, "the training inputs")
    require_finite(targets, "the training targets")
