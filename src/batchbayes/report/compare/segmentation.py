"""Assessment of a segmentation. Images are predicted one at a time, and only sums over their pixels are kept."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from batchbayes.engines.linear import Drawn
from batchbayes.methods.candidates import Candidate
from batchbayes.predict import Predicted
from batchbayes.report.compare.compare import affordable, charged, compare, predict_calibration
from batchbayes.report.compare.contenders import (
    Contender,
    compared_candidates,
    fit_novelty,
    notes_for_prediction,
)
from batchbayes.report.compare.pixels import PixelSums, kept_pixels, sums_over
from batchbayes.report.compare.rows import Show, assessed_rows, single_images
from batchbayes.report.compare.tuning import TemperatureCurve, temperature_grid
from batchbayes.report.page.figures import image_figures, shared_figures
from batchbayes.report.page.pictures import image_explorer, pick_thumbnails
from batchbayes.report.read.case import Case
from batchbayes.report.read.task import likelihood_notes
from batchbayes.report.result import (
    AURC,
    BRIER,
    BY_MI,
    ECE,
    PASSES,
    RANKING,
    Assessment,
    MetricColumn,
    flag_threshold,
    scores_for_limit,
)
from batchbayes.report.words.segmentation import image_terms, image_verdict

COLUMNS = (
    MetricColumn("accuracy", "Pixel accuracy", "higher", 1, "share of pixels with the right class", percent=True),
    MetricColumn(
        "mean_iou", "Mean IoU", "higher", 1, "overlap of predicted and true regions, mean over classes", percent=True
    ),
    MetricColumn(
        "nll", "NLL", "lower", 3, "negative log-likelihood: the surprise at the truth, in nats for each pixel"
    ),
    BRIER,
    ECE,
    PASSES,
    MetricColumn(
        "error_auroc", "AUROC", "higher", 3, "how well entropy tells wrong pixels from right ones", group=RANKING
    ),
    BY_MI,
    AURC,
)
TUNING_DRAWS, TUNING_IMAGES, CHECKED_IMAGES = 8, 8, 16
"""Jacobians of maps are large, so methods are tuned on few draws of few images, and scores are checked on few."""
TEMPERATURES = temperature_grid(0.4, 4, 9)


def assess_segmentation(case: Case, show: Show | None = None) -> Assessment:
    """Choose a method on the calibration images, and compare it with others on the test images."""
    case, contenders, choice = compare(case, _fit, _judge, _test, CHECKED_IMAGES)
    chosen: Contender[PixelSums] = choice.recommended
    [held_out] = sums_over(case, case.calibration, [chosen])
    limiting = scores_for_limit(held_out.mean_entropy(), chosen.seen.mean_entropy())
    threshold = float(flag_threshold(limiting))
    novelty, why_not = fit_novelty(case)
    told = {"class_names": case.class_names, "classes": case.num_outputs, **likelihood_notes(case.likelihood)}
    notes = notes_for_prediction(case, chosen, threshold, novelty, **told)
    wrong = chosen.seen.images["wrong"]
    truth = {"accuracy": [1 - share for share in wrong], "error_rate": wrong}
    rows = assessed_rows(chosen.posterior, case, notes, truth, novelty, show)
    columns = tuple(map(partial(_named, case.nouns[1]), COLUMNS))
    verdict = image_verdict(rows, contenders, choice, len(limiting), case.class_names, case.nouns)
    return Assessment(
        case=case,
        columns=columns,
        contenders=contenders,
        choice=choice,
        verdict=verdict.sentences,
        is_usable=verdict.is_usable,
        terms=image_terms(contenders, choice, case.nouns[1]),
        rows=rows,
        figures={}
        if case.settings.no_figures
        else shared_figures(case, contenders, chosen, columns, rows, novelty) | image_figures(case, contenders, chosen),
        explorer=image_explorer(chosen.seen.entropy.counts(), case.nouns),
        thumbnails=pick_thumbnails(case, rows, "entropy"),
        details={},
        notes=notes,
        novelty=novelty,
        facts={
            "test_count": len(wrong),
            "calibration_count": len(held_out.cells),
            "classes": case.num_outputs,
            "threshold": threshold,
            "no_novelty": why_not,
        },
    )


def _named(noun: str, column: MetricColumn) -> MetricColumn:
    """Return a column that says "token" where it says "pixel"."""
    label, meaning = (
        text.replace("Pixel", noun.title()).replace("pixel", noun) for text in (column.label, column.meaning)
    )
    return replace(column, label=label, meaning=meaning)


def _fit(case: Case) -> list[Candidate]:
    return compared_candidates(case, case.likelihood, tuning_samples=TUNING_DRAWS, tuning_examples=TUNING_IMAGES)


def _judge(case: Case, candidate: Candidate) -> list[Contender]:
    """Predict the calibration images at each temperature of a grid, and find the best one between them."""
    likelihoods = [case.at(temperature) for temperature in (1.0, *TEMPERATURES)]

    def losses(predicted: Predicted) -> Tensor:
        return torch.stack([_loss(case, seen.log_probs, predicted.batch[1]) for seen in predicted.predictives])

    most = affordable(candidate, candidate.sizes[-1], Drawn.EXACT, case.settings.budget)[-1]
    found, size, how = predict_calibration(
        case, candidate, most, lambda: single_images(case.calibration), likelihoods, losses
    )
    of_images, *others = torch.stack(found, 1)  # (G + 1, N)
    curve = TemperatureCurve(TEMPERATURES, torch.stack(others))
    plain = Contender(candidate, size, {"temperature": 1.0}, charged(candidate, of_images), **how)
    scaled = replace(
        plain,
        tuned={"temperature": curve.best(torch.arange(len(of_images)))},
        calibration_losses=charged(candidate, curve.cross_fitted(case.settings.seed)),
        has_temperature=True,
    )
    return [plain, scaled]


def _loss(case: Case, log_probs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss of the pixels of an image that count, ()."""
    keep = kept_pixels(labels, case.settings.ignore_label)
    return -log_probs.gather(-1, labels.where(keep, 0).unsqueeze(-1)).squeeze(-1)[keep].double().mean()


def _test(case: Case, contenders: Sequence[Contender], _: bool) -> Iterator[Contender[PixelSums]]:
    """Predict the test images, without and with a temperature, in one pass."""
    for contender, sums in zip(contenders, sums_over(case, case.test, contenders), strict=True):
        found = sums.metrics() | {"passes": contender.passes}
        yield replace(contender, seen=sums, metrics=found, losses=sums.per_image("loss"))
