"""The result of an assessment."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from torch import Tensor

from batchbayes._common.checks import as_path
from batchbayes.likelihoods import gaussian
from batchbayes.network.inputs import each_tensor, pick_inputs
from batchbayes.novelty.detector import Novelty
from batchbayes.plots.style import Figure
from batchbayes.posterior import Posterior
from batchbayes.predict import predict
from batchbayes.report.compare.choice import Choice
from batchbayes.report.compare.columns import MetricColumn
from batchbayes.report.compare.contenders import Contender
from batchbayes.report.compare.intervals import Intervals
from batchbayes.report.compare.rows import Rows
from batchbayes.report.read.case import Case
from batchbayes.report.read.examples import as_input

Figures = dict[str, tuple[Figure, str]]
"""Figures by file name, each with its caption."""


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
    contenders: Sequence[Contender]
    """All that was compared on the test data, the simplest first."""
    choice: Choice
    """What is recommended, and why."""
    rows: Rows
    """The rows of predictions.csv, as columns by name, so that `pandas.DataFrame(found.rows)` is a table."""
    notes: Mapping[str, Any]
    """What `batchbayes predict` has to know beside the posterior."""
    novelty: Novelty | None
    """The detector of inputs unlike the training data; None if there is none for this network and data."""
    facts: Mapping[str, Any]
    """What the report notes down about the data."""
    verdict: Mapping[str, str] = field(default_factory=dict)
    """The sentences of the first screen by their heading, the headline first. They are for everybody."""
    is_usable: bool = True
    """Whether the network can be used, as far as the data can tell. The verdict says why if it cannot."""
    terms: Mapping[str, str] = field(default_factory=dict)
    """The same in the terms of statistics, by heading."""
    figures: Figures = field(default_factory=dict)
    explorer: Mapping[str, Any] | None = None
    """What the interactive chart shows; None if the recommended method is equally certain about all inputs."""
    thumbnails: Thumbnails | None = None
    details: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Inputs of some rows in words, by "source-row"."""
    caveats: Sequence[str] = ()
    """Warnings that were given."""
    seconds: float = 0.0

    @property
    def recommended(self) -> Contender:
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
