"""Means of scores, also on a scale from 0 (constant variance) to 100 (the best variance at each point)."""

import math

import torch
from torch import Tensor

from batchbayes._common.checks import check_no_nan, check_not_empty, check_same_shape, refuse


def mean_score(scores: Tensor) -> float:
    r"""Mean over all elements, :math:`\tfrac1N \sum_i s_i`, summed in float64. Shapes: (N, ...) -> number.

    >>> mean_score(torch.tensor([1.0, 4.0]))
    2.5
    """
    check_not_empty("scores", scores)
    check_no_nan("scores", scores)
    return float(scores.detach().mean(dtype=torch.float64))


def negative_log_likelihood(log_likelihood: Tensor) -> float:
    r"""Mean negative log-likelihood, :math:`-\tfrac1N \sum_i \log p(y_i)`, in nats, for any likelihood.

    Infinite if one truth had probability zero. Shapes: (N, ...) -> number.

    >>> negative_log_likelihood(torch.tensor([-1.0, -2.0]))
    1.5
    """
    return -mean_score(log_likelihood)


def normalised_score(score: Tensor, constant: Tensor, optimum: Tensor) -> float:
    r"""Where a score stands between the best constant variance (0) and the per-point optimum (100),

    .. math:: 100 \, (\bar m - \bar m_{CU}) / (\bar m_{opt} - \bar m_{CU}),

    a ratio of test means, not a mean of ratios. Below zero: worse than constant. It serves CRPS and
    log-likelihood alike: the direction of the score cancels. All three have to be around the same predicted
    means (see ``best_constant_precision`` and ``scores.optima``). Shapes: three times (N, ...) -> number.
    Reference: Teye, Azizpour & Smith, ICML 2018.

    >>> normalised_score(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 2.0]), torch.tensor([0.5, 1.5]))
    50.0
    """
    check_same_shape("constant", constant, "score", score)
    check_same_shape("optimum", optimum, "score", score)
    at_constant, at_optimum = mean_score(constant), mean_score(optimum)
    span = at_optimum - at_constant
    if span == 0 or not math.isfinite(span):
        refuse(
            "a finite optimum that differs from the constant-variance score",
            f"means {at_optimum} and {at_constant}",
            "Equal errors leave nothing to normalise; else check that all three are the same score.",
        )
    return 100 * ((mean_score(score) - at_constant) / span)
