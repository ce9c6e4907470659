"""The rows of a training table: a fixed order, weights as repetitions, and folds."""

import numpy as np

from batchbayes._common.rng import stream_seed
from batchbayes.errors import BatchbayesError

FEWEST_ROWS = 5
"""Fewer rows cannot be split into folds with two rows or more for batch normalisation."""
COPIES = 4
"""Rows with weights that are not whole numbers are repeated this many times on average."""
MOST_ROWS = 100_000_000
"""More repetitions are refused before memory runs out."""


def ordered_rows(inputs: np.ndarray, targets: np.ndarray, weights: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Return which rows to train on, in an order that depends on their values alone, and which of them are copies.

    A whole weight is a number of repetitions: a weight of zero is the same as a row that is left out. Other weights are
    rounded, so that their running total is right. Copies of a row have the same number in the second array, its place
    in the order: they stay in one fold, since a network that has seen a copy has seen the row.

    >>> ordered_rows(np.array([[5.0], [4.0], [3.0], [2.0], [1.0]]), np.zeros(5), np.array([2, 1, 1, 1, 1]))
    (array([4, 3, 2, 1, 0, 0]), array([0, 1, 2, 3, 4, 4]))
    """
    last = np.zeros(len(inputs)) if weights is None else weights
    order = np.lexsort([last, targets, *inputs.T[::-1]])
    if weights is None:
        return order, np.arange(len(order))
    if not np.isfinite(weights).all() or (weights < 0).any() or not weights.sum() > 0:
        raise BatchbayesError(
            expected="finite sample weights of zero or more, not all zero",
            got=f"weights from {weights.min():g} to {weights.max():g}",
            fix="check sample_weight",
        )
    if (count := int((weights > 0).sum())) < FEWEST_ROWS:
        fix = "leave the weights out, or give more rows a weight"
        raise BatchbayesError(f"at least {FEWEST_ROWS} rows with a weight above zero", f"{count}", fix)
    is_whole = (weights == np.round(weights)).all()
    if is_whole and weights.sum() > MOST_ROWS:
        raise BatchbayesError(
            expected=f"whole sample weights, which are repetitions of rows, with a sum of at most {MOST_ROWS:,}",
            got=f"a sum of {weights.sum():g}",
            fix="if they are shares and not repetitions, pass sample_weight / sample_weight.sum()",
        )
    if not is_whole:
        weights = weights * float(COPIES * (weights > 0).sum() / weights.sum())
    ends = np.floor(np.cumsum(np.asarray(weights)[order]) + 0.5).astype(int)
    places = np.repeat(np.arange(len(order)), np.diff(ends, prepend=0))
    return order[places], places


def folds_of(rows: np.ndarray, num_folds: int, num_seeds: int, seed: int) -> np.ndarray:
    """Return a random fold for each row and seed, (R, N). Copies of a row, with one number in `rows`, share it."""
    _, group = np.unique(rows, return_inverse=True)
    count, random = int(group.max()) + 1, np.random.default_rng(stream_seed(seed, "folds"))
    return np.stack([random.permutation(count)[group] % min(num_folds, count) for _ in range(num_seeds)])
