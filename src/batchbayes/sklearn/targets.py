"""Targets as they are: a monotone transform for counts, positive and skewed targets, whole numbers, and limits."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from batchbayes.sklearn.columns import mean_and_unit
from batchbayes.sklearn.linear import ridge

Name = Literal["none", "sqrt", "log"]
LEAST_GAIN = 0.02
"""A transform must make the held-out CRPS smaller by this share."""
LEVELS = (np.arange(64) + 0.5) / 64
"""Levels of quantiles that stand for a distribution."""


@dataclass(frozen=True)
class Targets:
    """How targets become numbers around zero with a spread of about one, and back."""

    name: Name
    shift: float
    """Added before the logarithm."""
    mean: float
    unit: float
    lowest: float
    """No target can be smaller."""
    is_whole: bool

    @staticmethod
    def learn(name: Name, values: np.ndarray) -> "Targets":
        whole = bool((values == np.round(values)).all()) and len(np.unique(values)) > 2
        lowest = 0.0 if (values >= 0).all() and np.ptp(values) > 0 else -np.inf
        positive = values[values > 0]
        shift = (
            0.0 if values.min() > 0 else 1.0 if whole else 0.1 * float(np.median(positive)) if len(positive) else 1.0
        )
        plain = Targets(name, shift, 0.0, 1.0, lowest, whole)
        mean, unit = mean_and_unit(plain.forward(values))
        return Targets(name, shift, float(mean), float(unit), lowest, whole)

    def forward(self, values: np.ndarray) -> np.ndarray:
        """Return standardised numbers."""
        if self.name == "sqrt":
            values = np.sqrt(values)
        elif self.name == "log":
            values = np.log(values + self.shift)
        return (values - self.mean) / self.unit

    def back(self, values: np.ndarray) -> np.ndarray:
        """Return targets. Numbers outside of the range of the transform become its ends."""
        values = self.mean + self.unit * values
        if self.name == "sqrt":
            values = np.square(np.maximum(values, 0))
        elif self.name == "log":
            values = np.exp(np.minimum(values, 700)) - self.shift
        return np.maximum(values, self.lowest)

    def rounded(self, lower: np.ndarray, upper: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the smallest intervals that hold the same whole numbers, if targets are whole numbers."""
        if not self.is_whole:
            return lower, upper
        first, last = np.ceil(lower), np.floor(upper)
        return np.where(first <= last, first, lower), np.where(first <= last, last, upper)


def choose_transform(values: np.ndarray, inputs: torch.Tensor, folds: torch.Tensor) -> Targets:
    """Return the transform with which ridge regression predicts held-out targets best, by CRPS in their own unit."""
    plain = Targets.learn("none", values)
    if plain.lowest < 0 or len(np.unique(values)) < 5:
        return plain
    tried = [plain, Targets.learn("sqrt", values), Targets.learn("log", values)]
    standardised = np.stack([each.forward(values) for each in tried], 1)
    held_out = ridge(inputs, torch.from_numpy(standardised), folds[:1])[1].numpy()
    scores = []
    for target, own, predicted in zip(tried, standardised.T, held_out.T, strict=True):
        quantiles = target.back(predicted[:, None] + np.quantile(own - predicted, LEVELS))
        scores.append(pinball(quantiles, values))
    best = int(np.argmin(scores))
    return tried[best] if scores[best] < (1 - LEAST_GAIN) * scores[0] else plain


def pinball(quantiles: np.ndarray, values: np.ndarray) -> float:
    """Return twice the mean pinball loss of quantiles (N, L) at `LEVELS`, which is the CRPS."""
    differences = values[:, None] - quantiles
    return float(2 * np.maximum(LEVELS * differences, (LEVELS - 1) * differences).mean())
