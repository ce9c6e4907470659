"""What a training table looks like: its columns, their kinds and their ranges.

A schema can be kept with a posterior, so that a new table is read as the training table was: by name, not by position.
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from batchbayes._common.text import count
from batchbayes.errors import BatchbayesError, warn

Dtype = Literal["integer", "real"]


@dataclass(frozen=True)
class Column:
    """One input column of the training table, with its smallest and its largest value."""

    name: str
    dtype: Dtype
    low: float
    high: float

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or self.dtype not in ("integer", "real"):
            raise ValueError(f"a column {self.name!r} of dtype {self.dtype!r}")
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low <= self.high):
            raise ValueError(f"a column {self.name!r} from {self.low} to {self.high}")


@dataclass(frozen=True)
class Schema:
    """The input columns of a training table in their order, and its other columns."""

    columns: tuple[Column, ...]
    target: str | None = None
    target_dtype: Dtype | None = None
    """Class names are converted to integers."""
    class_names: tuple[str, ...] | None = None
    """The class with number k has the k-th name. None if the target column holds numbers."""
    id_column: str | None = None

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The names of the input columns."""
        return tuple(column.name for column in self.columns)

    def in_order(self, found: Sequence[str], where: str) -> tuple[str, ...]:
        """Return the input columns in the order of training, after a check that `found` has all of them.

        Columns that training did not have are named in a warning and not used. They cannot change a prediction, and
        tables that people have often contain more columns than the network needs.
        """
        wanted, there = set(self.feature_names), set(found)
        missing = [name for name in self.feature_names if name not in there]
        if missing:
            raise BatchbayesError(
                expected=f"the {count(len(self.columns), 'input column')} of the training table in {where}",
                got=f"no {_listed(missing)}; it has {_listed(found) or 'no columns'}",
                fix="add or rename columns; their order does not matter",
            )
        extra = [name for name in found if name not in wanted]
        if extra:
            warn(f"{where} has columns that the training table did not have: {_listed(extra)}. They are not used.")
        return self.feature_names

    def differences(self, inputs: Tensor, least: float = 0.0) -> list[str]:
        """Say which columns of inputs (N, columns) have values that the training table did not have.

        A column is named if the share of such values is above `least`.

        >>> age = Schema((Column("age", "integer", 18, 65),))
        >>> age.differences(torch.tensor([[20.0], [70.0], [30.5]]))
        ['age: 1 of 3 values outside 18 to 65', 'age: fractions, but only whole numbers in training']
        """
        found = []
        for column, values in zip(self.columns, inputs.T, strict=True):
            low, high = torch.tensor([column.low, column.high], dtype=values.dtype)  # rounded as the inputs are
            outside = int(((values < low) | (values > high)).sum())
            if outside > least * len(values):
                found.append(
                    f"{column.name}: {outside} of {len(values)} values outside {column.low:g} to {column.high:g}"
                )
            if column.dtype == "integer" and int((values != values.round()).sum()) > least * len(values):
                found.append(f"{column.name}: fractions, but only whole numbers in training")
        return found

    def far_values(self, inputs: Tensor, widths: float) -> list[str]:
        """Say which columns of inputs (N, columns) have values that are this number of widths outside of their range.

        >>> age = Schema((Column("age", "integer", 18, 65),))
        >>> age.far_values(torch.tensor([[70.0], [1990.0]]), widths=1)
        ['age: 1990 is far outside 18 to 65']
        """
        found = []
        for column, values in zip(self.columns, inputs.double().T, strict=True):
            width = (column.high - column.low) or max(1.0, abs(column.low))
            beyond = torch.maximum(values - column.high, column.low - values)
            if bool((beyond > widths * width).any()):
                value = float(values[beyond.argmax()])
                found.append(f"{column.name}: {value:g} is far outside {column.low:g} to {column.high:g}")
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the schema as dicts, lists, texts and numbers, which `json` can write."""
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def from_json(cls, fields: Any) -> "Schema":
        """Return the schema that `to_json` described."""
        try:
            columns = tuple(Column(**column) for column in fields["columns"])
            names = fields["class_names"]
            schema = cls(**fields | {"columns": columns, "class_names": None if names is None else tuple(names)})
            texts = [schema.target, schema.target_dtype, schema.id_column, *(schema.class_names or ())]
            if isinstance(names, str) or not all(text is None or isinstance(text, str) for text in texts):
                raise TypeError("names that are no texts")
            if schema.target_dtype not in ("integer", "real", None):
                raise ValueError(f"targets of dtype {schema.target_dtype!r}")
            require_distinct(schema.feature_names, "the schema")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise BatchbayesError(
                expected="the schema of a training table",
                got=f"something else ({' '.join(str(error).split())[:200]})",
                fix="use the file that was written, without changes",
            ) from error
        return schema


def dtype_of(targets: Tensor | None) -> Dtype | None:
    """Return the dtype of targets as a schema has it."""
    return None if targets is None else "real" if targets.is_floating_point() else "integer"


def require_distinct(names: Sequence[str], where: str) -> None:
    """Refuse names that occur twice: one column would be read two times."""
    twice = sorted(name for name, times in Counter(names).items() if times > 1)
    if twice:
        raise BatchbayesError(
            expected=f"different column names in {where}", got=f"{_listed(twice)} more than once", fix="rename columns"
        )


def _listed(names: Sequence[str], most: int = 20) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
