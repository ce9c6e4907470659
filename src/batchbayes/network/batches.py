"""Streams of inputs from the data of a user: a tensor, an array, a data set, a list of batches or a DataLoader."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, Subset

from batchbayes._common.checks import as_tensor, whole_number
from batchbayes._common.rng import generator
from batchbayes.errors import BatchbayesError, warn
from batchbayes.network.inputs import (
    Inputs,
    Picker,
    Whole,
    are_arrays,
    each_tensor,
    is_whole,
    pick_inputs,
    require_finite,
    tensors_of,
)

Batches = Any
"""A tensor or array of examples, a Dataset, or an iterable of batches such as a DataLoader.

A batch is x, (x, y, ...), or anything that a picker can read. A tuple or a dict of tensors is one batch: (x, y) is a
pair of inputs and targets. A list holds batches, unless it looks like such a pair."""

DATASET_BATCH = 64
"""Examples that are read from a Dataset at a time."""


def is_examples(data: object) -> bool:
    """Whether the data is a tensor or an array: all examples at once, without targets."""
    return isinstance(data, Tensor | np.ndarray | Inputs)


def as_batches(data: Batches) -> Iterable[Any]:
    """Return the data as an iterable of batches."""
    if is_examples(data) or isinstance(data, Mapping) or _is_one_batch(data):
        return [data]
    if callable(getattr(data, "train_dataloader", None)):  # a LightningDataModule
        return data.train_dataloader()
    if isinstance(data, Dataset):
        return ordered_loader(data, DATASET_BATCH)
    try:
        iter(data)
    except TypeError as error:
        raise BatchbayesError(
            expected="a tensor or an iterable of batches",
            got=f"a {type(data).__name__}",
            fix="pass a DataLoader, a Dataset, a list of batches, a tensor or an array",
        ) from error
    return data


def for_prediction(data: Batches) -> Batches:
    """Return what a LightningDataModule has for prediction, which is not its training data; other data as it is."""
    if not callable(getattr(data, "train_dataloader", None)):
        return data
    try:
        return data.predict_dataloader()
    except Exception as error:
        raise BatchbayesError(
            expected="a data module with predict_dataloader(), for prediction",
            got=f"{type(data).__name__}, and {type(error).__name__}: {error}"[:300],
            fix="pass the loader itself, as in datamodule.test_dataloader()",
        ) from error


def ordered_loader(dataset: Any, batch_size: int | None, **options: Any) -> DataLoader[Any]:
    """Return a loader that keeps the order. Without its own generator each pass would draw from the global one."""
    return DataLoader(dataset, batch_size, generator=torch.Generator(), **options)


def _is_one_batch(data: object) -> bool:
    """Whether this is one batch (x, y, ...), or one of its own kind. Two tensors of the same kind in a tuple may be
    either.

    Tables with different columns are not of the same kind. Images of different sizes are.
    """
    if is_whole(data) and not isinstance(data, Dataset | DataLoader):
        return True
    most = 2 if isinstance(data, list) else 100  # a longer list holds batches
    if not isinstance(data, list | tuple) or not 2 <= len(data) <= most or not are_arrays(data):
        return False
    if len({len(part) for part in data}) > 1:
        return False
    tensors = [as_tensor(part, "the data") for part in data]
    if len({(t.ndim, t.is_floating_point(), t.shape[1:] if t.ndim == 2 else None) for t in tensors}) > 1:
        return True
    if isinstance(data, tuple) and len(data) == 2:
        raise BatchbayesError(
            expected="data whose meaning is clear",
            got=f"a tuple of two tensors of shapes {tuple(tensors[0].shape)} and {tuple(tensors[1].shape)}: inputs and "
            "targets, or two batches of inputs",
            fix="pass [(x, y)] for inputs and targets, or a list [x1, x2] for two batches",
        )
    return False


def batch_stream(batches: Batches, picker: Picker = None, usual: Picker = None) -> Iterator[tuple[Any, Any]]:
    """Read the data once. Yield each batch as it comes, and its inputs. A tensor of examples is a single batch.

    `usual` says where inputs are if the picker does not, and a batch has several parts.
    """

    def inputs_of(batch: Any) -> Any:
        chosen = usual if picker is None and not is_examples(batch) else picker
        return require_finite(pick_inputs(batch, chosen), "the inputs")

    return ((batch, inputs_of(batch)) for batch in as_batches(batches))


def labelled_stream(batches: Batches, inputs: Picker, targets: Picker) -> Iterator[tuple[Any, Tensor]]:
    """Read the data once, and yield inputs and targets of each batch. The targets are last, if nothing else is said."""
    for batch, picked in batch_stream(batches, inputs):
        if targets is None and (not isinstance(batch, list | tuple) or len(batch) < 2):
            raise BatchbayesError(
                expected="labelled batches (x, y)",
                got=f"a {type(batch).__name__}",
                fix='pass a list or loader of pairs, or say where the targets are, as in targets="label"',
            )
        labels = require_finite(pick_inputs(batch, -1 if targets is None else targets), "the targets")
        if len(labels) != len(picked):
            got, fix = f"{len(labels)} and {len(picked)}", "check the batches"
            raise BatchbayesError(expected="as many targets as inputs", got=got, fix=fix)
        yield picked, labels


def input_stream(batches: Batches, picker: Picker = None) -> Iterator[Any]:
    """Read the data once, and yield the inputs of each batch."""
    return (inputs for _, inputs in batch_stream(batches, picker))


def first_of(stream: Iterator[Any]) -> Any:
    """Return the first inputs of a stream of training data, or raise an error if there are none."""
    for inputs in stream:
        return inputs
    got, fix = "an empty iterable", "check the loader or the generator"
    raise BatchbayesError(expected="at least one training batch", got=got, fix=fix)


def warn_if_shuffled(data: object) -> None:
    """Warn if a DataLoader gives examples in another order than its data set has."""
    if not isinstance(data, DataLoader) or isinstance(data.dataset, IterableDataset):
        return
    order = data.batch_sampler
    if isinstance(order, list | tuple):  # batches of indices
        order = list(chain.from_iterable(order))
    order = data.sampler if order is None else order.sampler if type(order) is BatchSampler else order
    given = list(order) if isinstance(order, list | tuple | range) else None
    if isinstance(order, SequentialSampler) or given == list(range(len(data.dataset))):  # type: ignore[arg-type]
        return
    warn(
        f"the DataLoader reads its data set by a {type(order).__name__}, so the predictions come in another order than "
        "the data set. Use shuffle=False, or predict_stream, which gives each batch with its targets."
    )


def warn_if_dropping(data: object, what: str = "get no prediction") -> None:
    """Warn if a DataLoader leaves out the last examples of its data set, because they do not fill a batch.

    `what` says what this means for them.
    """
    if not isinstance(data, DataLoader) or not getattr(data.batch_sampler, "drop_last", data.drop_last):
        return
    size, count = getattr(data.batch_sampler, "batch_size", None) or data.batch_size, num_sampled(data)
    left = f"the last {count % size} of {count} examples" if count and size else "the last examples"
    if not (count and size) or count % size:
        warn(f"the DataLoader has drop_last=True, so {left} {what}. Use drop_last=False.")


class Drawn:
    """Where the mini-batches of a stream have come from so far."""

    def __init__(self, num_examples: int | None = None) -> None:
        self.num_examples = num_examples
        """How many examples there are to draw from; None as long as that is not known."""
        self.passes: list[int] = []
        """How many mini-batches came from each pass over the data. Those of one pass share no example."""
        self.is_repeated = False
        """Whether the data is read again and again, so that a pass has all examples."""
        self.replacement = False
        """Whether an example may be drawn again before all are used."""

    def population(self, batch_size: int) -> float:
        r"""Return N such that the variance of the statistics of the batches lacks the factor (N - M) / (N - 1).

        Two batches of one pass have the covariance $-\sigma^2 / (N - 1)$. So batches that all come from one pass differ
        as much as batches of an endless population.

        >>> drawn = Drawn(2000)
        >>> drawn.passes = [1] * 64
        >>> round(drawn.population(1000)), Drawn(None).population(1000)
        (2000, inf)
        """
        rows, count = sum(self.passes), self.num_examples
        if rows < 2 or count is None or count <= batch_size or self.replacement:
            return math.inf
        together = sum(each * (each - 1) for each in self.passes) / (rows * (rows - 1))
        share = (count - batch_size * (1 - together)) / (count - 1)
        return math.inf if share >= 1 else (batch_size - share) / (1 - share)


def mini_batches(
    batches: Batches, batch_size: int | None, *, picker: Picker = None, seed: int = 0, drawn: Drawn | None = None
) -> tuple[int, Iterator[Any]]:
    """Return the batch size M, and a stream of training mini-batches of exactly M examples.

    From a tensor, an array, a pair (x, y) or a Dataset, each batch is drawn without replacement after a new shuffle.
    Batches of other sizes are cut and joined. The rest at the end of a pass is dropped, as in training. A list or a
    generator is read once. A DataLoader is read again and again, so its stream has no end. `drawn` is told what comes.
    """
    drawn = Drawn() if drawn is None else drawn
    if batch_size is not None:
        batch_size = whole_number("batch_size", batch_size, least=None)
    whole = is_examples(batches) or isinstance(batches, Mapping) or _is_one_batch(batches)
    if whole or isinstance(batches, Dataset):
        if batch_size is None:
            raise BatchbayesError(
                expected="batch_size= beside a tensor of training inputs",
                got="none",
                fix="pass the batch size that the network was trained with, or a DataLoader",
            )
        if not whole:
            loader = _shuffled_loader(batches, batch_size, seed)
            return batch_size, mini_batches(loader, batch_size, picker=picker, drawn=drawn)[1]
        examples = require_finite(pick_inputs(batches, picker), "the training inputs")
        if isinstance(examples, Whole):
            fix = "pass several batches: a list or a loader of them"
            raise BatchbayesError("training batches whose statistics differ", "one batch that cannot be cut", fix)
        require_size(len(examples), batch_size)
        drawn.num_examples = len(examples)
        return batch_size, _shuffled(examples, batch_size, seed, drawn)

    batches = as_batches(batches)
    first_pass = input_stream(batches, picker)
    first = first_of(first_pass)
    size = batch_size if batch_size is not None else getattr(batches, "batch_size", None) or _size_of(first)
    passes: Iterator[Iterator[Any]] = iter([chain([first], first_pass)])
    if isinstance(batches, Sequence):
        if not isinstance(first, Whole):
            drawn.num_examples = sum(len(pick_inputs(batch, picker)) for batch in batches)
    elif iter(batches) is not batches:
        passes = chain(passes, _endlessly(lambda: input_stream(batches, picker)))
        drawn.is_repeated = True
        drawn.num_examples = num_sampled(batches) if isinstance(batches, DataLoader) else None
        drawn.replacement = bool(getattr(getattr(batches, "sampler", None), "replacement", False))
    return size, (_uncut if isinstance(first, Whole) else _regrouped)(passes, size, drawn)


def _size_of(inputs: Any) -> int:
    """Return how many examples inputs hold."""
    if not isinstance(inputs, Whole):
        return len(inputs)
    if (size := inputs.num_examples) is None:
        raise BatchbayesError(
            expected="batch_size= beside batches that go whole to the network",
            got=f"{inputs}, which does not tell how many examples it holds",
            fix="pass how many graphs or sequences a training batch has; if it is one large graph, how many nodes",
        )
    return size


def _uncut(passes: Iterator[Iterator[Any]], batch_size: int, drawn: Drawn) -> Iterator[Any]:
    """Yield whole batches as they come."""
    require_size(batch_size, batch_size)
    for one_pass in passes:
        drawn.passes.append(0)
        for inputs in one_pass:
            drawn.passes[-1] += 1
            yield inputs
        if not drawn.passes[-1]:
            return  # the loader can be read only once


def _shuffled_loader(dataset: Any, batch_size: int, seed: int) -> DataLoader[Any]:
    require_size(len(dataset) if hasattr(dataset, "__len__") else float("inf"), batch_size)
    mixed = not isinstance(dataset, IterableDataset)
    return DataLoader(dataset, batch_size, shuffle=mixed, generator=generator(seed, "mini-batches"))


def _endlessly(make: Callable[[], Iterator[Any]]) -> Iterator[Iterator[Any]]:
    while True:
        yield make()


def require_size(available: float, batch_size: int) -> None:
    """Check that a batch has at least two examples, and that there are enough examples for one batch."""
    if batch_size < 2:
        raise BatchbayesError(
            expected="batches of at least two examples",
            got=f"a batch size of {batch_size}",
            fix="a batch of one has no batch statistics: raise batch_size, or use a loader with larger batches",
        )
    if available < batch_size:
        raise BatchbayesError(
            expected=f"at least {batch_size} training examples, one batch",
            got=f"{available:g}",
            fix="pass more training data, or lower batch_size",
        )


def _shuffled(examples: Any, batch_size: int, seed: int, drawn: Drawn) -> Iterator[Any]:
    shuffle = generator(seed, "mini-batches")
    while True:
        drawn.passes.append(1)
        rows = torch.randperm(len(examples), generator=shuffle)[:batch_size]
        yield each_tensor(examples, lambda tensor, rows=rows: tensor[rows.to(tensor.device)])


def _regrouped(passes: Iterator[Iterator[Any]], batch_size: int, drawn: Drawn) -> Iterator[Any]:
    require_size(batch_size, batch_size)
    for number, one_pass in enumerate(passes):
        held: list[Any] = []
        seen = 0
        drawn.passes.append(0)
        for inputs in one_pass:
            seen += len(inputs)
            held.append(inputs)
            _require_same_form(held)
            while sum(map(len, held)) >= batch_size:
                joined = held[0] if len(held) == 1 else torch.cat(held)
                held = [joined[batch_size:]] if len(joined) > batch_size else []
                drawn.passes[-1] += 1
                yield joined[:batch_size]
        if number and not seen:
            return  # the loader can be read only once
        require_size(seen, batch_size)
        drawn.num_examples = seen if drawn.is_repeated else drawn.num_examples


def _require_same_form(held: Sequence[Any]) -> None:
    """Raise an error if batches that have to be joined differ in more than their number of examples."""
    forms = {tuple((tensor.shape[1:], tensor.dtype) for tensor in tensors_of(part)) for part in held}
    if len(forms) > 1:
        raise BatchbayesError(
            expected="batches of one shape and dtype, which can be cut and joined",
            got="; ".join(sorted(" and ".join(f"(*, {tuple(s)}) {d}" for s, d in form) for form in forms)),
            fix="bring all inputs to one shape and dtype, or pass batches of exactly batch_size examples",
        )


def chunks(data: Batches, chunk_size: int | None, picker: Picker = None, *, numbers: int = 2**21) -> Iterator[Any]:
    """Read the data once, and cut the inputs of each batch into chunks."""
    stream = input_stream(for_prediction(data), picker)
    return (chunk for inputs in stream for chunk in cut(inputs, chunk_size, numbers))


def cut(inputs: Any, chunk_size: int | None, numbers: int) -> tuple[Any, ...]:
    """Cut inputs into chunks of `chunk_size` examples, or of about this number of numbers."""
    size = chunk_size or max(1, numbers // max(1, inputs[0].numel()) if len(inputs) else 1)
    return (inputs,) if len(inputs) <= size else inputs.split(size)


def spread_evenly(length: int, count: int) -> Tensor:
    """Choose at most `count` of `length` examples, evenly spread.

    >>> spread_evenly(10, 4)
    tensor([0, 3, 6, 9])
    """
    return torch.linspace(0, length - 1, min(length, count), dtype=torch.float64).round().long()


def evenly(data: Batches, count: int, picker: Picker = None) -> Iterable[Any]:
    """Return the data as batches of inputs, or a selection of at most `count` examples that is spread evenly over it.

    Files are often in the order of classes, so the first examples may all be alike. A loader that shuffles and an
    iterable are returned as they are: there the first examples are a fair selection, or no others can be reached.
    """
    if is_examples(data) or isinstance(data, Mapping) or _is_one_batch(data):
        inputs = pick_inputs(data, picker)
        return [inputs[spread_evenly(len(inputs), count)]]
    if isinstance(data, DataLoader) and isinstance(data.sampler, SequentialSampler) and data.batch_size:
        data = selected(data, count)
    elif isinstance(data, Dataset) and hasattr(data, "__len__"):
        data = selected(ordered_loader(data, DATASET_BATCH), count)
    own = getattr(data, "evenly", None)
    return input_stream(data if own is None else own(count), picker)


def known_length(data: Any, picker: Picker = None) -> int | None:
    """Return how many examples there are, if that is known before they are read."""
    if isinstance(data, DataLoader):
        return num_sampled(data)
    if is_examples(data) or isinstance(data, Mapping) or _is_one_batch(data):
        return len(pick_inputs(data, picker))
    if isinstance(data, list | tuple):
        return sum(len(pick_inputs(batch, picker)) for batch in data)
    return len(data) if isinstance(data, Dataset) and isinstance(data, Sized) else None


def num_sampled(loader: DataLoader[Any]) -> int | None:
    """Return how many examples a loader reads in a pass, if it tells. A sampler may leave out some of the data set.

    A loader with `batch_size=None` may pass on whole batches, and a batch sampler of a user's own may read anything.

    >>> num_sampled(DataLoader(torch.zeros(10, 2), batch_sampler=[[0, 1], [2, 3]]))
    4
    >>> num_sampled(DataLoader([torch.zeros(5, 2), torch.zeros(5, 2)], batch_size=None)) is None
    True
    """
    order = loader.batch_sampler
    if isinstance(order, list | tuple):
        return sum(map(len, order))
    if type(order) is not BatchSampler:
        return None
    sampler = order.sampler
    known = sampler if isinstance(sampler, Sized) else loader.dataset  # that of an IterableDataset is endless
    return len(known) if isinstance(known, Sized) else None


def selected(loader: DataLoader[Any], count: int) -> DataLoader[Any]:
    """Return a loader of at most `count` examples that are spread evenly over the data set, if it can be indexed.

    A loader whose sampler leaves out examples, such as those of a validation set, is returned as it is.
    """
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset) or len(dataset) <= count or num_sampled(loader) != len(dataset):
        return loader
    few = Subset(dataset, spread_evenly(len(dataset), count).tolist())
    return ordered_loader(few, loader.batch_size, collate_fn=loader.collate_fn, num_workers=loader.num_workers)
