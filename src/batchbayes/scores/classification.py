"""Scores of class probabilities (N, ..., K) against labels (N, ...), and of the probabilities alone."""

import torch
from torch import Tensor

from batchbayes._common.checks import SUM_TOLERANCE, check_labels, check_no_nan, check_probabilities, refuse


def categorical_log_likelihood(log_probs: Tensor, labels: Tensor) -> Tensor:
    r"""Log-probability of the true class, :math:`\log p_{y}`; :math:`-\infty` where the truth was ruled out.

    Shapes: log_probs (N, ..., K), labels (N, ...) -> (N, ...).

    >>> categorical_log_likelihood(torch.tensor([[0.25, 0.75]]).log(), torch.tensor([1]))
    tensor([-0.2877])
    """
    check_no_nan("log_probs", log_probs)
    check_labels(labels, log_probs)
    total = torch.logsumexp(log_probs.detach().double(), -1).abs()
    if total.numel() and not float(total.max()) <= SUM_TOLERANCE:
        refuse(
            "log-probabilities over the last axis",
            f"a log-sum-exp of up to {float(total.max()):.3g} in size, where it should be 0",
            "Apply log_softmax over the classes, and put classes last.",
        )
    return _take(log_probs, labels)


def brier(probs: Tensor, labels: Tensor) -> Tensor:
    r"""Brier score, :math:`\sum_k (p_k - 1[y = k])^2`, from 0 (certain and right) to 2 (certain and wrong).

    Brier, Monthly Weather Review 78 (1950): his sum over classes, which for two classes is twice the score
    that is often quoted. Shapes: probs (N, ..., K), labels (N, ...) -> (N, ...).

    >>> brier(torch.tensor([[0.25, 0.75]]), torch.tensor([0]))
    tensor([1.1250])
    """
    check_probabilities(probs)
    check_labels(labels, probs)
    residual = probs.scatter_add(-1, labels.long().unsqueeze(-1), probs.new_full((*labels.shape, 1), -1.0))
    return residual.square().sum(-1, dtype=torch.float64).to(probs.dtype)


def is_misclassified(probs: Tensor, labels: Tensor) -> Tensor:
    r"""Error of the most probable class, :math:`1[\arg\max_k p_k \neq y]`; of equal ones the first is chosen.

    Shapes: probs (N, ..., K), labels (N, ...) -> bool (N, ...).

    >>> is_misclassified(torch.tensor([[0.25, 0.75], [0.6, 0.4]]), torch.tensor([0, 0]))
    tensor([ True, False])
    """
    check_probabilities(probs)
    check_labels(labels, probs)
    return probs.argmax(-1) != labels


def entropy(probs: Tensor) -> Tensor:
    r"""Shannon entropy in nats, :math:`-\sum_k p_k \log p_k` with :math:`0 \log 0 = 0`.

    Shapes: probs (N, ..., K) -> (N, ...).

    >>> entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
    tensor([0.6931, 0.0000])
    """
    check_probabilities(probs)
    return torch.special.entr(probs).sum(-1, dtype=torch.float64).to(probs.dtype)


def max_probability(probs: Tensor) -> Tensor:
    r"""Confidence in the most probable class, :math:`\max_k p_k`.

    Shapes: probs (N, ..., K) -> (N, ...). Reference: Hendrycks & Gimpel, ICLR 2017.

    >>> max_probability(torch.tensor([[0.25, 0.75]]))
    tensor([0.7500])
    """
    check_probabilities(probs)
    return probs.amax(-1)


def _take(values: Tensor, labels: Tensor) -> Tensor:
    return values.gather(-1, labels.long().unsqueeze(-1)).squeeze(-1)
