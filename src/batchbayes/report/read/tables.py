"""Examples from tables: .csv and .parquet files. Columns are found by name.

Finite numbers come from arrow and from pandas as they are. All other cells are text, which is converted here, and what
is not clear is refused with its place.
"""

import codecs
import csv
import io
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchbayes._common.checks import install_command
from batchbayes.errors import BatchbayesError
from batchbayes.report.read.examples import Examples, from_tensors
from batchbayes.report.read.reading import Reading, class_numbers, cleaned, is_blank, names_among
from batchbayes.report.read.schema import Column, Dtype, Schema, dtype_of, require_distinct

TABLES = (".csv", ".parquet")
DELIMITERS = ",;\t"
LONG = 2**15
"""Tables with this many lines are worth the import of pandas, if they hold nothing but plain numbers."""
NEGATIVE_ZERO = re.compile(r"-0+(?![0-9.eE])")
"""Pandas reads it as an integer, without its sign."""
INDEX = re.compile(r"__index_level_\d+__")
"""The name under which pandas writes the numbers of rows to a Parquet file. They are no column of the table."""
SIGNS, POINTS, LINES = b"0123456789+-", b".eE", b"\r\n"
LARGEST, LARGEST_INTEGER = float(np.finfo(np.float32).max), 2**63 - 1
"""Inputs are 32-bit floats for most networks, and classes 64-bit integers."""
MOST_DIGITS = 20
"""The length of the longest 64-bit integer, with its sign. Python refuses to convert very long ones."""


@dataclass(frozen=True, eq=False)
class Table:
    """The columns of a file: arrays of finite numbers, or of texts."""

    name: str
    columns: dict[str, np.ndarray]
    place: Callable[[int], str]
    """Where a row is in the file, for example "line 2"."""

    @classmethod
    def of(
        cls, name: str, header: Sequence[str], columns: Sequence[np.ndarray], place: Callable[[int], str]
    ) -> "Table":
        """Return a table, after a check that each column has a name of its own."""
        if "" in header:
            raise BatchbayesError(
                expected=f"a name for each column of {name}",
                got=f"none for column {header.index('') + 1}",
                fix="name it or remove it; pandas writes such a column unless to_csv has index=False",
            )
        require_distinct(header, name)
        return cls(name, dict(zip(header, columns, strict=True)), place)

    def texts(self, column: str) -> list[str]:
        """Return a column as text."""
        return list(map(str, self.columns[column].tolist()))

    def is_blank(self, column: str) -> bool:
        """Say whether all cells of a column are empty."""
        return all(map(is_blank, self.texts(column)))

    def has_names(self, column: str) -> bool:
        """Say whether a column holds names: no cell is a number or starts like one."""
        return not self.is_blank(column) and not any(t.lstrip("+-.,")[:1].isdigit() for t in self.texts(column))

    def numbers(self, column: str) -> np.ndarray:
        """Return a column as float64. All cells must be numbers."""
        cells = self.columns[column]
        values = as_numbers(cells)
        if values is None:
            row = next(row for row in range(len(cells)) if as_numbers(cells[row : row + 1]) is None)
            cell = str(cells[row])
            raise BatchbayesError(
                expected=f"numbers in column {column!r} of {self.name}",
                got=f"{repr(cell if len(cell) <= 40 else f'{cell[:40]}...') if cell else 'an empty cell'} in "
                f"{self.place(row)}",
                fix="write decimal points and no separators or units; fill empty cells; encode words as numbers; name "
                "the target by --target, and names of rows by --id",
            )
        return values

    def described(self, column: str, values: np.ndarray) -> Column:
        """Return the kind and the range of a column with these numbers."""
        dtype: Dtype = "integer" if are_integers(self.columns[column]) else "real"
        return Column(column, dtype, float(values.min()), float(values.max()))

    def targets(self, column: str, dtype: Dtype | None) -> Tensor:
        """Return integers if all cells are integers and `dtype` is not "real", otherwise 64-bit floats."""
        values, cells = self.numbers(column), self.columns[column]
        if dtype != "real" and are_integers(cells):
            return torch.tensor(list(map(int, cells)))
        return torch.from_numpy(values)

    def classes(self, column: str, class_names: Sequence[str]) -> Tensor:
        """Return the number of the class of each row."""
        where = f"column {column!r} of {self.name}"
        return torch.tensor(class_numbers(self.texts(column), class_names, where, self.place))


