"""Assessment of a classifier."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from batchbayes import metrics
from batchbayes.calibrate import conformal_sets, tune_temperature
from batchbayes.methods.candidates import Candidate
from batchbayes.metrics import is_misclassified, max_probability
from batchbayes.predict import joined, predict_stream
from batchbayes.predictive import CategoricalPredictive, summarised
from batchbayes.report.compare.compare import affordable, calibration_draws, charged, compare
from batchbayes.report.compare.contenders import (
    ClassContender,
    Contender,
    Seen,
    compared_candidates,
    drawing,
    fit_novelty,
    notes_for_prediction,
)
from batchbayes.report.compare.honesty import class_honesty
from batchbayes.report.compare.rows import assessed_rows, class_labels
from batchbayes.report.compare.tuning import TemperatureCurve, temperature_grid
from batchbayes.report.page.figures import class_figures, shared_figures
from batchbayes.report.page.pictures import class_explorer, pick_details, pick_thumbnails
from batchbayes.report.read.case import Case
from batchbayes.report.read.examples import Examples
from batchbayes.report.read.task import likelihood_notes
from batchbayes.report.result import (
    AURC,
    BRIER,
    BY_MI,
    ECE,
    PASSES,
    RANKING,
    STRANGE,
    Assessment,
    MetricColumn,
    flag_threshold,
    scores_for_limit,
)
from batchbayes.report.words.classification import class_terms, class_verdict

COLUMNS = (
    MetricColumn("accuracy", "Accuracy", "higher", 1, "share of right answers", percent=True),
    MetricColumn("nll", "NLL", "lower", 3, "negative log-likelihood: the surprise at the truth, in nats"),
    MetricColumn("cll", "CLL", "higher", 3, "log-likelihood at the best temperature, tuned on other test data"),
    BRIER,
    ECE,
    MetricColumn("ece_equal_mass", "ECE, equal mass", "lower", 1, "the same with bins of equal size", percent=True),
    MetricColumn("ece_classwise", "ECE, classwise", "lower", 2, "the same for each class, averaged", percent=True),
    MetricColumn(
        "set_size", "Set size", "lower", 2, "mean size of conformal sets that hold the truth in 90 % of cases"
    ),
    PASSES,
    MetricColumn(
        "error_auroc", "AUROC", "higher", 3, "how well entropy tells wrong answers from right ones", group=RANKING
    ),
    BY_MI,
    AURC,
)
STRANGE_COLUMNS = (
    MetricColumn("ood_auroc", "AUROC", "higher", 3, "how well entropy tells strange from test inputs", group=STRANGE),
    MetricColumn("ood_auroc_mi", "AUROC by MI", "higher", 3, "how well mutual information does", group=STRANGE),
    MetricColumn("ood_aupr", "AUPR", "higher", 3, "area under precision and recall, by entropy", group=STRANGE),
    MetricColumn(
        "ood_fpr95", "FPR95", "lower", 1, "false alarms when 95 % of strange inputs are found",
        percent=True, group=STRANGE,
    ),
)  # fmt: skip
TEMPERATURES = temperature_grid(0.25, 16, 17)


def assess_classification(case: Case) -> Assessment:
    """Choose a method on the calibration data, and compare it with others on the test data."""
    held_out, labels = case.calibration.targets(), case.test.targets()
    case, contenders, choice = compare(
        case, lambda case: compared_candidates(case, case.likelihood), _judge, partial(_test, held_out, labels)
    )
    chosen: ClassContender = choice.recommended
    threshold = float(flag_threshold(scores_for_limit(chosen.seen.calibration.entropy, chosen.seen.test.entropy)))
    novelty, why_not = fit_novelty(case)
    told = {"class_names": case.class_names, **likelihood_notes(case.likelihood)}
    notes = notes_for_prediction(case, chosen, threshold, novelty, **told)
    truth = {"target": class_labels(labels, case.class_names)}
    rows = assessed_rows(chosen.posterior, case, notes, truth, novelty)
    wrong = is_misclassified(chosen.seen.test.probs, labels)
    verdict = class_verdict(rows, contenders, choice, case)
    return Assessment(
        case=case,
        columns=(*COLUMNS, *(STRANGE_COLUMNS if case.ood else ())),
        contenders=contenders,
        choice=choice,
        verdict=verdict.sentences,
        is_usable=verdict.is_usable,
        terms=class_terms(rows, contenders, choice, wrong, case),
        rows=rows,
        figures={}
        if case.settings.no_figures
        else shared_figures(case, contenders, chosen, COLUMNS, rows, novelty)
        | class_figures(case, contenders, chosen, labels),
        explorer=class_explorer(chosen.seen.test.entropy, wrong, threshold, has_novelty=novelty is not None),
        thumbnails=pick_thumbnails(case, rows, "entropy"),
        details=pick_details(case, rows, "entropy"),
        notes=notes,
        novelty=novelty,
        facts={
            "test_count": len(labels),
            "calibration_count": len(held_out),
            "classes": case.num_outputs,
            "threshold": threshold,
            "no_novelty": why_not,
        },
    )


def _judge(case: Case, candidate: Candidate) -> list[Contender]:
    """Predict the calibration data, without and with a temperature."""
    (draws, labels, how), contenders = calibration_draws(case, candidate), []
    for size in affordable(candidate, len(draws), how["drawn"], case.settings.budget):
        some = summarised(case.likelihood.summary(), draws[:size])
        grid = [-summarised(case.at(t).summary(), draws[:size]).log_prob(labels) for t in TEMPERATURES]
        curve = TemperatureCurve(TEMPERATURES, torch.stack(grid))
        right = ~is_misclassified(some.probs, labels)
        plain = Contender(
            candidate,
            size,
            {"temperature": 1.0},
            charged(candidate, -some.log_prob(labels)),
            trust=class_honesty(max_probability(some.probs).double(), right).trust,
            draws=draws,
            **how,
        )
        scaled = replace(
            plain,
            tuned={"temperature": tune_temperature(some, labels)},
            calibration_losses=charged(candidate, curve.cross_fitted(case.settings.seed)),
            has_temperature=True,
        )
        contenders += [plain, scaled]
    return contenders


def _test(
    held_out: Tensor, labels: Tensor, case: Case, contenders: Sequence[Contender], is_told: bool
) -> Iterator[ClassContender]:
    """Predict the test data for all contenders of a candidate in one pass; strange data too if it is told about."""
    tested = _predict_each(case, case.test, contenders)
    strange = _predict_each(case, case.ood, contenders) if case.ood and is_told else [None] * len(contenders)
    for contender, test, ood in zip(contenders, tested, strange, strict=True):
        assert contender.draws is not None
        draws = contender.draws[: contender.num_samples]
        held = summarised(case.at(contender.tuned["temperature"]).summary(), draws, keep=False)
        seen = Seen(held, test, ood)
        found = _metrics(seen, labels, held_out) | {"passes": contender.passes}
        yield replace(contender, seen=seen, metrics=found, losses=-test.log_prob(labels))


def _predict_each(case: Case, data: Examples, contenders: Sequence[Contender]) -> list[CategoricalPredictive]:
    """Return one predictive for each contender, from the same draws."""
    most = max(contenders, key=lambda each: each.num_samples)
    likelihoods = [case.at(each.tuned["temperature"]) for each in contenders]
    posterior, how = most.posterior, drawing(case, most)
    if all(each.num_samples == most.num_samples for each in contenders):
        pieces = [predicted.predictives for predicted in predict_stream(posterior, data, likelihoods, **how)]
    else:
        stream = predict_stream(posterior, data, [case.likelihood], keep_draws=True, **how)
        pieces = [
            [
                summarised(likelihood.summary(), predicted.predictives[0].draws[: each.num_samples], keep=False)
                for each, likelihood in zip(contenders, likelihoods, strict=True)
            ]
            for predicted in stream
        ]
    return [joined(column) for column in zip(*pieces, strict=True)]


def _metrics(seen: Seen[CategoricalPredictive], labels: Tensor, held_out: Tensor) -> dict[str, float]:
    test, has_draws = seen.test, seen.test.num_samples > 1
    wrong, confidence = is_misclassified(test.probs, labels), max_probability(test.probs)
    found = {name: value for name, value in metrics.evaluate(test, labels).items() if not math.isnan(value)}
    found |= {
        "ece_equal_mass": metrics.equal_mass_reliability(confidence, ~wrong).expected_calibration_error(),
        "ece_classwise": metrics.classwise_calibration_error(test.probs, labels),
        "mean_confidence": metrics.mean_score(confidence),
        "aurc": metrics.area_under_risk_coverage(test.entropy, wrong),
    }
    if len(labels) > 1:
        found["cll"] = metrics.calibrated_log_likelihood(test.log_probs, labels)
    if "error_auroc" in found and has_draws:
        found["error_auroc_mi"] = metrics.area_under_roc(test.mutual_information, wrong)
    sets = conformal_sets(seen.calibration, held_out)(test)
    found["set_size"] = metrics.mean_score(sets.sum(-1).double())
    found["set_coverage"] = metrics.mean_score(sets.gather(-1, labels.unsqueeze(-1)).double())
    if seen.ood is not None:
        found |= _strange_metrics(test, seen.ood, has_draws)
    return found


def _strange_metrics(seen: CategoricalPredictive, strange: CategoricalPredictive, has_draws: bool) -> dict[str, float]:
    is_strange = torch.arange(len(seen.entropy) + len(strange.entropy)) >= len(seen.entropy)
    counts = metrics.count_by_score(torch.cat([seen.entropy, strange.entropy]), is_strange)
    found = {
        "ood_auroc": counts.area_under_roc(),
        "ood_aupr": counts.average_precision(),
        "ood_fpr95": counts.false_positive_rate_at_recall(),
    }
    if has_draws:
        found["ood_auroc_mi"] = metrics.ood_auroc(seen.mutual_information, strange.mutual_information)
    return found
