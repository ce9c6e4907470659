"""Read examples from any file or folder that can be given by its path. No code in a file is executed."""

import os
from dataclasses import replace
from pathlib import Path

from batchbayes.data.arrays import input_shape, read_arrays
from batchbayes.data.examples import Examples
from batchbayes.data.image_folders import read_images, visible
from batchbayes.data.images import IMAGES
from batchbayes.data.masks import IMAGE_FOLDER, MASK_FOLDER, read_masked_images
from batchbayes.data.preprocess import Preprocessing
from batchbayes.data.reading import Reading
from batchbayes.data.tables import TABLES, parquet_shape, read_table
from batchbayes.errors import BatchbayesError

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
        if suffix in ARRAYS:
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
    return replace(examples, preprocessing=reading.preprocessing, input_dtype=reading.dtype)


def example_shape(path: str | os.PathLike[str], reading: Reading | None = None) -> tuple[int, ...]:
    """Return the number of examples in a file or folder, and the shape of one of them or the number of its columns.

    Files that can be read in part are not read here.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix in ARRAYS and path.exists():
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
