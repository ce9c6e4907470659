"""Novelty and drift as torch modules, for a file.

The detector of novelty takes inputs and returns p-values, as `Novelty.report` does. Drift returns the statistics of
each input, and the prediction that is adapted to all inputs of a call.
"""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor, nn

from batchbayes.drift.adapt import adapt_to
from batchbayes.drift.detector import Drift, sample_of
from batchbayes.network.function import Network
from batchbayes.novelty.detector import Novelty

ADAPTED = {"probs": "adapted_probs", "pred_mean": "adapted_mean"}
"""Outputs of a file, and their names if they are adapted."""


class Detector(nn.Module):
    """From inputs to p-values of novelty, by one pass of a network."""

    def __init__(self, detector: Novelty, network: Network) -> None:
        super().__init__()
        self.network, self._detector = network.module, replace(detector, sight=replace(detector.sight, network=network))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the share of ordinary inputs that are at least as unusual, (N,)."""
        parts, *_ = self._detector.parts(*self._detector.sight(inputs))
        return self._detector.judged(parts)[1].float()


class Drifted(nn.Module):
    """From inputs to their drift statistics, and to predictions that are adapted to all inputs of the call.

    There is no gate: the test compares with windows of ordinary inputs, which would make the file large. The mean of
    `drift_statistics` over a window is all that the test needs of it.
    """

    def __init__(self, drift: Drift, network: Network, finish: Callable[[Tensor], dict[str, Tensor]]) -> None:
        """`finish` returns what is said, by name, about outputs (N, ...) of the network."""
        super().__init__()
        self.network, self._finish = network.module, finish
        self._drift, self._sight = drift, replace(drift.sight, network=network)
        drift.moments._unmixing  # noqa: B018  # computed here, because a file cannot invert a matrix

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        """Return outputs of the file by name."""
        rows, classes = sample_of(self._drift.ordinary.gaussian, *self._sight(inputs))
        outputs = adapt_to(self._sight, self._drift.moments, inputs).logits
        found = self._finish(outputs.float())
        shown = {new: found[old] for old, new in ADAPTED.items() if old in found}
        if self._drift.confidence is not None:
            shown["adapted_logits"] = outputs.float()
        return {"drift_statistics": rows, "drift_class": classes, **shown}
