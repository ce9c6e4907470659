"""Columns of a table as inputs of a network: each column itself, and how far it is through each of its bins.

A network learns steps and thresholds of a column slowly from one number, and quickly from such bins (the piecewise
linear encoding of Gorishniy, Rubachev and Babenko, NeurIPS 2022, with quantiles as the ends of bins).
"""

from collections.abc import Sequence

import numpy as np

MOST_INPUTS = 512
"""Tables with many columns get fewer bins, so that there are at most so many."""


def bin_ends(columns: np.ndarray, num_bins: int) -> list[np.ndarray]:
    """Return the ends of the bins of each column, for columns (N, Q). A column of two values or fewer has no bins.

    >>> bin_ends(np.array([[0.0, 1.0], [1.0, 1.0], [2.0, 1.0], [6.0, 1.0]]), 2)
    [array([0. , 1.5, 6. ]), array([], dtype=float64)]
    """
    count = min(num_bins, MOST_INPUTS // columns.shape[1])
    found = [np.unique(np.quantile(column, np.linspace(0, 1, count + 1))) for column in columns.T]
    return [ends if len(ends) > 2 else ends[:0] for ends in found]


def encoded(columns: np.ndarray, bins: Sequence[np.ndarray]) -> np.ndarray:
    """Return columns (N, Q), followed by one number from 0 to 1 for each bin: 0 below it and 1 above it.

    >>> encoded(np.array([[1.0]]), [np.array([0.0, 2.0, 4.0])])
    array([[1. , 0.5, 0. ]])
    """
    shares = [
        np.clip((column[:, None] - ends[:-1]) / np.diff(ends), 0, 1)
        for column, ends in zip(columns.T, bins, strict=True)
        if len(ends)
    ]
    return np.concatenate([columns, *shares], 1)
