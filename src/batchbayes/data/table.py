"""A table of text, and its conversion to numbers and classes. What is not clear is refused with its place."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchbayes.data.classes import class_numbers
from batchbayes.data.numerals import are_integers, as_numbers
from batchbayes.data.schema import Column, Dtype, require_distinct
from batchbayes.errors import BatchbayesError, unknown_name

BLANKS = {"", "nan"}


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
        return all(cell.lower() in BLANKS for cell in self[column])

    def numbers(self, column: str) -> np.ndarray:
        """Return a column as float64. All cells must be numbers."""
        values = as_numbers(self[column])
        if values is None:
            wrong = next(row for row, cell in enumerate(self[column]) if as_numbers([cell]) is None)
            raise BatchbayesError(
                expected=f"numbers in column {column!r} of {self.name}",
                got=f"{_shown(self[column][wrong])} in {self.places[wrong]}",
                fix="write decimal points and no separators or units; fill empty cells; encode words as numbers",
            )
        return values

    def described(self, column: str, values: np.ndarray) -> Column:
        """Return the kind and the range of a column with these numbers."""
        dtype: Dtype = "integer" if are_integers(self[column]) else "real"
        return Column(column, dtype, float(values.min()), float(values.max()))

    def targets(self, column: str, dtype: Dtype | None) -> Tensor:
        """Return integers if all cells are integers and `dtype` is not "real", otherwise 32-bit floats."""
        values = self.numbers(column)
        if dtype != "real" and are_integers(self[column]):
            return torch.tensor([int(cell) for cell in self[column]])
        return torch.from_numpy(values.astype(np.float32))

    def has_names(self, column: str) -> bool:
        """Say whether a column holds names: no cell is a number or starts like one."""
        return not self.is_blank(column) and not any(cell.lstrip("+-.,")[:1].isdigit() for cell in self[column])

    def class_names(self, column: str) -> tuple[str, ...]:
        """Return the names in a column in the order of the alphabet."""
        return tuple(sorted({cell for cell in self[column] if cell.lower() not in BLANKS}))

    def classes(self, column: str, class_names: Sequence[str]) -> Tensor:
        """Return the number of the class of each row."""
        for cell, place in zip(self[column], self.places, strict=True):
            if cell.lower() in BLANKS:
                raise BatchbayesError(
                    expected=f"names of classes in column {column!r} of {self.name}",
                    got=f"{_shown(cell)} in {place}",
                    fix="fill it, or drop the row",
                )
            if cell not in class_names:
                raise unknown_name(
                    f"a class of training in {place}, column {column!r} of {self.name}", cell, class_names
                )
        return torch.tensor(class_numbers(self[column], class_names, self.name))


def _shown(cell: str) -> str:
    return "an empty cell" if not cell else repr(cell if len(cell) <= 40 else f"{cell[:40]}...")
