"""Scores of class probabilities (N, ..., K), with or without labels (N, ...).

Elements whose label is `ignore_index` are left out. Then the scores of the others come in one row, (n,).
"""

import torch
from torch import Tensor

from batchbayes._common.checks import (
    SUM_TOLERANCE,
    Values,
    check_labels,
    check_no_nan,
    check_probabilities,
    takes_arrays,
    without_ignored,
)
from batchbayes.errors import BatchbayesError


@takes_arrays
def categorical_log_likelihood(log_probs: Values, labels: Values, ignore_index: int | None = None) -> Tensor:
    r"""Return the log-probability of the true class, $\log p_y$. It is $-\infty$ where $p_y = 0$.

    Shapes: log_probs (N, ..., K), labels (N, ...) -> (N, ...).

    >>> categorical_log_likelihood(torch.tensor([[0.25, 0.75]]).log(), torch.tensor([1]))
    tensor([-0.2877])
    """
    log_probs, labels = without_ignored(log_probs, labels, ignore_index)
    check_no_nan("log_probs", log_probs)
    if not log_probs.ndim or not log_probs.is_floating_point():
        raise BatchbayesError(
            expected="floating-point log-probabilities of shape (N, ..., K)",
            got=f"{log_probs.dtype} of shape {tuple(log_probs.shape)}",
            fix="put examples first and classes last",
        )
    check_labels(labels, log_probs.shape[:-1], log_probs.shape[-1])
    total = torch.logsumexp(log_probs.detach().double(), -1).abs()
    if total.numel() and not float(total.max()) <= SUM_TOLERANCE:
        raise BatchbayesError(
            expected="log-probabilities over the last axis, with a log-sum-exp of 0",
            got=f"a log-sum-exp of up to {float(total.max()):.3g} in absolute value",
            fix="apply log_softmax over the classes, and put classes last",
        )
    return log_probs.gather(-1, labels.long().unsqueeze(-1)).squeeze(-1)


@takes_arrays
def brier(probs: Values, labels: Values, ignore_index: int | None = None) -> Tensor:
    r"""Return the Brier score, $\sum_k (p_k - 1[y = k])^2$, from 0 (certain and right) to 2 (certain and wrong).

    This is the original sum over all classes. For two classes it is twice the score that is often quoted.
    Shapes: probs (N, ..., K), labels (N, ...) -> (N, ...). Reference: Brier, Monthly Weather Review 78 (1950).

    >>> brier(torch.tensor([[0.25, 0.75]]), torch.tensor([0]))
    tensor([1.1250])
    """
    probs, labels = without_ignored(probs, labels, ignore_index)
    check_probabilities(probs)
    check_labels(labels, probs.shape[:-1], probs.shape[-1])
    residual = probs.scatter_add(-1, labels.long().unsqueeze(-1), probs.new_full((*labels.shape, 1), -1.0))
    return residual.square().sum(-1, dtype=torch.float64).to(probs.dtype)


@takes_arrays
def is_misclassified(probs: Values, labels: Values, ignore_index: int | None = None) -> Tensor:
    r"""Return whether the most probable class is wrong, $1[\arg\max_k p_k \neq y]$. The first of equal classes counts.

    Shapes: probs (N, ..., K), labels (N, ...) -> bool (N, ...).

    >>> is_misclassified(torch.tensor([[0.25, 0.75], [0.6, 0.4]]), torch.tensor([0, 0]))
    tensor([ True, False])
    >>> is_misclassified(torch.tensor([[0.25, 0.75], [0.6, 0.4]]), torch.tensor([0, 255]), ignore_index=255)
    tensor([True])
    """
    probs, labels = without_ignored(probs, labels, ignore_index)
    check_probabilities(probs)
    check_labels(labels, probs.shape[:-1], probs.shape[-1])
    return probs.argmax(-1) != labels


@takes_arrays
def entropy(probs: Values) -> Tensor:
    r"""Return the Shannon entropy in nats, $-\sum_k p_k \log p_k$ with $0 \log 0 = 0$.

    Shapes: probs (N, ..., K) -> (N, ...).

    >>> entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
    tensor([0.6931, 0.0000])
    """
    check_probabilities(probs)
    return torch.special.entr(probs).sum(-1, dtype=torch.float64).to(probs.dtype)


@takes_arrays
def max_probability(probs: Values) -> Tensor:
    r"""Return the probability of the most probable class, $\max_k p_k$.

    Shapes: probs (N, ..., K) -> (N, ...). Reference: Hendrycks & Gimpel, ICLR 2017.

    >>> max_probability(torch.tensor([[0.25, 0.75]]))
    tensor([0.7500])
    """
    check_probabilities(probs)
    return probs.amax(-1)
