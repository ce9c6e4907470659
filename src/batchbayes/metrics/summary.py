"""Means of scores, and scores on a scale from 0 (constant variance) to 100 (the best variance for each point)."""

import math

import torch

from batchbayes._common.checks import Values, check_no_nan, check_not_empty, check_same_shape, takes_arrays
from batchbayes.errors import BatchbayesError


@takes_arrays
def mean_score(scores: Values) -> float:
    r"""Return the mean over all elements, $\frac1N \sum_i s_i$. Shapes: (N, ...) -> number.

    >>> mean_score(torch.tensor([1.0, 4.0]))
    2.5
    """
    check_not_empty("scores", scores)
    check_no_nan("scores", scores)
    return float(scores.detach().mean(dtype=torch.float64))


@takes_arrays
def negative_log_likelihood(log_likelihood: Values) -> float:
    r"""Return the mean negative log-likelihood in nats, $-\frac1N \sum_i \log p(y_i)$.

    It is infinite if one true value has probability zero. Shapes: (N, ...) -> number.

    >>> negative_log_likelihood(torch.tensor([-1.0, -2.0]))
    1.5
    """
    return 0.0 - mean_score(log_likelihood)  # a minus sign would make -0.0 of a mean of zero


@takes_arrays
def normalised_score(score: Values, constant: Values, optimum: Values) -> float:
    r"""Return a score on a scale from 0, the best constant variance, to 100, the best variance for each point.

    It is $100 (\bar m - \bar m_{const}) / (\bar m_{opt} - \bar m_{const})$, a ratio of means over the examples. A value
    below zero is worse than a constant variance. It works for CRPS and for log-likelihood, because the direction of the
    score cancels. All three scores must be of the same predicted means (see `best_constant_precision` and
    `scores.optima`). Shapes: each of the three (N, ...) -> number. Reference: Teye, Azizpour & Smith, ICML 2018.

    >>> normalised_score(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 2.0]), torch.tensor([0.5, 1.5]))
    50.0
    """
    check_same_shape("constant", constant, "score", score)
    check_same_shape("optimum", optimum, "score", score)
    at_constant, at_optimum = mean_score(constant), mean_score(optimum)
    span = at_optimum - at_constant
    if span == 0 or not math.isfinite(span):
        raise BatchbayesError(
            expected="a finite optimum that differs from the constant-variance score",
            got=f"means {at_optimum} and {at_constant}",
            fix="check that all three are the same score; if all errors are equal, this scale does not exist",
        )
    return 100 * ((mean_score(score) - at_constant) / span)
