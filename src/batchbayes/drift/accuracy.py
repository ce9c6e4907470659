r"""How accurate is the network on a window without labels, and which classes belong into a set that holds the truth?

Labelled calibration data is corrupted on purpose: noise, blur, other brightness, contrast and resolution for images,
and noise, shifts and scales for everything else. On each of these drifts the adapted network is asked, so it is known
how sure it is and how often it is right. One temperature makes its confidence the accuracy, over all of them. Then

- the adapted network is right as often as it is sure: the mean of the largest probability;
- the network as it is is right as often as the adapted one believes in its answers: the mean of
  $p_{adapted}(\text{class that the network predicts})$.

The interval adds how far the purposeful drifts were off to the chance of n examples. A drift unlike all of them can be
further off. **Sets**: at each purposeful drift, split conformal gives the threshold that covers the true class. The
threshold for a window is read off at its confidence. Coverage is promised where nothing has changed, and measured
elsewhere (docs/results/drift.md).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from batchbayes._common.minimise import minimise
from batchbayes._common.rng import generator

EXAMPLES = 192
"""Labelled examples in each purposeful drift."""
WINDOW = 64
"""The window size at which they are adapted to."""
STRENGTHS = (0.5, 1.0)


class Estimate(NamedTuple):
    """A share, and an interval that should hold the true one in about 95 of 100 windows."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.value:.0f} % ({100 * self.low:.0f} to {100 * self.high:.0f} %)"


@dataclass(frozen=True, eq=False)
class Confidence:
    """What adapted logits are worth."""

    temperature: float
    error: float
    """Root mean square of confidence less accuracy, over the purposeful drifts."""
    sureness: Tensor
    """The mean confidence on each drift, in ascending order, (J,)."""
    scores: Tensor
    """1 - probability of the true class, sorted for each drift, (J, m)."""

    def probs(self, logits: Tensor) -> Tensor:
        """Return calibrated probabilities (n, K)."""
        return (logits / self.temperature).softmax(1)

    def estimate(self, adapted: Tensor, answers: Tensor) -> Estimate:
        """Return how often the answers (n,) are right, by adapted logits (n, K)."""
        return self.around(float(self.probs(adapted).gather(1, answers[:, None]).mean()), len(answers))

    def around(self, value: float, count: int) -> Estimate:
        """Return the estimate that a mean probability of `count` answers stands for."""
        margin = 2 * math.sqrt(self.error**2 + (value * (1 - value) + 1 / count) / count)
        return Estimate(value, max(0.0, value - margin), min(1.0, value + margin))

    def sets(self, adapted: Tensor, coverage: float) -> Tensor:
        """Return which classes belong to the set of each example, (n, K) bool. No set is empty."""
        probs = self.probs(adapted)
        rank = min(self.scores.shape[1] - 1, math.ceil(coverage * (self.scores.shape[1] + 1)) - 1)
        threshold = _interpolated(float(probs.amax(1).mean()), self.sureness, self.scores[:, rank])
        return (1 - probs <= threshold) | (probs == probs.amax(1, keepdim=True))


def _interpolated(at: float, places: Tensor, values: Tensor) -> float:
    """Return the value at a place between increasing places. Values are first made to fall: less sure, wider sets."""
    values = values.flip(0).cummax(0).values.flip(0)
    right = int(torch.searchsorted(places, at).clamp(1, len(places) - 1))
    left, width = right - 1, float(places[right] - places[right - 1])
    share = min(1.0, max(0.0, (at - float(places[left])) / width)) if width > 0 else 0.5
    return float((1 - share) * values[left] + share * values[right])


def measure_confidence(
    inputs: Tensor, labels: Tensor, adapted_logits: Callable[[Tensor], Tensor], seed: int
) -> Confidence:
    """Drift labelled inputs on purpose, and compare confidence and accuracy of adapted logits."""
    rows = torch.randperm(len(inputs), generator=generator(seed, "labelled"))[:EXAMPLES]
    inputs, labels = inputs[rows], labels[rows].long()
    drifted = (made.split(WINDOW) for made in purposeful_drifts(inputs, seed))
    logits = torch.stack([torch.cat([adapted_logits(part) for part in parts]) for parts in drifted])  # (J, m, K)
    every = labels.expand(len(logits), -1)
    right = (logits.argmax(2) == every).double().mean(1)

    def off(log_temperature: float) -> float:
        sure = (logits / math.exp(log_temperature)).softmax(2).amax(2).mean(1)
        return float((sure - right).square().mean())

    temperature = math.exp(minimise(off, -math.log(5), math.log(20))[0])
    probs = (logits / temperature).softmax(2)
    sure = probs.amax(2).mean(1)
    order = sure.argsort()
    scores = 1 - probs.gather(2, every[..., None])[..., 0]
    error = float((sure - right).square().mean().sqrt())
    return Confidence(temperature, error, sure[order], scores[order].sort(1).values)


def purposeful_drifts(x: Tensor, seed: int) -> Iterator[Tensor]:
    """Yield the inputs (n, C, ...) as they are, and drifted in several ways and strengths."""
    yield x
    random, are_images = generator(seed, "purposeful"), x.ndim == 4 and min(x.shape[2:]) >= 8
    unit = x.std([d for d in range(x.ndim) if d != 1], keepdim=True).clamp_min(1e-6)
    noise, chance = torch.randn(x.shape, generator=random), torch.rand(x.shape, generator=random)
    for strength in STRENGTHS:
        yield x + 0.4 * strength * unit * noise
        yield x + strength * unit
        if not are_images:
            yield x * (1 + strength)
            continue
        middle = x.mean((2, 3), keepdim=True)
        yield middle + (1 - 0.8 * strength) * (x - middle)
        yield torch.where(chance < 0.02 * strength, x.amin(), torch.where(chance > 1 - 0.02 * strength, x.amax(), x))
        reach = round(2 * strength)
        yield F.avg_pool2d(F.pad(x, [reach] * 4, mode="replicate"), 2 * reach + 1, 1)
        small = [round(size * (1 - 0.45 * strength)) for size in x.shape[2:]]
        coarse = F.interpolate(x, size=small, mode="bilinear", align_corners=False, antialias=True)
        yield F.interpolate(coarse, size=list(x.shape[2:]), mode="nearest")
