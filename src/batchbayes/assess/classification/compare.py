"""Assessment of a classifier."""

from dataclasses import dataclass

import torch
from torch import Tensor

from batchbayes.assess.candidates import Entry, Way, class_entries, drawing, fit_all, notes_for_new_data
from batchbayes.assess.choice import choose
from batchbayes.assess.classification.figures import class_figures
from batchbayes.assess.classification.verdict import class_verdict
from batchbayes.assess.explorer import class_explorer
from batchbayes.assess.job import FLAGGED_SHARE, Assessment, Column, Job, Loaded, Scored
from batchbayes.assess.tables import Table, class_table, joined
from batchbayes.assess.thumbnails import pick_details, pick_thumbnails
from batchbayes.calibrate import conformal_sets, tune_temperature
from batchbayes.likelihoods import categorical
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
from batchbayes.predictive import CategoricalPredictive
from batchbayes.scores import brier, is_misclassified, max_probability

RANKING = "Does the uncertainty find errors?"
STRANGE = "Does the uncertainty find strange inputs?"
COLUMNS = (
    Column("accuracy", "Accuracy", "higher", 1, "share of right answers", percent=True),
    Column("nll", "NLL", "lower", 3, "negative log-likelihood: the surprise at the truth, in nats"),
    Column("brier", "Brier", "lower", 3, "squared distance of the probabilities from the truth, 0 to 2"),
    Column("ece", "ECE", "lower", 1, "mean gap between confidence and accuracy, 15 equal-width bins", percent=True),
    Column("ece_equal_mass", "ECE, equal mass", "lower", 1, "the same with bins of equal size", percent=True),
    Column("ece_classwise", "ECE, classwise", "lower", 2, "the same for each class, averaged", percent=True),
    Column("set_size", "Set size", "lower", 2, "mean size of conformal sets that hold the truth in 90 % of cases"),
    Column("error_auroc", "AUROC", "higher", 3, "how well entropy tells wrong answers from right ones", group=RANKING),
    Column("error_auroc_mi", "AUROC by MI", "higher", 3, "how well mutual information does", group=RANKING),
    Column("aurc", "AURC", "lower", 4, "mean error rate as the least certain are set aside", group=RANKING),
)
OOD_COLUMNS = (
    Column("ood_auroc", "AUROC", "higher", 3, "how well entropy tells strange inputs from test inputs", group=STRANGE),
    Column("ood_auroc_mi", "AUROC by MI", "higher", 3, "how well mutual information does", group=STRANGE),
    Column("ood_aupr", "AUPR", "higher", 3, "area under precision and recall, by entropy", group=STRANGE),
    Column(
        "ood_fpr95", "FPR95", "lower", 1, "false alarms when 95 % of strange inputs are found",
        percent=True, group=STRANGE,
    ),
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Contender:
    """A method with its predictions everywhere."""

    way: Way
    temperature: float
    calibration: CategoricalPredictive
    test: CategoricalPredictive
    ood: CategoricalPredictive | None
    settings: dict[str, object]

    @property
    def name(self) -> str:
        return self.way.name


def assess_classification(job: Job, loaded: Loaded) -> Assessment:
    """Compare the methods on the test data, and say which to use."""
    fitted = fit_all(job, loaded, categorical())
    held_out, labels = loaded.calibration.targets(), loaded.test.targets()
    entries = class_entries(job, loaded, fitted)
    contenders = [contender for entry in entries for contender in _contenders(job, loaded, entry, held_out)]
    contenders.sort(key=lambda contender: contender.way.rank)
    columns = (*COLUMNS, *(OOD_COLUMNS if loaded.ood else ()))
    scored = [_score(contender, labels, held_out) for contender in contenders]
    choice = choose(scored)
    chosen = next(c for c in contenders if c.name == choice.recommended)
    drawn = next(c for c in contenders if c.name == fitted[0].tuned_name)
    threshold = float(chosen.calibration.entropy.double().quantile(1 - FLAGGED_SHARE))
    table = _table(loaded, chosen, drawn, labels, threshold)
    wrong = is_misclassified(chosen.test.probs, labels)
    return Assessment(
        task="classification",
        columns=columns,
        scored=scored,
        recommended=choice.recommended,
        verdict=class_verdict(scored, choice, contenders, labels, loaded),
        table=table,
        figures=class_figures(loaded, contenders, chosen, drawn, labels, fitted[0]),
        explorer=class_explorer(chosen.test.entropy, wrong, threshold),
        thumbnails=pick_thumbnails(loaded, table, "entropy"),
        details=pick_details(loaded, table, "entropy"),
        posterior=fitted[0].tuned.posterior,
        notes={
            "task": "classification",
            "temperature": chosen.temperature,
            "draw_temperature": drawn.temperature,
            "class_names": loaded.class_names,
            **notes_for_new_data(job, chosen.settings, drawn.settings, threshold),
        },
        facts={
            "test_count": len(labels),
            "calibration_count": len(held_out),
            "classes": loaded.num_outputs,
            "threshold": threshold,
        },
    )


def _contenders(job: Job, loaded: Loaded, entry: Entry, held_out: Tensor) -> list[Contender]:
    """All ways of using a posterior, in one pass over each data set."""
    maker = drawing(job)
    plain = maker.bundle(entry.posterior, loaded.calibration, [categorical()], keep_draws=True).predictives[0]
    temperatures = [tune_temperature(plain, held_out) if way.warm else 1.0 for way in entry.ways]
    likelihoods = [categorical(temperature=t) for t in temperatures]
    test = maker.bundle(entry.posterior, loaded.test, likelihoods)
    ood = maker.bundle(entry.posterior, loaded.ood, likelihoods).predictives if loaded.ood else None
    return [
        Contender(
            way=way,
            temperature=temperature,
            calibration=_again(plain, likelihoods[i]),
            test=test.predictives[i],
            ood=ood[i] if ood else None,
            settings={**entry.settings, "engine": test.engine, "temperature": temperature},
        )
        for i, (way, temperature) in enumerate(zip(entry.ways, temperatures, strict=True))
    ]


def _again(predictive: CategoricalPredictive, likelihood) -> CategoricalPredictive:
    """The same draws under another likelihood."""
    if likelihood.temperature == 1:
        return predictive
    summary = likelihood.summary()
    summary.add(predictive.draws)
    return summary.finish(None)


def _score(contender: Contender, labels: Tensor, held_out: Tensor) -> Scored:
    seen, has_draws = contender.test, contender.test.num_samples > 1
    wrong, confidence = is_misclassified(seen.probs, labels), max_probability(seen.probs)
    losses = -seen.log_prob(labels)
    metrics = {
        "accuracy": accuracy(seen.probs, labels),
        "nll": mean_score(losses),
        "brier": mean_score(brier(seen.probs, labels)),
        "ece": expected_calibration_error(equal_width_reliability(confidence, ~wrong)),
        "ece_equal_mass": expected_calibration_error(equal_mass_reliability(confidence, ~wrong)),
        "ece_classwise": classwise_calibration_error(seen.probs, labels),
        "mean_confidence": mean_score(confidence),
        "aurc": area_under_risk_coverage(count_by_score(seen.entropy, wrong)),
    }
    if 0 < int(wrong.sum()) < len(wrong):
        metrics["error_auroc"] = area_under_roc(count_by_score(seen.entropy, wrong))
        if has_draws:
            metrics["error_auroc_mi"] = area_under_roc(count_by_score(seen.mutual_information, wrong))
    sets = conformal_sets(contender.calibration, held_out)(seen)
    metrics["set_size"] = mean_score(sets.sum(-1).double())
    metrics["set_coverage"] = mean_score(sets.gather(-1, labels.unsqueeze(-1)).double())
    if contender.ood is not None:
        metrics |= _ood_metrics(seen, contender.ood, has_draws)
    return Scored(contender.name, contender.way.about, metrics, losses, contender.settings)


def _ood_metrics(seen: CategoricalPredictive, strange: CategoricalPredictive, has_draws: bool) -> dict[str, float]:
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


def _table(loaded: Loaded, chosen: Contender, drawn: Contender, labels: Tensor, threshold: float) -> Table:
    names = loaded.class_names
    table = class_table(
        chosen.test, drawn.test, source="test", rows=loaded.test.rows(), labels=labels, names=names, threshold=threshold
    )
    if loaded.ood is None or chosen.ood is None or drawn.ood is None:
        return table
    strange = class_table(
        chosen.ood, drawn.ood, source="ood", rows=loaded.ood.rows(), labels=None, names=names, threshold=threshold
    )
    return joined(table, strange)
