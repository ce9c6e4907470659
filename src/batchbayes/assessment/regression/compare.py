"""Assessment of a regression."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from batchbayes._common.text import number
from batchbayes.assessment.contenders import (
    Contender,
    Seen,
    ValueContender,
    compared_candidates,
    drawing,
    notes_for_prediction,
)
from batchbayes.assessment.explorer import value_explorer
from batchbayes.assessment.load import Case
from batchbayes.assessment.options import AssessOptions
from batchbayes.assessment.recommend import recommend
from batchbayes.assessment.regression.figures import LEVELS, central, value_figures
from batchbayes.assessment.regression.quantities import quantities
from batchbayes.assessment.regression.verdict import value_terms, value_verdict
from batchbayes.assessment.result import FLAGGED_SHARE, STRANGE, Assessment, MetricColumn
from batchbayes.assessment.rows import CONFORMAL_LEVEL, assessed_rows, first_output, rounded, spread_of_draws
from batchbayes.assessment.thumbnails import pick_details, pick_thumbnails
from batchbayes.calibrate import conformal_intervals, tune_precision
from batchbayes.likelihoods import gaussian
from batchbayes.methods.candidates import Candidate
from batchbayes.metrics import (
    area_under_roc,
    best_constant_precision,
    count_by_score,
    interval_summary,
    mean_score,
    normalised_score,
    rank_correlation,
    root_mean_squared_error,
    sharpness,
)
from batchbayes.prediction import predict
from batchbayes.predictive import GaussianPredictive
from batchbayes.scores import crps_optimum, gaussian_crps, gaussian_log_likelihood, log_likelihood_optimum, mixture_crps

INTERVALS = "Do intervals hold the target?"
COLUMNS = (
    MetricColumn("rmse", "RMSE", "lower", 3, "root of the mean squared error, in units of the target"),
    MetricColumn("nll", "NLL", "lower", 3, "negative log-likelihood: the surprise at the truth, in nats"),
    MetricColumn("crps", "CRPS", "lower", 3, "distance of the prediction from the truth, in units of the target"),
    MetricColumn("crps_normalised", "CRPS, 0 to 100", "higher", 1, "0: best constant spread, 100: best at each point"),
    MetricColumn("nll_normalised", "PLL, 0 to 100", "higher", 1, "the same scale for the log-likelihood"),
    MetricColumn("sharpness", "Sharpness", "lower", 3, "root of the mean predicted variance: compare with the RMSE"),
    MetricColumn("rank_correlation", "Rank correlation", "higher", 3, "of predicted spread and absolute error"),
    MetricColumn(
        "coverage_90", "90 % hold", "target", 1, "share of targets in 90 % intervals",
        percent=True, target=0.9, group=INTERVALS,
    ),
    MetricColumn("width_90", "Width", "lower", 3, "mean width of the 90 % intervals", group=INTERVALS),
    MetricColumn(
        "conformal_coverage", "Conformal hold", "target", 1, "share of targets in conformal 90 % intervals",
        percent=True, target=0.9, group=INTERVALS,
    ),
    MetricColumn("conformal_width", "Width", "lower", 3, "mean width of conformal 90 % intervals", group=INTERVALS),
)  # fmt: skip
STRANGE_COLUMNS = (
    MetricColumn(
        "ood_auroc", "AUROC", "higher", 3, "how well the spread tells strange from test inputs", group=STRANGE
    ),
)


def assess_regression(options: AssessOptions, case: Case) -> Assessment:
    """Compare the methods on the test data, and recommend one."""
    held_out, targets = case.calibration.targets().float(), case.test.targets().float()
    candidates = compared_candidates(options, case, gaussian(1.0))
    contenders = [_contender(options, case, candidate, held_out, targets) for candidate in candidates]
    choice = recommend(contenders)
    chosen: ValueContender = choice.recommended
    conformal = conformal_intervals(chosen.seen.calibration, held_out, CONFORMAL_LEVEL)
    threshold = float(spread_of_draws(chosen.seen.calibration).double().quantile(1 - FLAGGED_SHARE))
    notes = notes_for_prediction(options, case, chosen, threshold, conformal_width=conformal.width)
    test = chosen.seen.test
    shaped = targets.reshape(test.mean.shape)
    predicted = quantities(case.test.target_name, options.unit, shaped.flatten(1).shape[1])
    unit = predicted[0].label
    rows = assessed_rows(chosen.posterior, case, notes, rounded(first_output(shaped)))
    errors, spread = (test.mean - shaped).flatten(1), spread_of_draws(test) if chosen.has_draws else None
    lower, upper = conformal(test)
    return Assessment(
        columns=(*COLUMNS, *(STRANGE_COLUMNS if case.ood else ())),
        contenders=contenders,
        recommended=chosen,
        verdict=value_verdict(
            rows,
            choice,
            errors,
            shaped.flatten(1),
            (lower.flatten(1), upper.flatten(1)),
            predicted,
            ood=case.ood,
            calibration_count=len(held_out),
        ),
        terms=value_terms(contenders, choice, spread, errors, shaped.flatten(1), predicted, case.ood),
        rows=rows,
        figures=value_figures(contenders, chosen, targets, held_out, unit),
        explorer=None if spread is None else value_explorer(spread, errors[:, 0], threshold, unit),
        thumbnails=None if spread is None else pick_thumbnails(case, rows, "epistemic_std"),
        details={} if spread is None else pick_details(case, rows, "epistemic_std"),
        notes=notes,
        facts={
            "test_count": len(targets),
            "calibration_count": len(held_out),
            "threshold": threshold,
            "unit": predicted[0].unit,
        },
    )


def _contender(
    options: AssessOptions, case: Case, candidate: Candidate, held_out: Tensor, targets: Tensor
) -> ValueContender:
    """Predict with a posterior, with observation noise tuned on calibration data."""
    posterior, kept = candidate.posterior, {"keep_draws": True, **drawing(options)}
    plain = predict(posterior, case.calibration, gaussian(1.0), **kept)
    precision = tune_precision(plain, held_out)
    likelihood = gaussian(precision)
    summary = likelihood.summary()
    summary.add(plain.draws)
    test = predict(posterior, case.test, likelihood, **kept)
    strange = predict(posterior, case.ood, likelihood, **kept) if case.ood else None
    seen = Seen(summary.finish(plain.draws), test, strange)
    noise = number(precision**-0.5)
    return Contender(
        candidate=replace(candidate, about=f"{candidate.about}; observation noise tuned on calibration data"),
        tuned={"precision": precision},
        advice=f"{candidate.advice}, with observation noise of standard deviation {noise}.",
        engine=test.engine,
        seen=seen,
        metrics=_metrics(seen, precision, targets.reshape(test.mean.shape), held_out),
        losses=-test.log_prob(targets.reshape(test.mean.shape)).flatten(1).mean(1),
        num_samples=test.num_samples,
    )


def _metrics(seen: Seen[GaussianPredictive], precision: float, targets: Tensor, held_out: Tensor) -> dict[str, float]:
    test, held_out = seen.test, held_out.reshape(seen.calibration.mean.shape)
    losses = -test.log_prob(targets)
    crps = mixture_crps(test.draws, precision, targets)
    metrics = {
        "rmse": root_mean_squared_error(test.mean, targets),
        "nll": mean_score(losses),
        "crps": mean_score(crps),
        "sharpness": sharpness(test.std),
        **_normalised(seen, crps, -losses, targets, held_out),
    }
    for level in LEVELS:
        summary = interval_summary(*central(test, level), targets)
        metrics[f"coverage_{level * 100:.0f}"] = summary.coverage
        metrics[f"width_{level * 100:.0f}"] = summary.mean_width
    conformal = conformal_intervals(seen.calibration, held_out, CONFORMAL_LEVEL)
    if math.isfinite(conformal.width):
        summary = interval_summary(*conformal(test), targets)
        metrics |= {"conformal_coverage": summary.coverage, "conformal_width": summary.mean_width}
    if float(test.std.max()) > float(test.std.min()) * (1 + 1e-6):
        metrics["rank_correlation"] = rank_correlation(test.std, (test.mean - targets).abs())
        if seen.ood is not None:
            both = torch.cat([first_output(test.std), first_output(seen.ood.std)])
            is_strange = torch.arange(len(both)) >= len(test.std)
            metrics["ood_auroc"] = area_under_roc(count_by_score(both, is_strange))
    return metrics


def _normalised(
    seen: Seen[GaussianPredictive], crps: Tensor, log_likelihood: Tensor, targets: Tensor, held_out: Tensor
) -> dict[str, float]:
    """Return scores on a scale from 0, the best constant spread on calibration data, to 100, the best at each point."""
    mean, calibrated = seen.test.mean, seen.calibration.mean
    error = targets - mean
    constant = best_constant_precision(calibrated, held_out, "crps") ** -0.5
    found = {"crps_normalised": normalised_score(crps, gaussian_crps(mean, constant, targets), crps_optimum(error))}
    keep = error != 0
    constant = best_constant_precision(calibrated, held_out, "log_likelihood") ** -0.5
    at_constant = gaussian_log_likelihood(mean, constant, targets)
    found["nll_normalised"] = normalised_score(
        log_likelihood[keep], at_constant[keep], log_likelihood_optimum(error[keep])
    )
    return found
