"""The regression data of the MCBN paper: published splits, cross-validation folds and standardisation."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchbayes_papers.data.folder import DataFolder
from batchbayes_papers.data.uci import load_regression, published_folds, published_split
from batchbayes_papers.mcbn.scores import ANY, Limits

SYNTHETIC = "synthetic"
SYNTHETIC_ROWS = 300
PRECISIONS = {
    "boston": (0.01, 10.0),
    "concrete": (0.001, 10.0),
    "energy": (0.01, 100.0),
    "kin8nm": (10.0, 1000.0),
    "power": (0.01, 10.0),
    "protein": (0.01, 10.0),
    "wine": (0.01, 10.0),
    "yacht": (0.01, 100.0),
    SYNTHETIC: ANY,
}
"""The published limits of the search for the precision tau of the observation noise."""


@dataclass(frozen=True, eq=False)
class StandardisedPart:
    """Examples to train on and other examples to predict, standardised by the moments of the former."""

    inputs: Tensor
    targets: Tensor
    """(N, 1)"""
    others: Tensor
    """The inputs to predict."""
    truth: Tensor
    """The targets to predict, (n,), in their own unit and in double precision."""
    center: float
    scale: float

    def in_units(self, outputs: Tensor) -> Tensor:
        """Convert outputs (..., 1) to targets in their own unit, (...)."""
        return outputs.squeeze(-1).double() * self.scale + self.center


@dataclass(frozen=True, eq=False)
class Split:
    """One split of a data set."""

    folds: list[StandardisedPart]
    """The training parts of the cross-validation; the examples to predict are the left-out fold."""
    whole: StandardisedPart
    """All rows except the test rows; the examples to predict are the test rows."""
    precisions: Limits
    """The limits of the search for the precision."""


def load_split(dataset: str, split: int, folder: DataFolder) -> Split:
    """Load a published split by its seed, 1 to 5."""
    if dataset == SYNTHETIC:
        inputs, targets = synthetic_data()
    else:
        data = load_regression(dataset, folder)
        inputs, targets = data.inputs, data.targets
    train, test = published_split(len(targets), split)
    folds = [standardised(inputs, targets, rows, left_out) for rows, left_out in published_folds(train)]
    return Split(folds, standardised(inputs, targets, train, test), PRECISIONS[dataset])


def synthetic_data(count: int = SYNTHETIC_ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Return data for tests: a smooth function of three of five inputs, with more noise where the first is positive."""
    source = np.random.RandomState(0)
    inputs = source.uniform(-1, 1, (count, 5))
    noise = source.normal(size=count) * (0.05 + 0.2 * (inputs[:, 0] > 0))
    return inputs, 3 + np.sin(3 * inputs[:, 0]) + inputs[:, 1] * inputs[:, 2] + noise


def standardised(inputs: np.ndarray, targets: np.ndarray, rows: np.ndarray, others: np.ndarray) -> StandardisedPart:
    """Return `rows` to train on and `others` to predict. A feature that is constant in `rows` is only centred."""
    mean, std = inputs[rows].mean(0), inputs[rows].std(0)
    std[std == 0] = 1
    center, scale = float(targets[rows].mean()), float(targets[rows].std()) or 1.0

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))

    return StandardisedPart(
        tensor((inputs[rows] - mean) / std),
        tensor((targets[rows, None] - center) / scale),
        tensor((inputs[others] - mean) / std),
        torch.from_numpy(targets[others].astype(np.float64)),
        center,
        scale,
    )
