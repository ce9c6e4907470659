"""What an assessment hands to the writers of its output folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from batchbayes.assessment.contenders import Contender
from batchbayes.assessment.rows import Rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FLAGGED_SHARE = 0.1
"""The threshold for flags is set so that this share of the calibration data is above it."""
RANKING, STRANGE = "Does the uncertainty find errors?", "Does the uncertainty find strange inputs?"
"""Titles of tables."""

Figures = dict[str, tuple["Figure", str]]
"""Figures by file name, each with its caption."""


@dataclass(frozen=True)
class MetricColumn:
    """A column of the tables of metrics: its label, which way is better, how it is written, what it means."""

    key: str
    label: str
    better: Literal["lower", "higher", "target"]
    digits: int
    meaning: str
    percent: bool = False
    target: float | None = None
    group: str = "How good and how honest"
    """Title of the table that the column is in."""


@dataclass(frozen=True, eq=False)
class Thumbnails:
    """Small pictures of some rows."""

    keys: Sequence[str]
    """The row that each picture belongs to, as "source-row"."""
    images: Tensor
    """Colours from 0 to 1, (n, 3, h, w)."""


@dataclass(frozen=True, eq=False)
class Assessment:
    """The contents of the output folder."""

    columns: Sequence[MetricColumn]
    contenders: Sequence[Contender[Any]]
    """All that was compared, the simplest first."""
    recommended: Contender[Any]
    verdict: Mapping[str, str]
    """The sentences of the first screen by their heading, the headline first. They are for everybody."""
    terms: Mapping[str, str]
    """The same in the terms of statistics, by heading."""
    rows: Rows
    """The rows of predictions.csv."""
    figures: Figures
    explorer: Mapping[str, object] | None
    """What the interactive chart shows; None if the recommended method is equally certain about all inputs."""
    thumbnails: Thumbnails | None
    details: Mapping[str, Sequence[str]]
    """Inputs of some rows in words, by "source-row"."""
    notes: Mapping[str, object]
    """What `batchbayes predict` has to know beside the posterior."""
    facts: Mapping[str, object]
    """What the report notes down about the data."""
