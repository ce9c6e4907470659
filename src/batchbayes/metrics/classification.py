"""Accuracy, and calibration by bins: of the answers with confidence p, is a share p right?

Scores of class probabilities (N, ..., K), with or without labels (N, ...).

Elements whose label is `ignore_index` are left out. Then the scores of the others come in one row, (n,).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from batchbayes._common.checks import (
    SUM_TOLERANCE,
    Values,
    check_bool,
    check_in_unit_interval,
    check_labels,
    check_no_nan,
    check_not_empty,
    check_probabilities,
    whole_number,
    without_ignored,
)
from batchbayes._common.signatures import checked
from batchbayes.errors import BatchbayesError

NUM_BINS = 15
"""The number of bins in Guo et al., ICML 2017, and in most published values."""


@dataclass(frozen=True, eq=False)
class Reliability:
    """Sums over the examples in each bin of confidence, the lowest confidence first.

    Sums are (B,) in float64. Bins of equal mass may hold fractions of examples that have the same confidence.
    """

    counts: Tensor
    confidence_sums: Tensor
    correct_sums: Tensor
    edges: Tensor | None = None
    """Where bins begin and end, (B + 1,); None for bins of equal width."""

    @property
    def mean_confidence(self) -> Tensor:
        """Mean confidence in each bin, (B,), NaN in an empty bin."""
        return self.confidence_sums / self.counts

    @property
    def accuracy(self) -> Tensor:
        """Share of right answers in each bin, (B,), NaN in an empty bin."""
        return self.correct_sums / self.counts

    def expected_calibration_error(self) -> float:
        """Return what the function `expected_calibration_error` returns, but for these bins, of equal width or not."""
        total = float(self.counts.sum())
        if total == 0:
            raise BatchbayesError(expected="at least one example in the bins", got="none", fix="add examples first")
        return float((self.correct_sums - self.confidence_sums).abs().sum()) / total


@checked
def accuracy(probs: Values, labels: Values, ignore_index: int | None = None) -> float:
    r"""Return the share of right answers, $\frac1N \sum_i 1[\arg\max_k p_{ik} = y_i]$.

    Labels of `ignore_index` do not count. Shapes: probs (N, ..., K), labels (N, ...) -> number.

    >>> accuracy(torch.tensor([[0.25, 0.75], [0.6, 0.4]]), torch.tensor([0, 0]))
    0.5
    """
    probs, labels = without_ignored(probs, labels, ignore_index)
    check_not_empty("labels", labels)
    return 1 - float(is_misclassified(probs, labels).double().mean())


@checked
def equal_width_reliability(confidence: Values, correct: Values, num_bins: int = NUM_BINS) -> Reliability:
    r"""Sort examples into bins $((b-1)/B, b/B]$ of confidence. A confidence of zero goes into the first bin.

    For the answers of a classifier pass `max_probability(probs)` and `~is_misclassified(probs, labels)`.
    Shapes: confidence (N, ...), correct bool (N, ...) -> bins (B,).

    >>> confidence, correct = torch.tensor([0.2, 0.9, 1.0]), torch.tensor([False, True, True])
    >>> bins = equal_width_reliability(confidence, correct, num_bins=2)
    >>> bins.counts.tolist(), bins.correct_sums.tolist()
    ([1.0, 2.0], [0.0, 2.0])
    """
    _check_bins(confidence, correct, num_bins)
    confidence = confidence.detach().double().flatten().contiguous()  # bucketize warns about other strides
    edges = torch.arange(1, num_bins, dtype=torch.float64, device=confidence.device) / num_bins
    index = torch.bucketize(confidence, edges)

    def sums(weights: Tensor) -> Tensor:
        return torch.bincount(index, weights, minlength=num_bins)

    return Reliability(sums(torch.ones_like(confidence)), sums(confidence), sums(correct.double().flatten()))


@checked
def equal_mass_reliability(confidence: Values, correct: Values, num_bins: int = NUM_BINS) -> Reliability:
    r"""Sort examples by confidence and cut them into bins of equal size. The first N mod B bins have one more.

    If a cut lies between examples of the same confidence, these are shared between the bins in proportion. So the
    result does not depend on the order of the data. Shapes: confidence (N, ...), correct bool (N, ...) -> bins (B,).
    Reference: Nguyen & O'Connor, EMNLP 2015; the adaptive error of Nixon et al., CVPR-W 2019, is similar.

    >>> confidence, correct = torch.tensor([0.9, 0.9, 0.9]), torch.tensor([False, True, True])
    >>> bins = equal_mass_reliability(confidence, correct, num_bins=2)
    >>> [round(share, 4) for share in bins.accuracy.tolist()]
    [0.6667, 0.6667]
    """
    _check_bins(confidence, correct, num_bins)
    check_not_empty("confidence", confidence)
    values, inverse, sizes = torch.unique(
        confidence.detach().double().flatten(), return_inverse=True, return_counts=True
    )
    hits = torch.bincount(inverse, correct.double().flatten(), minlength=len(values))
    last_rank = sizes.cumsum(0)  # (G,) rank of the last example of each group of equal confidences
    cuts = torch.arange(1, num_bins + 1, device=values.device)
    cuts = cuts * (len(inverse) // num_bins) + cuts.clamp(max=len(inverse) % num_bins)  # (B,)
    group = torch.searchsorted(last_rank, cuts).clamp(max=len(values) - 1)  # the group that holds each cut
    share = (cuts - (last_rank - sizes)[group]) / sizes[group]  # how much of that group lies below the cut

    def sums(per_group: Tensor) -> Tensor:
        below = per_group.cumsum(0)[group] - (1 - share) * per_group[group]
        return torch.diff(below, prepend=below.new_zeros(1))

    return Reliability(sums(sizes.double()), sums(values * sizes), sums(hits), torch.cat([values[:1], values[group]]))


@checked
def expected_calibration_error(
    probs: Values, labels: Values, num_bins: int = NUM_BINS, ignore_index: int | None = None
) -> float:
    r"""Return the mean gap between confidence and accuracy (ECE), $\sum_b \frac{n_b}{N} |acc_b - conf_b|$.

    The confidence is the probability of the most probable class, and its bins have equal width. The result lies between
    0 and 1. It is biased upwards for few examples or many bins, so state the bins beside the number. Labels of
    `ignore_index` do not count. For other bins see `equal_mass_reliability`, and for data that comes in pieces
    `ReliabilityHistogram`.
    Shapes: probs (N, ..., K), labels (N, ...) -> number. Reference: Guo et al., ICML 2017, equation 3.

    >>> expected_calibration_error(torch.tensor([[0.25, 0.75], [0.75, 0.25]]), torch.tensor([1, 1]))
    0.25
    """
    probs, labels = without_ignored(probs, labels, ignore_index)
    check_not_empty("labels", labels)
    right = ~is_misclassified(probs, labels)
    return equal_width_reliability(max_probability(probs), right, num_bins).expected_calibration_error()


@checked
def classwise_calibration_error(
    probs: Values, labels: Values, num_bins: int = NUM_BINS, ignore_index: int | None = None
) -> float:
    r"""Return the mean over classes of the equal-width calibration error of $p_k$ as a forecast of $y = k$.

    Labels of `ignore_index` do not count. Shapes: probs (N, ..., K), labels (N, ...) -> number.
    Reference: Kull et al., NeurIPS 2019.

    >>> classwise_calibration_error(torch.tensor([[0.75, 0.25], [0.75, 0.25]]), torch.tensor([0, 0]))
    0.25
    """
    probs, labels = without_ignored(probs, labels, ignore_index)
    check_probabilities(probs)
    num_classes = probs.shape[-1]
    check_labels(labels, probs.shape[:-1], num_classes)
    errors = [
        equal_width_reliability(probs[..., k], labels == k, num_bins).expected_calibration_error()
        for k in range(num_classes)
    ]
    return sum(errors) / num_classes


def _check_bins(confidence: Tensor, correct: Tensor, num_bins: int) -> None:
    check_bool("correct", correct, "confidence", confidence)
    check_in_unit_interval("confidence", confidence)
    whole_number("num_bins", num_bins)


@checked
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


@checked
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


@checked
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


@checked
def entropy(probs: Values) -> Tensor:
    r"""Return the Shannon entropy in nats, $-\sum_k p_k \log p_k$ with $0 \log 0 = 0$.

    Shapes: probs (N, ..., K) -> (N, ...).

    >>> entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
    tensor([0.6931, 0.0000])
    """
    check_probabilities(probs)
    return torch.special.entr(probs).sum(-1, dtype=torch.float64).to(probs.dtype)


@checked
def max_probability(probs: Values) -> Tensor:
    r"""Return the probability of the most probable class, $\max_k p_k$.

    Shapes: probs (N, ..., K) -> (N, ...). Reference: Hendrycks & Gimpel, ICLR 2017.

    >>> max_probability(torch.tensor([[0.25, 0.75]]))
    tensor([0.7500])
    """
    check_probabilities(probs)
    return probs.amax(-1)
