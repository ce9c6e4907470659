"""Examples from arrays: .npz files and .zarr folders.

Arrays by name in files: .npz files, and .zarr folders. All rows can be read, or some, in memory for these alone.
"""

import math
import os
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from batchbayes._common.text import count
from batchbayes.errors import BatchbayesError, warn
from batchbayes.report.read.examples import Examples, from_tensors
from batchbayes.report.read.reading import Reading, class_numbers, cleaned, names_among
from batchbayes.report.read.schema import Column, Schema, dtype_of, require_distinct

INPUT_KEYS, TARGET_KEYS = ("x", "inputs", "images", "data"), ("y", "targets", "labels", "target")


@dataclass(frozen=True)
class StoredArray:
    """An array in a file."""

    shape: tuple[int, ...]
    read: Callable[[range | None], np.ndarray]
    """Reads some rows, or all of them for None."""

    @property
    def ndim(self) -> int:
        return len(self.shape)


A = TypeVar("A", np.ndarray, StoredArray)


CLASS_KEYS, FEATURE_KEYS, ID_KEYS = ("class_names", "classes"), ("features", "feature_names"), ("ids", "id")


def read_arrays(path: Path, reading: Reading, inputs_only: bool, rows: range | None) -> Examples:
    """Read the inputs and the targets of an .npz file or a .zarr folder.

    The inputs are an array `X` (or inputs, images, data), the targets an array `y` (or targets, labels, target). There
    may be texts beside them: `class_names`, `features` (the names of the columns of X) and `ids`. With `features`, the
    columns are put in the order of the schema.
    """
    target, schema, id_array = reading.target, reading.schema, reading.id_column
    arrays = _arrays(path, rows)
    inputs = _inputs(path, arrays)
    targets = None if inputs_only else _wanted(path, arrays, target, TARGET_KEYS, "an array of targets")
    features = _texts(path, arrays, FEATURE_KEYS, inputs.shape[1] if inputs.ndim == 2 else None)
    ids = _texts(path, arrays, (id_array,) if id_array else ID_KEYS, len(inputs))
    if id_array and ids is None:
        raise _no_array(path, arrays, f"an array {id_array!r}")
    inputs = _numbers(path, "inputs", inputs)
    if schema:
        inputs, features = _in_order(path, inputs, features, schema), schema.feature_names
    has_names = targets is not None and targets.dtype.kind == "U"
    names = _class_names(path, arrays, has_names or inputs_only, reading.known_classes)
    if targets is not None and has_names:
        words = [cleaned(str(word)) for word in targets.flat]
        names = names or names_among(words)
        targets = np.array(class_numbers(words, names, path.name)).reshape(targets.shape)
    labels = None if targets is None else _targets(path, targets, schema)
    target = target or _target_name(arrays)
    return from_tensors(
        path.name,
        torch.from_numpy(inputs),
        labels,
        class_names=names,
        feature_names=features,
        target_name=target,
        source_ids=ids,
        schema=schema or _schema(inputs, features, labels, target, names if has_names else None),
    )


def input_shape(path: Path) -> tuple[int, ...]:
    """Return the shape of all inputs of a file, (N, ...), without reading them."""
    with open_arrays(path) as arrays:
        return _inputs(path, arrays).shape


def _arrays(path: Path, rows: range | None) -> dict[str, np.ndarray]:
    """Read all arrays. With `rows`, arrays with a row for each example are read in part."""
    with open_arrays(path) as stored:
        count = None if rows is None else _inputs(path, stored).shape[0]
        whole = (*CLASS_KEYS, *FEATURE_KEYS)
        return {
            name: array.read(rows if name not in whole and array.shape[:1] == (count,) else None)
            for name, array in stored.items()
        }


def _inputs(path: Path, arrays: Mapping[str, A]) -> A:
    inputs = _wanted(path, arrays, None, INPUT_KEYS, "an array X of inputs")
    if inputs is None:
        raise _no_array(path, arrays, "an array X of inputs")
    return inputs


def _wanted(path: Path, arrays: Mapping[str, A], name: str | None, keys: Sequence[str], what: str) -> A | None:
    """Return the array with a name, or the only one with a usual name. A single text is a name, and no data."""
    if name is not None:
        if name not in arrays or not arrays[name].ndim:
            raise _no_array(path, arrays, f"an array {name!r}")
        return arrays[name]
    found = [key for key, array in arrays.items() if key.lower() in keys and array.ndim]
    if len(found) > 1:
        raise BatchbayesError(
            expected=f"{what} in {path.name}", got=f"more than one: {', '.join(found)}", fix="rename all but one"
        )
    return arrays[found[0]] if found else None


