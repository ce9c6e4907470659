"""Columns of a table as inputs of networks: numbers, words, booleans, dates and missing values.

| column | becomes |
|---|---|
| number, boolean | itself, and how far it is through each of its bins |
| date, words such as 2024-05-31 | days, month, weekday and hour of UTC, each as a number |
| words, categories | a column of 0 and 1 for each frequent value, embedded by the first layer; rare ones share one |
| missing number | the median, and a column that says so |
| missing word | a category of its own |

A network learns steps and thresholds of a column slowly from one number, and quickly from bins (the piecewise linear
encoding of Gorishniy, Rubachev and Babenko, NeurIPS 2022, with quantiles as the ends of bins).
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, Literal

import numpy as np

from batchbayes.errors import BatchbayesError, warn

MOST_INPUTS = 256
"""Tables with many columns get fewer bins, so that there are at most so many."""
FEWEST_OF_A_LEVEL = 3
"""Categories in fewer rows share one column."""
MISSING, NO_TEXT = "\0", "\1"
"""The category of a missing word, and what stands before one that is no text, so that 1 and "1" differ."""
DAY = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d+)?)?)?(Z|[+-]\d\d:?\d\d)?")
"""How dates are written that mean the same everywhere (ISO 8601)."""
OTHER_DAY, PLAIN_NUMBER = re.compile(r"\d{1,4}[./-]\d{1,2}[./-]\d{1,4}.*"), re.compile(r"[+-]?\d*[.,]?\d+(e[+-]?\d+)?")
TIME = "datetime64[us]"
"""Nanoseconds wrap round in 2262."""
Kind = Literal["number", "date", "words"]


def is_frame(table: Any) -> bool:
    """Return whether a table has columns of their own types, as frames of pandas and polars have."""
    return hasattr(table, "columns") and (hasattr(table, "dtypes") or hasattr(table, "schema"))


@dataclass(frozen=True)
class Column:
    """How one column of a table is read."""

    name: str
    kind: Kind
    levels: list[str] = field(default_factory=list)
    """The categories that have a column, of words."""
    known: list[str] = field(default_factory=list)
    """All categories of the training data."""
    medians: list[float] = field(default_factory=list)
    """What stands in for a missing value, of each number that the column becomes."""
    was_missing: bool = False
    is_old: bool = True
    """Whether a missing word is an empty one, and 1 is "1", as in version 0.3.0."""

    @staticmethod
    def learn(name: str, kind: Kind, values: np.ndarray, num_levels: int = 32) -> "Column":
        """Learn from the values of training. Categories beyond `num_levels` share one column."""
        if kind == "words":
            counts = Counter(values.tolist())
            frequent = [level for level, rows in counts.most_common() if rows >= FEWEST_OF_A_LEVEL]
            if len(frequent) > num_levels:
                rows = sum(counts[level] for level in frequent[num_levels:])
                warn(
                    f"column {name} has {len(frequent)} categories, of which the {len(frequent) - num_levels} rarest, "
                    f"in {rows} rows, are read as one: raise num_levels, or encode them by their targets."
                )
            return Column(name, kind, sorted(frequent[:num_levels]), sorted(counts), is_old=False)
        numbers = _numbers(kind, values)
        missing = np.isnan(numbers).any(1)
        if missing.all():
            raise BatchbayesError(
                expected=f"some values in column {name}", got="none", fix="leave the column out, of training and later"
            )
        return Column(name, kind, medians=np.nanmedian(numbers, 0).tolist(), was_missing=bool(missing.any()))

    def numbers(self, values: np.ndarray) -> np.ndarray:
        """Return the numbers that get bins, (N, C)."""
        found = _numbers(self.kind, values) if self.kind != "words" else np.empty((len(values), 0))
        return np.where(np.isnan(found), np.reshape(self.medians, (1, -1)), found)

    def flags(self, values: np.ndarray) -> np.ndarray:
        """Return columns of 0 and 1, (N, C)."""
        if self.kind == "words":
            own = self._words(values)[:, None] == np.array(self.levels, dtype=object)[None]
            return np.concatenate([own, ~own.any(1, keepdims=True)], 1).astype(float)
        missing = np.isnan(_numbers(self.kind, values)).any(1, keepdims=True)
        return missing.astype(float) if self.was_missing else np.empty((len(values), 0))

    def unknown(self, values: np.ndarray) -> np.ndarray:
        """Return which rows have a category, or a missing value, that training had not, (N,)."""
        if self.kind == "words":
            known = set(self.known)
            return np.array([value not in known for value in self._words(values)])
        return np.isnan(_numbers(self.kind, values)).any(1) & np.array(not self.was_missing)

    def _words(self, values: np.ndarray) -> np.ndarray:
        return np.array([value.lstrip(MISSING + NO_TEXT) for value in values], object) if self.is_old else values


def _numbers(kind: Kind, values: np.ndarray) -> np.ndarray:
    """Return a column as numbers, (N, C), with NaN where a value is missing."""
    if kind == "number":
        return np.asarray(values, dtype=np.float64)[:, None]
    days = values.astype("datetime64[D]")
    since = (values - np.datetime64("2000-01-01")) / np.timedelta64(1, "D")
    month = (values.astype("datetime64[M]") - values.astype("datetime64[Y]")) / np.timedelta64(1, "M")
    weekday = np.where(np.isnat(values), np.nan, (days.astype(np.int64) + 3) % 7)
    return np.stack([since, month, weekday, (values - days) / np.timedelta64(1, "h")], 1).astype(np.float64)


def read_frame(frame: Any) -> dict[str, tuple[Kind, np.ndarray]]:
    """Return the kind and the values of each column of a frame of pandas or polars."""
    return {str(name): _read(str(name), frame[name]) for name in frame.columns}


def _read(name: str, series: Any) -> tuple[Kind, np.ndarray]:
    if str(series.dtype).startswith("period"):
        series = series.dt.to_timestamp()
    kind = _type_of(series)
    if kind == "M":
        plain = series.dt.tz_convert(None) if getattr(series.dtype, "tz", None) else series  # of pandas
        return "date", np.asarray(plain.to_numpy()).astype(TIME)
    if kind == "m":
        found = np.asarray(series.to_numpy()).astype("timedelta64[ns]")
        return "number", np.where(np.isnat(found), np.nan, found / np.timedelta64(1, "D"))
    values = series.to_list()
    # Comparisons with NA of pandas have no truth.
    is_missing = [value is None or type(value).__name__ in ("NAType", "NaTType") or value != value for value in values]
    pairs = list(zip(values, is_missing, strict=True))
    seen = [value for value, gone in pairs if not gone]
    if seen and all(isinstance(value, date) for value in seen):  # a column of objects
        return "date", np.array(["NaT" if gone else _in_utc(value) for value, gone in pairs], dtype=TIME)
    is_number = all(isinstance(value, int | float | Decimal | np.number | np.bool_) for value in seen)
    if kind in "iufb" or (is_number and kind != "category"):
        found = np.array([np.nan if gone else float(value) for value, gone in pairs])
        if np.isinf(found).any():
            raise BatchbayesError(f"finite numbers in column {name}", "infinity", "replace it by a missing value")
        return "number", found
    words = [value if isinstance(value, str) else MISSING if gone else f"{NO_TEXT}{value}" for value, gone in pairs]
    return "words", np.array(words, dtype=object)


def _in_utc(value: date) -> date:
    if isinstance(value, datetime) and value.tzinfo:
        return value.astimezone(UTC).replace(tzinfo=None)
    return value


def as_meant(name: str, kind: Kind, values: np.ndarray) -> tuple[Kind, np.ndarray]:
    """Return words that are all dates as dates. Warn of words that look like other dates, or like numbers."""
    words = [value for value in values if value not in (MISSING, "")] if kind == "words" else []
    if not words or len(set(words)) == 1:
        return kind, values
    if all(map(DAY.fullmatch, words)):
        with suppress(BatchbayesError):  # a thirteenth month
            return "date", dates_of(name, values)
    for pattern, what, fix in (
        (OTHER_DAY, "dates", "pandas.to_datetime(...)"),
        (PLAIN_NUMBER, "numbers", "pandas.to_numeric(...), if they are amounts"),
    ):
        if all(map(pattern.fullmatch, words)):
            warn(f"column {name} has {what} as words, such as {words[0]!r}. They are read as categories: use {fix}.")
            break
    return kind, values


def dates_of(name: str, words: np.ndarray) -> np.ndarray:
    """Return dates that are written in words."""
    try:
        each = [None if word in (MISSING, "") else _in_utc(datetime.fromisoformat(word)) for word in words]
    except ValueError as error:
        fix = "write them as in 2024-05-31, or convert the column to dates"
        raise BatchbayesError(f"dates in column {name}, as in training", str(error), fix) from error
    return np.array(["NaT" if day is None else day for day in each], dtype=TIME)


def _type_of(series: Any) -> str:
    """Return a letter as numpy has: i, u, f and b for numbers, M and m for times, O for anything else; or category."""
    if str(series.dtype) == "category":  # of pandas, and its values may be numbers
        return "category"
    if isinstance(found := getattr(series.dtype, "kind", None), str):
        return found
    named = str(series.dtype)  # polars
    times = {"Date": "M", "Datetime": "M", "Duration": "m"}
    return times.get(named.partition("(")[0], "f" if series.dtype.is_numeric() or named == "Boolean" else "O")


def read_array(values: np.ndarray) -> dict[str, tuple[Kind, np.ndarray]]:
    """Return the columns of an array as numbers."""
    return {str(number): ("number", column) for number, column in enumerate(values.T)}


@dataclass(frozen=True, eq=False)
class Columns:
    """How a table becomes inputs: what each column becomes, the ends of bins, and means and units."""

    plans: tuple[Column, ...]
    bins: tuple[np.ndarray, ...]
    mean: np.ndarray
    unit: np.ndarray

    @staticmethod
    def raw(plans: Sequence[Column], read: Mapping[str, tuple[Kind, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers and the flags of a table, (N, C) each."""
        pairs = [(plan, read[plan.name][1]) for plan in plans]
        numbers, flags = ([own(*pair) for pair in pairs] for own in (Column.numbers, Column.flags))
        return np.concatenate(numbers, 1), np.concatenate(flags, 1)

    @staticmethod
    def learn(plans: Sequence[Column], numbers: np.ndarray, flags: np.ndarray, num_bins: int) -> "Columns":
        """Learn bins and units from the numbers and flags of training."""
        bins = bin_ends(numbers, num_bins)
        mean, unit = mean_and_unit(encoded(numbers, flags, bins))
        return Columns(tuple(plans), tuple(bins), mean, unit)

    @property
    def is_bounded(self) -> np.ndarray:
        """Which inputs stay in a range for any row, (Q,): all but the numbers that have bins."""
        return np.concatenate([[not len(ends) for ends in self.bins], np.ones(len(self.mean) - len(self.bins))]) > 0

    @property
    def is_bin(self) -> np.ndarray:
        """Which inputs are bins, (Q,): the last ones."""
        return np.arange(len(self.mean)) >= len(self.mean) - sum(max(0, len(ends) - 1) for ends in self.bins)

    def standardised(self, numbers: np.ndarray, flags: np.ndarray) -> np.ndarray:
        """Return inputs (N, Q) as float32."""
        with np.errstate(all="ignore"):  # what is too large becomes infinite, and is refused
            found = ((encoded(numbers, flags, self.bins) - self.mean) / self.unit).astype(np.float32)
        if not np.isfinite(found).all():
            raise BatchbayesError(
                expected="inputs whose distance from the training data is a number of float32, in standard deviations",
                got="some that are too far away",
                fix="look for a wrong unit or a mark of missing values such as 1e300",
            )
        return found

    def checked(self, read: Mapping[str, tuple[Kind, np.ndarray]]) -> Mapping[str, tuple[Kind, np.ndarray]]:
        """Refuse columns of another kind than in training. Nothing but missing values fits any kind."""
        fitting = {}
        for plan in self.plans:
            kind, values = read[plan.name]
            if kind != plan.kind and kind == "number" and np.isnan(values).all():
                empty = {"date": np.full(len(values), "NaT", TIME)}
                kind, values = plan.kind, empty.get(plan.kind, np.full(len(values), MISSING, dtype=object))
            if (kind, plan.kind) == ("words", "date"):
                kind, values = "date", dates_of(plan.name, values)
            if kind != plan.kind:
                raise BatchbayesError(
                    expected=f"{plan.kind} in column {plan.name}, as in training",
                    got=kind,
                    fix="convert the column to the type that it had in training",
                )
            fitting[plan.name] = kind, values
        return fitting

    def unknown(self, read: Mapping[str, tuple[Kind, np.ndarray]]) -> dict[str, np.ndarray]:
        """Return for each column with values that training had not which rows have them."""
        found = {plan.name: plan.unknown(read[plan.name][1]) for plan in self.plans}
        return {name: rows for name, rows in found.items() if rows.any()}


