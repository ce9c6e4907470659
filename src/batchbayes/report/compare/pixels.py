"""Sums over all pixels of all images. Their memory does not grow with the number of pixels."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from batchbayes import metrics
from batchbayes.engines.linear import Drawn
from batchbayes.predict import predict_stream
from batchbayes.predictive import CategoricalPredictive
from batchbayes.report.compare.contenders import Contender, drawing
from batchbayes.report.compare.honesty import By, Group
from batchbayes.report.compare.rows import image_cells, single_images
from batchbayes.report.read.case import Case
from batchbayes.report.read.examples import Examples

KEYS = ("loss", "brier", "wrong", "confidence", "entropy", "information")
FEWEST_IMAGES = 10
"""A class that was predicted in fewer images is not judged by itself."""


class PixelSums:
    """What a method predicted for images: exact sums over all pixels but those of the ignored label."""

    def __init__(self, num_classes: int, ignored_label: int | None) -> None:
        self.ignored_label = ignored_label
        self.confusion = metrics.ConfusionMatrix(num_classes, ignored_label)
        self.reliability = metrics.ReliabilityHistogram()
        self.entropy = metrics.ScoreHistogram(0.0, math.log(num_classes) + 1e-3)
        self.information = metrics.ScoreHistogram(0.0, math.log(num_classes) + 1e-3)
        self.images: dict[str, list[float]] = {key: [] for key in KEYS}
        """Means over the counted pixels of each image."""
        self.cells: list[dict[str, Any]] = []
        """What predictions.csv says about each image."""
        self.drawn: set[Drawn] = set()
        """How the draws were made."""
        self.num_samples = 0
        self._pixels: list[int] = []
        self._by_class: list[Tensor] = []
        """Of each image, the number of pixels that were predicted as each class, and the sums of their confidence and
        of right ones, (3, K)."""

    def add(self, seen: CategoricalPredictive, labels: Tensor) -> None:
        """Add one image (1, H, W) with its labels. At least one of its pixels must count."""
        self.num_samples = seen.num_samples
        self.drawn.add(seen.drawn)
        self.confusion.add(seen.log_probs.argmax(-1), labels)
        self.cells.append(image_cells(seen))
        keep = kept_pixels(labels, self.ignored_label)
        log_probs, labels = seen.log_probs[keep], labels[keep]  # (pixels, K), (pixels,)
        probs, wrong = log_probs.exp(), log_probs.argmax(-1) != labels
        self.reliability.add(probs.amax(-1), ~wrong)
        entropy, information = seen.entropy[keep], seen.mutual_information[keep]
        self.entropy.add(entropy, wrong)
        self.information.add(information, wrong)
        truth = log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        brier = probs.square().sum(-1) - 2 * truth.exp() + 1
        self._pixels.append(len(labels))
        sums = torch.stack([torch.ones_like(wrong), probs.amax(-1), ~wrong]).double()  # (3, pixels)
        none = torch.zeros(3, log_probs.shape[-1], dtype=torch.float64)
        self._by_class.append(none.index_add_(1, log_probs.argmax(-1), sums))
        for key, values in zip(KEYS, (-truth, brier, wrong, probs.amax(-1), entropy, information), strict=True):
            self.images[key].append(float(values.double().mean()))

    def per_image(self, key: str) -> Tensor:
        """Return the mean of a quantity over the counted pixels of each image, (N,)."""
        return torch.tensor(self.images[key], dtype=torch.float64)

    def mean_entropy(self) -> Tensor:
        """Return the mean entropy over all pixels of each image, (N,)."""
        return torch.tensor([cells["entropy"] for cells in self.cells], dtype=torch.float64)

    def mean(self, key: str) -> float:
        """Return the mean of a quantity over the counted pixels of all images."""
        pixels = torch.tensor(self._pixels, dtype=torch.float64)
        return float((self.per_image(key) * pixels).sum() / pixels.sum())

    def class_groups(self, names: Sequence[Any]) -> list[Group]:
        """Return what was said about the pixels of each predicted class, and what was right.

        Pixels of one image depend on each other, so images are what a standard error counts.
        """
        found, sums = [], torch.stack(self._by_class, 1)  # (3, N, K)
        for name, (counts, said, right) in zip(names, sums.unbind(2), strict=False):
            images, total = int((counts > 0).sum()), float(counts.sum())
            if images >= FEWEST_IMAGES:
                shares = float(said.sum()) / total, float(right.sum()) / total
                residuals = said - right - (shares[0] - shares[1]) * counts
                error = float(residuals.square().sum().sqrt()) / total
                found.append(Group(By.CLASS, str(name), 0.0, 0.0, images, *shares, error))
        return found

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the tables."""
        bins, counts = self.reliability.reliability(), self.entropy.counts()
        found = {
            "accuracy": self.confusion.pixel_accuracy(),
            "mean_iou": self.confusion.mean_intersection_over_union(),
            "nll": self.mean("loss"),
            "brier": self.mean("brier"),
            "ece": bins.expected_calibration_error(),
            "mean_confidence": float(bins.confidence_sums.sum() / bins.counts.sum()),
            "mean_entropy": self.mean("entropy"),
            "mean_mutual_information": self.mean("information"),
            "aurc": counts.area_under_risk_coverage(),
        }
        if 0 < self.mean("wrong") < 1:
            found["error_auroc"] = counts.area_under_roc()
            if self.num_samples > 1:
                found["error_auroc_mi"] = self.information.counts().area_under_roc()
        return found


def kept_pixels(labels: Tensor, ignored_label: int | None) -> Tensor:
    """Return which pixels count, bool in the shape of the labels."""
    return torch.ones_like(labels, dtype=torch.bool) if ignored_label is None else labels != ignored_label


def sums_over(case: Case, data: Examples, contenders: Sequence[Contender]) -> list[PixelSums]:
    """Predict labelled images in one pass, and return the sums for contenders that share their draws."""
    totals = [PixelSums(case.num_outputs, case.settings.ignore_label) for _ in contenders]
    likelihoods, first = [case.at(each.tuned["temperature"]) for each in contenders], contenders[0]
    stream = predict_stream(first.posterior, single_images(data), likelihoods, **drawing(case, first))
    for predicted in stream:
        for sums, seen in zip(totals, predicted.predictives, strict=True):
            sums.add(seen, predicted.batch[1])
    return totals
