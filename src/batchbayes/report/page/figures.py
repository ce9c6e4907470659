"""The figures that all tasks have: quality against price, novelty, and how methods were tuned.

The figures of a classifier.

The figures of a regression.

The figures of a segmentation.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from batchbayes import plots
from batchbayes.metrics import (
    best_constant_precision,
    equal_width_reliability,
    interval_summary,
    is_misclassified,
    max_probability,
    risk_coverage,
)
from batchbayes.novelty.detector import Novelty
from batchbayes.plots.style import Figure
from batchbayes.predict import predict_stream
from batchbayes.report.compare.contenders import ClassContender, Contender, ValueContender, drawing, novelty_level
from batchbayes.report.compare.pixels import PixelSums, kept_pixels
from batchbayes.report.compare.rows import Rows, first_output, single_images
from batchbayes.report.page.pictures import displayable
from batchbayes.report.read.case import Case
from batchbayes.report.read.examples import Examples
from batchbayes.report.result import Figures, MetricColumn
from batchbayes.report.words.methods import tuning_caption
from batchbayes.report.words.shared import numbers

C = TypeVar("C", bound=Contender[Any])
SHOWN = 6
"""Methods in a figure with a line or a panel for each."""
PRICED = ("nll", "accuracy", "ece", "rmse", "crps")
"""Metrics that are drawn against their price, as far as a task has them."""


def shared_figures(
    case: Case,
    contenders: Sequence[Contender[Any]],
    chosen: Contender[Any],
    columns: Sequence[MetricColumn],
    rows: Rows,
    novelty: Novelty | None,
) -> Figures:
    """Draw quality against price, the novelty of test and strange inputs, and curves of tuning."""
    return {
        **_price(contenders, chosen, [column for column in columns if column.key in PRICED]),
        **_novelty(rows, novelty_level(novelty), case.ood.name if case.ood else None),
        **_tuning(contenders),
    }


def most_telling(contenders: Sequence[C], chosen: Contender[Any]) -> list[C]:
    """Return the network, the recommended contender and the best others, as many as a figure can show, in order."""
    first = [contenders[0], chosen, *sorted(contenders, key=lambda contender: contender.mean_loss)]
    kept = list(dict.fromkeys(first))[:SHOWN]
    return [contender for contender in contenders if contender in kept]


def _price(contenders: Sequence[Contender[Any]], chosen: Contender[Any], columns: Sequence[MetricColumn]) -> Figures:
    qualities = {
        f"{column.label}{', %' if column.percent else ''} ({column.better} is better)": [
            (100 if column.percent else 1) * contender.metrics[column.key] for contender in contenders
        ]
        for column in columns
    }
    figure = plots.price_figure(
        [contender.name for contender in contenders],
        [contender.passes for contender in contenders],
        qualities,
        recommended=chosen.name,
    )
    caption = (
        "Quality against price: what each method reaches on the test data, and how many times as long as one pass of "
        "the network it takes. The recommended one has a ring. The choice was made on calibration data."
    )
    return {"quality-price": (figure, caption)}


def _novelty(rows: Rows, level: float, strange: str | None) -> Figures:
    if "" in rows["novelty"]:
        return {}
    p_values = {"test data": numbers(rows, "novelty")}
    if strange is not None:
        p_values[strange] = numbers(rows, "novelty", "ood")
    caption = (
        "How unusual the inputs are to the network. The p-value of an input is the share of ordinary inputs that are "
        f"at least as unusual. Those with {level:.2g} or less are called novel. Data like that of training is spread "
        "evenly."
    )
    return {"novelty": (plots.novelty_figure(p_values, level=level), caption)}


def _tuning(contenders: Sequence[Contender[Any]]) -> Figures:
    """Draw the curve by which each method was tuned, if there are any."""
    tuned = {id(c.candidate.curve): c.candidate for c in contenders if c.candidate.curve is not None}
    return {
        f"tuning-{i}": (
            plots.batch_size_figure(
                curve.values, curve.losses, best=curve.best, trained_with=curve.start, score="NLL on calibration data"
            ),
            tuning_caption(candidate),
        )
        for i, candidate in enumerate(tuned.values(), start=1)
        if (curve := candidate.curve) is not None
    }


def class_figures(case: Case, contenders: Sequence[ClassContender], chosen: ClassContender, labels: Tensor) -> Figures:
    """Draw the figures of a classifier. Those of one method show the recommended one."""
    bins, curves = {}, {}
    for contender in most_telling(contenders, chosen):
        test = contender.seen.test
        wrong = is_misclassified(test.probs, labels)
        bins[contender.name] = equal_width_reliability(max_probability(test.probs), ~wrong)
        curve = risk_coverage(test.entropy, wrong)
        curves[contender.name] = curve.coverage, curve.risk
    figures = {
        "reliability": (
            plots.reliability_figure(bins),
            "Accuracy against confidence. Dots on the diagonal are honest. Below it a method is too sure of itself.",
        ),
        "risk-coverage": (
            plots.risk_coverage_figure(curves),
            "Error rate of the answers that are kept when the least certain ones (by entropy) are set aside.",
        ),
    }
    test, ood = chosen.seen.test, chosen.seen.ood
    if case.ood is not None and ood is not None:
        scores = {"entropy (nats)": (test.entropy, ood.entropy)}
        if chosen.has_draws:
            scores["mutual information (nats)"] = test.mutual_information, ood.mutual_information
        figures["out-of-distribution"] = (
            plots.shift_figure(scores),
            f"Uncertainty about the test data and about {case.ood.name} ({chosen.name}).",
        )
    if (picture := _certainty(case, chosen, labels)) is not None:
        why = "on which the draws agree most and least" if chosen.has_draws else "with the lowest and highest entropy"
        figures["most-and-least-certain"] = picture, f"Test images {why} ({chosen.name})."
    return figures


def _certainty(case: Case, chosen: ClassContender, labels: Tensor) -> Figure | None:
    test = chosen.seen.test
    order = (test.mutual_information if chosen.has_draws else test.entropy).argsort(stable=True)
    shown = torch.cat([order[:8], order[-8:]]) if len(order) >= 16 else order
    images = displayable(case.test.raw().take(shown.tolist()))
    if images is None:
        return None
    return plots.certainty_figure(
        images,
        labels[shown],
        test.log_probs.argmax(-1)[shown],
        entropy=test.entropy[shown],
        mutual_information=test.mutual_information[shown],
        count=min(8, len(order) // 2),
        names=case.class_names,
    )


LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


def value_figures(
    contenders: Sequence[ValueContender],
    chosen: ValueContender,
    targets: Tensor,
    held_out: Tensor,
    unit: str,
) -> Figures:
    """Draw the figures of a regression. Those of one method show the recommended one."""
    shaped = targets.reshape(chosen.seen.test.mean.shape)
    coverages = {}
    for contender in most_telling(contenders, chosen):
        ends = [contender.seen.test.interval(level) for level in LEVELS]
        coverages[contender.name] = [interval_summary(low, high, shaped).coverage for low, high in ends]
    figures: Figures = {
        "interval-coverage": (
            plots.interval_coverage_figure(LEVELS, coverages),
            "How often intervals hold the target, against how often they should. Below the diagonal they are too "
            "narrow.",
        ),
    }
    if not chosen.has_draws:
        return figures
    mean = chosen.seen.calibration.mean
    constant = best_constant_precision(mean, held_out.reshape(mean.shape), "log_likelihood")
    scatter = plots.uncertainty_error_figure(
        first_output(chosen.seen.test.std),
        first_output(chosen.seen.test.mean - shaped),
        constant_std=constant**-0.5,
        unit=unit,
    )
    caption = (
        f"Errors in the order of the predicted spread ({chosen.name}). If the spread tells large errors from small "
        "ones, the dots and their running mean rise to the right with the bands."
    )
    return {"uncertainty-error": (scatter, caption), **figures}


def image_figures(case: Case, contenders: Sequence[Contender[PixelSums]], chosen: Contender[PixelSums]) -> Figures:
    """Draw the figures of a segmentation. Those of one method show the recommended one."""
    curves, shown = {}, most_telling(contenders, chosen)
    for contender in shown:
        curve = contender.seen.entropy.counts().risk_coverage()
        curves[contender.name] = curve.coverage, curve.risk
    whole, part = case.nouns
    maps: Figures = {}
    if whole == "image":
        caption = "The most certain test image, one in the middle and the least certain one, by their mean entropy "
        maps = {"segmentation": (_triptychs(case, chosen), f"{caption}({chosen.name}).")}
    return maps | {
        "reliability": (
            plots.reliability_figure({c.name: c.seen.reliability.reliability() for c in shown}),
            f"Accuracy of {part}s against confidence. Below the diagonal a method is too sure of itself.",
        ),
        "risk-coverage": (
            plots.risk_coverage_figure(curves, risk=f"error of the {part}s kept"),
            f"Error rate of the {part}s that are kept when the least certain ones (by entropy) are set aside.",
        ),
    }


def _triptychs(case: Case, chosen: Contender[PixelSums]) -> Figure:
    order = chosen.seen.mean_entropy().argsort()
    picked = list(dict.fromkeys(int(order[i]) for i in (0, len(order) // 2, len(order) - 1)))
    found = {row: (image, labels) for row, image, labels in case.test.find(picked)}
    images, labels = (torch.stack(parts) for parts in zip(*(found[row] for row in picked), strict=True))
    shown = displayable(images)
    pictures = shown if shown is not None else images[:, :1].expand(-1, 3, -1, -1)
    some = single_images(Examples("some", [(images, labels)]))
    likelihoods = [case.at(chosen.tuned["temperature"])]
    panels = []
    for picture, predicted in zip(
        pictures, predict_stream(chosen.posterior, some, likelihoods, **drawing(case, chosen)), strict=True
    ):
        seen, truth = predicted.predictives[0], predicted.batch[1][0]
        classes = seen.log_probs[0].argmax(-1)
        wrong = (classes != truth) & kept_pixels(truth, case.settings.ignore_label)
        panels.append(plots.Triptych(picture.permute(1, 2, 0), classes, seen.entropy[0], wrong))
    return plots.segmentation_figure(panels, num_classes=case.num_outputs, names=case.class_names)