def as_numbers(cells: np.ndarray) -> np.ndarray | None:
    """Return plain decimal numbers as float64, or None if a cell is no such number or too large for 32 bits.

    Python itself accepts more, such as underscores, digits of other scripts, `nan` and `infinity`.

    >>> as_numbers(texts_of(["1", "-2.5e3", ".5"]))
    array([ 1.0e+00, -2.5e+03,  5.0e-01])
    >>> [as_numbers(texts_of([cell])) for cell in ("1_0", "nan", "1,5", "", "e", "1e39")]
    [None, None, None, None, None, None]
    """
    if cells.dtype.kind == "O" and not has_only("".join(cells), SIGNS + POINTS):
        return None
    try:
        values = cells.astype(np.float64)
    except ValueError:
        return None
    return values if np.abs(values).max(initial=0) <= LARGEST else None


def are_integers(cells: np.ndarray) -> bool:
    """Say whether all numbers are written without point and exponent and fit into 64 bits.

    >>> [are_integers(texts_of(cells)) for cells in (["1", "-2"], ["1", "2.0"], ["1" + "0" * 20])]
    [True, False, False]
    """
    if cells.dtype.kind == "O" and (not has_only("".join(cells), SIGNS) or max(map(len, cells)) > MOST_DIGITS):
        return False
    return cells.dtype.kind in "Oiu" and all(abs(int(cell)) <= LARGEST_INTEGER for cell in cells)


def has_only(text: str, characters: bytes) -> bool:
    """Say whether a text has no other characters than these.

    >>> has_only("1,5", b"0123456789"), has_only("15", b"0123456789")
    (False, True)
    """
    return not text.encode().translate(None, characters)


def texts_of(cells: Sequence[str]) -> np.ndarray:
    """Return texts as an array of objects: numpy's own arrays of text give each the room of the longest."""
    found = np.empty(len(cells), object)
    found[:] = cells
    return found


def read_csv(path: Path, as_text: Collection[str | None] = ()) -> Table:
    """Read a table with column names in its first line, separated by commas, semicolons or tabs.

    `csv` reads it, since it is strict: pandas fills short rows, mends quotation marks and knows no lines. On plain
    numbers there is nothing to guess, and pandas is many times faster. It leaves the columns `as_text` as they are.
    """
    text = _decoded(path)
    first = re.sub(r'"[^"]*"', "", text).partition("\n")[0]  # marks inside quotation marks do not count
    delimiter = max(DELIMITERS, key=first.count)  # a comma if they tie
    header, lines = [cleaned(name) for name in first.split(delimiter)], range(2, 2 + text.count("\n"))
    columns = _plain_numbers(text.removeprefix(f"{first}\n"), delimiter, [name in as_text for name in header])
    if columns is None:
        header, columns, lines = _strictly(path, text, delimiter)
    _require_names(path, header)
    return Table.of(path.name, header, columns, lambda row: f"line {lines[row]}")


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


def _plain_numbers(body: str, delimiter: str, is_text: Sequence[bool]) -> list[np.ndarray] | None:
    """Read long columns of plain numbers by pandas. None if there is anything else, or no pandas."""
    plain = body.count("\n") >= LONG and has_only(body, SIGNS + POINTS + LINES + delimiter.encode())
    if not plain or NEGATIVE_ZERO.search(body):
        return None
    try:
        import pandas

        kinds: dict[Any, Any] = {number: object for number, found in enumerate(is_text) if found}
        options: dict[str, Any] = {"na_filter": False, "skip_blank_lines": False, "low_memory": False}
        if tuple(map(int, pandas.__version__.split(".")[:2])) < (3, 1):  # from then on it always rounds exactly
            options["float_precision"] = "round_trip"
        frame = pandas.read_csv(io.StringIO(body), sep=delimiter, header=None, dtype=kinds, **options)
    except (ImportError, ValueError):  # a row has more cells than the one before it
        return None
    columns = [frame[number].to_numpy() for number in frame.columns]
    clear = len(columns) == len(is_text) and all(
        (column != "").all() if text else column.dtype.kind in "iuf" and as_numbers(column) is not None
        for column, text in zip(columns, is_text, strict=True)
    )
    return columns if clear else None


