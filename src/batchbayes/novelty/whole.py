"""Is a batch as a whole unlike ordinary data, even if each of its inputs could be an ordinary one?

Pixels that were not normalised, or channels in another order, move all inputs in the same direction. The mean of a
batch tells that, and a single input cannot. Batches of ordinary inputs with the same number of examples and the same
predicted classes say what is usual, as for the windows of `windows.py`. There are two tests: one of the mean
statistics of each layer, and one of properties of the inputs that have a name, such as the mean of a channel. The
p-value of the batch is twice the smaller one of the two (Bonferroni), and both are conformal.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from batchbayes._common import text
from batchbayes.network.source import spread_evenly
from batchbayes.novelty.looks import Change, changes_of, looks, summary_of
from batchbayes.novelty.scores import ClassGaussian, fit_gaussian
from batchbayes.novelty.windows import Ordinary, Sample, keep_ordinary, sample_of
from batchbayes.state import Codec, State, coded, nested

LEAST, MOST = 16, 1024
"""Batches with fewer inputs are not judged as a whole. Of larger ones an even selection is."""
KEPT = 1000
"""Ordinary examples that are kept."""
ALARM = 0.004
"""A batch with this p-value is told of loudly. It is the smallest p-value there is."""


class BatchReport(NamedTuple):
    """What is said of all inputs together."""

    num_examples: int
    p_value: float
    """How often a batch of ordinary inputs, of this size and of these predicted classes, is as unusual."""
    changes: tuple[Change, ...]
    """Properties of the inputs that differ by more than four standard errors, the largest difference first."""

    @property
    def is_unusual(self) -> bool:
        """Whether the batch is as unusual as a p-value can say."""
        return self.p_value <= ALARM

    def __str__(self) -> str:
        """Say it in words."""
        count = text.count(self.num_examples, "input")
        if not self.is_unusual:
            return f"The {count} together look like ordinary ones (p = {self.p_value:.2g})."
        inside = f" In the inputs: {'; '.join(map(str, self.changes[:4]))}." if self.changes else ""
        return (
            f"the {count} together are unlike the data of the fit (p = {self.p_value:.2g}).{inside} Check that they "
            "are prepared in the same way: scaling, order of channels, resolution."
        )


class Looked(NamedTuple):
    """What is known of single inputs."""

    layers: Tensor
    """Mean statistics of each layer, (n, d)."""
    energy: Tensor
    """Of the logits, (n,)."""
    classes: Tensor
    """Predicted ones, (n,)."""
    inputs: Tensor
    """Properties of the inputs that have a name, (n, F). There are none of tokens."""
    names: tuple[str, ...] = ()
    """Of these properties."""

    def of(self, rows: Tensor) -> "Looked":
        """Return the same of some inputs."""
        return Looked(self.layers[rows], self.energy[rows], self.classes[rows], self.inputs[rows], self.names)

    def sample(self, gaussian: ClassGaussian, rows: Tensor) -> Sample:
        """Return rows (n, d) of layers or of properties as examples of a window."""
        return sample_of(gaussian, rows, self.classes, self.energy)

    def at_most(self, count: int) -> "Looked":
        """Return the same of an even selection of the inputs."""
        return self.of(spread_evenly(len(self.layers), min(count, len(self.layers))))


def joined(parts: Sequence[Looked]) -> Looked:
    """Return what is known of the inputs of several chunks."""
    layers, energy, classes, inputs, names = zip(*parts, strict=True)
    return Looked(torch.cat(layers), torch.cat(energy), torch.cat(classes), torch.cat(inputs), names[0])


def properties(inputs: Any) -> tuple[tuple[str, ...], Tensor]:
    """Return names and properties (n, F) of inputs; none if they are not one tensor of real numbers."""
    if isinstance(inputs, Tensor) and inputs.is_floating_point() and inputs.ndim > 1:
        return looks(inputs)
    return (), torch.empty(len(inputs), 0, dtype=torch.float32)


def _ordinary(name: str) -> Codec:
    """Return the codec of ordinary examples, whose number `rest` stands among the tensors."""
    own, rest = nested(Ordinary, name), f"{name}rest"

    def write(value: Ordinary | None, batches: Any) -> State:
        header, tensors = own.write(value, batches)
        return header, tensors | {rest: torch.tensor(header.pop("rest"), dtype=torch.float64)} if value else {}

    return Codec(
        write, lambda file: own.read(replace(file, header={**file.header, "rest": float(file.tensors.get(rest, 0.0))}))
    )


@dataclass(frozen=True, eq=False)
class OrdinaryBatches:
    """Ordinary examples, for batches to be compared with."""

    layers: Ordinary = field(metadata=coded(_ordinary("layers.")))
    inputs: Ordinary | None = field(metadata=coded(_ordinary("inputs.")))
    summary: Tensor
    """Mean, standard deviation and number of the properties of ordinary inputs, (3, F)."""

    def report(self, seen: Looked) -> BatchReport:
        """Say whether a batch is unlike ordinary ones."""
        few = seen.at_most(MOST)
        found = [_p_value(self.layers, few.layers, few)]
        if self.inputs is not None:
            found.append(_p_value(self.inputs, few.inputs, few))
        changes = changes_of(seen.names, seen.inputs, self.summary)
        return BatchReport(len(seen.layers), min(1.0, len(found) * min(found)), changes)


def fit_whole(layers: ClassGaussian, fitted: Looked, ordinary: Looked, num_classes: int, seed: int) -> OrdinaryBatches:
    """Keep ordinary examples. What is unusual is seen with `layers`, and with the inputs of the fit."""
    kept, inputs = ordinary.at_most(KEPT), None
    if kept.names:
        gaussian = fit_gaussian(fitted.inputs, torch.zeros_like(fitted.classes), 1)
        inputs = keep_ordinary(gaussian, kept.sample(gaussian, kept.inputs), num_classes, seed)
    of_layers = keep_ordinary(layers, kept.sample(layers, kept.layers), num_classes, seed)
    return OrdinaryBatches(of_layers, inputs, summary_of(kept.inputs))


def _p_value(ordinary: Ordinary, rows: Tensor, seen: Looked) -> float:
    return ordinary.evidence(seen.sample(ordinary.gaussian, rows), [rows.shape[1]]).p_value
