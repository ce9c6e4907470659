"""The figures of an assessment: those of all tasks, and those of each. What shows one method shows the recommended."""

from collections.abc import Sequence
from typing import Any

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
from batchbayes.plots.style import Figure
from batchbayes.predict import predict_stream
from batchbayes.report.compare.contenders import Contender
from batchbayes.report.compare.rows import first_output
from batchbayes.report.page.pictures import displayable
from batchbayes.report.read.examples import Examples
from batchbayes.report.result import Assessment, Figures
from batchbayes.report.words.say import say
from batchbayes.report.words.shared import numbers

SHOWN = 6
"""Methods in a figure with a line or a panel for each."""
PRICED = ("nll", "accuracy", "ece", "rmse", "crps")
"""Metrics that are drawn against their price, as far as a task has them."""


def shared_figures(found: Assessment) -> Figures:
    """Draw quality against price, the novelty of test and strange inputs, and curves of tuning."""
    return {**_price(found), **_novelty(found), **_tuning(found.contenders)}


def most_telling(found: Assessment) -> list[Contender]:
    """Return the network, the recommended contender and the best others, as many as a figure can show, in order."""
    others = sorted(found.contenders, key=lambda contender: contender.mean_loss)
    kept = list(dict.fromkeys([found.contenders[0], found.recommended, *others]))[:SHOWN]
    return [contender for contender in found.contenders if contender in kept]


def _price(found: Assessment) -> Figures:
    qualities = {
        f"{column.label}{', %' if column.percent else ''} ({column.better} is better)": [
            (100 if column.percent else 1) * contender.metrics[column.key] for contender in found.contenders
        ]
        for column in found.columns
        if column.key in PRICED
    }
    figure = plots.price_figure(
        [contender.name for contender in found.contenders],
        [contender.passes for contender in found.contenders],
        qualities,
        recommended=found.recommended.name,
    )
    return _captioned("quality-price", figure)


def _captioned(name: str, figure: Figure, *, caption: str = "", **words: Any) -> Figures:
    """Return a figure with its caption, which has the name of its file if there is only one for it."""
    return {name: (figure, say(f"caption.{caption or name}", **words))}


def _novelty(found: Assessment) -> Figures:
    if "" in found.rows["novelty"]:
        return {}
    p_values, level = {"test data": numbers(found.rows, "novelty")}, found.notes["novelty_level"]
    if found.case.ood is not None:
        p_values[found.case.ood.name] = numbers(found.rows, "novelty", "ood")
    return _captioned("novelty", plots.novelty_figure(p_values, level=level), level=level)


def _tuning(contenders: Sequence[Contender]) -> Figures:
    """Draw the curve by which each method was tuned, if there are any."""
    tuned = {id(c.candidate.curve): c.candidate for c in contenders if c.candidate.curve is not None}
    return {
        f"tuning-{i}": (
            plots.batch_size_figure(
                curve.values, curve.losses, best=curve.best, trained_with=curve.start, score="NLL on calibration data"
            ),
            say("method.tuning", label=candidate.method.label),
        )
        for i, candidate in enumerate(tuned.values(), start=1)
        if (curve := candidate.curve) is not None
    }


def class_figures(found: Assessment) -> Figures:
    """Draw the figures of a classifier."""
    bins, curves, case, chosen = {}, {}, found.case, found.recommended
    for contender in most_telling(found):
        test = contender.seen.test
        wrong = is_misclassified(test.probs, case.truth)
        bins[contender.name] = equal_width_reliability(max_probability(test.probs), ~wrong)
        curve = risk_coverage(test.entropy, wrong)
        curves[contender.name] = curve.coverage, curve.risk
    figures = {
        **shared_figures(found),
        **_captioned("reliability", plots.reliability_figure(bins)),
        **_captioned("risk-coverage", plots.risk_coverage_figure(curves)),
    }
    test, ood = chosen.seen.test, chosen.seen.ood
    if case.ood is not None and ood is not None:
        scores = {"entropy (nats)": (test.entropy, ood.entropy)}
        if chosen.has_draws:
            scores["mutual information (nats)"] = test.mutual_information, ood.mutual_information
        shift = plots.shift_figure(scores)
        figures |= _captioned("out-of-distribution", shift, ood=case.ood.name, chosen=chosen.name)
    if (picture := _certainty(found)) is not None:
        name = "most-and-least-certain"
        figures |= _captioned(name, picture, caption=name + "-draws" * chosen.has_draws, chosen=chosen.name)
    return figures


