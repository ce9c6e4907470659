"""Counters for data that comes in pieces, such as all pixels of all images. Their memory does not grow.

Each counter has a method `add` for a piece of any shape, which may be empty. The `Reliability` and `ScoreCounts` that
it returns have the summaries as methods. One counter is for one thread.
"""

import torch
from torch import Tensor

from batchbayes._common.checks import Values, check_bool, check_classes, check_finite, check_same_shape
from batchbayes._common.signatures import checked
from batchbayes.errors import BatchbayesError
from batchbayes.metrics.classification import NUM_BINS, Reliability, equal_width_reliability
from batchbayes.metrics.ranking import ScoreCounts, both_classes


class ConfusionMatrix:
    r"""Counts $C_{yk}$ of the examples of class y that were predicted as k. Examples of the ignored label do not count.

    >>> matrix = ConfusionMatrix(num_classes=2, ignore_index=255)
    >>> matrix.add(torch.tensor([0, 1, 1, 1]), torch.tensor([0, 0, 1, 255]))
    >>> matrix.counts.tolist()
    [[1, 1], [0, 1]]
    >>> matrix.intersection_over_union().tolist()
    [0.5, 0.5]
    """

    def __init__(self, num_classes: int, ignore_index: int | None = None) -> None:
        self.num_classes = num_classes
        self.ignore_index = ignore_index
        self.counts = torch.zeros(num_classes, num_classes, dtype=torch.int64)

    @checked
    def add(self, predicted: Values, labels: Values) -> None:
        """Count a piece. Shapes: predicted classes (N, ...), labels (N, ...)."""
        check_same_shape("predicted", predicted, "labels", labels)
        if self.ignore_index is not None:
            keep = labels != self.ignore_index
            predicted, labels = predicted[keep], labels[keep]
        check_classes("predicted classes", predicted, self.num_classes)
        check_classes("labels", labels, self.num_classes)
        cell = labels.long().flatten() * self.num_classes + predicted.long().flatten()
        self.counts += torch.bincount(cell, minlength=self.num_classes**2).view_as(self.counts).cpu()

    def pixel_accuracy(self) -> float:
        r"""Return the share of examples on the diagonal, $\sum_k C_{kk} / \sum_{yk} C_{yk}$."""
        return int(self.counts.diagonal().sum()) / self._total()

    def intersection_over_union(self) -> Tensor:
        r"""Return $C_{kk} / (\sum_y C_{yk} + \sum_y C_{ky} - C_{kk})$ for each class, NaN for a class never seen.

        Shape: (K,) in float64. Reference: Everingham et al., IJCV 88 (2010).
        """
        hits = self.counts.diagonal().double()
        return hits / (self.counts.sum(0) + self.counts.sum(1) - hits)

    def mean_intersection_over_union(self) -> float:
        """Return the mean over the classes that were seen as a label or as a prediction, but not the ignored one."""
        self._total()
        overlap = self.intersection_over_union()
        if self.ignore_index is not None and 0 <= self.ignore_index < len(overlap):
            overlap[self.ignore_index] = float("nan")
        return float(overlap.nanmean())

    def _total(self) -> int:
        if total := int(self.counts.sum()):
            return total
        raise BatchbayesError(expected="at least one example with a label", got="none", fix="add examples first")


class ReliabilityHistogram:
    """The bins of `equal_width_reliability` over all pieces, without any approximation.

    >>> histogram = ReliabilityHistogram()
    >>> histogram.add(torch.tensor([0.25]), torch.tensor([False]))
    >>> histogram.add(torch.tensor([0.75]), torch.tensor([False]))
    >>> histogram.reliability().expected_calibration_error()
    0.5
    """

    def __init__(self, num_bins: int = NUM_BINS) -> None:
        self._sums = torch.zeros(3, num_bins, dtype=torch.float64)

    def add(self, confidence: Values, correct: Values) -> None:
        """Count a piece. Shapes: confidence (N, ...), correct bool (N, ...)."""
        piece = equal_width_reliability(confidence, correct, self._sums.shape[1])
        self._sums += torch.stack((piece.counts, piece.confidence_sums, piece.correct_sums)).cpu()

    def reliability(self) -> Reliability:
        """Return the bins so far."""
        counts, confidence_sums, correct_sums = self._sums.clone()
        return Reliability(counts, confidence_sums, correct_sums)


class ScoreHistogram:
    """Numbers of positives and negatives at each value of a fine grid. Each score is rounded to the nearest value.

    The summaries of `counts()` are exact if all scores lie on the grid. Otherwise rounding makes some scores equal, but
    never puts a lower score above a higher one. `roc_resolution` says how much that can change the area under the ROC
    curve.

    >>> histogram = ScoreHistogram(0.0, 1.0, num_values=11)
    >>> histogram.add(torch.tensor([0.5, 0.1, 0.5]), torch.tensor([True, False, False]))
    >>> histogram.counts().area_under_roc(), histogram.roc_resolution()
    (0.75, 0.25)
    """

    def __init__(self, lowest: float, highest: float, num_values: int = 2**16 + 1) -> None:
        if not (lowest < highest and num_values >= 2):
            raise BatchbayesError(
                expected="lowest below highest, and at least two grid values",
                got=f"lowest {lowest}, highest {highest}, num_values {num_values}",
                fix="pass the range of the score, which is 0 to log K for the entropy of K classes",
            )
        self.lowest, self.highest = lowest, highest
        self._counts = torch.zeros(2, num_values, dtype=torch.int64)

    @checked
    def add(self, scores: Values, positive: Values) -> None:
        """Count a piece. Shapes: scores (N, ...), positive bool (N, ...)."""
        check_bool("positive", positive, "scores", scores)
        check_finite("scores", scores)
        num_values = self._counts.shape[1]
        step = (self.highest - self.lowest) / (num_values - 1)
        index = ((scores.double().flatten() - self.lowest) / step).round().long()
        if index.numel() and not (int(index.min()) >= 0 and int(index.max()) < num_values):
            raise BatchbayesError(
                expected=f"scores from {self.lowest} to {self.highest}",
                got=f"{float(scores.min())} to {float(scores.max())}",
                fix="make the histogram with a wider range",
            )
        cell = index + num_values * (~positive.flatten()).long()
        self._counts += torch.bincount(cell, minlength=2 * num_values).view_as(self._counts).cpu()

    def counts(self) -> ScoreCounts:
        """Return the counts so far."""
        grid = torch.linspace(self.lowest, self.highest, self._counts.shape[1], dtype=torch.float64)
        seen = self._counts.sum(0) > 0
        positives, negatives = self._counts[:, seen].flip(1)
        return ScoreCounts(grid[seen].flip(0), positives, negatives)

    def roc_resolution(self) -> float:
        """Return the largest change of the area under the ROC curve that rounding can make."""
        positives, negatives = both_classes(self.counts())
        return float(0.5 * (positives * negatives).sum() / (positives.sum() * negatives.sum()))
