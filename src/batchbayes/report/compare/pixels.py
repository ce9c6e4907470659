"""Classes of pixels or tokens: how a segmentation is compared.

Images are predicted one at a time, and only sums over their pixels are kept, so that memory does not grow.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from batchbayes import metrics
from batchbayes.engines.linear import Drawn
from batchbayes.methods.candidates import Candidate
from batchbayes.predict import Predicted, predict_stream
from batchbayes.predictive import CategoricalPredictive
from batchbayes.report.compare.columns import PIXELS, MetricColumn
from batchbayes.report.compare.contenders import Contender, Seen, affordable, compared_candidates, predict_calibration
from batchbayes.report.compare.groups import By, Group
from batchbayes.report.compare.rows import Rows
from batchbayes.report.compare.task import Task
from batchbayes.report.compare.tuning import TemperatureCurve, temperature_grid
from batchbayes.report.page.explorer import image_explorer
from batchbayes.report.page.figures import image_figures
from batchbayes.report.read.case import Case
from batchbayes.report.read.examples import Examples
from batchbayes.report.read.likelihood import likelihood_notes
from batchbayes.report.result import Assessment
from batchbayes.report.words.classes import image_terms, image_verdict

TUNING_DRAWS, TUNING_IMAGES, CHECKED_IMAGES = 8, 8, 16
"""Jacobians of maps are large, so methods are tuned on few draws of few images, and scores are checked on few."""
TEMPERATURES = temperature_grid(0.4, 4, 9)
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
        self.entropies: list[float] = []
        """The mean entropy over all pixels of each image, as predictions.csv has it."""
        self.drawn = Drawn.EXACT
        """How the draws of the last image were made; BOTH if they were for any of them."""
        self.num_samples = 0
        self._pixels: list[int] = []
        self._by_class: list[Tensor] = []
        """Of each image, the number of pixels that were predicted as each class, and the sums of their confidence and
        of right ones, (3, K)."""

    def add(self, seen: CategoricalPredictive, labels: Tensor) -> None:
        """Add one image (1, H, W) with its labels. At least one of its pixels must count."""
        self.num_samples = seen.num_samples
        self.drawn = self.drawn if self.drawn is Drawn.BOTH else seen.drawn
        self.confusion.add(seen.log_probs.argmax(-1), labels)
        self.entropies.append(float(seen.entropy.double().mean()))
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
        return torch.tensor(self.entropies, dtype=torch.float64)

    def mean(self, key: str) -> float:
        """Return the mean of a quantity over the counted pixels of all images."""
        pixels = torch.tensor(self._pixels, dtype=torch.float64)
        return float((self.per_image(key) * pixels).sum() / pixels.sum())

    def without_uncertain(self, share: float) -> tuple[float, float, float, float]:
        """Set about this share of the pixels aside, the least certain ones.

        Return which share is kept, the entropy above which pixels are set aside, and the error rates before and after.
        """
        curve = self.entropy.counts().risk_coverage()
        last = int((curve.coverage <= 1 - share).sum().clamp(min=1)) - 1
        kept, limit, after = (float(each[last]) for each in (curve.coverage, curve.thresholds, curve.risk))
        return kept, limit, float(curve.risk[-1]), after

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
    stream = predict_stream(first.posterior, data.one_by_one(), likelihoods, **first.drawing(case))
    for predicted in stream:
        for sums, seen in zip(totals, predicted.predictives, strict=True):
            sums.add(seen, predicted.batch[1])
    return totals


class Pixels(Task):
    """A class for each pixel of an image, or for each token of a sequence."""

    columns = PIXELS
    checked = CHECKED_IMAGES

    def fit(self, case: Case) -> list[Candidate]:
        return compared_candidates(case, case.likelihood, tuning_samples=TUNING_DRAWS, tuning_examples=TUNING_IMAGES)

    def judge(self, case: Case, candidate: Candidate) -> list[Contender]:
        """Predict the calibration images at each temperature of a grid, and find the best one between them."""

        def losses(predicted: Predicted) -> Tensor:
            """Return the mean loss of the pixels that count, at each temperature."""
            labels = predicted.batch[1]
            keep = kept_pixels(labels, case.settings.ignore_label)
            at = labels.where(keep, 0).unsqueeze(-1)
            each = [-seen.log_probs.gather(-1, at).squeeze(-1) for seen in predicted.predictives]
            return torch.stack([loss[keep].double().mean() for loss in each])

        likelihoods = [case.at(temperature) for temperature in (1.0, *TEMPERATURES)]
        most = affordable(candidate, candidate.sizes[-1], Drawn.EXACT, case.settings.budget)[-1]
        found, size, how = predict_calibration(case, candidate, most, likelihoods, losses)
        of_images, *others = torch.stack(found, 1)  # (G + 1, N)
        curve = TemperatureCurve(TEMPERATURES, torch.stack(others))
        plain = Contender.judged(candidate, size, {"temperature": 1.0}, of_images, **how)
        return [plain, plain.with_temperature(curve, curve.best(torch.arange(len(of_images))), case.settings.seed)]

    def test(self, case: Case, contenders: Sequence[Contender], is_told: bool) -> Iterator[Contender]:
        """Predict the test images, without and with a temperature, in one pass."""
        for contender, sums in zip(contenders, sums_over(case, case.test, contenders), strict=True):
            found = sums.metrics() | {"passes": contender.passes}
            yield replace(contender, seen=Seen(sums), metrics=found, losses=sums.per_image("loss"))

    def uncertainty(self, case: Case, chosen: Contender) -> tuple[Tensor, Tensor]:
        [held_out] = sums_over(case, case.calibration, [chosen])
        return held_out.mean_entropy(), chosen.seen.test.mean_entropy()

    def notes(self, case: Case, chosen: Contender) -> dict[str, Any]:
        return {"class_names": case.class_names, "classes": case.num_outputs, **likelihood_notes(case.likelihood)}

    def truth(self, case: Case, chosen: Contender) -> Rows:
        wrong = chosen.seen.test.images["wrong"]
        return {"accuracy": [1 - share for share in wrong], "error_rate": wrong}

    def told(self, found: Assessment, limit_count: int) -> Assessment:
        case, verdict = found.case, image_verdict(found, limit_count)
        found = replace(found, columns=[_named(case.nouns[1], column) for column in found.columns])
        return replace(
            found,
            verdict=verdict.sentences,
            is_usable=verdict.is_usable,
            terms=image_terms(found),
            figures={} if case.settings.no_figures else image_figures(found),
            explorer=image_explorer(found.recommended.seen.test.entropy.counts(), case.nouns),
            facts={**found.facts, "classes": case.num_outputs, "threshold": found.notes["threshold"]},
        )


def _named(noun: str, column: MetricColumn) -> MetricColumn:
    """Return a column that says "token" where it says "pixel"."""
    said = (text.replace("Pixel", noun.title()).replace("pixel", noun) for text in (column.label, column.meaning))
    return replace(column, **dict(zip(("label", "meaning"), said, strict=True)))
