"""Assessment of a classifier."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from batchbayes.assessment.classification.figures import class_figures
from batchbayes.assessment.classification.verdict import class_terms, class_verdict
from batchbayes.assessment.contenders import (
    ClassContender,
    Contender,
    Seen,
    advice_for_classes,
    compared_candidates,
    drawing,
    notes_for_prediction,
    with_temperatures,
)
from batchbayes.assessment.explorer import class_explorer
from batchbayes.assessment.load import Case
from batchbayes.assessment.options import AssessOptions
from batchbayes.assessment.recommend import recommend
from batchbayes.assessment.result import FLAGGED_SHARE, RANKING, STRANGE, Assessment, MetricColumn
from batchbayes.assessment.rows import assessed_rows, class_labels
from batchbayes.assessment.thumbnails import pick_details, pick_thumbnails
from batchbayes.calibrate import conformal_sets, tune_temperature
from batchbayes.data.examples import Examples
from batchbayes.likelihoods import Categorical, categorical
from batchbayes.methods.candidates import Candidate
from batchbayes.metrics import (
    accuracy,
    area_under_risk_coverage,
    area_under_roc,
    average_precision,
    classwise_calibration_error,
    count_by_score,
    equal_mass_reliability,
    equal_width_reliability,
    expected_calibration_error,
    false_positive_rate_at_recall,
    mean_score,
)
from batchbayes.posterior import Posterior
from batchbayes.prediction import predict, predict_stream
from batchbayes.predictive import CategoricalPredictive
from batchbayes.scores import brier, is_misclassified, max_probability

COLUMNS = (
    MetricColumn("accuracy", "Accuracy", "higher", 1, "share of right answers", percent=True),
    MetricColumn("nll", "NLL", "lower", 3, "negative log-likelihood: the surprise at the truth, in nats"),
    MetricColumn("brier", "Brier", "lower", 3, "squared distance of the probabilities from the truth, 0 to 2"),
    MetricColumn(
        "ece", "ECE", "lower", 1, "mean gap between confidence and accuracy, 15 equal-width bins", percent=True
    ),
    MetricColumn("ece_equal_mass", "ECE, equal mass", "lower", 1, "the same with bins of equal size", percent=True),
    MetricColumn("ece_classwise", "ECE, classwise", "lower", 2, "the same for each class, averaged", percent=True),
    MetricColumn(
        "set_size", "Set size", "lower", 2, "mean size of conformal sets that hold the truth in 90 % of cases"
    ),
    MetricColumn(
        "error_auroc", "AUROC", "higher", 3, "how well entropy tells wrong answers from right ones", group=RANKING
    ),
    MetricColumn("error_auroc_mi", "AUROC by MI", "higher", 3, "how well mutual information does", group=RANKING),
    MetricColumn("aurc", "AURC", "lower", 4, "mean error rate as the least certain are set aside", group=RANKING),
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


def assess_classification(options: AssessOptions, case: Case) -> Assessment:
    """Compare the methods on the test data, and recommend one."""
    held_out, labels = case.calibration.targets(), case.test.targets()
    contenders: list[ClassContender] = []
    for group in with_temperatures(compared_candidates(options, case, categorical())):
        contenders += _contenders(options, case, group, held_out, labels)
    contenders.sort(key=lambda contender: contender.candidate.rank)
    choice = recommend(contenders)
    chosen: ClassContender = choice.recommended
    threshold = float(chosen.seen.calibration.entropy.double().quantile(1 - FLAGGED_SHARE))
    notes = notes_for_prediction(options, case, chosen, threshold, class_names=case.class_names)
    rows = assessed_rows(chosen.posterior, case, notes, class_labels(labels, case.class_names))
    wrong = is_misclassified(chosen.seen.test.probs, labels)
    return Assessment(
        columns=(*COLUMNS, *(STRANGE_COLUMNS if case.ood else ())),
        contenders=contenders,
        recommended=chosen,
        verdict=class_verdict(rows, contenders, choice, case),
        terms=class_terms(contenders, choice, wrong, case),
        rows=rows,
        figures=class_figures(case, contenders, chosen, labels),
        explorer=class_explorer(chosen.seen.test.entropy, wrong, threshold, has_draws=chosen.has_draws),
        thumbnails=pick_thumbnails(case, rows, "entropy"),
        details=pick_details(case, rows, "entropy"),
        notes=notes,
        facts={
            "test_count": len(labels),
            "calibration_count": len(held_out),
            "classes": case.num_outputs,
            "threshold": threshold,
        },
    )


def _contenders(
    options: AssessOptions, case: Case, group: Sequence[Candidate], held_out: Tensor, labels: Tensor
) -> Iterator[ClassContender]:
    """Predict with a posterior, without and with a temperature, in one pass over each part of the data."""
    posterior = group[0].posterior
    plain = predict(posterior, case.calibration, categorical(), keep_draws=True, **drawing(options))
    temperatures = [1.0, *(tune_temperature(plain, held_out) for _ in group[1:])]
    likelihoods = [categorical(temperature=temperature) for temperature in temperatures]
    tested = _predict_each(options, posterior, case.test, likelihoods)
    strange = _predict_each(options, posterior, case.ood, likelihoods) if case.ood else [None] * len(group)
    for candidate, likelihood, test, ood in zip(group, likelihoods, tested, strange, strict=True):
        seen = Seen(_under(plain, likelihood), test, ood)
        yield Contender(
            candidate=candidate,
            tuned={"temperature": likelihood.temperature},
            advice=advice_for_classes(candidate, likelihood.temperature),
            engine=test.engine,
            seen=seen,
            metrics=_metrics(seen, labels, held_out),
            losses=-test.log_prob(labels),
            num_samples=test.num_samples,
        )


def _predict_each(
    options: AssessOptions, posterior: Posterior, data: Examples, likelihoods: Sequence[Categorical]
) -> list[CategoricalPredictive]:
    """Return one predictive for each likelihood, from the same draws."""
    stream = predict_stream(posterior, data, likelihoods, **drawing(options))
    columns = list(zip(*(predicted.predictives for predicted in stream), strict=True))
    return [replace(type(pieces[0]).concatenate(pieces), engine=pieces[0].engine) for pieces in columns]


def _under(predictive: CategoricalPredictive, likelihood: Categorical) -> CategoricalPredictive:
    """Return the predictive of the same draws under another likelihood."""
    if likelihood.temperature == 1:
        return predictive
    summary = likelihood.summary()
    summary.add(predictive.draws)
    return summary.finish(None)


def _metrics(seen: Seen[CategoricalPredictive], labels: Tensor, held_out: Tensor) -> dict[str, float]:
    test, has_draws = seen.test, seen.test.num_samples > 1
    wrong, confidence = is_misclassified(test.probs, labels), max_probability(test.probs)
    metrics = {
        "accuracy": accuracy(test.probs, labels),
        "nll": mean_score(-test.log_prob(labels)),
        "brier": mean_score(brier(test.probs, labels)),
        "ece": expected_calibration_error(equal_width_reliability(confidence, ~wrong)),
        "ece_equal_mass": expected_calibration_error(equal_mass_reliability(confidence, ~wrong)),
        "ece_classwise": classwise_calibration_error(test.probs, labels),
        "mean_confidence": mean_score(confidence),
        "aurc": area_under_risk_coverage(count_by_score(test.entropy, wrong)),
    }
    if 0 < int(wrong.sum()) < len(wrong):
        metrics["error_auroc"] = area_under_roc(count_by_score(test.entropy, wrong))
        if has_draws:
            metrics["error_auroc_mi"] = area_under_roc(count_by_score(test.mutual_information, wrong))
    sets = conformal_sets(seen.calibration, held_out)(test)
    metrics["set_size"] = mean_score(sets.sum(-1).double())
    metrics["set_coverage"] = mean_score(sets.gather(-1, labels.unsqueeze(-1)).double())
    if seen.ood is not None:
        metrics |= _strange_metrics(test, seen.ood, has_draws)
    return metrics


def _strange_metrics(seen: CategoricalPredictive, strange: CategoricalPredictive, has_draws: bool) -> dict[str, float]:
    is_strange = torch.arange(len(seen.entropy) + len(strange.entropy)) >= len(seen.entropy)
    counts = count_by_score(torch.cat([seen.entropy, strange.entropy]), is_strange)
    metrics = {
        "ood_auroc": area_under_roc(counts),
        "ood_aupr": average_precision(counts),
        "ood_fpr95": false_positive_rate_at_recall(counts),
    }
    if has_draws:
        information = torch.cat([seen.mutual_information, strange.mutual_information])
        metrics["ood_auroc_mi"] = area_under_roc(count_by_score(information, is_strange))
    return metrics