def _numbers(path: Path, what: str, values: np.ndarray) -> np.ndarray:
    """Return real numbers as floats, with all their digits, after a check that they fit into 32 bits."""
    if values.dtype.kind not in "fiub":
        raise BatchbayesError(
            expected=f"real numbers as {what} in {path.name}",
            got=f"an array of type {values.dtype}",
            fix="encode words and dates as numbers; separate the parts of complex numbers",
        )
    if not len(values):
        raise BatchbayesError(expected=f"examples in {path.name}", got="none", fix="check how the file was written")
    with np.errstate(over="ignore"):  # a number that is too large becomes infinity, which is refused
        numbers = values.astype(np.float32)
    bad = ~np.isfinite(numbers).reshape(len(numbers), -1).all(1) if numbers.size else np.zeros(1, bool)
    if bad.any():
        raise BatchbayesError(
            expected=f"finite numbers as {what} in {path.name}",
            got=f"{count(int(bad.sum()), 'row')} with NaN or infinity, the first is row {int(bad.argmax())} (counted "
            "from 0)",
            fix="drop or fill those rows",
        )
    is_wide = values.dtype == np.float64 or (values.dtype.kind in "iu" and values.dtype.itemsize > 2)
    return values.astype(np.float64) if is_wide and not np.array_equal(numbers, values) else numbers


def _targets(path: Path, values: np.ndarray, schema: Schema | None) -> Tensor:
    """Return integers as labels, and other numbers as real targets."""
    _numbers(path, "targets", values)
    whole = values.dtype.kind in "iub"
    if whole and values.size and values.max() > np.iinfo(np.int64).max:
        raise BatchbayesError(
            expected=f"whole numbers below 2^63 as targets in {path.name}",
            got=f"{values.max()}",
            fix="number the classes from 0, or write real targets as floats",
        )
    if not whole or (schema and schema.target_dtype == "real"):
        return torch.from_numpy(values.astype(np.float32 if values.dtype == np.float32 else np.float64))
    return torch.from_numpy(values.astype(np.int64))


def _class_names(
    path: Path, arrays: Mapping[str, np.ndarray], has_names: bool, wanted: tuple[str, ...] | None
) -> tuple[str, ...] | None:
    """Return the names of training, or those in the file. If targets are numbers, both must be in the same order."""
    stored = _texts(path, arrays, CLASS_KEYS, None)
    if wanted and stored and wanted != stored and not has_names:
        raise BatchbayesError(
            expected=f"the class names of training in {path.name}: {', '.join(wanted)}",
            got=", ".join(stored),
            fix="number the classes as in training",
        )
    return wanted or stored


def _texts(
    path: Path, arrays: Mapping[str, np.ndarray], keys: Sequence[str], length: int | None
) -> tuple[str, ...] | None:
    """Return an array of names, which must have this length."""
    key = next((key for key in keys if key in arrays), None)
    if key is None:
        return None
    values = arrays[key]
    if values.ndim != 1 or values.dtype.kind not in "Uiu" or (length is not None and len(values) != length):
        raise BatchbayesError(
            expected=f"{'a list of' if length is None else length} names as {key} in {path.name}",
            got=f"{values.dtype} of shape {values.shape}",
            fix="check how the file was written",
        )
    return tuple(cleaned(str(value)) for value in values)


def _in_order(path: Path, inputs: np.ndarray, features: tuple[str, ...] | None, schema: Schema) -> np.ndarray:
    if inputs.ndim != 2 or (features is None and inputs.shape[1] != len(schema.columns)):
        raise BatchbayesError(
            expected=f"inputs of shape (N, {len(schema.columns)}) in {path.name}, as in training",
            got=f"shape {inputs.shape}",
            fix="give the columns of training, and their names as an array features",
        )
    if features is None:
        order = ", ".join(schema.feature_names[:6]) + (", ..." if len(schema.feature_names) > 6 else "")
        warn(f"{path.name} has no array features with the names of its columns: they are taken in the order {order}.")
        return inputs
    require_distinct(features, path.name)
    return np.ascontiguousarray(inputs[:, [features.index(name) for name in schema.in_order(features, path.name)]])


def _schema(
    inputs: np.ndarray,
    features: tuple[str, ...] | None,
    targets: Tensor | None,
    target: str | None,
    class_names: tuple[str, ...] | None,
) -> Schema | None:
    """Return the schema of a table whose columns have names."""
    if features is None or inputs.ndim != 2:
        return None
    require_distinct(features, "features")
    whole = (inputs == np.round(inputs)).all(0)
    return Schema(
        tuple(
            Column(name, "integer" if whole[i] else "real", float(inputs[:, i].min()), float(inputs[:, i].max()))
            for i, name in enumerate(features)
        ),
        target=target,
        target_dtype=dtype_of(targets),
        class_names=class_names,
    )


def _target_name(arrays: Mapping[str, np.ndarray]) -> str | None:
    name = arrays.get("target")
    return str(name) if name is not None and not name.ndim and name.dtype.kind == "U" else None


def _no_array(path: Path, arrays: Mapping[str, Any], wanted: str) -> BatchbayesError:
    return BatchbayesError(
        expected=f"{wanted} in {path.name}", got=f"arrays {', '.join(sorted(arrays)) or 'none'}", fix="rename one"
    )


