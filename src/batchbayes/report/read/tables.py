"""Examples from tables: .csv and .parquet files. Columns are found by name."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchbayes._common.checks import install_command
from batchbayes.errors import BatchbayesError
from batchbayes.report.read.csv_file import Table, read_csv
from batchbayes.report.read.examples import Examples, from_tensors
from batchbayes.report.read.reading import Reading, cleaned, names_among
from batchbayes.report.read.schema import Schema, dtype_of

INDEX = re.compile(r"__index_level_\d+__")
"""The name under which pandas writes the numbers of rows. They are no column of the table."""


def read_parquet(path: Path, rows: range | None = None) -> Table:
    """Read a Parquet table, or some of its rows. This needs pyarrow."""
    with _parquet(path) as file:
        table = file.read() if rows is None else _groups(file, rows)
        table = table.drop_columns([name for name in table.column_names if INDEX.fullmatch(name)])
        cells = [["" if c is None else cleaned(str(c)) for c in column.to_pylist()] for column in table.columns]
    if not table.num_rows:
        raise BatchbayesError(expected=f"rows in {path.name}", got="none", fix="check the file")
    first = 1 if rows is None else 1 + rows.start
    places = [f"row {row}" for row in range(first, first + table.num_rows)]
    return Table(path.name, tuple(map(cleaned, table.column_names)), cells, places)


def parquet_shape(path: Path) -> tuple[int, int]:
    """Return the number of rows and columns of a Parquet table, without reading it."""
    with _parquet(path) as file:
        return file.metadata.num_rows, file.metadata.num_columns


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


TABLES = (".csv", ".parquet")


def read_table(path: Path, reading: Reading, inputs_only: bool, rows: range | None) -> Examples:
    """Read a table. All columns are inputs, except the target and the ids.

    With a schema, the inputs are the columns of training in their order, and its target and its ids are used if the
    table has them. A target column without any value is then left out. The names of the classes are those that are
    known from training, or those in the column in the order of the alphabet.
    """
    table = read_csv(path) if path.suffix.lower() == ".csv" else read_parquet(path, rows)
    schema, (target, id_column) = reading.schema, _special_columns(table, reading)
    features = [name for name in table.header if name not in (target, id_column)]
    if schema:
        features = schema.in_order(features, table.name)
    if not features:
        raise BatchbayesError(
            expected=f"at least one input column in {table.name}",
            got=f"no column beside {', '.join(name for name in (target, id_column) if name)}",
            fix="add the columns that the network needs",
        )
    columns = [table.numbers(name) for name in features]
    targets, names = _targets(table, None if inputs_only else target, reading)
    return from_tensors(
        table.name,
        torch.from_numpy(np.stack(columns, 1)),
        targets,
        class_names=names,
        feature_names=tuple(features),
        target_name=target,
        source_ids=tuple(table[id_column]) if id_column else None,
        schema=schema
        or Schema(
            columns=tuple(map(table.described, features, columns)),
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
        names = names or names_among(table[target])
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
        if name is not None and name not in table.header:
            raise BatchbayesError(
                expected=f"{what} {name!r} in {table.name}",
                got=f"columns {', '.join(table.header)}",
                fix=f"give one of them as {option}",
            )
    if schema:
        target = target or (schema.target if schema.target in table.header else None)
        id_column = id_column or (schema.id_column if schema.id_column in table.header else None)
    if target is not None and target == id_column:
        raise BatchbayesError(
            expected="different columns for targets and ids", got=f"{target!r} for both", fix="leave one of them out"
        )
    return target, id_column