def _strictly(path: Path, text: str, delimiter: str) -> tuple[list[str], list[np.ndarray], list[int]]:
    """Return the header, the columns as text, and the line in which each row starts."""
    records, line = [], 1
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        for cells in reader:
            records.append((line, [cleaned(cell) for cell in cells]))
            line = reader.line_num + 1
    except csv.Error as error:
        got = f"a record that starts in line {line} and cannot be read ({error})"
        fix = "look for a quotation mark that is not closed, and for cells longer than 131,072 characters"
        raise _refused(path, got, fix) from error
    while records and not any(records[-1][1]):
        records.pop()
    if len(records) < 2:
        raise _refused(path, "no rows" if records else "an empty file", "check the file")
    (_, header), *rows = records
    _require_names(path, header)
    if len(header) > 1:  # in a table with one column, an empty line is an empty cell
        rows = [(line, cells) for line, cells in rows if cells not in ([], [""])]
    rows = [(line, cells or [""]) for line, cells in rows]
    if uneven := next(((line, len(cells)) for line, cells in rows if len(cells) != len(header)), None):
        got = f"line {uneven[0]} with another number of cells, {uneven[1]} instead of {len(header)}"
        raise _refused(path, got, "check the file")
    return header, [texts_of(cells) for cells in zip(*(cells for _, cells in rows), strict=True)], [n for n, _ in rows]


def _require_names(path: Path, header: Sequence[str]) -> None:
    """Refuse a first line that holds data. A name such as 2019 is allowed beside names that are no numbers."""
    numbers = [cell for cell in header if as_numbers(texts_of([cell])) is not None]
    if numbers and (len(numbers) == len(header) or not all(cell.isdigit() for cell in numbers)):
        raise _refused(path, f"numbers in the first line, such as {numbers[0]}", "add a first line with column names")


def _refused(path: Path, got: str, fix: str) -> BatchbayesError:
    return BatchbayesError(
        expected=f"a line of column names, and rows with as many cells, in {path.name}", got=got, fix=fix
    )


def read_parquet(path: Path, rows: range | None = None) -> Table:
    """Read a Parquet table, or some of its rows. This needs pyarrow."""
    with _parquet(path) as file:
        table = file.read() if rows is None else _groups(file, rows)
        table = table.drop_columns([name for name in table.column_names if INDEX.fullmatch(name)])
        columns = list(map(_from_arrow, table.columns))
    if not table.num_rows:
        raise BatchbayesError(expected=f"rows in {path.name}", got="none", fix="check the file")
    first = 1 if rows is None else 1 + rows.start
    return Table.of(path.name, list(map(cleaned, table.column_names)), columns, lambda row: f"row {first + row}")


def parquet_shape(path: Path) -> tuple[int, int]:
    """Return the number of rows and columns of a Parquet table, without reading it."""
    with _parquet(path) as file:
        return file.metadata.num_rows, file.metadata.num_columns


def _from_arrow(column: Any) -> np.ndarray:
    """Return a column of finite numbers as it is, and any other as text."""
    from pyarrow import types  # pyright: ignore[reportMissingImports]

    if not column.null_count and (types.is_integer(column.type) or types.is_floating(column.type)):
        values = column.to_numpy()
        if np.isfinite(values).all():
            return values
    return texts_of(["" if cell is None else cleaned(str(cell)) for cell in column.to_pylist()])


