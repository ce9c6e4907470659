"""Novelty and drift as torch modules, for a file.

The detector of novelty takes inputs and returns p-values, as `Novelty.report` does. Drift returns the statistics of
each input, and the prediction that is adapted to all inputs of a call.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from batchbayes.drift.adapt import ClassMoments, adapt_to
from batchbayes.drift.detector import Drift, sample_of
from batchbayes.network.function import Network
from batchbayes.novelty.detector import Novelty
from batchbayes.novelty.scores import TAIL, TIE, ClassGaussian, LastFeatures
from batchbayes.novelty.statistics import FLOOR, Place, Sight, kept_outputs

ADAPTED = {"probs": "adapted_probs", "pred_mean": "adapted_mean"}
"""Outputs of a file, and their names if they are adapted."""


class Watched(nn.Module):
    """One more pass of the network, with its layers watched."""

    def __init__(self, sight: Sight, network: Network) -> None:
        super().__init__()
        self.network, self._run, self._sight = network.module, network, sight
        # torch.export wants tensors that are in the order of their memory, and warns of others.
        units = sight.units.split([place.channels for place in sight.places], dim=1)
        self._units = [unit.contiguous() for unit in units]

    def _see(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the statistics (N, D) of all sites, and the logits (N, K), as `Sight` does."""
        seen: dict[str, Tensor] = {}
        places = self._sight.places

        def see(place: Place, unit: Tensor, h: Tensor) -> None:
            seen[place.name] = _statistics(self._sight.along_channels(place, h), unit, place.positions)

        before = {place.name: partial(see, place, unit) for place, unit in zip(places, self._units, strict=True)}
        logits = kept_outputs(self._run(inputs, before=before), self._sight.logits)
        return torch.cat([seen[place.name] for place in places], 1), logits


class Detector(Watched):
    """From inputs to p-values of novelty."""

    def __init__(self, detector: Novelty, network: Network) -> None:
        super().__init__(detector.sight, network)
        features = detector.features
        if features is not None:
            features = LastFeatures(_in_order(features.within), _in_order(features.common))
        ordered = replace(detector, gaussian=_in_order(detector.gaussian), features=features)
        self._parts, self._sum_of = ordered.parts, ordered.sum_of
        self._ordinary = detector.ordinary_parts.double().sort(0).values  # (n, parts)
        self._calibration = detector.calibration_scores.double()  # (m,)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the share of ordinary inputs that are at least as unusual, (N,)."""
        score = self._sum_of(self._surprise(self._parts(*self._see(inputs))[0]))
        at_least = (self._calibration >= score[:, None] - TIE).double().sum(1)
        return ((1 + at_least) / (len(self._calibration) + 1)).float()

    def _surprise(self, parts: Tensor) -> Tensor:
        """Return -log p of each part (N, parts) among the ordinary ones, as `ranks.surprise` does."""
        count = len(self._ordinary)
        tail = max(1, int(TAIL * count))
        start = self._ordinary[-tail - 1 :][:1]  # (1, parts)
        excess = (self._ordinary[-tail:] - start).mean(0).clamp_min(1e-9)
        at_least = (self._ordinary[None] >= parts[:, None] - TIE).double().sum(1)  # (N, parts)
        ranks = -((1 + at_least) / (count + 1)).log()
        beyond = (parts - start) / excess - math.log((1 + tail) / (count + 1))
        return torch.where(parts > start + TIE, beyond, ranks)


class Drifted(Watched):
    """From inputs to their drift statistics, and to predictions that are adapted to all inputs of the call.

    It runs the code of `drift` itself. There is no gate: the test compares with windows of ordinary inputs, which would
    make the file large. The mean of `drift_statistics` over a window is all that the test needs of it.
    """

    def __init__(self, drift: Drift, network: Network, finish: Callable[[Tensor], dict[str, Tensor]]) -> None:
        """`finish` returns what is said, by name, about outputs (N, ...) of the network."""
        super().__init__(drift.sight, network)
        self._traced = replace(drift.sight, network=network)
        moments = {name: tensor.contiguous() for name, tensor in vars(drift.moments).items() if name[0] != "_"}
        self._moments, self._gaussian = ClassMoments(**moments), _in_order(drift.ordinary.gaussian)
        self._moments._unmixing  # noqa: B018  # computed here, because a file cannot invert a matrix
        self._is_labelled, self._finish = drift.confidence is not None, finish

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        """Return outputs of the file by name."""
        statistics, logits = self._see(inputs)
        rows, classes = sample_of(self._gaussian, statistics, logits)
        outputs = adapt_to(self._traced, self._moments, inputs).logits
        found = self._finish(outputs.float())
        shown = {new: found[old] for old, new in ADAPTED.items() if old in found}
        if self._is_labelled:
            shown["adapted_logits"] = outputs.float()
        return {"drift_statistics": rows, "drift_class": classes, **shown}


def _in_order(gaussian: ClassGaussian) -> ClassGaussian:
    return replace(gaussian, directions=gaussian.directions.contiguous())


def _statistics(h: Tensor, unit: Tensor, positions: bool) -> Tensor:
    """Return the statistics of the input (N, C, ...) of one site, (N, C) or (N, 3 C)."""
    middle, spread = unit
    if not positions:
        return ((h - middle) / spread).float()
    over, centred = list(range(2, h.ndim)), (h - middle.view(-1, *[1] * (h.ndim - 2))).float()
    z = centred.mean(over) / spread
    variance = (centred.square().mean(over) / spread.square() - z.square()).clamp_min(0)
    return torch.cat([z, (variance + z.square() + FLOOR).log(), (variance + FLOOR).log()], 1)
