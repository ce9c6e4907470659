r"""How accurate is the network on a window without labels, and which classes belong into a set that holds the truth?

Labelled calibration data is corrupted on purpose: noise, blur, other brightness, contrast and resolution for images,
and noise, shifts and scales for everything else, from mild to strong. On each of these drifts the adapted network is
asked, so it is known how sure it is and how often it is right. One temperature brings the two together as far as it
can. Confidence falls too slowly with the accuracy all the same, so a line follows:
$\mathrm{logit}(accuracy) = a + b\,\mathrm{logit}(confidence)$. The probabilities of a window are then those at the
temperature at which their mean confidence is this accuracy. So

- the adapted network is right as often as it is sure: the mean of the largest probability;
- the network as it is is right as often as the adapted one believes in its answers: the mean of
  $p_{adapted}(\text{class that the network predicts})$.

The interval adds how far the purposeful drifts were off to the chance of n examples. A drift unlike all of them can be
further off. **Sets**: the purposeful drifts that are most like a window in confidence say which threshold covers the
true class (split conformal). Coverage under drift is measured, not promised (docs/results/drift.md).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from batchbayes._common.rng import generator
from batchbayes._common.tune import tune

EXAMPLES = 128
"""Labelled examples in each purposeful drift."""
WINDOW = 64
"""The window size at which they are adapted to."""
STRENGTHS = (1 / 3, 2 / 3, 1.0)
BISECTIONS = 24
ALIKE = 5
"""Purposeful drifts that set the threshold of sets together."""


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
    intercept: float
    slope: float
    error: float
    """Root mean square of expected less true accuracy, over the purposeful drifts."""
    expected: Tensor
    """The expected accuracy on each drift, (J,)."""
    scores: Tensor
    """1 - probability of the true class, for each drift, (J, m)."""

    def temperature_of(self, logits: Tensor) -> Tensor:
        """Return the temperature at which adapted logits (n, K) of a window are as sure as they are right.

        No step depends on a number in Python, so that an exported file has them too.
        """
        logits = logits.double()
        sure = _logit(_mean_confidence(logits, self.temperature))
        expected = torch.sigmoid(self.intercept + self.slope * sure)
        low = torch.full_like(expected, -5.0)
        for step in range(BISECTIONS):
            middle = low + 5.0 / 2**step
            low = torch.where(_mean_confidence(logits, middle.exp()) > expected, middle, low)
        return low.exp()

    def probs(self, logits: Tensor) -> Tensor:
        """Return calibrated probabilities (n, K) of a window."""
        return (logits / self.temperature_of(logits).to(logits)).softmax(1)

    def estimate(self, adapted: Tensor, answers: Tensor) -> Estimate:
        """Return how often the answers (n,) are right, by adapted logits (n, K)."""
        value = float(self.probs(adapted).gather(1, answers[:, None]).mean())
        margin = 2 * math.sqrt(self.error**2 + (value * (1 - value) + 1 / len(answers)) / len(answers))
        return Estimate(value, max(0.0, value - margin), min(1.0, value + margin))

    def sets(self, adapted: Tensor, coverage: float) -> Tensor:
        """Return which classes belong to the set of each example, (n, K) bool. No set is empty."""
        probs = self.probs(adapted)
        far = (self.expected - float(probs.amax(1).mean())).abs()
        scores = self.scores[far.topk(min(ALIKE, len(far)), largest=False).indices].flatten().sort().values
        threshold = scores[min(len(scores) - 1, math.ceil(coverage * (len(scores) + 1)) - 1)]
        return (1 - probs <= threshold) | (probs == probs.amax(1, keepdim=True))


def _mean_confidence(logits: Tensor, temperature: float | Tensor) -> Tensor:
    return (logits / temperature).softmax(-1).amax(-1).mean(-1)


def _logit(share: Tensor, least: float = 1e-6) -> Tensor:
    share = share.clamp(least, 1 - least)
    return share.log() - (1 - share).log()


def measure_confidence(
    inputs: Tensor, labels: Tensor, adapted_logits: Callable[[Tensor], Tensor], seed: int
) -> Confidence:
    """Drift labelled inputs on purpose, and compare confidence and accuracy of adapted logits."""
    rows = torch.randperm(len(inputs), generator=generator(seed, "labelled"))[:EXAMPLES]
    inputs, labels = inputs[rows], labels[rows].long()
    drifted = (made.split(WINDOW) for _, _, made in purposeful_drifts(inputs, seed))
    logits = torch.stack([torch.cat([adapted_logits(part) for part in parts]) for parts in drifted])  # (J, m, K)
    right = (logits.argmax(2) == labels).double().mean(1)

    def off(log_temperature: float) -> float:
        return float((_mean_confidence(logits, math.exp(log_temperature)) - right).square().mean())

    temperature = tune(off, -math.log(5), math.log(20)).value
    sure, truth = _logit(_mean_confidence(logits, temperature)), _logit(right, 0.5 / len(labels))
    spread = sure - sure.mean()
    slope = float((spread @ truth).clamp_min(0) / spread.square().sum().clamp_min(1e-6))
    intercept = float(truth.mean()) - slope * float(sure.mean())
    expected = torch.sigmoid(intercept + slope * sure)
    error = float((expected - right).square().mean().sqrt())
    found = Confidence(temperature, intercept, slope, error, expected, torch.empty(0))
    probs = torch.stack([found.probs(each) for each in logits])
    return replace(found, scores=1 - probs.gather(2, labels.expand(len(logits), -1)[..., None])[..., 0])


def purposeful_drifts(x: Tensor, seed: int) -> Iterator[tuple[str, float, Tensor]]:
    """Yield the inputs (n, C, ...) as they are, and drifted: what is done, how much of it (0 to 1), and the result."""
    yield "as it is", 0.0, x
    random, are_images = generator(seed, "purposeful"), x.ndim == 4 and min(x.shape[2:]) >= 8
    unit = x.std([d for d in range(x.ndim) if d != 1], keepdim=True).clamp_min(1e-6)
    noise, chance = (draw(x.shape, generator=random, dtype=torch.float32) for draw in (torch.randn, torch.rand))
    for strength in STRENGTHS:
        yield "noise", strength, x + 0.8 * strength * unit * noise
        yield "shift", strength, x + strength * unit
        if not are_images:
            yield "scale", strength, x * (1 + strength)
            continue
        middle, share = x.mean((2, 3), keepdim=True), 0.06 * strength
        yield "low contrast", strength, middle + (1 - 0.9 * strength) * (x - middle)
        pepper = torch.where(chance > 1 - share, x.amax(), x)
        yield "dead pixels", strength, torch.where(chance < share, x.amin(), pepper)
        reach = round(3 * strength)
        yield "blur", strength, F.avg_pool2d(F.pad(x, [reach] * 4, mode="replicate"), 2 * reach + 1, 1)
        small = [round(size * (1 - 0.65 * strength)) for size in x.shape[2:]]
        coarse = F.interpolate(x, size=small, mode="bilinear", align_corners=False, antialias=True)
        yield "low resolution", strength, F.interpolate(coarse, size=list(x.shape[2:]), mode="nearest")
