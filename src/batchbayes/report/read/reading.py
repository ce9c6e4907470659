"""How examples are read: as those of training were, so that columns, classes and numbers mean the same."""

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from batchbayes.errors import BatchbayesError, unknown_name
from batchbayes.report.read.examples import Examples
from batchbayes.report.read.preprocess import InTargetUnits, Preprocessing, Standardise
from batchbayes.report.read.schema import Schema

INPUT_DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "float16", "bfloat16", "int64")}
"""Types of inputs that a network may need, by their names in files of posteriors."""


@dataclass(frozen=True)
class Reading:
    """How files and folders are read. Data functions prepare their inputs themselves."""

    target: str | None = None
    """The target column of a table, or the target array of an .npz file. Integers and names become class numbers, other
    numbers become real targets."""
    id_column: str | None = None
    """The column or array with a name for each example. Images have their file names."""
    ignored_label: int | None = None
    """The number of pixels in masks that do not count."""
    schema: Schema | None = None
    """The columns of the training table. They are found by name."""
    class_names: tuple[str, ...] | None = None
    """The names of the classes in the training data, in the order of the network's outputs."""
    preprocessing: Preprocessing | None = None
    """What is done to the inputs each time they are read."""
    target_scale: Standardise | None = None
    """The standardisation of the targets that the network was trained on, if they were."""
    input_dtype: str | None = None
    """One of INPUT_DTYPES, if the network does not take inputs of the type that they have."""

    @property
    def dtype(self) -> torch.dtype | None:
        """The type that inputs are converted to; None leaves them as they are."""
        return INPUT_DTYPES[self.input_dtype] if self.input_dtype else None

    @property
    def resize(self) -> tuple[int, int] | None:
        """The height and the width that images are resized to."""
        return self.preprocessing.resize if self.preprocessing else None

    @property
    def known_classes(self) -> tuple[str, ...] | None:
        """The names of the classes in the target column of training, or else those of `class_names`."""
        return (self.schema and self.schema.class_names) or self.class_names

    def like(self, examples: Examples, order: tuple[str, ...] | None) -> "Reading":
        """Return how to read other sources, so that their columns and classes are those of these examples.

        Args:
            examples: what was read first. What is known already is not changed.
            order: the names that the user gave. If they contain all names of classes in the data, they say which
                output of the network belongs to which class. Otherwise they are other words for the same classes.
        """
        names = self.class_names or examples.class_names
        if self.class_names is None and names and order and set(names) <= set(order):
            names = order
        schema = self.schema or examples.schema
        if schema and schema.class_names:
            schema = replace(schema, class_names=names)
        return replace(self, schema=schema, class_names=names)

    def in_target_units(self, network: nn.Module) -> nn.Module:
        """Return a network whose outputs are in the unit of the targets in files."""
        return network if self.target_scale is None else InTargetUnits(network, self.target_scale).eval()

    def optional_columns(self) -> "Reading":
        """Return how to read a table that may lack the target and the ids. Without a schema, it has neither."""
        return replace(self, target=None, id_column=None)

    def to_json(self) -> dict[str, Any]:
        """Return what `batchbayes predict` has to know, as values that `json` can write."""
        return {
            "schema": self.schema and self.schema.to_json(),
            "class_names": self.class_names,
            "preprocessing": self.preprocessing and self.preprocessing.to_json(),
            **({"input_dtype": self.input_dtype} if self.input_dtype else {}),
            **({"targets": Preprocessing(None, self.target_scale).to_json()} if self.target_scale else {}),
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], target: str | None, id_column: str | None) -> "Reading":
        """Return the reading that `to_json` described, with the columns that the user names."""
        schema, names, preprocessing = (fields.get(key) for key in ("schema", "class_names", "preprocessing"))
        dtype, targets = fields.get("input_dtype"), fields.get("targets")
        if dtype is not None and dtype not in INPUT_DTYPES:
            raise BatchbayesError(
                expected=f"inputs of {' or '.join(INPUT_DTYPES)} in the notes of the posterior",
                got=repr(dtype),
                fix="assess again: the file is damaged",
            )
        return cls(
            target=target,
            id_column=id_column,
            schema=None if schema is None else Schema.from_json(schema),
            class_names=None if names is None else tuple(map(str, names)),
            preprocessing=None if preprocessing is None else Preprocessing.from_json(preprocessing),
            target_scale=None if targets is None else Preprocessing.from_json(targets).standardise,
            input_dtype=dtype,
        )


INVISIBLE = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff\u00ad"))
"""Characters that nobody sees: without width, or a hyphen that is not shown."""


def cleaned(text: str) -> str:
    """Return a text as it looks: composed letters, without characters that cannot be seen, and without outer spaces.

    >>> cleaned("cafe\u0301\u200b ") == "caf\u00e9"
    True
    """
    return text.strip() if text.isascii() else unicodedata.normalize("NFC", text.translate(INVISIBLE)).strip()


BLANKS = {"", "nan", "na", "n/a", "#n/a", "<na>", "none", "null", "nil", "?"}
"""How programs write that a value is missing, in lower case."""


def is_blank(cell: str) -> bool:
    """Whether a text says that a value is missing."""
    return cell.lower() in BLANKS


def names_among(cells: Iterable[str]) -> tuple[str, ...]:
    """Return the names of classes in the order of the alphabet."""
    return tuple(sorted({cell for cell in cells if not is_blank(cell)}))


def class_numbers(
    found: Iterable[str], class_names: Sequence[str], where: str, place: Callable[[int], str] | None = None
) -> list[int]:
    """Return the number of each name. Missing names, and names that training did not have, are refused.

    `place` says where a name is. Two classes that differ in upper and lower case alone are refused too.

    >>> class_numbers(["dog", "cat", "dog"], ("cat", "dog"), "t.csv")
    [1, 0, 1]
    """
    number = {name: label for label, name in enumerate(class_names)}
    spellings = Counter(map(str.casefold, class_names))
    if twice := sorted((name for name in class_names if spellings[name.casefold()] > 1), key=str.casefold)[:2]:
        raise BatchbayesError(
            expected=f"names of classes that differ in more than upper and lower case in {where}",
            got=" and ".join(map(repr, twice)),
            fix="write each class in one way, and only once",
        )
    labels = []
    for row, name in enumerate(found):
        if name not in number:
            there = f"{place(row)}, {where}" if place else where
            if is_blank(name):
                got, fix = repr(name) if name else "an empty cell", "fill it, or drop the row, or rename this class"
                raise BatchbayesError(expected=f"names of classes in {there}", got=got, fix=fix)
            raise unknown_name(f"classes of training in {there}", name, class_names)
        labels.append(number[name])
    return labels