LOCAL_HEADER = struct.Struct("<26xHH")
"""The header of a file inside a .zip file ends with the lengths of its name and of its extra fields."""


@contextmanager
def open_arrays(path: Path) -> Iterator[Mapping[str, StoredArray]]:
    """Give the arrays of a file by name. Pickled objects are refused and not loaded."""
    try:
        with _npz(path) if path.suffix.lower() == ".npz" else _zarr(path) as arrays:
            yield arrays
    except BatchbayesError:
        raise
    except Exception as error:  # zipfile, zlib, lzma, zarr and numpy each have their own errors for a damaged file
        raise BatchbayesError(
            expected=f"arrays of numbers in {path}",
            got=(str(error).splitlines() or [type(error).__name__])[0].rstrip("."),
            fix="write it with numpy.savez" if path.suffix.lower() == ".npz" else "write it with zarr.save_group",
        ) from error


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Read all arrays of an .npz file."""
    with open_arrays(path) as arrays:
        return {name: array.read(None) for name, array in arrays.items()}


@contextmanager
def _npz(path: Path) -> Iterator[dict[str, StoredArray]]:
    with path.open("rb") as stream:
        if stream.read(len(npy.MAGIC_PREFIX)) == npy.MAGIC_PREFIX:
            raise ValueError("a single array")
        archive = zipfile.ZipFile(stream)
        members = archive.infolist()
        names = [info.filename.removesuffix(".npy") for info in members]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"more than one array {min(twice)}")
        yield {name: _member(stream, archive, info) for name, info in zip(names, members, strict=True)}


def _member(stream: IO[bytes], archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> StoredArray:
    """Return one array of an .npz file. What lies before the wanted rows is skipped, unless it is compressed."""
    with archive.open(info) as member:
        shape, by_columns, dtype = _header(member)
        begin = member.tell()

    def read(rows: range | None) -> np.ndarray:
        if rows is None:
            with archive.open(info) as member:
                return npy.read_array(member, allow_pickle=False)
        if info.compress_type != zipfile.ZIP_STORED:
            with archive.open(info) as member:
                return _some_rows(member, begin, rows, shape, by_columns, dtype)
        stream.seek(info.header_offset)
        name, extra = LOCAL_HEADER.unpack(stream.read(LOCAL_HEADER.size))
        start = info.header_offset + LOCAL_HEADER.size + name + extra
        return _some_rows(stream, start + begin, rows, shape, by_columns, dtype)

    return StoredArray(shape, read)


def _header(member: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return the shape, whether columns lie one after the other (Fortran order), and the type of the numbers."""
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    shape, by_columns, dtype = readers[npy.read_magic(member)](member)
    if dtype.hasobject:
        raise ValueError("Object arrays cannot be loaded when allow_pickle=False")
    return shape, by_columns and len(shape) > 1, dtype


def _some_rows(
    file: IO[bytes], begin: int, rows: range, shape: tuple[int, ...], by_columns: bool, dtype: np.dtype[Any]
) -> np.ndarray:
    """Read rows of an array whose numbers begin at a place of a file."""
    count, rest = len(rows), math.prod(shape[1:])
    strips, width = (rest, 1) if by_columns else (1, rest)  # each strip has all rows, with `width` numbers of each
    found = np.empty((strips, count * width), dtype)
    for number in range(strips):
        file.seek(begin + (number * shape[0] + rows.start) * width * dtype.itemsize, os.SEEK_SET)
        content = file.read(found[number].nbytes)
        if len(content) < found[number].nbytes:
            raise ValueError("the file ends too soon")
        found[number] = np.frombuffer(content, dtype)
    return found.reshape(*shape[:0:-1], count).T if by_columns else found.reshape(count, *shape[1:])


@contextmanager
def _zarr(path: Path) -> Iterator[dict[str, StoredArray]]:
    try:
        import zarr  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise BatchbayesError(
            expected="zarr, to read .zarr folders", got="none", fix="pip install zarr, or write .npz files"
        ) from error
    opened: Any = zarr.open(str(path), mode="r")
    arrays = {"X": opened} if isinstance(opened, zarr.Array) else dict(opened.arrays())
    for name, array in arrays.items():
        _warn_of_lost_chunks(path, name, array)
    yield {name: _zarr_array(array) for name, array in arrays.items()}


def _warn_of_lost_chunks(path: Path, name: str, array: Any) -> None:
    """Warn if chunks are missing. Zarr reads them as the fill value, and may leave out chunks of nothing else."""
    there, every = array.nchunks_initialized, array.nchunks
    if there < every:
        warn(
            f"{every - there} of {every} chunks of {name} are missing in {path.name}. They are read as "
            f"{array.fill_value}. If the array has other values there, chunks were lost: copy it again."
        )


def _zarr_array(array: Any) -> StoredArray:
    def read(rows: range | None) -> np.ndarray:
        return np.asarray(array[:] if rows is None else array[rows.start : rows.stop])

    return StoredArray(tuple(array.shape), read)
