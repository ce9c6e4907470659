"""The result of an assessment."""

import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from batchbayes._common.checks import as_path
from batchbayes.likelihoods import gaussian
from batchbayes.network.inputs import each_tensor, pick_inputs
from batchbayes.novelty.detector import Novelty
from batchbayes.plots.style import Figure
from batchbayes.posterior import Posterior
from batchbayes.predict import predict
from batchbayes.report.compare.compare import Choice
from batchbayes.report.compare.contenders import Contender
from batchbayes.report.compare.intervals import Intervals
from batchbayes.report.compare.rows import Rows
from batchbayes.report.read.case import Case
from batchbayes.report.read.examples import as_input

FLAGGED_SHARE = 0.1
"""On average, at most this share of new examples is above the threshold for flags."""
FEWEST = 20
"""This many examples are enough to set the limit for flags. A limit from fewer examples is called rough."""
RANKING, STRANGE = "Does the uncertainty find errors?", "Does the uncertainty find strange inputs?"
"""Titles of tables."""

Figures = dict[str, tuple[Figure, str]]
"""Figures by file name, each with its caption."""


def flag_threshold(scores: Tensor) -> Tensor:
    """Return the limit above which the flagged share of new examples lies, by the scores (N, ...) of others.

    The rank is chosen so that this holds on average for any number of examples. Below nine it is the highest one.

    >>> import torch
    >>> float(flag_threshold(torch.arange(8))), float(flag_threshold(torch.arange(99)))
    (7.0, 89.0)
    """
    rank = math.ceil((1 - FLAGGED_SHARE) * (len(scores) + 1) - 1e-9)
    return scores.double().sort(0).values[min(rank, len(scores)) - 1]


def scores_for_limit(held_out: Tensor, test: Tensor) -> Tensor:
    """Return the scores (N, ...) that set a limit: of the calibration data, and of the test data too if it is small.

    A limit by few examples is a matter of luck: with 8 it marks half of 10 others in one of 35 cases. It needs no
    labels, so the test data can help to set it.
    """
    return held_out if len(held_out) >= FEWEST else torch.cat([held_out, test])


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


BRIER = MetricColumn("brier", "Brier", "lower", 3, "squared distance of the probabilities from the truth, 0 to 2")
ECE = MetricColumn(
    "ece", "ECE", "lower", 1, "mean gap between confidence and accuracy, 15 equal-width bins", percent=True
)
PASSES = MetricColumn(
    "passes", "Passes", "lower", 0, "what a prediction costs, in forward passes; novelty takes one more"
)
BY_MI = MetricColumn("error_auroc_mi", "AUROC by MI", "higher", 3, "how well mutual information does", group=RANKING)
AURC = MetricColumn("aurc", "AURC", "lower", 4, "mean error rate as the least certain are set aside", group=RANKING)
"""Columns of more than one task."""


@dataclass(frozen=True, eq=False)
class Thumbnails:
    """Small pictures of some rows."""

    keys: Sequence[str]
    """The row that each picture belongs to, as "source-row"."""
    images: Tensor
    """Colours from 0 to 1, (n, 3, h, w)."""


@dataclass(frozen=True, eq=False)
class Assessment:
    """What was found out about a network: all that the output folder of `batchbayes assess` holds.

    Notebooks show it as the report.
    """

    case: Case
    columns: Sequence[MetricColumn]
    contenders: Sequence[Contender[Any]]
    """All that was compared on the test data, the simplest first."""
    choice: Choice
    """What is recommended, and why."""
    verdict: Mapping[str, str]
    """The sentences of the first screen by their heading, the headline first. They are for everybody."""
    terms: Mapping[str, str]
    """The same in the terms of statistics, by heading."""
    rows: Rows
    """The rows of predictions.csv, as columns by name, so that `pandas.DataFrame(found.rows)` is a table."""
    figures: Figures
    explorer: Mapping[str, object] | None
    """What the interactive chart shows; None if the recommended method is equally certain about all inputs."""
    thumbnails: Thumbnails | None
    details: Mapping[str, Sequence[str]]
    """Inputs of some rows in words, by "source-row"."""
    notes: Mapping[str, object]
    """What `batchbayes predict` has to know beside the posterior."""
    novelty: Novelty | None
    """The detector of inputs unlike the training data; None if there is none for this network and data."""
    facts: Mapping[str, object]
    """What the report notes down about the data."""
    is_usable: bool = True
    """Whether the network can be used, as far as the data can tell. The verdict says why if it cannot."""
    caveats: Sequence[str] = ()
    """Warnings that were given."""
    seconds: float = 0.0

    @property
    def recommended(self) -> Contender[Any]:
        """The contender to use."""
        return self.choice.recommended

    @property
    def posterior(self) -> Posterior:
        """The recommended posterior."""
        return self.recommended.posterior

    @property
    def likelihood(self) -> Any:
        """The likelihood to use it with, with its tuned temperature or precision."""
        tuned = self.recommended.tuned
        return gaussian(tuned["precision"]) if "precision" in tuned else replace(self.case.likelihood, **tuned)

    @property
    def intervals(self) -> Intervals:
        """The 90 % intervals of real targets: `found.intervals.ends(predictive.mean, predictive.std)`."""
        return Intervals.from_notes(self.notes)

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        """The metrics of each method on the test data, by its name. `pandas.DataFrame(found.metrics).T` is a table."""
        return {contender.name: dict(contender.metrics) for contender in self.contenders}

    def predict(self, data: Any, **options: Any) -> Any:
        """Predict new inputs as recommended. The options are those of `bb.predict`, such as `inputs`.

        Inputs get the type that the network needs, as in the assessment.
        """
        picker, converted = options.pop("inputs", None), partial(as_input, dtype=self.case.reading.dtype)
        options["inputs"] = lambda batch: each_tensor(pick_inputs(batch, picker), converted)
        drawing: Any = {"num_samples": self.notes["draws"], "seed": self.notes["seed"], "engine": self.notes["engine"]}
        return predict(self.posterior, data, self.likelihood, **drawing | options)

    def save(self, folder: str | os.PathLike[str], *, overwrite: bool = False, parquet: bool = False) -> Path:
        """Write report.html and all other files to a folder, whole or not at all. Return the path of the report."""
        from batchbayes.report.write import save_assessment

        return save_assessment(self, as_path(folder), overwrite=overwrite, parquet=parquet)

    def html(self) -> str:
        """Return the report as one page that needs no other files."""
        with tempfile.TemporaryDirectory() as folder:
            return self.save(Path(folder) / "report").read_text(encoding="utf-8")

    def _repr_html_(self) -> str:
        """Show the report in a notebook, in a frame of its own."""
        return (
            f'<iframe srcdoc="{escape(self.html())}" style="width: 100%; height: 80vh; border: 0" '
            'sandbox="allow-scripts"></iframe>'
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.verdict['headline']} Recommended: {self.choice.name}.)"
