"""Data sources: files, folders and data functions. All of them are read as the training data was.

Read examples from any file or folder that can be given by its path. No code in a file is executed.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from batchbayes.errors import BatchbayesError
from batchbayes.report.options import AssessOptions
from batchbayes.report.read.arrays import input_shape, read_arrays
from batchbayes.report.read.examples import Examples, as_batch
from batchbayes.report.read.factories import call_named, is_name
from batchbayes.report.read.images import IMAGES, read_images, visible
from batchbayes.report.read.masks import IMAGE_FOLDER, MASK_FOLDER, read_masked_images
from batchbayes.report.read.objects import from_object
from batchbayes.report.read.preprocess import Preprocessing, Standardise
from batchbayes.report.read.reading import Reading
from batchbayes.report.read.tables import TABLES, parquet_shape, read_table


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
    if options.standardise_targets and (
        is_function(options.train) or options.task in ("classification", "segmentation")
    ):
        raise BatchbayesError(
            expected="a training file with values to learn --standardise-targets from",
            got=options.train if is_function(options.train) else f"--task {options.task}",
            fix="leave the option out; a data function and a model can scale targets and outputs themselves",
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
    if options.standardise_targets:
        reading = replace(reading, target_scale=_scale_of_targets(source))
    return _in_batches(source, options.batch_size), reading.like(source, options.class_names)


def _scale_of_targets(source: Examples) -> Standardise:
    """Return the mean and the std of the values in the target column."""
    if source.class_names:
        raise BatchbayesError(
            expected=f"values in the target column of {source.name}, for --standardise-targets",
            got=f"names of classes, such as {source.class_names[0]}",
            fix="leave the option out",
        )
    targets = source.targets()
    return Standardise.fit([(targets.reshape(len(targets), -1), None)])


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


ARRAYS = (".npz", ".zarr")
READ_IN_PART = (*ARRAYS, ".parquet")


def read_examples(
    path: str | os.PathLike[str],
    reading: Reading | None = None,
    *,
    inputs_only: bool = False,
    rows: range | None = None,
) -> Examples:
    """Read the examples in a file or folder.

    Args:
        path: a table (.csv, .parquet), arrays (.npz, .zarr), an image, a folder of images, a folder with a sub-folder
            of images for each class, or a folder with the sub-folders `images` and `masks`.
        reading: how to read it.
        inputs_only: whether targets are ignored, so that they may be of classes that training did not have.
        rows: only these examples. Of .npz, .zarr and .parquet no others are read; a .csv file is read whole.
    """
    path, reading = Path(path), reading or Reading()
    if not path.exists():
        raise BatchbayesError(expected="a data file or folder", got=f"nothing at {path}", fix="check the path")
    suffix = path.suffix.lower()
    try:
        if suffix in ARRAYS and (path.is_file() or path.is_dir()):  # a pipe would be waited for
            examples = read_arrays(path, reading, inputs_only, rows)
        elif path.is_dir() or (suffix in IMAGES and path.is_file()):
            _require_unit_scale(reading.preprocessing)
            images, masks = _segmentation(path)
            if masks is not None and not inputs_only:
                examples = read_masked_images(images, masks, reading)
            else:
                examples = read_images(images, reading, inputs_only)
        elif suffix in TABLES and path.is_file():
            examples = read_table(path, reading, inputs_only, rows)
        else:
            raise BatchbayesError(
                expected="a .npz, .zarr, .csv or .parquet file, an image, a folder of images, or pkg.module:function",
                got=str(path),
                fix="convert it, or write a function that returns a DataLoader",
            )
    except OSError as error:
        raise BatchbayesError(
            expected=f"a file that can be read at {path}", got=str(error.strerror or error), fix="check its permissions"
        ) from error
    if rows is not None and suffix not in READ_IN_PART:
        examples = examples.between(rows)
    dtype = reading.dtype or torch.float32  # numbers are read with all their digits, and rounded at the end
    return replace(examples, preprocessing=reading.preprocessing, input_dtype=dtype)


def example_shape(path: str | os.PathLike[str], reading: Reading | None = None) -> tuple[int, ...]:
    """Return the number of examples in a file or folder, and the shape of one of them or the number of its columns.

    Files that can be read in part are not read here.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix in ARRAYS and (path.is_file() or path.is_dir()):
        return input_shape(path)
    if suffix == ".parquet" and path.is_file():
        return parquet_shape(path)
    examples = read_examples(path, reading, inputs_only=True)
    return len(examples.rows()), *next(iter(examples))[0].shape[1:]


def _segmentation(path: Path) -> tuple[Path, Path | None]:
    """Return the folders of images and masks. A folder that has only `images` is new data without masks."""
    folders = {child.name for child in visible(path) if child.is_dir()} if path.is_dir() else set()
    if folders == {IMAGE_FOLDER, MASK_FOLDER}:
        return path / IMAGE_FOLDER, path / MASK_FOLDER
    return (path / IMAGE_FOLDER if folders == {IMAGE_FOLDER} else path), None


def _require_unit_scale(preprocessing: Preprocessing | None) -> None:
    scale = preprocessing and preprocessing.standardise
    if scale and max(scale.mean) > 1:
        raise BatchbayesError(
            expected="a mean for images with values from 0 to 1",
            got=f"a mean {scale.mean}",
            fix="divide the mean and the std by 255",
        )