def _groups(file: Any, rows: range) -> Any:
    """Read the groups of rows that hold these rows, and cut them."""
    sizes = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
    ends = list(accumulate(sizes))
    wanted = [i for i, end in enumerate(ends) if end > rows.start and end - sizes[i] < rows.stop]
    table = file.read_row_groups(wanted)
    return table.slice(rows.start - (ends[wanted[0]] - sizes[wanted[0]]), len(rows))


@contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    """Give an open Parquet file."""
    try:
        from pyarrow import ArrowException, parquet  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise BatchbayesError(
            expected="pyarrow, to read .parquet files",
            got="none",
            fix=f"{install_command('parquet')}, or convert to .csv",
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            yield file
    except (ArrowException, OSError) as error:
        raise BatchbayesError(
            expected=f"a Parquet table in {path.name}",
            got=f"a damaged file ({' '.join(str(error).split())[:200]})",
            fix="write it again, or convert it to .csv",
        ) from error


def read_table(path: Path, reading: Reading, inputs_only: bool, rows: range | None) -> Examples:
    """Read a table. All columns are inputs, except the target and the ids.

    With a schema, the inputs are the columns of training in their order, and its target and its ids are used if the
    table has them. A target column without any value is then left out. The names of the classes are those that are
    known from training, or those in the column in the order of the alphabet.
    """
    schema = reading.schema
    others = reading.target, reading.id_column, schema and schema.target, schema and schema.id_column
    table = read_csv(path, others) if path.suffix.lower() == ".csv" else read_parquet(path, rows)
    target, id_column = _special_columns(table, reading)
    features = [name for name in table.columns if name not in (target, id_column)]
    if schema:
        features = schema.in_order(features, table.name)
    if not features:
        raise BatchbayesError(
            expected=f"at least one input column in {table.name}",
            got=f"no column beside {', '.join(name for name in (target, id_column) if name)}",
            fix="add the columns that the network needs",
        )
    inputs = [table.numbers(name) for name in features]
    targets, names = _targets(table, None if inputs_only else target, reading)
    return from_tensors(
        table.name,
        torch.from_numpy(np.stack(inputs, 1)),
        targets,
        class_names=names,
        feature_names=tuple(features),
        target_name=target,
        source_ids=tuple(table.texts(id_column)) if id_column else None,
        schema=schema
        or Schema(
            columns=tuple(map(table.described, features, inputs)),
            target=target,
            target_dtype=dtype_of(targets),
            class_names=names if target and table.has_names(target) else None,
            id_column=id_column,
        ),
    )


def _targets(table: Table, target: str | None, reading: Reading) -> tuple[Tensor | None, tuple[str, ...] | None]:
    """Return the targets, and the names of the classes. A column holds names if it did so in training."""
    schema, names = reading.schema, reading.known_classes
    if target is None or (schema and table.is_blank(target)):
        return None, names
    if schema.class_names if schema and schema.target_dtype else table.has_names(target):
        names = names or names_among(table.texts(target))
        return table.classes(target, names), names
    return table.targets(target, schema.target_dtype if schema else None), names


def _special_columns(table: Table, reading: Reading) -> tuple[str | None, str | None]:
    """Return the target column and the id column: those that were asked for, or those of training if they are there."""
    schema, target, id_column = reading.schema, reading.target, reading.id_column
    if schema and schema.target and target not in (None, schema.target):
        raise BatchbayesError(
            expected=f"the target column of training, {schema.target!r}", got=repr(target), fix="leave --target out"
        )
    for name, what, option in ((target, "a target column", "--target"), (id_column, "an id column", "--id")):
        if name is not None and name not in table.columns:
            raise BatchbayesError(
                expected=f"{what} {name!r} in {table.name}",
                got=f"columns {', '.join(table.columns)}",
                fix=f"give one of them as {option}",
            )
    if schema:
        target = target or (schema.target if schema.target in table.columns else None)
        id_column = id_column or (schema.id_column if schema.id_column in table.columns else None)
    if target is not None and target == id_column:
        raise BatchbayesError(
            expected="different columns for targets and ids", got=f"{target!r} for both", fix="leave one of them out"
        )
    return target, id_column
