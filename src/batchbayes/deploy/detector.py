"""The novelty detector as a torch module: inputs in, p-values out. It computes what `Novelty.report` computes."""

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from batchbayes.detection.novelty import MOST, Novelty
from batchbayes.detection.ranks import TAIL
from batchbayes.detection.statistics import FLOOR, Place
from batchbayes.network import Network, pick_output
from batchbayes.shadow import workplace

TIE = 1e-9
"""Scores that differ by less are equal. They are sums of logarithms of ranks, so ties are common, and the last digit of
a logarithm is not the same everywhere."""


class Detector(nn.Module):
    """One more pass of the network, with its batch-norm sites watched."""

    def __init__(self, detector: Novelty, network: Network) -> None:
        super().__init__()
        self.network, self._output = network.module, network.output
        self._sight = detector.sight
        # torch.export wants tensors that are in the order of their memory, and warns of others.
        self._gaussian = replace(detector.gaussian, directions=detector.gaussian.directions.contiguous())
        units = self._sight.units.split([place.channels for place in self._sight.places], dim=1)
        self._units = [unit.contiguous() for unit in units]
        self._ordinary = detector.ordinary_parts.double().sort(0).values  # (n, parts)
        self._calibration = detector.calibration_scores.double()  # (m,)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the share of ordinary inputs that are at least as unusual, (N,)."""
        statistics, logits = self._see(inputs)
        z = self._gaussian.standardise(statistics)
        classes = logits.argmax(1) if logits.shape[1] else torch.zeros_like(z[:, 0], dtype=torch.long)
        distance, evidence = self._gaussian.distances(z, classes)
        parts = [distance]
        if logits.shape[1]:
            parts += [-logits.logsumexp(1), evidence][: min(2, logits.shape[1])]
        found = self._surprise(torch.stack(parts, 1).clamp(max=MOST))
        score = found[:, 0] if len(parts) == 1 else found[:, 0] + found[:, 1:].mean(1)
        at_least = (self._calibration >= score[:, None] - TIE).double().sum(1)
        return ((1 + at_least) / (len(self._calibration) + 1)).float()

    def _see(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the statistics (N, D) of all sites, and the logits (N, K), as `Sight` does."""
        seen: dict[str, Tensor] = {}
        places = self._sight.places

        def see(place: Place, unit: Tensor, h: Tensor) -> None:
            seen[place.name] = _statistics(h, unit, place.positions)

        before = {place.name: partial(see, place, unit) for place, unit in zip(places, self._units, strict=True)}
        with workplace(self.network) as place:
            place.prepare({"before": before})
            outputs = pick_output(place.module(inputs), self._output).double()
        if not self._sight.logits:
            logits = outputs.new_zeros(outputs.shape[0], 0)
        else:
            logits = outputs if outputs.ndim == 2 else outputs.logsumexp(1).flatten(1).mean(1, keepdim=True)
        return torch.cat([seen[place.name] for place in places], 1), logits

    def _surprise(self, parts: Tensor) -> Tensor:
        """Return -log p of each part (N, parts) among the ordinary ones, as `ranks.surprise` does."""
        count = len(self._ordinary)
        tail = max(1, int(TAIL * count))
        start = self._ordinary[-tail - 1 :][:1]  # (1, parts)
        excess = (self._ordinary[-tail:] - start).mean(0).clamp_min(1e-9)
        at_least = (self._ordinary[None] >= parts[:, None]).double().sum(1)  # (N, parts)
        ranks = -((1 + at_least) / (count + 1)).log()
        beyond = (parts - start) / excess - math.log((1 + tail) / (count + 1))
        return torch.where(parts > start, beyond, ranks)


def _statistics(h: Tensor, unit: Tensor, positions: bool) -> Tensor:
    """Return the statistics of the input (N, C, ...) of one site, (N, C) or (N, 3 C)."""
    middle, spread = unit
    if not positions:
        return ((h - middle) / spread).float()
    over, centred = list(range(2, h.ndim)), (h - middle.view(-1, *[1] * (h.ndim - 2))).float()
    z = centred.mean(over) / spread
    variance = (centred.square().mean(over) / spread.square() - z.square()).clamp_min(0)
    return torch.cat([z, (variance + z.square() + FLOOR).log(), (variance + FLOOR).log()], 1)
