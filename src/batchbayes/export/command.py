"""`batchbayes export`: the recommended method of an assessment as one file."""

import json
from typing import Any

from torch import Tensor, nn

from batchbayes.errors import BatchbayesError
from batchbayes.export.export import Exported, export
from batchbayes.likelihoods import gaussian
from batchbayes.report.assess import running
from batchbayes.report.compare.intervals import Intervals
from batchbayes.report.options import ExportOptions
from batchbayes.report.read.factories import build_network
from batchbayes.report.read.preprocess import Preprocessing
from batchbayes.report.read.reading import Reading
from batchbayes.report.read.sources import read_source
from batchbayes.report.read.task import noted_likelihood
from batchbayes.report.write import require_new_file
from batchbayes.saving import load, load_notes


class Prepare(nn.Module):
    """The standardisation of an assessment, as a module."""

    def __init__(self, preprocessing: Preprocessing) -> None:
        super().__init__()
        self._preprocessing = preprocessing

    def forward(self, inputs: Tensor) -> Tensor:
        return self._preprocessing(inputs)


def export_posterior(options: ExportOptions) -> Exported:
    """Export what an assessment has saved, with its temperature or its intervals, and with its threshold."""
    network = build_network(options.model, options.weights, "cpu")
    posterior, notes = load(options.posterior, network), load_notes(options.posterior)
    if "task" not in notes:
        raise BatchbayesError(
            expected="a posterior written by batchbayes assess", got="one without its notes", fix="use bb.export"
        )
    reading = Reading.from_json(notes.get("reading", {}), options.target, options.id)
    data = read_source(options.input, reading, "the inputs", inputs_only=True)
    prepare = None if data.preprocessing is None else Prepare(data.preprocessing)
    inputs, _ = next(iter(data.raw()))
    regression = notes["task"] == "regression"
    return export(
        posterior,
        options.out,
        inputs,
        gaussian(notes["precision"]) if regression else noted_likelihood(notes),
        num_samples=options.draws or notes["draws"],
        seed=notes["seed"],
        conformal=Intervals.from_notes(notes) if regression else None,
        threshold=_one_output(notes["threshold"]) if regression else notes["threshold"],
        novelty=load(options.novelty, network) if options.novelty else None,
        prepare=prepare,
    )


def _one_output(values: list[float]) -> float:
    """Return the number of the one output, or refuse several outputs."""
    if len(values) > 1:
        raise BatchbayesError(
            expected="an assessment of a network with one target",
            got=f"{len(values)} targets",
            fix="call bb.export in Python, and compare the spread of each target with its own threshold",
        )
    return values[0]


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
    }
    if options.json:
        print(json.dumps(facts))
    elif not options.quiet:
        kind = f"ONNX, opset {made.opset}" if made.opset else "torch.export"
        needed = made.weight_bytes + made.bank_bytes
        print(f"{made.path} ({kind}): {made.num_bytes:,} bytes, of which the weights and the draws take {needed:,}")
        print(f"outputs: {', '.join(made.outputs)}")
        print(f"largest difference from batchbayes on the example inputs: {made.difference:.1e}")