def _certainty(found: Assessment) -> Figure | None:
    test, case = found.recommended.seen.test, found.case
    order = (test.mutual_information if found.recommended.has_draws else test.entropy).argsort(stable=True)
    shown = torch.cat([order[:8], order[-8:]]) if len(order) >= 16 else order
    images = displayable(case.test.raw().take(shown.tolist()))
    if images is None:
        return None
    return plots.certainty_figure(
        images,
        case.truth[shown],
        test.log_probs.argmax(-1)[shown],
        entropy=test.entropy[shown],
        mutual_information=test.mutual_information[shown],
        count=min(8, len(order) // 2),
        names=case.class_names,
    )


LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


def value_figures(found: Assessment, targets: Tensor, held_out: Tensor, unit: str) -> Figures:
    """Draw the figures of a regression, from the targets of test and calibration data, (N, ...) each."""
    chosen, coverages = found.recommended, {}
    shaped = targets.reshape(chosen.seen.test.mean.shape)
    for contender in most_telling(found):
        ends = [contender.seen.test.interval(level) for level in LEVELS]
        coverages[contender.name] = [interval_summary(low, high, shaped).coverage for low, high in ends]
    coverage = _captioned("interval-coverage", plots.interval_coverage_figure(LEVELS, coverages))
    if not chosen.has_draws:
        return shared_figures(found) | coverage
    mean = chosen.seen.calibration.mean
    constant = best_constant_precision(mean, held_out.reshape(mean.shape), "log_likelihood")
    scatter = plots.uncertainty_error_figure(
        first_output(chosen.seen.test.std),
        first_output(chosen.seen.test.mean - shaped),
        constant_std=constant**-0.5,
        unit=unit,
    )
    return shared_figures(found) | _captioned("uncertainty-error", scatter, chosen=chosen.name) | coverage


def image_figures(found: Assessment) -> Figures:
    """Draw the figures of a segmentation."""
    (whole, part), figures = found.case.nouns, shared_figures(found)
    bins, curves = {}, {}
    for contender in most_telling(found):
        curve = contender.seen.test.entropy.counts().risk_coverage()
        curves[contender.name] = curve.coverage, curve.risk
        bins[contender.name] = contender.seen.test.reliability.reliability()
    if whole == "image":
        figures |= _captioned("segmentation", _triptychs(found), chosen=found.recommended.name)
    errors = plots.risk_coverage_figure(curves, risk=f"error of the {part}s kept")
    return (
        figures
        | _captioned("reliability", plots.reliability_figure(bins), caption="reliability-pixels", part=part)
        | _captioned("risk-coverage", errors, caption="risk-coverage-pixels", part=part)
    )


def _triptychs(found: Assessment) -> Figure:
    case, chosen = found.case, found.recommended
    order = chosen.seen.test.mean_entropy().argsort()
    picked = list(dict.fromkeys(int(order[i]) for i in (0, len(order) // 2, len(order) - 1)))
    rows = {row: (image, labels) for row, image, labels in case.test.find(picked)}
    images, labels = (torch.stack(parts) for parts in zip(*(rows[row] for row in picked), strict=True))
    shown = displayable(images)
    pictures = shown if shown is not None else images[:, :1].expand(-1, 3, -1, -1)
    some, likelihoods = Examples("some", [(images, labels)]).one_by_one(), [case.at(chosen.tuned["temperature"])]
    stream = predict_stream(chosen.posterior, some, likelihoods, **chosen.drawing(case))
    panels = []
    for picture, predicted in zip(pictures, stream, strict=True):
        seen, truth = predicted.predictives[0], predicted.batch[1][0]
        classes = seen.log_probs[0].argmax(-1)
        wrong = (classes != truth) & (truth != chosen.seen.test.ignored_label)
        panels.append(plots.Triptych(picture.permute(1, 2, 0), classes, seen.entropy[0], wrong))
    return plots.segmentation_figure(panels, num_classes=case.num_outputs, names=case.class_names)
