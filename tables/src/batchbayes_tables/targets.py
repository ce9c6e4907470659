"""Targets as they are: a monotone transform for counts, positive and skewed targets, whole numbers, and limits."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from batchbayes_tables.columns import mean_and_unit
from batchbayes_tables.linear import ridge

Name = Literal["none", "sqrt", "log"]
LEAST_GAIN = 0.02
"""A transform must make the held-out CRPS smaller by this share."""
LEVELS = (np.arange(64) + 0.5) / 64
"""Levels of quantiles that stand for a distribution."""
TAILS = np.r_[0.0, 1 / (1 + np.exp(-np.linspace(-8, 8, 255))), 1.0]
"""Levels that also stand for its tails."""
SHARES = np.diff(np.r_[0.0, (TAILS[1:] + TAILS[:-1]) / 2, 1.0])
"""How much of the distribution each of them stands for."""
SLACK = 1e-9
"""How far beyond the largest errors a distribution ends, so that rounding leaves none of them outside."""
CHUNK = 4096
"""Rows that are sorted at a time."""


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

    def atoms(self, middle: np.ndarray, spread: np.ndarray, errors: np.ndarray, trees: np.ndarray) -> np.ndarray:
        """Return targets that stand for the distribution of each row, (N, A): by its networks, then by its trees.

        Middles and spreads are (N,), errors are any number of errors in spreads, and trees are (N, T).
        """
        ends = np.quantile(errors, TAILS) + SLACK * np.r_[-1, np.zeros(len(TAILS) - 2), 1]
        found = self.back(np.concatenate([middle[:, None] + spread[:, None] * ends, trees], 1))
        return np.round(found) if self.is_whole else found


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
        scores.append(atoms_crps(quantiles, np.full(len(LEVELS), 1 / len(LEVELS)), values))
    best = int(np.argmin(scores))
    return tried[best] if scores[best] < (1 - LEAST_GAIN) * scores[0] else plain


def weights_of_atoms(share: float, num_trees: int) -> np.ndarray:
    """Return how much each atom counts, (A,), if trees count a share."""
    trees = np.full(num_trees, share / max(1, num_trees))
    return np.concatenate([(1 - share) * SHARES, trees])


def atoms_crps(atoms: np.ndarray, weights: np.ndarray, values: np.ndarray) -> float:
    """Return the mean CRPS of atoms (N, A) with weights (A,): E|X - y| - E|X - X'| / 2.

    >>> atoms_crps(np.array([[2.0, 0.0]]), np.array([0.5, 0.5]), np.array([0.0]))
    0.5
    """
    order = np.argsort(atoms, 1)
    own, sorted_atoms = weights[order], np.take_along_axis(atoms, order, 1)
    spread = (own * sorted_atoms * (2 * own.cumsum(1) - own - 1)).sum(1)
    return float(((np.abs(atoms - values[:, None]) @ weights) - spread).mean())


def atoms_scores(atoms: np.ndarray, weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return how far each value is from the median of its distribution, (N,), as a share of it, 0.5 at most."""
    up_to, below = ((side @ weights) for side in (atoms <= values[:, None], atoms < values[:, None]))
    return np.maximum(0.5 - up_to, below - 0.5)


def atoms_quantiles(atoms: np.ndarray, weights: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Return the smallest atom of each row up to which there is a share of at least each level, (N, L).

    Levels are (L,), or (N, L). A value whose score is at most 0.5 - level is not below it.
    """
    parts, rows = [], np.broadcast_to(levels, (len(atoms), np.shape(levels)[-1]))
    for start in range(0, len(atoms), CHUNK):
        some = atoms[start : start + CHUNK]
        order = np.argsort(some, 1)
        up_to = weights[order].cumsum(1)
        wanted = np.minimum(rows[start : start + CHUNK], up_to[:, -1:]) - 1e-12
        places = np.stack([(up_to < each[:, None]).sum(1) for each in wanted.T], 1)
        parts.append(np.take_along_axis(np.take_along_axis(some, order, 1), places, 1))
    return np.concatenate(parts)
