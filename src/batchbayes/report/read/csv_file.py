"""Read the text of a CSV file, and refuse what could be misread.

A table of text, and its conversion to numbers and classes. What is not clear is refused with its place.
"""

import codecs
import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from batchbayes.errors import BatchbayesError
from batchbayes.report.read.reading import class_numbers, cleaned, is_blank
from batchbayes.report.read.schema import Column, Dtype, require_distinct

DELIMITERS = ",;\t"


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of cells, all of them text."""

    name: str
    """The name of the file."""
    header: tuple[str, ...]
    cells: Sequence[Sequence[str]]
    """The cells of each column."""
    places: Sequence[str]
    """Where each row is in the file, for example "line 2"."""

    def __post_init__(self) -> None:
        if "" in self.header:
            raise BatchbayesError(
                expected=f"a name for each column of {self.name}",
                got=f"none for column {self.header.index('') + 1}",
                fix="name it or remove it; pandas writes such a column unless to_csv has index=False",
            )
        require_distinct(self.header, self.name)

    def __getitem__(self, column: str) -> Sequence[str]:
        """Return the cells of a column."""
        return self.cells[self.header.index(column)]

    def is_blank(self, column: str) -> bool:
        """Say whether all cells of a column are empty."""
        return all(map(is_blank, self[column]))

    def numbers(self, column: str) -> np.ndarray:
        """Return a column as float64. All cells must be numbers."""
        values = as_numbers(self[column])
        if values is None:
            wrong = next(row for row, cell in enumerate(self[column]) if as_numbers([cell]) is None)
            raise BatchbayesError(
                expected=f"numbers in column {column!r} of {self.name}",
                got=f"{_shown(self[column][wrong])} in {self.places[wrong]}",
                fix="write decimal points and no separators or units; fill empty cells; encode words as numbers; name "
                "the target by --target, and names of rows by --id",
            )
        return values

    def described(self, column: str, values: np.ndarray) -> Column:
        """Return the kind and the range of a column with these numbers."""
        dtype: Dtype = "integer" if are_integers(self[column]) else "real"
        return Column(column, dtype, float(values.min()), float(values.max()))

    def targets(self, column: str, dtype: Dtype | None) -> Tensor:
        """Return integers if all cells are integers and `dtype` is not "real", otherwise 64-bit floats."""
        values = self.numbers(column)
        if dtype != "real" and are_integers(self[column]):
            return torch.tensor([int(cell) for cell in self[column]])
        return torch.from_numpy(values)

    def has_names(self, column: str) -> bool:
        """Say whether a column holds names: no cell is a number or starts like one."""
        return not self.is_blank(column) and not any(cell.lstrip("+-.,")[:1].isdigit() for cell in self[column])

    def classes(self, column: str, class_names: Sequence[str]) -> Tensor:
        """Return the number of the class of each row."""
        where = f"column {column!r} of {self.name}"
        return torch.tensor(class_numbers(self[column], class_names, where, self.places))


def read_csv(path: Path) -> Table:
    """Read a table with column names in its first line, separated by commas, semicolons or tabs."""
    text = _decoded(path)
    records = [(line, [cleaned(cell) for cell in cells]) for line, cells in _records(path, text)]
    while records and not any(records[-1][1]):
        records.pop()
    if len(records) < 2:
        raise _refused(path, "no rows" if records else "an empty file", "check the file")
    (_, header), *rows = records
    _require_header(path, header)
    if len(header) > 1:  # in a table with one column, an empty line is an empty cell
        rows = [(line, cells) for line, cells in rows if cells not in ([], [""])]
    uneven = next(((line, cells) for line, cells in rows if len(cells or [""]) != len(header)), None)
    if uneven:
        got = f"line {uneven[0]} with another number of cells, {len(uneven[1])} instead of {len(header)}"
        raise _refused(path, got, "check the file")
    columns = [[cells[i] if cells else "" for _, cells in rows] for i in range(len(header))]
    return Table(path.name, tuple(header), columns, [f"line {line}" for line, _ in rows])


def _decoded(path: Path) -> str:
    """Decode UTF-8, or UTF-16 with its mark. In other encodings a name could be misread without any sign."""
    raw = path.read_bytes()
    marked = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        text = raw.decode("utf-16" if marked else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        got = f"a byte {raw[error.start]:#x} in line {line}, which is not UTF-8 (perhaps Latin-1)"
        raise _refused(path, got, "save it as UTF-8, in Excel as 'CSV UTF-8'") from error
    if "\0" in text:
        raise _refused(path, "a zero byte (perhaps UTF-16 or UTF-32, or no text at all)", "save it as UTF-8")
    return text


def _records(path: Path, text: str) -> list[tuple[int, list[str]]]:
    """Return the cells of each record, with the number of the line in which the record starts."""
    line = 1
    try:
        first = re.sub(r'"[^"]*"', "", text).partition("\n")[0]  # marks inside quotation marks do not count
        delimiter = max(DELIMITERS, key=first.count)  # a comma if they tie
        reader, records = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True), []
        for cells in reader:
            records.append((line, cells))
            line = reader.line_num + 1
    except csv.Error as error:
        got = f"a record that starts in line {line} and cannot be read ({error})"
        fix = "look for a quotation mark that is not closed, and for cells longer than 131,072 characters"
        raise _refused(path, got, fix) from error
    return records


def _require_header(path: Path, header: list[str]) -> None:
    """Refuse a first line that holds data. A name such as 2019 is allowed beside names that are no numbers."""
    numbers = [cell for cell in header if as_numbers([cell]) is not None]
    if numbers and (len(numbers) == len(header) or not all(cell.isdigit() for cell in numbers)):
        raise _refused(path, f"numbers in the first line, such as {numbers[0]}", "add a first line with column names")


def _refused(path: Path, got: str, fix: str) -> BatchbayesError:
    return BatchbayesError(
        expected=f"a line of column names, and rows with as many cells, in {path.name}", got=got, fix=fix
    )


CHARACTERS = frozenset("0123456789+-.eE")


LARGEST = float(np.finfo(np.float32).max)
"""Inputs and real targets are 32-bit floats."""


LARGEST_INTEGER = 2**63 - 1


MOST_DIGITS = 20
"""The length of the longest 64-bit integer, with its sign. Python refuses to convert very long ones."""


def _shown(cell: str) -> str:
    return "an empty cell" if not cell else repr(cell if len(cell) <= 40 else f"{cell[:40]}...")


def as_numbers(cells: Sequence[str]) -> np.ndarray | None:
    """Return plain decimal numbers as float64, or None if a cell is no such number or too large for 32 bits.

    Python itself accepts more, such as underscores, digits of other scripts, `nan` and `infinity`.

    >>> as_numbers(["1", "-2.5e3", ".5"])
    array([ 1.0e+00, -2.5e+03,  5.0e-01])
    >>> [as_numbers([cell]) for cell in ("1_0", "nan", "1,5", "", "e", "1e39")]
    [None, None, None, None, None, None]
    """
    if not CHARACTERS.issuperset("".join(cells)):
        return None
    try:
        values = np.array([float(cell) for cell in cells])
    except ValueError:
        return None
    return values if np.abs(values).max(initial=0) <= LARGEST else None


def are_integers(cells: Sequence[str]) -> bool:
    """Say whether all numbers are written without point and exponent and fit into 64 bits.

    >>> are_integers(["1", "-2"]), are_integers(["1", "2.0"]), are_integers(["1" + "0" * 20])
    (True, False, False)
    """
    if not CHARACTERS.difference(".eE").issuperset("".join(cells)) or max(map(len, cells)) > MOST_DIGITS:
        return False
    return all(abs(int(cell)) <= LARGEST_INTEGER for cell in cells)
