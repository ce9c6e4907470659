"""Accumulators for data that comes in pieces, such as all pixels of all images; their memory never grows.

Each has ``add`` for a piece of any shape, be it empty, and gives the objects that the rest of
``batchbayes.metrics`` summarises.
"""

import torch
from torch import Tensor

from batchbayes._common.checks import check_bool, check_finite, check_integer, check_same_shape, refuse
from batchbayes.metrics.classification import NUM_BINS, Reliability, equal_width_reliability
from batchbayes.metrics.ranking import ScoreCounts, both_classes


class ConfusionMatrix:
    r"""Counts :math:`C_{yk}` of examples of class y predicted as k, without those of the ignored label.

    >>> matrix = ConfusionMatrix(num_classes=2, ignored_label=255)
    >>> matrix.add(torch.tensor([0, 1, 1, 1]), torch.tensor([0, 0, 1, 255]))
    >>> matrix.counts.tolist()
    [[1, 1], [0, 1]]
    >>> matrix.intersection_over_union().tolist()
    [0.5, 0.5]
    """

    def __init__(self, num_classes: int, ignored_label: int | None = None) -> None:
        self.num_classes = num_classes
        self.ignored_label = ignored_label
        self.counts = torch.zeros(num_classes, num_classes, dtype=torch.int64)

    def add(self, predicted: Tensor, labels: Tensor) -> None:
        """Shapes: predicted classes (N, ...), labels (N, ...)."""
        check_same_shape("predicted", predicted, "labels", labels)
        if self.ignored_label is not None:
            keep = labels != self.ignored_label
            predicted, labels = predicted[keep], labels[keep]
        for name, tensor in (("predicted classes", predicted), ("labels", labels)):
            check_integer(name, tensor)
            if tensor.numel() and not (int(tensor.min()) >= 0 and int(tensor.max()) < self.num_classes):
                refuse(
                    f"{name} from 0 to {self.num_classes - 1}",
                    f"{int(tensor.min())} to {int(tensor.max())}",
                    "Set num_classes, or ignored_label for a label without a class.",
                )
        cell = labels.long().flatten() * self.num_classes + predicted.long().flatten()
        self.counts += torch.bincount(cell, minlength=self.num_classes**2).view_as(self.counts).cpu()

    def pixel_accuracy(self) -> float:
        r"""Share of examples on the diagonal, :math:`\sum_k C_{kk} / \sum_{yk} C_{yk}`."""
        total = int(self.counts.sum())
        if total == 0:
            refuse("at least one example with a label", "none", "Add examples before asking for the accuracy.")
        return int(self.counts.diagonal().sum()) / total

    def intersection_over_union(self) -> Tensor:
        r"""Per class, :math:`C_{kk} / (\sum_y C_{yk} + \sum_y C_{ky} - C_{kk})`; NaN if never seen.

        Shape: (K,), float64. Reference: Everingham et al., IJCV 88 (2010).
        """
        hits = self.counts.diagonal().double()
        return hits / (self.counts.sum(0) + self.counts.sum(1) - hits)

    def mean_intersection_over_union(self) -> float:
        """Mean over the classes that were seen, be it as truth or as prediction."""
        if int(self.counts.sum()) == 0:
            refuse("at least one example with a label", "none", "Add examples before asking for the overlap.")
        return float(self.intersection_over_union().nanmean())


class ReliabilityHistogram:
    """Equal-width reliability, exact: the calibration error needs no more than three sums a bin.

    >>> from batchbayes.metrics.classification import expected_calibration_error
    >>> histogram = ReliabilityHistogram()
    >>> histogram.add(torch.tensor([0.25]), torch.tensor([False]))
    >>> histogram.add(torch.tensor([0.75]), torch.tensor([False]))
    >>> expected_calibration_error(histogram.reliability())
    0.5
    """

    def __init__(self, num_bins: int = NUM_BINS) -> None:
        self._sums = torch.zeros(3, num_bins, dtype=torch.float64)

    def add(self, confidence: Tensor, correct: Tensor) -> None:
        """Shapes: confidence (N, ...), correct bool (N, ...)."""
        piece = equal_width_reliability(confidence, correct, self._sums.shape[1])
        self._sums += torch.stack((piece.counts, piece.confidence_sums, piece.correct_sums)).cpu()

    def reliability(self) -> Reliability:
        """The bins so far, for ``expected_calibration_error`` and the reliability diagram."""
        counts, confidence_sums, correct_sums = self._sums.clone()
        return Reliability(counts, confidence_sums, correct_sums)


class ScoreHistogram:
    """Positives and negatives at each value of a fine grid, to the nearest of which every score is rounded.

    The summaries of ``counts()`` are exact if scores lie on the grid. If not, rounding only adds ties: it
    never puts a lower score above a higher one, and ``roc_resolution`` bounds what the ties can do to the
    area under the ROC curve.

    >>> from batchbayes.metrics.ranking import area_under_roc
    >>> histogram = ScoreHistogram(0.0, 1.0, num_values=11)
    >>> histogram.add(torch.tensor([0.5, 0.1, 0.5]), torch.tensor([True, False, False]))
    >>> area_under_roc(histogram.counts()), histogram.roc_resolution()
    (0.75, 0.25)
    """

    def __init__(self, lowest: float, highest: float, num_values: int = 2**16 + 1) -> None:
        if not (lowest < highest and num_values >= 2):
            refuse(
                "lowest below highest, and two grid values or more",
                f"lowest {lowest}, highest {highest}, num_values {num_values}",
                "The entropy of K classes, for example, goes from 0 to log K.",
            )
        self.lowest, self.highest = lowest, highest
        self._counts = torch.zeros(2, num_values, dtype=torch.int64)

    def add(self, score: Tensor, positive: Tensor) -> None:
        """Shapes: score (N, ...), positive bool (N, ...)."""
        check_same_shape("positive", positive, "score", score)
        check_bool("positive", positive)
        check_finite("score", score)
        num_values = self._counts.shape[1]
        step = (self.highest - self.lowest) / (num_values - 1)
        index = ((score.double().flatten() - self.lowest) / step).round().long()
        if index.numel() and not (int(index.min()) >= 0 and int(index.max()) < num_values):
            refuse(
                f"scores from {self.lowest} to {self.highest}",
                f"{float(score.min())} to {float(score.max())}",
                "Make the histogram with a wider range.",
            )
        cell = index + num_values * (~positive.flatten()).long()
        self._counts += torch.bincount(cell, minlength=2 * num_values).view_as(self._counts).cpu()

    def counts(self) -> ScoreCounts:
        """The counts so far, for the functions of ``batchbayes.metrics.ranking``."""
        grid = torch.linspace(self.lowest, self.highest, self._counts.shape[1], dtype=torch.float64)
        seen = self._counts.sum(0) > 0
        positives, negatives = self._counts[:, seen].flip(1)
        return ScoreCounts(grid[seen].flip(0), positives, negatives)

    def roc_resolution(self) -> float:
        """Largest difference that rounding can have made to the area under the ROC curve."""
        positives, negatives = both_classes(self.counts())
        return float(0.5 * (positives * negatives).sum() / (positives.sum() * negatives.sum()))
