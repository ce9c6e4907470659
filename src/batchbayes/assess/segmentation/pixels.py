"""Sums over all pixels of all images, whose memory grows with neither."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from batchbayes.assess.engine import Drawing
from batchbayes.assess.tables import Table, flags
from batchbayes.data.examples import Examples
from batchbayes.likelihoods import categorical
from batchbayes.metrics import (
    ConfusionMatrix,
    ReliabilityHistogram,
    ScoreHistogram,
    area_under_risk_coverage,
    area_under_roc,
    expected_calibration_error,
)
from batchbayes.posterior import Posterior
from batchbayes.predictive import CategoricalPredictive


class PixelSums:
    """Metrics of a segmentation, exact on all pixels but those of the ignored label."""

    def __init__(self, num_classes: int, ignored_label: int | None) -> None:
        self.ignored_label = ignored_label
        self.confusion = ConfusionMatrix(num_classes, ignored_label)
        self.reliability = ReliabilityHistogram()
        self.entropy = ScoreHistogram(0.0, math.log(num_classes) + 1e-3)
        self.information = ScoreHistogram(0.0, math.log(num_classes) + 1e-3)
        self.images: dict[str, list[float]] = {key: [] for key in ("loss", "brier", "wrong", "entropy", "information")}
        self._pixels: list[int] = []

    def add(self, seen: CategoricalPredictive, labels: Tensor) -> None:
        """Images (n, H, W) with their labels."""
        predicted = seen.log_probs.argmax(-1)
        self.confusion.add(predicted, labels)
        for i in range(len(labels)):
            keep = kept_pixels(labels[i], self.ignored_label)
            self._add_image(
                seen.log_probs[i][keep], seen.entropy[i][keep], seen.mutual_information[i][keep], labels[i][keep]
            )

    def _add_image(self, log_probs: Tensor, entropy: Tensor, information: Tensor, labels: Tensor) -> None:
        if not len(labels):
            return
        probs = log_probs.exp()
        wrong = log_probs.argmax(-1) != labels
        self.reliability.add(probs.amax(-1), ~wrong)
        self.entropy.add(entropy, wrong)
        self.information.add(information, wrong)
        truth = log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        brier = probs.square().sum(-1) - 2 * truth.exp() + 1
        self._pixels.append(len(labels))
        for key, values in zip(self.images, (-truth, brier, wrong, entropy, information), strict=True):
            self.images[key].append(float(values.double().mean()))

    def per_image(self, key: str) -> Tensor:
        """The mean of a quantity over the pixels of each image, (N,)."""
        return torch.tensor(self.images[key], dtype=torch.float64)

    def mean(self, key: str) -> float:
        """The mean of a quantity over all pixels."""
        pixels = torch.tensor(self._pixels, dtype=torch.float64)
        return float((self.per_image(key) * pixels).sum() / pixels.sum())

    def _mean_overlap(self) -> float:
        """Mean intersection over union of the classes that were seen, without that of the ignored label."""
        overlap = self.confusion.intersection_over_union()
        if self.ignored_label is not None and 0 <= self.ignored_label < len(overlap):
            overlap[self.ignored_label] = float("nan")
        return float(overlap.nanmean())

    def metrics(self, *, has_draws: bool) -> dict[str, float]:
        """What goes into the table."""
        bins, counts = self.reliability.reliability(), self.entropy.counts()
        found = {
            "accuracy": self.confusion.pixel_accuracy(),
            "mean_iou": self._mean_overlap(),
            "nll": self.mean("loss"),
            "brier": self.mean("brier"),
            "ece": expected_calibration_error(bins),
            "mean_confidence": float(bins.confidence_sums.sum() / bins.counts.sum()),
            "aurc": area_under_risk_coverage(counts),
        }
        if 0 < self.mean("wrong") < 1:
            found["error_auroc"] = area_under_roc(counts)
            if has_draws:
                found["error_auroc_mi"] = area_under_roc(self.information.counts())
        return found


def kept_pixels(labels: Tensor, ignored_label: int | None) -> Tensor:
    """Which pixels count, bool in the shape of the labels."""
    return torch.ones_like(labels, dtype=torch.bool) if ignored_label is None else labels != ignored_label


def image_table(
    maker: Drawing, answering: Posterior, posterior: Posterior, data: Examples, notes: Mapping[str, Any]
) -> Table:
    """One row an image for new data: mean confidence, entropy and mutual information over its pixels."""
    confidence: list[float] = []
    entropy: list[float] = []
    information: list[float] = []

    def note(answer: tuple[CategoricalPredictive, ...], _: Tensor, __: Tensor) -> None:
        confidence.extend(answer[0].log_probs.amax(-1).exp().flatten(1).mean(1).tolist())
        entropy.extend(answer[0].entropy.flatten(1).mean(1).tolist())

    def note_draws(drawn: tuple[CategoricalPredictive, ...], _: Tensor, __: Tensor) -> None:
        information.extend(drawn[0].mutual_information.flatten(1).mean(1).tolist())

    maker.stream(answering, data, [categorical(temperature=notes["temperature"])], note)
    maker.stream(posterior, data, [categorical(temperature=notes["draw_temperature"])], note_draws)
    return {
        "source": ["new"] * len(entropy),
        "row": data.rows().tolist(),
        "confidence": [*confidence],
        "entropy": [*entropy],
        "mutual_information": [*information],
        "flag": flags(torch.tensor(entropy), notes["threshold"]),
    }
