"""Classes of examples: how a classifier is compared."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from batchbayes import metrics
from batchbayes.calibrate import conformal_sets, tune_temperature
from batchbayes.methods.candidates import Candidate
from batchbayes.metrics import is_misclassified, max_probability
from batchbayes.predict import joined, predict_stream
from batchbayes.predictive import CategoricalPredictive, summarised
from batchbayes.report.compare.columns import CLASSES, STRANGE_CLASSES
from batchbayes.report.compare.contenders import Contender, Seen, affordable, calibration_draws, compared_candidates
from batchbayes.report.compare.groups import of_classes
from batchbayes.report.compare.rows import Rows, class_labels
from batchbayes.report.compare.task import Task
from batchbayes.report.compare.tuning import TemperatureCurve, temperature_grid
from batchbayes.report.page.explorer import class_explorer
from batchbayes.report.page.figures import class_figures
from batchbayes.report.read.case import Case
from batchbayes.report.read.examples import Examples
from batchbayes.report.read.likelihood import likelihood_notes
from batchbayes.report.result import Assessment
from batchbayes.report.words.classes import class_terms, class_verdict

TEMPERATURES = temperature_grid(0.25, 16, 17)


class Classes(Task):
    """One class for each example."""

    columns = CLASSES
    strange_columns = STRANGE_CLASSES

    def fit(self, case: Case) -> list[Candidate]:
        return compared_candidates(case, case.likelihood)

    def judge(self, case: Case, candidate: Candidate) -> list[Contender]:
        """Predict the calibration data, without and with a temperature."""
        (draws, how), labels, contenders = calibration_draws(case, candidate), case.held_out, []
        for size in affordable(candidate, len(draws), how["drawn"], case.settings.budget):
            some = summarised(case.likelihood.summary(), draws[:size])
            grid = [-summarised(case.at(t).summary(), draws[:size]).log_prob(labels) for t in TEMPERATURES]
            right = ~is_misclassified(some.probs, labels)
            plain = Contender.judged(
                candidate,
                size,
                {"temperature": 1.0},
                -some.log_prob(labels),
                trust=of_classes(max_probability(some.probs).double(), right).trust,
                draws=draws,
                **how,
            )
            curve = TemperatureCurve(TEMPERATURES, torch.stack(grid))
            contenders += [plain, plain.with_temperature(curve, tune_temperature(some, labels), case.settings.seed)]
        return contenders

    def test(self, case: Case, contenders: Sequence[Contender], is_told: bool) -> Iterator[Contender]:
        """Predict the test data for all contenders of a candidate in one pass, and strange data."""
        tested = _predict_each(case, case.test, contenders)
        strange = _predict_each(case, case.ood, contenders) if case.ood and is_told else [None] * len(contenders)
        for contender, test, ood in zip(contenders, tested, strange, strict=True):
            assert contender.draws is not None
            draws = contender.draws[: contender.num_samples]
            held = summarised(case.at(contender.tuned["temperature"]).summary(), draws, keep=False)
            found = _metrics(test, case.truth, held, case.held_out)
            if ood is not None:
                found |= _strange_metrics(test, ood)
            losses = -test.log_prob(case.truth)
            yield replace(
                contender, seen=Seen(test, held, ood), metrics=found | {"passes": contender.passes}, losses=losses
            )

    def uncertainty(self, case: Case, chosen: Contender) -> tuple[Tensor, Tensor]:
        return chosen.seen.calibration.entropy, chosen.seen.test.entropy

    def notes(self, case: Case, chosen: Contender) -> dict[str, object]:
        return {"class_names": case.class_names, **likelihood_notes(case.likelihood)}

    def truth(self, case: Case, chosen: Contender) -> Rows:
        return {"target": class_labels(case.truth, case.class_names)}

    def told(self, found: Assessment, limit_count: int) -> Assessment:
        case, test, verdict = found.case, found.recommended.seen.test, class_verdict(found)
        wrong, threshold = is_misclassified(test.probs, case.truth), found.notes["threshold"]
        return replace(
            found,
            verdict=verdict.sentences,
            is_usable=verdict.is_usable,
            terms=class_terms(found, wrong),
            figures={} if case.settings.no_figures else class_figures(found),
            explorer=class_explorer(test.entropy, wrong, threshold, has_novelty=found.novelty is not None),
            facts={**found.facts, "classes": case.num_outputs, "threshold": threshold},
        )


def _predict_each(case: Case, data: Examples, contenders: Sequence[Contender]) -> list[CategoricalPredictive]:
    """Return one predictive for each contender, from the same draws."""
    most = max(contenders, key=lambda each: each.num_samples)
    likelihoods, how = [case.at(each.tuned["temperature"]) for each in contenders], most.drawing(case)
    if all(each.num_samples == most.num_samples for each in contenders):
        pieces = [predicted.predictives for predicted in predict_stream(most.posterior, data, likelihoods, **how)]
    else:
        stream = predict_stream(most.posterior, data, [case.likelihood], keep_draws=True, **how)
        pieces = [
            [
                summarised(likelihood.summary(), predicted.predictives[0].draws[: each.num_samples], keep=False)
                for each, likelihood in zip(contenders, likelihoods, strict=True)
            ]
            for predicted in stream
        ]
    return [joined(column) for column in zip(*pieces, strict=True)]


def _metrics(
    test: CategoricalPredictive, labels: Tensor, held: CategoricalPredictive, held_out: Tensor
) -> dict[str, float]:
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
    if "error_auroc" in found and test.num_samples > 1:
        found["error_auroc_mi"] = metrics.area_under_roc(test.mutual_information, wrong)
    sets = conformal_sets(held, held_out)(test)
    found["set_size"] = metrics.mean_score(sets.sum(-1).double())
    found["set_coverage"] = metrics.mean_score(sets.gather(-1, labels.unsqueeze(-1)).double())
    return found


def _strange_metrics(seen: CategoricalPredictive, strange: CategoricalPredictive) -> dict[str, float]:
    is_strange = torch.arange(len(seen.entropy) + len(strange.entropy)) >= len(seen.entropy)
    counts = metrics.count_by_score(torch.cat([seen.entropy, strange.entropy]), is_strange)
    found = {
        "ood_auroc": counts.area_under_roc(),
        "ood_aupr": counts.average_precision(),
        "ood_fpr95": counts.false_positive_rate_at_recall(),
    }
    if seen.num_samples > 1:
        found["ood_auroc_mi"] = metrics.ood_auroc(seen.mutual_information, strange.mutual_information)
    return found