def mean_and_unit(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean of each column, and its standard deviation, which is 1 for a column of equal values.

    >>> mean_and_unit(np.array([[1e-20, 5.0], [3e-20, 5.0]]))
    (array([2.e-20, 5.e+00]), array([1.e-20, 1.e+00]))
    """
    with np.errstate(over="ignore"):
        mean, spread = values.mean(0), values.std(0)
    if not np.isfinite(spread).all():
        got = f"some as large as {np.abs(values).max():g}"
        raise BatchbayesError(expected="numbers whose squares are finite", got=got, fix="use another unit")
    return mean, np.where(spread > 1e-12 * np.abs(values).max(0, initial=0), spread, 1.0)


def bin_ends(columns: np.ndarray, num_bins: int) -> list[np.ndarray]:
    """Return the ends of the bins of each column, for columns (N, Q). A column of two values or fewer has no bins.

    >>> bin_ends(np.array([[0.0, 1.0], [1.0, 1.0], [2.0, 1.0], [6.0, 1.0]]), 2)
    [array([0. , 1.5, 6. ]), array([], dtype=float64)]
    """
    count = min(num_bins, MOST_INPUTS // max(1, columns.shape[1]))
    found = [np.unique(np.quantile(column, np.linspace(0, 1, count + 1))) for column in columns.T]
    return [ends if len(ends) > 2 else ends[:0] for ends in found]


def encoded(numbers: np.ndarray, flags: np.ndarray, bins: Sequence[np.ndarray]) -> np.ndarray:
    """Return numbers (N, Q), flags, and one number from 0 to 1 for each bin: 0 below it and 1 above it.

    >>> encoded(np.array([[1.0]]), np.ones((1, 1)), [np.array([0.0, 2.0, 4.0])])
    array([[1. , 1. , 0.5, 0. ]])
    """
    shares = [
        np.clip((column[:, None] - ends[:-1]) / np.diff(ends), 0, 1)
        for column, ends in zip(numbers.T, bins, strict=True)
        if len(ends)
    ]
    return np.concatenate([numbers, flags, *shares], 1)
