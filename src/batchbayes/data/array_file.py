"""Arrays by name in files: .npz files, and .zarr folders. All rows can be read, or some, in memory for these alone."""

import math
import os
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from batchbayes.errors import BatchbayesError

LOCAL_HEADER = struct.Struct("<26xHH")
"""The header of a file inside a .zip file ends with the lengths of its name and of its extra fields."""


@dataclass(frozen=True)
class StoredArray:
    """An array in a file."""

    shape: tuple[int, ...]
    read: Callable[[range | None], np.ndarray]
    """Reads some rows, or all of them for None."""

    @property
    def ndim(self) -> int:
        return len(self.shape)


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
        yield {info.filename.removesuffix(".npy"): _member(stream, archive, info) for info in archive.infolist()}


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
    strips, width = (rest, 1) if by_columns else (1, rest)  # each strip has all rows, with so many numbers of each
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
    yield {name: _zarr_array(array) for name, array in arrays.items()}


def _zarr_array(array: Any) -> StoredArray:
    def read(rows: range | None) -> np.ndarray:
        return np.asarray(array[:] if rows is None else array[rows.start : rows.stop])

    return StoredArray(tuple(array.shape), read)
