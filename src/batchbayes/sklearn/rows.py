"""The rows of a training table: a fixed order, weights as repetitions, and folds that keep equal rows together."""

import numpy as np

from batchbayes._common.rng import stream_seed
from batchbayes.errors import BatchbayesError

COPIES = 4
"""Rows with weights that are not whole numbers are repeated this many times on average."""


def ordered_rows(inputs: np.ndarray, targets: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    """Return which rows to train on, in an order that depends on their values alone.

    A weight is a number of repetitions. So a weight of two is the same as a row that occurs twice, and a weight of zero
    the same as a row that is left out. Other weights are rounded, so that their running total is right.

    >>> ordered_rows(np.array([[2.0], [1.0]]), np.zeros(2), np.array([2, 1]))
    array([1, 0, 0])
    """
    order = np.lexsort([targets, *inputs.T[::-1]])
    if weights is None:
        return order
    if not np.isfinite(weights).all() or (weights < 0).any() or not weights.sum() > 0:
        raise BatchbayesError(
            expected="finite sample weights of zero or more, not all zero",
            got=f"weights from {weights.min():g} to {weights.max():g}",
            fix="check sample_weight",
        )
    if not (weights == np.round(weights)).all():
        weights = weights * float(COPIES * (weights > 0).sum() / weights.sum())
    running_total = np.cumsum(np.asarray(weights)[order])
    ends = np.floor(running_total + 0.5).astype(int)
    return np.repeat(order, np.diff(ends, prepend=0))


def folds_of(inputs: np.ndarray, num_folds: int, seed: int) -> np.ndarray:
    """Return the fold of each row, (N,). Rows with equal inputs are in one fold, so that none is tested on its copy."""
    _, group = np.unique(inputs, axis=0, return_inverse=True)
    group = group.reshape(-1)
    count = int(group.max()) + 1
    if count < 2:
        group, count = np.arange(len(inputs)), len(inputs)
    shuffled = np.random.default_rng(stream_seed(seed, "folds")).permutation(count)
    return shuffled[group] % min(num_folds, count)
