"""Assessment of a segmentation. Images are predicted one at a time, and only sums over their pixels are kept."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributions

from batchbayes.assessment.contenders import (
    Contender,
    advice_for_classes,
    compared_candidates,
    drawing,
    notes_for_prediction,
    with_temperatures,
)
from batchbayes.assessment.explorer import image_explorer
from batchbayes.assessment.load import Case
from batchbayes.assessment.options import AssessOptions
from batchbayes.assessment.recommend import recommend
from batchbayes.assessment.result import FLAGGED_SHARE, RANKING, Assessment, MetricColumn
from batchbayes.assessment.rows import as_rows, image_columns, single_images
from batchbayes.assessment.segmentation.figures import image_figures
from batchbayes.assessment.segmentation.pixels import PixelSums, kept_pixels, sums_over
from batchbayes.assessment.segmentation.verdict import image_terms, image_verdict
from batchbayes.assessment.thumbnails import pick_thumbnails
from batchbayes.calibrate import lowest
from batchbayes.likelihoods import Categorical, categorical
from batchbayes.methods.candidates import Candidate
from batchbayes.posterior import Posterior
from batchbayes.prediction import predict_stream

COLUMNS = (
    MetricColumn("accuracy", "Pixel accuracy", "higher", 1, "share of pixels with the right class", percent=True),
    MetricColumn(
        "mean_iou", "Mean IoU", "higher", 1, "overlap of predicted and true regions, mean over classes", percent=True
    ),
    MetricColumn(
        "nll", "NLL", "lower", 3, "negative log-likelihood: the surprise at the truth, in nats for each pixel"
    ),
    MetricColumn("brier", "Brier", "lower", 3, "squared distance of the probabilities from the truth, 0 to 2"),
    MetricColumn(
        "ece", "ECE", "lower", 1, "mean gap between confidence and accuracy, 15 equal-width bins", percent=True
    ),
    MetricColumn(
        "error_auroc", "AUROC", "higher", 3, "how well entropy tells wrong pixels from right ones", group=RANKING
    ),
    MetricColumn("error_auroc_mi", "AUROC by MI", "higher", 3, "how well mutual information does", group=RANKING),
    MetricColumn("aurc", "AURC", "lower", 4, "mean error rate as the least certain are set aside", group=RANKING),
)
TUNING_DRAWS, TUNING_IMAGES = 8, 8
"""Jacobians of maps are large, so methods are tuned on few draws of few images."""
TEMPERATURES = torch.linspace(math.log(0.4), math.log(4), 9).exp().tolist()


@dataclass(frozen=True)
class IgnoringCategorical(Categorical):
    """A categorical likelihood in which labels of one value do not count."""

    ignored_label: int | None = None

    def __call__(self, outputs: Tensor) -> distributions.Categorical:
        return _Ignoring(self.logits(outputs), self.ignored_label)

    def fitting(self, outputs: Tensor, targets: Tensor) -> Tensor:
        keep = kept_pixels(targets, self.ignored_label)
        return super().fitting(outputs, targets.where(keep, 0)).where(keep.cpu(), targets.cpu())


class _Ignoring(distributions.Categorical):
    def __init__(self, logits: Tensor, ignored_label: int | None) -> None:
        super().__init__(logits=logits, validate_args=False)
        self._ignored_label = ignored_label

    def log_prob(self, value: Tensor) -> Tensor:
        keep = kept_pixels(value, self._ignored_label)
        return torch.where(keep, super().log_prob(value.where(keep, 0)), 0.0)


def assess_segmentation(options: AssessOptions, case: Case) -> Assessment:
    """Compare the methods on the test images, and recommend one."""
    tuning = IgnoringCategorical(ignored_label=options.ignore_label)
    candidates = compared_candidates(options, case, tuning, tuning_samples=TUNING_DRAWS, tuning_examples=TUNING_IMAGES)
    contenders: list[Contender[PixelSums]] = []
    for group in with_temperatures(candidates):
        contenders += _contenders(options, case, group)
    contenders.sort(key=lambda contender: contender.candidate.rank)
    choice = recommend(contenders)
    chosen: Contender[PixelSums] = choice.recommended
    [held_out] = sums_over(options, case, case.calibration, chosen.posterior, [chosen.tuned["temperature"]])
    threshold = float(held_out.mean_entropy().quantile(1 - FLAGGED_SHARE))
    notes = notes_for_prediction(options, case, chosen, threshold, class_names=case.class_names)
    wrong = chosen.seen.images["wrong"]
    rows = as_rows(image_columns(chosen.seen.cells), notes, "test", case.test.ids()) | {
        "row": case.test.rows().tolist(),
        "accuracy": [1 - share for share in wrong],
        "error_rate": wrong,
    }
    return Assessment(
        columns=COLUMNS,
        contenders=contenders,
        recommended=chosen,
        verdict=image_verdict(rows, contenders, choice),
        terms=image_terms(contenders, choice),
        rows=rows,
        figures=image_figures(options, case, contenders, chosen),
        explorer=image_explorer(chosen.seen.entropy.counts()),
        thumbnails=pick_thumbnails(case, rows, "entropy"),
        details={},
        notes=notes,
        facts={
            "test_count": len(wrong),
            "calibration_count": len(held_out.cells),
            "classes": case.num_outputs,
            "threshold": threshold,
        },
    )


def _contenders(options: AssessOptions, case: Case, group: Sequence[Candidate]) -> Iterator[Contender[PixelSums]]:
    """Predict with a posterior, without and with a temperature, in one pass over the test images."""
    posterior = group[0].posterior
    temperatures = [1.0, *(_best_temperature(options, case, posterior) for _ in group[1:])]
    totals = sums_over(options, case, case.test, posterior, temperatures)
    for candidate, temperature, sums in zip(group, temperatures, totals, strict=True):
        yield Contender(
            candidate=candidate,
            tuned={"temperature": temperature},
            advice=advice_for_classes(candidate, temperature),
            engine=sums.engine,
            seen=sums,
            metrics=sums.metrics(),
            losses=sums.per_image("loss"),
            num_samples=sums.num_samples,
        )


def _best_temperature(options: AssessOptions, case: Case, posterior: Posterior) -> float:
    """Return the temperature with the lowest NLL of all calibration pixels, between the points of a grid."""
    totals = torch.zeros(len(TEMPERATURES), dtype=torch.float64)
    likelihoods = [categorical(temperature=t) for t in TEMPERATURES]
    for predicted in predict_stream(posterior, single_images(case.calibration), likelihoods, **drawing(options)):
        labels = predicted.batch[1]
        keep = kept_pixels(labels, options.ignore_label)
        for i, seen in enumerate(predicted.predictives):
            log_probs = seen.log_probs.gather(-1, labels.where(keep, 0).unsqueeze(-1)).squeeze(-1)
            totals[i] -= log_probs[keep].double().sum()
    return between(TEMPERATURES, totals.tolist())


def between(temperatures: Sequence[float], costs: Sequence[float]) -> float:
    """Return the lowest point of the parabola in log T through the best point of a grid and its neighbours.

    >>> round(between([1.0, 2.0, 4.0], [1.0, 0.0, 1.0]), 3)
    2.0
    """
    best = min(range(1, len(costs) - 1), key=lambda i: costs[i])
    x = [math.log(t) for t in temperatures[best - 1 : best + 2]]
    y = costs[best - 1 : best + 2]

    def parabola(at: float) -> float:
        terms = ((y[i], [x[j] for j in range(3) if j != i], x[i]) for i in range(3))
        return sum(v * (at - a) * (at - b) / ((c - a) * (c - b)) for v, (a, b), c in terms)

    return math.exp(lowest(parabola, x[0], x[2]))
