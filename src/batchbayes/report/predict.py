"""Predictions for new data, from the posterior file of an assessment and the network. No training data is needed."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from batchbayes.errors import BatchbayesError, warn
from batchbayes.methods.table import resolve
from batchbayes.novelty.detector import Novelty
from batchbayes.posterior import Posterior
from batchbayes.report.compare.rows import Rows, predict_rows
from batchbayes.report.maps import map_writer
from batchbayes.report.notes import checked_notes, require_outputs
from batchbayes.report.options import PredictOptions
from batchbayes.report.read.case import trial
from batchbayes.report.read.data_check import UNFAMILIAR, outside_ranges, unfamiliar
from batchbayes.report.read.examples import Examples
from batchbayes.report.read.factories import build_network, named_method
from batchbayes.report.read.reading import Reading
from batchbayes.report.read.sources import read_source
from batchbayes.report.running import noted_warnings, running
from batchbayes.report.write import NOVELTY, print_rows, require_new_file, strict_json, write_rows
from batchbayes.saving import load, load_notes


@dataclass(frozen=True, eq=False)
class Predictor:
    """A network with the posterior of its assessment, ready to predict."""

    network: nn.Module
    posterior: Posterior
    notes: Mapping[str, Any]
    novelty: Novelty | None
    reading: Reading

    @classmethod
    def load(cls, options: PredictOptions) -> "Predictor":
        """Read the network and the posterior that the options name."""
        if options.method:
            named_method(options.method)
        notes = checked_notes(load_notes(options.posterior))
        given = {"draws": options.draws, "seed": options.seed, "engine": options.engine}
        notes |= {key: value for key, value in given.items() if value is not None}
        reading = Reading.from_json(notes["reading"], options.target, options.id)
        network = reading.in_target_units(build_network(options.model, options.weights, options.device))
        posterior = load(options.posterior, network)
        return cls(network, posterior, notes, _novelty(options.posterior, notes, network), reading)

    def read(self, source: str, rows: range | None = None) -> Examples:
        """Read inputs as those of the training data were read."""
        return read_source(source, self.reading, "the inputs", inputs_only=True, rows=rows)

    def rows(self, data: Examples, source: str, maps: Path | None = None) -> Rows:
        """Return the rows of predictions.csv for new inputs. Warn if they are unlike the training data."""
        notes = self.notes
        require_outputs(notes, trial(self.network, data))
        if reason := unfamiliar(self.network, data, classes=notes["task"] != "regression"):
            warn(f"{UNFAMILIAR} {reason}")
        if problem := outside_ranges(data, self.reading.schema):
            warn(problem)
        show = None if maps is None else map_writer(maps, notes["task"], notes.get("classes", 1))
        return predict_rows(self.posterior, data, notes, source, self.novelty, show)


def _novelty(posterior: Path, notes: Mapping[str, Any], network: nn.Module) -> Novelty | None:
    """Return the detector of novelty that was saved beside the posterior, if there is one."""
    if not notes.get("novelty"):
        return None
    path = posterior.with_name(NOVELTY)
    if not path.is_file():
        raise BatchbayesError(
            expected=f"{NOVELTY} in the folder of {posterior.name}, as the assessment wrote it",
            got=f"nothing at {path}",
            fix="copy both files together",
        )
    return load(path, network)


def predict_command(options: PredictOptions) -> None:
    """Write predictions of new data to a file, or print them."""
    if options.parts is not None:
        resolve("batchbayes.report.parts:parts_command")(options)
        return
    if len(options.input) > 1 or options.cluster or options.scheduler_file or options.parquet:
        expected = "--parts DIR beside several inputs, a cluster or --parquet"
        raise BatchbayesError(expected=expected, got="none", fix="name a folder for the parts")
    if options.out is not None:
        require_new_file(options.out)
    with running(options), noted_warnings():
        predictor = Predictor.load(options)
        rows = predictor.rows(predictor.read(options.input[0]), "new", options.maps)
    cells = list(zip(*rows.values(), strict=True))
    if options.out is not None:
        write_rows(options.out, rows)
    if options.json:
        print(strict_json([dict(zip(rows, each, strict=True)) for each in cells]))
    elif options.out is None:
        print_rows(sys.stdout, rows)
    elif not options.quiet:
        print(f"{len(cells)} predictions: {options.out}")
