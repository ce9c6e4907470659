"""Data sources: files, folders and data functions. All of them are read as the training data was."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from batchbayes.assessment.named import call_named, is_name
from batchbayes.assessment.options import AssessOptions
from batchbayes.data.examples import Examples, as_batch, from_object
from batchbayes.data.files import read_examples
from batchbayes.data.preprocess import Preprocessing, Standardise
from batchbayes.data.reading import Reading
from batchbayes.errors import BatchbayesError


def is_function(source: str) -> bool:
    """Return whether a source is a data function."""
    return is_name(source) and not Path(source).exists()


def read_source(
    source: str, reading: Reading, what: str, *, inputs_only: bool = False, rows: range | None = None
) -> Examples:
    """Read examples from a data function, or from a file or a folder as `read_examples` does."""
    if not is_function(source):
        return read_examples(source, reading, inputs_only=inputs_only, rows=rows)
    examples = from_object(source, call_named(source, what))
    names, found = reading.class_names, examples.class_names
    if not inputs_only and names and found and names != found:
        raise BatchbayesError(
            expected=f"the class names of training in {examples.name}: {', '.join(names)}",
            got=", ".join(found),
            fix="number the classes as in training",
        )
    return replace(examples, input_dtype=reading.dtype)


def first_reading(options: AssessOptions) -> Reading:
    """Return how to read the training data."""
    given = [source for source in (options.train, options.test, options.calibration, options.ood) if source]
    asked = [name for name in ("mean", "std", "resize", "standardise") if getattr(options, name)]
    if asked and all(map(is_function, given)):
        raise BatchbayesError(
            expected=f"a file or a folder beside --{asked[0]}",
            got="data functions alone",
            fix="prepare the inputs in the data functions",
        )
    if (options.mean is None) != (options.std is None) or (options.standardise and options.mean):
        raise BatchbayesError(
            expected="--mean and --std together, or --standardise alone",
            got=f"--{' and --'.join(asked)}",
            fix="give the numbers that were used in training, or let them be learnt from the training file",
        )
    if options.standardise and is_function(options.train):
        raise BatchbayesError(
            expected="a training file to learn --standardise from", got=options.train, fix="give --mean and --std"
        )
    scale = Standardise(options.mean, options.std) if options.mean and options.std else None
    return Reading(
        target=options.target,
        id_column=options.id,
        ignored_label=options.ignore_label,
        preprocessing=Preprocessing(options.resize, scale) if scale or options.resize else None,
    )


@dataclass(frozen=True, eq=False)
class Training:
    """Training data."""

    name: str
    batches: Any
    """What methods read mini-batches from, with the training-time transforms."""
    plain: Any
    """The same examples as they look at prediction time, as far as this is known."""
    examples: Examples | None = None
    """What is known about them, if they can be read several times."""

    def typed(self, dtype: torch.dtype) -> "Training":
        """Return the same data with inputs of another type."""
        return replace(self, batches=_typed(self.batches, dtype), plain=_typed(self.plain, dtype))


def training_of(name: str, made: Any, batch_size: int | None) -> Training:
    """Return training data from a loader, a data set, an iterator of batches, or tensors x or (x, y)."""
    if isinstance(made, tuple) and made and isinstance(made[0], Tensor | np.ndarray):
        inputs, targets = as_batch(made, name)
        made = inputs if targets is None else TensorDataset(inputs, targets)
    if isinstance(made, Tensor | np.ndarray):
        inputs = as_batch(made, name)[0]
        return Training(name, inputs, inputs)
    if hasattr(made, "__next__"):
        batches = (as_batch(batch, "the training data")[0] for batch in made)
        return Training(name, batches, batches)
    source = from_object(name, made, may_shuffle=True)
    return _in_batches(source, batch_size) if isinstance(made, Dataset) else Training(name, source, source, source)


def read_training(options: AssessOptions, reading: Reading) -> tuple[Training, Reading]:
    """Return the training data, and how all other sources are read."""
    if is_function(options.train):
        found = training_of(options.train, call_named(options.train, "the training data"), options.batch_size)
        return found, reading.like(found.examples, options.class_names) if found.examples else reading
    source = read_source(options.train, reading, "the training data")
    if options.standardise:
        learnt = Preprocessing(options.resize, Standardise.fit(source))
        source, reading = replace(source, preprocessing=learnt), replace(reading, preprocessing=learnt)
    return _in_batches(source, options.batch_size), reading.like(source, options.class_names)


def _in_batches(source: Examples, batch_size: int | None) -> Training:
    """Return the examples of a file or a data set in batches of training."""
    batches = _without_batch_size() if batch_size is None else _shuffled(source, batch_size)
    return Training(source.name, batches, source, source)


def _shuffled(source: Examples, batch_size: int) -> Examples:
    """Return the examples in random batches of one size."""
    assert isinstance(source.batches, DataLoader)
    shuffled = DataLoader(source.batches.dataset, batch_size=batch_size, shuffle=True, drop_last=True)
    if len(shuffled) == 0:
        raise BatchbayesError(
            expected=f"at least {batch_size} training examples, one batch",
            got=f"{len(source.batches.dataset)} in {source.name}",  # type: ignore[arg-type]
            fix="lower --batch-size to that of training",
        )
    return replace(source, batches=shuffled)


def _without_batch_size() -> Iterator[Tensor]:
    """Raise an error when a method reads the first batch. Some methods never do."""
    raise BatchbayesError(
        expected="--batch-size (batch_size=) beside training data from a file or a data set",
        got="none",
        fix="pass the batch size that the network was trained with, or --method none",
    )
    yield


def _typed(data: Any, dtype: torch.dtype) -> Any:
    """Convert the inputs of training data: a tensor, examples, or an iterator of inputs."""
    if isinstance(data, Examples):
        return replace(data, input_dtype=dtype)
    return data.to(dtype) if isinstance(data, Tensor) else (inputs.to(dtype) for inputs in data)
