"""What an assessment recommends as one file, and `batchbayes export`."""

import json
import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from batchbayes.drift.detector import Drift
from batchbayes.export.export import Exported, export
from batchbayes.novelty.detector import Novelty
from batchbayes.posterior import Posterior
from batchbayes.report.compare.intervals import Intervals
from batchbayes.report.options import ExportOptions, PredictOptions
from batchbayes.report.predict import Predictor
from batchbayes.report.read.examples import Examples, as_input
from batchbayes.report.read.likelihood import noted_likelihood
from batchbayes.report.running import running
from batchbayes.report.words.values import names_and_units
from batchbayes.report.write import require_new_file
from batchbayes.saving import load


class Prepare(nn.Module):
    """The standardisation of an assessment, as a module."""

    def __init__(self, data: Examples) -> None:
        super().__init__()
        self._preprocessing, self._dtype = data.preprocessing, data.input_dtype

    def forward(self, inputs: Tensor) -> Tensor:
        return as_input(self._preprocessing(inputs), self._dtype) if self._preprocessing else inputs


def export_recommended(
    posterior: Posterior,
    notes: Mapping[str, Any],
    novelty: Novelty | None,
    path: str | os.PathLike[str],
    inputs: Tensor,
    prepare: nn.Module | None = None,
    drift: Drift | None = None,
) -> Exported:
    """Export a posterior with all that an assessment has noted beside it: what `batchbayes predict` says."""
    is_regression = notes["task"] == "regression"
    return export(
        posterior,
        path,
        inputs,
        noted_likelihood(notes),
        num_samples=notes["draws"],
        seed=notes["seed"],
        conformal=Intervals.from_notes(notes) if is_regression else None,
        threshold=notes["threshold"],
        novelty=novelty,
        novelty_level=notes["novelty_level"],
        drift=drift,
        prepare=prepare,
        engine=notes["engine"],
        notes={name: json.dumps(value) for name, value in _names(notes).items()},
    )


def _names(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the numbers of a file mean: columns, targets and classes, with their ranges and units."""
    found: dict[str, Any] = {"task": notes["task"]}
    schema = notes["reading"].get("schema")
    if schema:
        found["columns"] = [each | {"unit": names_and_units(each["name"], None, 1)[0][1]} for each in schema["columns"]]
    if notes["task"] == "regression":
        targets = names_and_units(schema and schema["target"], notes.get("unit"), notes["outputs"])
        found["targets"] = [{"name": name, "unit": unit} for name, unit in targets]
    elif notes["class_names"]:
        found["classes"] = list(notes["class_names"])
    return found


def export_posterior(options: ExportOptions) -> Exported:
    """Export what an assessment has saved, with the detector of novelty that lies beside it."""
    common = {name: getattr(options, name) for name in ("model", "weights", "target", "id", "posterior", "draws")}
    predictor = Predictor.load(PredictOptions(**common, input=[options.input]))
    data = predictor.read(options.input)
    inputs, _ = next(iter(data.raw()))
    novelty = load(options.novelty, predictor.network) if options.novelty else predictor.novelty
    prepare = None if data.preprocessing is None else Prepare(data)
    drift = load(options.drift, predictor.network) if options.drift else None
    return export_recommended(predictor.posterior, predictor.notes, novelty, options.out, inputs, prepare, drift)


def export_command(options: ExportOptions) -> None:
    """Write the file, and say what is in it."""
    require_new_file(options.out)
    with running(options):
        made = export_posterior(options)
    facts: dict[str, Any] = {
        "file": str(made.path),
        "outputs": list(made.outputs),
        "opset": made.opset,
        "bytes": made.num_bytes,
        "bytes_of_weights": made.weight_bytes,
        "bytes_of_bank": made.bank_bytes,
        "largest_difference": made.difference,
        "passes": made.passes,
    }
    if options.json:
        print(json.dumps(facts))
    elif not options.quiet:
        kind = f"ONNX, opset {made.opset}" if made.opset else "torch.export"
        needed = made.weight_bytes + made.bank_bytes
        print(f"{made.path} ({kind}): {made.num_bytes:,} bytes, of which the weights and the draws take {needed:,}")
        print(f"outputs: {', '.join(made.outputs)}")
        print(f"a prediction takes {made.passes:.3g} times as long as one pass of the network")
        print(f"largest difference from batchbayes predict on the example inputs: {made.difference:.1e}")
