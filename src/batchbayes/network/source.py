"""The data of a user: a tensor, a pair, a data set, a list of batches, a loader or a stream, read in one way.

All that has to be known of the form of the data is asked here: where inputs and targets are, how many examples there
are, whether they can be read again, and in which order they come. A `Source` is read in one pass, in mini-batches
without end, or as an even choice of examples, which is spread over all of it whatever the form.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import chain, repeat
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

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
ROOM = 2**26
"""Numbers that are held while an even choice is made from a stream that does not tell its length (256 MiB)."""
MOST_READ = 2**17
"""Examples after which such a choice ends, because a stream may have no end."""
SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class Source:
    """The data of a user, and where inputs and targets are in its batches.

    >>> rows = torch.arange(20.0)[:, None]
    >>> for data in (rows, list(rows.split(3)), iter(rows.split(3)), DataLoader(rows, 3)):
    ...     print(torch.cat([inputs for inputs, _ in Source(data).evenly(4)]).flatten().tolist())
    [0.0, 6.0, 13.0, 19.0]
    [0.0, 6.0, 13.0, 19.0]
    [0.0, 6.0, 13.0, 19.0]
    [0.0, 6.0, 13.0, 19.0]
    """

    def __init__(
        self,
        data: Batches,
        inputs: Picker = None,
        targets: Picker = None,
        *,
        usual: Picker = None,
        for_prediction: bool = False,
    ) -> None:
        """Take data. `usual` says where inputs are if the picker does not, and a batch has several parts."""
        self.is_module = callable(getattr(data, "train_dataloader", None))
        if self.is_module:  # a LightningDataModule
            data = _loader_for_prediction(data) if for_prediction else data.train_dataloader()
        self.data: Any = data
        self._targets = targets
        self.is_rows = isinstance(data, Tensor | np.ndarray | Inputs)
        """Whether the data is a tensor or an array: all examples at once, without targets."""
        self.is_one = self.is_rows or isinstance(data, Mapping) or _is_one_batch(data)
        """Whether the data is a single batch."""
        self.is_loader, self.is_dataset = isinstance(data, DataLoader), isinstance(data, Dataset)
        self.is_once = hasattr(data, "__next__")
        """Whether the data can be read only once."""
        self._inputs = usual if inputs is None and not self.is_rows else inputs

    # What is known before anything is read.

    @property
    def num_examples(self) -> int | None:
        """How many examples there are, if that is known before they are read."""
        if self.is_loader:
            return num_sampled(self.data)
        if self.is_one:
            return len(pick_inputs(self.data, self._inputs))
        if isinstance(self.data, list | tuple):
            return sum(len(pick_inputs(batch, self._inputs)) for batch in self.data)
        return len(self.data) if self.is_dataset and isinstance(self.data, Sized) else None

    @property
    def can_be_indexed(self) -> bool:
        """Whether this is a data set, or a loader that reads all of one in its order."""
        dataset = self.data.dataset if self.is_loader else self.data
        if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
            return False
        if not self.is_loader:
            return self.is_dataset
        in_order = isinstance(self.data.sampler, SequentialSampler) and self.data.batch_size is not None
        return in_order and num_sampled(self.data) == len(dataset)

    def warn_if_shuffled(self) -> None:
        """Warn if a loader gives examples in another order than its data set has."""
        if not self.is_loader or isinstance(self.data.dataset, IterableDataset):
            return
        order = self.data.batch_sampler
        if isinstance(order, list | tuple):  # batches of indices
            order = list(chain.from_iterable(order))
        order = self.data.sampler if order is None else order.sampler if type(order) is BatchSampler else order
        given = list(order) if isinstance(order, list | tuple | range) else None
        if not isinstance(order, SequentialSampler) and given != list(range(len(self.data.dataset))):
            warn(
                f"the DataLoader reads its data set by a {type(order).__name__}, so the predictions come in another "
                "order than the data set. Use shuffle=False, or predict_stream, which gives each batch with its "
                "targets."
            )

    def warn_if_dropping(self, what: str = "get no prediction") -> None:
        """Warn if a loader leaves out the last examples, because they do not fill a batch. `what` does this mean?"""
        if not self.is_loader or not getattr(self.data.batch_sampler, "drop_last", self.data.drop_last):
            return
        size = getattr(self.data.batch_sampler, "batch_size", None) or self.data.batch_size
        count = num_sampled(self.data)
        left = f"the last {count % size} of {count} examples" if count and size else "the last examples"
        if not (count and size) or count % size:
            warn(f"the DataLoader has drop_last=True, so {left} {what}. Use drop_last=False.")

    # One pass.

    def batches(self) -> Iterator[tuple[Any, Any]]:
        """Read the data once. Yield each batch as it comes, and its inputs. A tensor of examples is a single batch."""
        return ((batch, require_finite(pick_inputs(batch, self._inputs), "the inputs")) for batch in self.read())

    def inputs(self) -> Iterator[Any]:
        """Read the data once, and yield the inputs of each batch."""
        return (inputs for _, inputs in self.batches())

    def labelled(self) -> Iterator[tuple[Any, Tensor]]:
        """Read the data once, and yield inputs and targets. The targets are last, if nothing else is said."""
        for batch, inputs in self.batches():
            if self._targets is None and (not isinstance(batch, list | tuple) or len(batch) < 2):
                fix = 'pass a list or loader of pairs, or say where the targets are, as in targets="label"'
                raise BatchbayesError("labelled batches (x, y)", f"a {type(batch).__name__}", fix)
            targets = pick_inputs(batch, -1 if self._targets is None else self._targets)
            if len(require_finite(targets, "the targets")) != len(inputs):
                got = f"{len(inputs)} and {len(targets)}"
                raise BatchbayesError("as many targets as inputs", got, "check the batches")
            yield inputs, targets

    def chunks(self, chunk_size: int | None, *, numbers: int = 2**21) -> Iterator[Any]:
        """Read the data once, and cut the inputs of each batch into chunks."""
        return (chunk for inputs in self.inputs() for chunk in cut(inputs, chunk_size, numbers))

    def head(self, count: int) -> list[Any]:
        """Return the inputs of the first batches, with `count` examples or more. A stream will give them again."""
        taken, found = [], []
        for batch, inputs in self.batches():
            taken.append(batch)
            found.append(inputs)
            if sum(map(len, found)) >= count:
                break
        self.data = chain(taken, self.data) if self.is_once else self.data
        return found or [first_of(iter(()))]

    def read(self) -> Iterable[Any]:
        """Return the data as an iterable of batches."""
        if self.is_one:
            return [self.data]
        if self.is_dataset:
            return ordered_loader(self.data, DATASET_BATCH)
        if not hasattr(self.data, "__iter__") and not hasattr(self.data, "__getitem__"):
            fix = "pass a DataLoader, a Dataset, a list of batches, a tensor or an array"
            raise BatchbayesError("a tensor or an iterable of batches", f"a {type(self.data).__name__}", fix)
        self.skip_a_seed()
        return self.data

    def skip_a_seed(self) -> None:
        """Draw what torch draws when it begins to read a loader, so that a seed gives the rows that it always gave."""
        if self.is_loader:
            torch.empty((), dtype=torch.int64).random_(generator=self.data.generator)

    # An even choice.

    def evenly(
        self, count: float, labels: Callable[[Any, Any], Any] = lambda batch, inputs: None
    ) -> Iterator[tuple[Any, Any]]:
        """Yield inputs, and labels of batches, of at most `count` examples that are spread evenly over the data.

        Files are often in the order of classes, so the first examples may all be alike. Of a loader that shuffles the
        first examples are a fair selection. Labels that are no tensor are passed on.
        """
        source, total, shuffles = self, self.num_examples, self.is_loader and isinstance(self.data.sampler, SHUFFLING)
        if callable(own := getattr(self.data, "evenly", None)):
            source, total = self._of(own(count)), None
        elif self.can_be_indexed and total is not None and total > count:
            loader = self.data if self.is_loader else ordered_loader(self.data, DATASET_BATCH)
            source, total = self._of(selected(loader, int(count))), int(count)
        if total is None or isinstance(getattr(source.data, "dataset", source.data), IterableDataset):
            yield from source._from_stream(count, labels)
            return
        wanted, start = torch.arange(min(total, count)) if shuffles else spread_evenly(total, count), 0
        for batch, inputs in source.batches():
            rows = wanted[(wanted >= start) & (wanted < start + len(inputs))] - start
            start += len(inputs)
            if len(rows):
                found = labels(batch, inputs)
                every = len(rows) == len(inputs)
                yield (
                    (inputs, found)
                    if every
                    else (_rows(inputs, rows), found[rows] if isinstance(found, Tensor) else found)
                )
            if not len(wanted) or start > wanted[-1]:
                return

    def _from_stream(self, count: float, labels: Callable[[Any, Any], Any]) -> Iterator[tuple[Any, Any]]:
        """Do the same for a stream that does not tell its length: hold every k-th example, and fewer as it goes on."""
        parts: list[_Held] = []
        start, stride = 0, 1
        for batch, inputs in self.batches():
            numbers = torch.arange(start, start + len(inputs))
            start += len(inputs)
            parts += _kept([(numbers, inputs, labels(batch, inputs))], numbers[numbers % stride == 0])
            most = max(2 * count, ROOM // max(1, inputs[0].numel())) if len(inputs) else math.inf
            while sum(len(numbers) for numbers, _, _ in parts) > most:
                stride *= 2
                parts = _kept(parts, torch.arange(0, start, stride))
            if start >= MOST_READ and count < math.inf:
                break
        wanted = spread_evenly(start, count) // stride * stride
        yield from ((inputs, found) for _, inputs, found in _kept(parts, wanted))

    def _of(self, data: Batches) -> Self:
        return type(self)(data, self._inputs, self._targets)

    # Training.

    def mini_batches(self, batch_size: int | None, seed: int = 0) -> "MiniBatches":
        """Return a stream of training mini-batches of exactly M examples.

        From a tensor, an array, a pair (x, y) or a Dataset, each batch is drawn without replacement after a new
        shuffle. Batches of other sizes are cut and joined. The rest at the end of a pass is dropped, as in training. A
        list or a generator is read once. A DataLoader is read again and again, so its stream has no end.
        """
        size = batch_size if batch_size is None else whole_number("batch_size", batch_size, least=None)
        if (self.is_one or self.is_dataset) and size is None:
            fix = "pass the batch size that the network was trained with, or a DataLoader"
            raise BatchbayesError("batch_size= beside a tensor of training inputs", "none", fix)
        if self.is_dataset and size is not None:
            require_size(math.inf if (known := self.num_examples) is None else known, size)
            random, mixed = generator(seed, "mini-batches"), not isinstance(self.data, IterableDataset)
            return MiniBatches(self._of(DataLoader(self.data, size, shuffle=mixed, generator=random)), size, seed)
        return MiniBatches(self, size, seed)


class MiniBatches(Iterator[Any]):
    """A stream of mini-batches, which knows where they have come from so far."""

    def __init__(self, source: Source, batch_size: int | None, seed: int) -> None:
        self.num_examples: int | None = None
        """How many examples there are to draw from; None as long as that is not known."""
        self.passes: list[int] = []
        """How many mini-batches came from each pass over the data. Those of one pass share no example."""
        self.replacement = False
        """Whether an example may be drawn again before all are used."""
        self._is_repeated = False
        if source.is_one and batch_size is not None:
            self.batch_size, self._stream = batch_size, self._drawn(source, batch_size, seed)
        else:
            self.batch_size, self._stream = self._joined(source, batch_size)

    def __next__(self) -> Any:
        return next(self._stream)

    def population(self, batch_size: int) -> float:
        r"""Return N such that the variance of the statistics of the batches lacks the factor (N - M) / (N - 1).

        Two batches of one pass have the covariance $-\sigma^2 / (N - 1)$. So batches that all come from one pass differ
        as much as batches of an endless population.

        >>> drawn = Source(torch.zeros(2000, 1)).mini_batches(1000)
        >>> drawn.passes = [1] * 64
        >>> round(drawn.population(1000)), drawn.population(2000)
        (2000, inf)
        """
        rows, count = sum(self.passes), self.num_examples
        if rows < 2 or count is None or count <= batch_size or self.replacement:
            return math.inf
        together = sum(each * (each - 1) for each in self.passes) / (rows * (rows - 1))
        share = (count - batch_size * (1 - together)) / (count - 1)
        return math.inf if share >= 1 else (batch_size - share) / (1 - share)

    def _drawn(self, source: Source, batch_size: int, seed: int) -> Iterator[Any]:
        """Return batches that are drawn from examples in memory."""
        examples = require_finite(pick_inputs(source.data, source._inputs), "the training inputs")
        if isinstance(examples, Whole):
            fix = "pass several batches: a list or a loader of them"
            raise BatchbayesError("training batches whose statistics differ", "one batch that cannot be cut", fix)
        require_size(len(examples), batch_size)
        self.num_examples, shuffle = len(examples), generator(seed, "mini-batches")

        def draw() -> Iterator[Any]:
            while True:
                self.passes.append(1)
                yield _rows(examples, torch.randperm(len(examples), generator=shuffle)[:batch_size])

        return draw()

    def _joined(self, source: Source, batch_size: int | None) -> tuple[int, Iterator[Any]]:
        """Return the batch size, and the batches of a user, cut and joined to it."""
        if not source.is_module:
            source.skip_a_seed()
        one_pass = source.inputs()
        first = first_of(one_pass)
        source.skip_a_seed()
        size = batch_size if batch_size is not None else getattr(source.data, "batch_size", None) or _size_of(first)
        passes: Iterator[Iterator[Any]] = iter([chain([first], one_pass)])
        if isinstance(source.data, Sequence):
            self.num_examples = None if isinstance(first, Whole) else source.num_examples
        elif not source.is_once:
            self._is_repeated = True
            passes = chain(passes, (each.inputs() for each in repeat(source)))
            self.num_examples = source.num_examples
            self.replacement = bool(getattr(getattr(source.data, "sampler", None), "replacement", False))
        return size, (self._uncut if isinstance(first, Whole) else self._regrouped)(passes, size)

    def _uncut(self, passes: Iterator[Iterator[Any]], size: int) -> Iterator[Any]:
        """Yield whole batches as they come."""
        require_size(size, size)
        for one_pass in passes:
            self.passes.append(0)
            for inputs in one_pass:
                self.passes[-1] += 1
                yield inputs
            if not self.passes[-1]:
                return  # the loader can be read only once

    def _regrouped(self, passes: Iterator[Iterator[Any]], size: int) -> Iterator[Any]:
        require_size(size, size)
        for number, one_pass in enumerate(passes):
            held: list[Any] = []
            seen = 0
            self.passes.append(0)
            for inputs in one_pass:
                seen += len(inputs)
                held.append(inputs)
                _require_same_form(held)
                while sum(map(len, held)) >= size:
                    joined = held[0] if len(held) == 1 else torch.cat(held)
                    held = [joined[size:]] if len(joined) > size else []
                    self.passes[-1] += 1
                    yield joined[:size]
            if number and not seen:
                return  # the loader can be read only once
            require_size(seen, size)
            self.num_examples = seen if self._is_repeated else self.num_examples


def _loader_for_prediction(module: Any) -> Any:
    """Return what a LightningDataModule has for prediction, which is not its training data."""
    try:
        return module.predict_dataloader()
    except Exception as error:
        got = f"{type(module).__name__}, and {type(error).__name__}: {error}"[:300]
        fix = "pass the loader itself, as in datamodule.test_dataloader()"
        raise BatchbayesError("a data module with predict_dataloader(), for prediction", got, fix) from error


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
        shapes = " and ".join(str(tuple(t.shape)) for t in tensors)
        got = f"a tuple of two tensors of shapes {shapes}: inputs and targets, or two batches of inputs"
        fix = "pass [(x, y)] for inputs and targets, or a list [x1, x2] for two batches"
        raise BatchbayesError("data whose meaning is clear", got, fix)
    return False


def first_of(stream: Iterator[Any]) -> Any:
    """Return the first inputs of a stream of training data, or raise an error if there are none."""
    for inputs in stream:
        return inputs
    got, fix = "an empty iterable", "check the loader or the generator"
    raise BatchbayesError("at least one training batch", got, fix)


def _size_of(inputs: Any) -> int:
    """Return how many examples inputs hold."""
    size = inputs.num_examples if isinstance(inputs, Whole) else len(inputs)
    if size is None:
        got = f"{inputs}, which does not tell how many examples it holds"
        fix = "pass how many graphs or sequences a training batch has; if it is one large graph, how many nodes"
        raise BatchbayesError("batch_size= beside batches that go whole to the network", got, fix)
    return size


def require_size(available: float, batch_size: int) -> None:
    """Check that a batch has at least two examples, and that there are enough examples for one batch."""
    if batch_size < 2:
        fix = "a batch of one has no batch statistics: raise batch_size, or use a loader with larger batches"
        raise BatchbayesError("batches of at least two examples", f"a batch size of {batch_size}", fix)
    if available < batch_size:
        expected = f"at least {batch_size} training examples, one batch"
        raise BatchbayesError(expected, f"{available:g}", "pass more training data, or lower batch_size")


def _require_same_form(held: Sequence[Any]) -> None:
    """Raise an error if batches that have to be joined differ in more than their number of examples."""
    forms = {tuple((tensor.shape[1:], tensor.dtype) for tensor in tensors_of(part)) for part in held}
    if len(forms) > 1:
        got = "; ".join(sorted(" and ".join(f"(*, {tuple(s)}) {d}" for s, d in form) for form in forms))
        fix = "bring all inputs to one shape and dtype, or pass batches of exactly batch_size examples"
        raise BatchbayesError("batches of one shape and dtype, which can be cut and joined", got, fix)


_Held = tuple[Tensor, Any, Any]
"""The numbers of some examples of a stream, their inputs and their labels."""


def _kept(parts: Iterable[_Held], wanted: Tensor) -> list[_Held]:
    """Return the examples with these numbers."""
    found = [(part, torch.isin(part[0], wanted)) for part in parts]
    return [
        part if on.all() else (part[0][on], part[1][on], part[2][on] if isinstance(part[2], Tensor) else part[2])
        for part, on in found
        if on.any()
    ]


def _rows(inputs: Any, rows: Tensor) -> Any:
    return each_tensor(inputs, lambda tensor: tensor[rows.to(tensor.device)])


def cut(inputs: Any, chunk_size: int | None, numbers: int) -> tuple[Any, ...]:
    """Cut inputs into chunks of `chunk_size` examples, or of about this number of numbers."""
    size = chunk_size or max(1, numbers // max(1, inputs[0].numel()) if len(inputs) else 1)
    return (inputs,) if len(inputs) <= size else inputs.split(size)


def spread_evenly(length: int, count: float) -> Tensor:
    """Choose at most `count` of `length` examples, evenly spread.

    >>> spread_evenly(10, 4)
    tensor([0, 3, 6, 9])
    """
    return torch.linspace(0, length - 1, int(min(length, count)), dtype=torch.float64).round().long()


def ordered_loader(dataset: Any, batch_size: int | None, **options: Any) -> DataLoader[Any]:
    """Return a loader that keeps the order. Without its own generator each pass would draw from the global one."""
    return DataLoader(dataset, batch_size, generator=torch.Generator(), **options)


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
