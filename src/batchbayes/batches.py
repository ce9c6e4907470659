"""Streams of input tensors from the data of a user: a tensor, a list of batches, a DataLoader or a generator."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchbayes._common.rng import generator
from batchbayes.errors import BatchbayesError

Batches = Tensor | Iterable[Any]
"""A tensor of examples, or an iterable of batches. A batch is x, (x, y, ...), or anything that a picker can read."""

Picker = str | int | Callable[[Any], Tensor] | None
"""Where the inputs are in a batch: a key, a position, a function of the batch, or None for x and (x, y)."""


def pick_inputs(batch: Any, picker: Picker = None) -> Tensor:
    """Return the input tensor of one batch.

    >>> pick_inputs((torch.zeros(2, 3), torch.ones(2))).shape
    torch.Size([2, 3])
    >>> pick_inputs({"image": torch.zeros(2, 3), "label": torch.ones(2)}, "image").shape
    torch.Size([2, 3])
    """
    if callable(picker):
        inputs = picker(batch)
    elif picker is not None:
        try:
            inputs = batch[picker]
        except (KeyError, IndexError, TypeError) as error:
            raise BatchbayesError(
                expected=f"a batch with inputs at {picker!r}",
                got=_describe(batch),
                fix="pass a key or a position that the batch has as inputs=",
            ) from error
    elif isinstance(batch, list | tuple) and batch:
        inputs = batch[0]
    else:
        inputs = batch
    if not isinstance(inputs, Tensor) or inputs.ndim == 0:
        where = 'say where the inputs are, as in inputs="image", inputs=1 or inputs=lambda batch: batch.x'
        raise BatchbayesError(
            expected="a batch that is a tensor (N, ...), or a tuple that starts with one",
            got=_describe(batch),
            fix="convert it with torch.from_numpy" if isinstance(inputs, np.ndarray | np.generic) else where,
        )
    return inputs


def _describe(batch: object) -> str:
    if isinstance(batch, Mapping):
        return f"a {type(batch).__name__} with keys {sorted(map(str, batch))}"
    if isinstance(batch, Tensor):
        return f"a tensor of shape {tuple(batch.shape)}"
    return f"a {type(batch).__name__}"


def batch_stream(batches: Batches, picker: Picker = None) -> Iterator[tuple[Any, Tensor]]:
    """Read the data once. Yield each batch as it comes, and its inputs. A tensor of examples is a single batch."""
    if isinstance(batches, Tensor):
        batches = [batches]
    try:
        iterator = iter(batches)
    except TypeError as error:
        raise BatchbayesError(
            expected="a tensor or an iterable of batches",
            got=f"a {type(batches).__name__}",
            fix="pass a DataLoader, a list of batches or a tensor",
        ) from error
    return ((batch, require_finite(pick_inputs(batch, picker), "the inputs")) for batch in iterator)


def input_stream(batches: Batches, picker: Picker = None) -> Iterator[Tensor]:
    """Read the data once, and yield the inputs of each batch."""
    return (inputs for _, inputs in batch_stream(batches, picker))


def require_finite(values: Tensor, what: str) -> Tensor:
    """Return the values if they are finite. NaN or infinity would get into every statistic without any sign."""
    suspect = values.is_floating_point() and not values.sum().isfinite()  # much faster than a test of each number
    if suspect and (bad := int((~torch.isfinite(values)).sum())):
        raise BatchbayesError(
            expected=f"finite numbers in {what}",
            got=f"{bad} of {values.numel()} that are NaN or infinite",
            fix="drop or fill those rows; if the inputs are fine, look for NaN in the weights of the network",
        )
    return values


def mini_batches(
    batches: Batches, batch_size: int | None, *, picker: Picker = None, seed: int = 0
) -> tuple[int, Iterator[Tensor]]:
    """Return the batch size M, and a stream of training mini-batches of exactly M examples.

    From a tensor, each batch is drawn without replacement after a new shuffle. Batches of other sizes are cut and
    joined. The rest at the end of a pass is dropped, as in training. A list or a generator is read once. A DataLoader
    is read again and again, so its stream has no end.
    """
    if isinstance(batches, Tensor):
        if batch_size is None:
            raise BatchbayesError(
                expected="batch_size= beside a tensor of training inputs",
                got="none",
                fix="pass the batch size that the network was trained with, or a DataLoader",
            )
        examples = require_finite(batches, "the training inputs")
        require_size(len(examples), batch_size)
        return batch_size, _shuffled(examples, batch_size, seed)

    first_pass = input_stream(batches, picker)
    first = next(first_pass, None)
    if first is None:
        raise BatchbayesError(
            expected="at least one training batch",
            got="an empty iterable",
            fix="check the loader or the generator",
        )
    size = batch_size if batch_size is not None else getattr(batches, "batch_size", None) or len(first)
    passes: Iterator[Iterator[Tensor]] = iter([chain([first], first_pass)])
    if not isinstance(batches, Sequence) and iter(batches) is not batches:
        passes = chain(passes, _endlessly(lambda: input_stream(batches, picker)))
    return size, _regrouped(passes, size)


def _endlessly(make: Callable[[], Iterator[Tensor]]) -> Iterator[Iterator[Tensor]]:
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


def _shuffled(examples: Tensor, batch_size: int, seed: int) -> Iterator[Tensor]:
    shuffle = generator(seed, "mini-batches")
    while True:
        yield examples[torch.randperm(len(examples), generator=shuffle)[:batch_size].to(examples.device)]


def _regrouped(passes: Iterator[Iterator[Tensor]], batch_size: int) -> Iterator[Tensor]:
    require_size(batch_size, batch_size)
    for one_pass in passes:
        held: list[Tensor] = []
        seen = 0
        for inputs in one_pass:
            seen += len(inputs)
            held.append(inputs)
            while sum(map(len, held)) >= batch_size:
                joined = held[0] if len(held) == 1 else torch.cat(held)
                held = [joined[batch_size:]]
                yield joined[:batch_size]
        require_size(seen, batch_size)


def chunks(data: Batches, chunk_size: int | None, picker: Picker = None, *, numbers: int = 2**21) -> Iterator[Tensor]:
    """Read the data once, and cut the inputs of each batch into chunks."""
    return (chunk for inputs in input_stream(data, picker) for chunk in cut(inputs, chunk_size, numbers))


def cut(inputs: Tensor, chunk_size: int | None, numbers: int) -> tuple[Tensor, ...]:
    """Cut inputs into chunks of `chunk_size` examples, or of about so many numbers."""
    per_example = max(1, inputs[0].numel()) if len(inputs) else 1
    return inputs.split(chunk_size or max(1, numbers // per_example))
