"""Accuracy, and calibration by binning: is a confidence of p right in a share p of the cases?"""

from dataclasses import dataclass

import torch
from torch import Tensor

from batchbayes._common.checks import (
    check_bool,
    check_in_unit_interval,
    check_labels,
    check_not_empty,
    check_probabilities,
    check_same_shape,
    refuse,
)
from batchbayes.scores import is_misclassified

# The number of bins of Guo et al., ICML 2017, with which most published values were computed.
NUM_BINS = 15


@dataclass(frozen=True, eq=False)
class Reliability:
    """Sums over the examples of each confidence bin, from the lowest confidence to the highest.

    All of shape (B,) and float64. Equal-mass bins may hold fractions of examples of equal confidence.
    """

    counts: Tensor
    confidence_sums: Tensor
    correct_sums: Tensor

    @property
    def mean_confidence(self) -> Tensor:
        """(B,), NaN in an empty bin."""
        return self.confidence_sums / self.counts

    @property
    def accuracy(self) -> Tensor:
        """(B,), NaN in an empty bin."""
        return self.correct_sums / self.counts


def accuracy(probs: Tensor, labels: Tensor) -> float:
    r"""Share of examples whose most probable class is the true one. Shapes: (N, ..., K), (N, ...) -> number.

    >>> accuracy(torch.tensor([[0.25, 0.75], [0.6, 0.4]]), torch.tensor([0, 0]))
    0.5
    """
    check_not_empty("labels", labels)
    return 1 - float(is_misclassified(probs, labels).double().mean())


def equal_width_reliability(confidence: Tensor, correct: Tensor, num_bins: int = NUM_BINS) -> Reliability:
    r"""Examples sorted into bins :math:`((b-1)/B, b/B]` of confidence; zero goes into the first.

    For the usual ECE: confidence = ``max_probability(probs)``, correct =
    ``~is_misclassified(probs, labels)``. Shapes: confidence (N, ...), correct bool (N, ...) -> bins (B,).

    >>> confidence, correct = torch.tensor([0.2, 0.9, 1.0]), torch.tensor([False, True, True])
    >>> bins = equal_width_reliability(confidence, correct, num_bins=2)
    >>> bins.counts.tolist(), bins.correct_sums.tolist()
    ([1.0, 2.0], [0.0, 2.0])
    """
    _check_bins(confidence, correct, num_bins)
    confidence = confidence.double().flatten().contiguous()  # bucketize warns of strides
    edges = torch.arange(1, num_bins, dtype=torch.float64, device=confidence.device) / num_bins
    index = torch.bucketize(confidence, edges)

    def sums(weights: Tensor) -> Tensor:
        return torch.bincount(index, weights, minlength=num_bins)

    return Reliability(sums(torch.ones_like(confidence)), sums(confidence), sums(correct.double().flatten()))


def equal_mass_reliability(confidence: Tensor, correct: Tensor, num_bins: int = NUM_BINS) -> Reliability:
    r"""Examples sorted by confidence and cut into bins of equal size; the first N mod B are larger by one.

    Examples of equal confidence on both sides of a cut are shared out in proportion, so that the result does
    not depend on the order of the data. Shapes: confidence (N, ...), correct bool (N, ...) -> bins (B,).
    Reference: Nguyen & O'Connor, EMNLP 2015; the adaptive error of Nixon et al., CVPR-W 2019, is alike.

    >>> confidence, correct = torch.tensor([0.9, 0.9, 0.9]), torch.tensor([False, True, True])
    >>> bins = equal_mass_reliability(confidence, correct, num_bins=2)
    >>> [round(share, 4) for share in bins.accuracy.tolist()]
    [0.6667, 0.6667]
    """
    _check_bins(confidence, correct, num_bins)
    check_not_empty("confidence", confidence)
    values, inverse, sizes = torch.unique(confidence.double().flatten(), return_inverse=True, return_counts=True)
    hits = torch.bincount(inverse, correct.double().flatten(), minlength=len(values))
    last_rank = sizes.cumsum(0)  # (G,) rank at which each group of equal confidences ends
    cuts = torch.arange(1, num_bins + 1, device=values.device)
    cuts = cuts * (len(inverse) // num_bins) + cuts.clamp(max=len(inverse) % num_bins)  # (B,)
    group = torch.searchsorted(last_rank, cuts).clamp(max=len(values) - 1)  # the group that holds each cut
    share = (cuts - (last_rank - sizes)[group]) / sizes[group]  # how much of that group lies below the cut

    def sums(per_group: Tensor) -> Tensor:
        below = per_group.cumsum(0)[group] - (1 - share) * per_group[group]
        return torch.diff(below, prepend=below.new_zeros(1))

    return Reliability(sums(sizes.double()), sums(values * sizes), sums(hits))


def expected_calibration_error(reliability: Reliability) -> float:
    r"""Mean gap between confidence and accuracy, :math:`\sum_b \tfrac{n_b}{N} |acc_b - conf_b|`, from 0 to 1.

    Equal width or equal mass, as the bins are. It is biased upwards for few examples or many bins: name the
    bins beside the number. Shapes: bins (B,) -> number. Reference: Guo et al., ICML 2017, equation 3.

    >>> bins = equal_width_reliability(torch.tensor([0.25, 0.75]), torch.tensor([False, False]))
    >>> expected_calibration_error(bins)
    0.5
    """
    total = float(reliability.counts.sum())
    if total == 0:
        refuse("at least one example", "none", "Add examples before asking for the calibration error.")
    return float((reliability.correct_sums - reliability.confidence_sums).abs().sum()) / total


def classwise_calibration_error(probs: Tensor, labels: Tensor, num_bins: int = NUM_BINS) -> float:
    r"""Mean over classes of the equal-width calibration error of :math:`p_k` as a forecast of :math:`y = k`.

    Shapes: probs (N, ..., K), labels (N, ...) -> number. Reference: Kull et al., NeurIPS 2019.

    >>> classwise_calibration_error(torch.tensor([[0.75, 0.25], [0.75, 0.25]]), torch.tensor([0, 0]))
    0.25
    """
    check_probabilities(probs)
    check_labels(labels, probs)
    num_classes = probs.shape[-1]
    errors = [
        expected_calibration_error(equal_width_reliability(probs[..., k], labels == k, num_bins))
        for k in range(num_classes)
    ]
    return sum(errors) / num_classes


def _check_bins(confidence: Tensor, correct: Tensor, num_bins: int) -> None:
    check_same_shape("correct", correct, "confidence", confidence)
    check_bool("correct", correct)
    check_in_unit_interval("confidence", confidence)
    if num_bins < 1:
        refuse("one bin or more", f"{num_bins}", f"{NUM_BINS} is the usual number.")
