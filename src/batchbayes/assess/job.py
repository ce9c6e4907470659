"""What is asked for: the options of `batchbayes assess`, and what an assessment hands to the writers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from batchbayes.data.examples import Examples
from batchbayes.posterior import Posterior
from batchbayes.prediction import Engine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Task = Literal["classification", "regression", "segmentation"]

CALIBRATION_SHARE = 1 / 3
"""Of the test set, split off for tuning where no validation data is given."""
FLAGGED_SHARE = 0.1
"""The most uncertain tenth of the calibration data sets the threshold above which a row is flagged."""


@dataclass(frozen=True)
class Job:
    """The options of the command, as it was given."""

    model: str
    train: str
    test: str
    out: Path
    weights: Path | None = None
    validation: str | None = None
    ood: str | None = None
    task: Task | None = None
    target: str | None = None
    class_names: tuple[str, ...] | None = None
    ignored_label: int | None = None
    batch_size: int | None = None
    methods: tuple[str, ...] = ("mcbn",)
    center: Literal["running", "batches"] = "running"
    engine: Engine = "auto"
    num_samples: int = 64
    seed: int = 0
    device: str = "cpu"
    overwrite: bool = False
    parquet: bool = False
    command: str = ""


@dataclass(frozen=True, eq=False)
class Loaded:
    """The network and its data, checked."""

    network: nn.Module
    task: Task
    train: Any
    """What `mcbn` reads mini-batches from."""
    batch_size: int | None
    calibration: Examples
    test: Examples
    ood: Examples | None
    num_outputs: int
    class_names: tuple[str, ...] | None
    split_off: bool
    """Whether the calibration data is a part of the test set."""


@dataclass(frozen=True)
class Column:
    """A column of the table: what it is called, which way is better, how it is written, what it means."""

    key: str
    label: str
    better: Literal["lower", "higher", "target"]
    digits: int
    meaning: str
    percent: bool = False
    target: float | None = None
    group: str = "How good and how honest"
    """Columns of one group stand in one table."""


@dataclass(frozen=True, eq=False)
class Scored:
    """A method that was compared, with its figures."""

    name: str
    about: str
    """One line for somebody who has never heard of it."""
    metrics: Mapping[str, float]
    losses: Tensor
    """What it is judged by, for each example (or image): lower is better, (N,)."""
    settings: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Assessment:
    """All that the files of the output folder are made from."""

    task: Task
    columns: Sequence[Column]
    scored: Sequence[Scored]
    recommended: str
    verdict: Mapping[str, str]
    """Sentences by their heading, the headline first."""
    table: Mapping[str, Sequence[object]]
    """The columns of predictions.csv."""
    figures: "Mapping[str, tuple[Figure, str]]"
    """Figures by file name, each with its caption."""
    explorer: Mapping[str, object]
    """What the interactive chart of the report shows: labels, and the risk at each threshold."""
    thumbnails: "Thumbnails | None"
    details: Mapping[str, Sequence[str]]
    """What else is to be said about some rows, such as their inputs, by "source-row"."""
    posterior: Posterior
    notes: Mapping[str, object]
    """What `batchbayes predict` has to know beside the posterior."""
    facts: Mapping[str, object]


@dataclass(frozen=True, eq=False)
class Thumbnails:
    """Small pictures of some rows."""

    keys: Sequence[str]
    """Which row of the table each belongs to."""
    images: Tensor
    """Colours from 0 to 1, (n, 3, h, w)."""
