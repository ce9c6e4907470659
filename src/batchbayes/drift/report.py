"""What is said of a window: tests, layers, properties of the inputs that have a name, and accuracy, also in words."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from batchbayes._common import text
from batchbayes.drift.accuracy import Estimate
from batchbayes.novelty.looks import Change

Kind = Literal["nothing", "classes", "inputs", "inputs and classes"]


@dataclass(frozen=True, eq=False)
class DriftReport:
    """What a window of n inputs says about a change of the data."""

    num_examples: int
    kind: Kind
    """What has changed, at the level of 5 % for each of the two tests."""
    p_value: float
    """That inputs have changed: windows of ordinary inputs of the same predicted classes are as unusual this often."""
    class_p_value: float
    """The same for the mix of classes (label shift)."""
    sites: dict[str, float]
    """The evidence at each batch-norm layer, -log p of that layer alone, in the order of a pass."""
    changes: tuple[Change, ...]
    """Properties of the inputs that differ by more than four standard errors, the largest difference first."""
    mix: Tensor
    """The mix of classes that the adapted network predicts, (K,)."""
    trust: Tensor
    """How far adapting would believe the window at each site, for means and spreads: 0 to 1, (sites, 2)."""
    expected_accuracy: Estimate | None
    """How often the adapted network is right; None without labelled calibration data."""
    network_accuracy: Estimate | None
    """How often the network as it is is right."""
    temperature: float | None
    """Adapted logits are too sure: `bb.predict(drift.adapt(x), x, bb.categorical(temperature=report.temperature))`."""

    def __str__(self) -> str:
        """Say it in words."""
        told = {
            "nothing": "No change is seen",
            "classes": "The mix of classes has changed, and inputs of each class look as before",
            "inputs": "The inputs have changed",
            "inputs and classes": "The inputs have changed, and the mix of classes too",
        }
        lines = [f"{told[self.kind]} ({text.count(self.num_examples, 'example')}, p = {self.p_value:.2g})."]
        if self.kind.startswith("inputs"):
            most = sorted(self.sites, key=lambda name: -self.sites[name])[:3]
            lines.append(f"Layers where it shows most: {', '.join(most)}.")
            if self.changes:
                lines.append(f"In the inputs: {'; '.join(map(str, self.changes[:4]))}.")
        if self.network_accuracy and self.expected_accuracy:
            lines.append(f"Expected accuracy: {self.network_accuracy}; adapted {self.expected_accuracy}.")
        if self.num_examples < 8:
            lines.append("With few examples little can be seen, and adapting can do little.")
        return " ".join(lines)
