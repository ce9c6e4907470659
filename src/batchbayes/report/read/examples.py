"""Examples with or without targets. They can be read in batches several times, always in the same order."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from batchbayes._common.checks import as_tensor
from batchbayes._common.rng import generator
from batchbayes._common.text import count
from batchbayes.errors import BatchbayesError
from batchbayes.network.source import SHUFFLING, num_sampled, ordered_loader, selected
from batchbayes.report.read.preprocess import Preprocessing
from batchbayes.report.read.schema import Schema

READ_SIZE = 128
"""The batch size for reading files."""

ORDERS = (SequentialSampler, RandomSampler)
"""How a loader may read a data set if it reads all of it."""

Batch = tuple[Tensor, Tensor | None]


@dataclass(frozen=True, eq=False)
class Examples:
    """A source of batches (inputs, targets or None), and what is known about them."""

    name: str
    batches: Iterable[Any]
    """A loader or a list of batches x, (x,) or (x, y)."""
    class_names: tuple[str, ...] | None = None
    feature_names: tuple[str, ...] | None = None
    target_name: str | None = None
    part: tuple[int, float, bool] | None = None
    """(seed, share, below): only examples whose random number is below the share (True) or above it (False)."""
    source_ids: Sequence[str] | None = None
    """A name for each example of the whole source: a file name, or the cell of an id column."""
    schema: Schema | None = None
    """What the training table looks like, if the examples come from a table."""
    ignored_label: int | None = None
    """The label of pixels that do not count."""
    preprocessing: Preprocessing | None = None
    """What is done to the inputs of each batch when it is read."""
    input_dtype: torch.dtype | None = None
    """What inputs are converted to in the end; None leaves them as they are."""

    def __iter__(self) -> Iterator[Batch]:
        return ((inputs, targets) for _, inputs, targets in self._numbered())

    def _numbered(self) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield batches, each with the numbers of its examples in the whole source."""
        random, start = generator(self.part[0], "split") if self.part else None, 0
        for batch in self.batches:
            inputs, targets = as_batch(batch, self.name)
            rows = torch.arange(start, start + len(inputs))
            start += len(inputs)
            if self.part:
                keep = (torch.rand(len(inputs), generator=random) < self.part[1]) == self.part[2]
                rows, inputs, targets = rows[keep], inputs[keep], None if targets is None else targets[keep]
            if len(inputs):
                inputs = self.preprocessing(inputs) if self.preprocessing else inputs
                yield rows, as_input(inputs, self.input_dtype), targets

    def one_by_one(self) -> Iterator[Batch]:
        """Yield batches of one example, so that memory does not grow with the batch size."""
        for inputs, targets in self:
            labels = [None] * len(inputs) if targets is None else targets.split(1)
            yield from zip(inputs.split(1), labels, strict=True)

    @property
    def whole_loader(self) -> DataLoader[Any] | None:
        """The batches, if they are a loader that reads all of a data set, in order or shuffled. Others read a part."""
        loader = self.batches
        if not isinstance(loader, DataLoader) or loader.batch_size is None or type(loader.sampler) not in ORDERS:
            return None
        return loader if num_sampled(loader) == len(loader.dataset) else None  # type: ignore[arg-type]

    @property
    def size(self) -> int | None:
        """The number of examples in the whole source, if it is known without reading them. Methods ask for it."""
        return num_sampled(self.batches) if isinstance(self.batches, DataLoader) else None

    def whole(self) -> "Examples":
        """Return all examples of the source, whichever part of it these are."""
        return replace(self, part=None)

    def rows(self) -> Tensor:
        """Return the number of each example in the whole source, (N,). The source is read only if it has to be."""
        if not self.part and (loader := self.whole_loader) and not loader.drop_last:
            return torch.arange(len(loader.dataset))  # type: ignore[arg-type]
        return torch.cat([rows for rows, _, _ in self._numbered()])

    def ids(self) -> tuple[str, ...] | None:
        """Return the name of each example, or None if the source has no names or another order each time."""
        if self.source_ids is None or isinstance(getattr(self.batches, "sampler", None), SHUFFLING):
            return None
        return tuple(self.source_ids if self.part is None else (self.source_ids[int(row)] for row in self.rows()))

    def between(self, rows: range) -> "Examples":
        """Return some consecutive examples of a data set."""
        assert isinstance(self.batches, DataLoader)
        ids = None if self.source_ids is None else self.source_ids[rows.start : rows.stop]
        loader = ordered_loader(Subset(self.batches.dataset, rows), READ_SIZE)
        return replace(self, batches=loader, source_ids=ids)

    def evenly(self, count: int) -> "Examples":
        """Return at most `count` examples that are spread evenly over a data set, or all of another source."""
        if self.part or not (loader := self.whole_loader):
            return self
        return replace(self, batches=selected(loader, count), source_ids=None)

    def raw(self) -> "Examples":
        """Return the same examples without the preprocessing, to show them to people."""
        return replace(self, preprocessing=None)

    def split(self, share: float, seed: int) -> "tuple[Examples, Examples]":
        """Return a random part of about this share, and the rest. They depend only on the seed and the order."""
        return replace(self, part=(seed, share, True)), replace(self, part=(seed, share, False))

    def labelled(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches, or raise an error at the first one without targets."""
        for inputs, targets in self:
            if targets is None:
                fix = "name the column by --target, or give each batch as (inputs, targets)"
                raise BatchbayesError(f"inputs and targets in {self.name}", "only inputs", fix)
            yield inputs, targets

    def targets(self) -> Tensor:
        """Return all targets, (N, ...)."""
        found = [targets for _, targets in self.labelled()]
        if not found:
            raise BatchbayesError(f"inputs and targets in {self.name}", "no examples", "check how the data is read")
        return torch.cat(found)

    def find(self, rows: Sequence[int]) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        """Yield position, input and target of the examples at these positions, in the order of the source."""
        wanted, start = set(rows), 0
        for inputs, targets in self:
            here = sorted(wanted.intersection(range(start, start + len(inputs))))
            for row in here:
                yield row, inputs[row - start], None if targets is None else targets[row - start]
            start += len(inputs)
            wanted -= set(here)
            if not wanted:
                return

    def some(self, rows: Sequence[int]) -> "Examples":
        """Return the labelled examples at these positions, in memory, in the order of the source."""
        _, inputs, targets = zip(*self.find(rows), strict=True)
        batch = torch.stack(inputs), torch.stack(targets)
        return replace(self, batches=[batch], part=None, source_ids=None, preprocessing=None)

    def take(self, rows: Sequence[int], each: Callable[[Tensor], Tensor] = lambda image: image) -> Tensor:
        """Return the inputs at these positions, in the given order. `each` can shrink each input when it is read."""
        found = {row: each(inputs) for row, inputs, _ in self.find(rows)}
        return torch.stack([found[row] for row in rows])


def as_input(inputs: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return inputs in the type that a network needs. If that is not known, whole numbers become floats."""
    return inputs.to(dtype or (inputs.dtype if inputs.is_floating_point() else torch.float32))


def as_batch(batch: Any, name: str) -> Batch:
    """Separate a batch into inputs and targets. Inputs become floats; whole-number and yes-or-no targets int64."""
    parts = [tensor_or_not(part) for part in (batch if isinstance(batch, list | tuple) else [batch])]
    wrong = [part for part in parts[:2] if not isinstance(part, Tensor) or not part.ndim]
    if isinstance(batch, Mapping) or not parts or wrong:
        raise BatchbayesError(
            expected=f"batches of {name} as (inputs, targets) tensors",
            got=f"a {type(batch).__name__}{_contents(batch)}",
            fix="give batches as tuples of two tensors, for example by collate_fn= of a DataLoader; for graphs, which "
            "go whole to the network, use bb.predict and bb.metrics",
        )
    if any(part.is_complex() for part in parts[:2]):
        raise BatchbayesError(
            expected=f"real numbers in {name}",
            got="complex numbers",
            fix="give real and imaginary parts as two columns",
        )
    inputs, targets = as_input(parts[0]), parts[1] if len(parts) > 1 else None
    targets = targets if targets is None or targets.is_floating_point() else targets.long()
    _require_equal_length(name, inputs, targets)
    bad = _has_gaps(inputs)
    if targets is not None:
        bad |= _has_gaps(targets)
    if bad.any():
        first = int(bad.nonzero()[0])
        raise BatchbayesError(
            expected=f"finite numbers in {name}",
            got=f"{count(int(bad.sum()), 'row')} with NaN or infinity, the first in position {first} of its batch",
            fix="drop or fill those rows",
        )
    return inputs, targets


def tensor_or_not(part: Any) -> Any:
    """Return an array of numbers as a tensor, and everything else as it is."""
    is_numbers = isinstance(part, np.ndarray) and part.dtype.kind in "fiub" and part.dtype.itemsize <= 8
    return as_tensor(part).detach() if is_numbers or isinstance(part, Tensor) else part


def _contents(batch: Any) -> str:
    parts = [type(part).__name__ for part in batch[:4]] if isinstance(batch, list | tuple) else []
    return f" of {', '.join(parts)}" if parts else ""


def _has_gaps(values: Tensor) -> Tensor:
    """Say for each example whether it has NaN or infinity, (N,)."""
    return ~torch.isfinite(values).reshape(len(values), math.prod(values.shape[1:])).all(1)


def _require_equal_length(name: str, inputs: Tensor, targets: Tensor | None) -> None:
    if targets is not None and len(inputs) != len(targets):
        raise BatchbayesError(
            expected=f"as many targets as inputs in {name}",
            got=f"{len(inputs)} inputs and {len(targets)} targets",
            fix="check how the data was put together",
        )


def from_tensors(name: str, inputs: Tensor, targets: Tensor | None = None, **known: Any) -> Examples:
    """Return examples that are in memory."""
    _require_equal_length(name, inputs, targets)
    return from_dataset(name, TensorDataset(*(t for t in (inputs, targets) if t is not None)), **known)


def from_dataset(name: str, dataset: "Dataset[Any]", **known: Any) -> Examples:
    """Return examples in the order of a map-style data set."""
    return Examples(name, ordered_loader(dataset, READ_SIZE), **known)
