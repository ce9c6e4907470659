"""Assessment of a regression."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from batchbayes import metrics
from batchbayes._common.checks import real
from batchbayes.calibrate import tune_precision
from batchbayes.likelihoods import gaussian
from batchbayes.methods.candidates import Candidate
from batchbayes.metrics import crps_optimum, gaussian_crps, gaussian_log_likelihood, log_likelihood_optimum
from batchbayes.predict import predict
from batchbayes.predictive import GaussianPredictive, at_least_single, summarised
from batchbayes.report.compare.compare import affordable, calibration_draws, charged, compare
from batchbayes.report.compare.contenders import (
    Contender,
    Seen,
    ValueContender,
    compared_candidates,
    drawing,
    fit_novelty,
    notes_for_prediction,
)
from batchbayes.report.compare.honesty import columns_of
from batchbayes.report.compare.intervals import Intervals, fifths_of, fit_intervals
from batchbayes.report.compare.rows import assessed_rows, first_output, outputs_of, rounded, suffix
from batchbayes.report.compare.tuning import cross_fitted
from batchbayes.report.page.figures import LEVELS, shared_figures, value_figures
from batchbayes.report.page.pictures import pick_details, pick_thumbnails, value_explorer
from batchbayes.report.read.case import Case
from batchbayes.report.result import PASSES, STRANGE, Assessment, MetricColumn, flag_threshold, scores_for_limit
from batchbayes.report.words.regression import Findings, quantities, value_terms, value_verdict

INTERVALS = "Do intervals hold the target?"
COLUMNS = (
    MetricColumn("rmse", "RMSE", "lower", 3, "root of the mean squared error, in units of the target"),
    MetricColumn("nll", "NLL", "lower", 3, "negative log-likelihood: the surprise at the truth, in nats"),
    MetricColumn("crps", "CRPS", "lower", 3, "distance of the prediction from the truth, in units of the target"),
    MetricColumn("crps_normalised", "CRPS, 0 to 100", "higher", 1, "0: best constant spread, 100: best at each point"),
    MetricColumn("nll_normalised", "PLL, 0 to 100", "higher", 1, "the same scale for the log-likelihood"),
    MetricColumn("sharpness", "Sharpness", "lower", 3, "root of the mean predicted variance: compare with the RMSE"),
    MetricColumn("rank_correlation", "Rank correlation", "higher", 3, "of predicted spread and absolute error"),
    PASSES,
    MetricColumn(
        "coverage_90", "90 % hold", "target", 1, "share of targets in 90 % intervals",
        percent=True, target=0.9, group=INTERVALS,
    ),
    MetricColumn("width_90", "Width", "lower", 3, "mean width of the 90 % intervals", group=INTERVALS),
    MetricColumn(
        "conformal_coverage", "Conformal hold", "target", 1, "share of targets in conformal 90 % intervals",
        percent=True, target=0.9, group=INTERVALS,
    ),
    MetricColumn(
        "worst_fifth", "Worst fifth", "higher", 1, "the same in the fifth of the predictions where it is lowest",
        percent=True, group=INTERVALS,
    ),
    MetricColumn("conformal_width", "Width", "lower", 3, "mean width of conformal 90 % intervals", group=INTERVALS),
)  # fmt: skip
JOINT = MetricColumn("joint_nll", "Joint NLL", "lower", 3, "of all outputs of an example together, in nats")
"""Shown for several outputs."""
STRANGE_COLUMNS = (
    MetricColumn(
        "ood_auroc", "AUROC", "higher", 3, "how well the spread tells strange from test inputs", group=STRANGE
    ),
)


def assess_regression(case: Case) -> Assessment:
    """Choose a method on the calibration data, and compare it with others on the test data."""
    held_out, targets = as_values(case.calibration.targets()), as_values(case.test.targets())
    case, contenders, choice = compare(
        case,
        lambda case: compared_candidates(case, gaussian(1.0), averaged=1),
        _judge,
        partial(_test, held_out, targets),
    )
    chosen: ValueContender = choice.recommended
    held, test, intervals = chosen.seen.calibration, chosen.seen.test, chosen.seen.intervals
    assert intervals is not None
    novelty, why_not = fit_novelty(case)
    held_spread, test_spread = (outputs_of(part.epistemic_variance.sqrt()) for part in (held, test))  # (N, D)
    thresholds = _thresholds(scores_for_limit(held_spread, test_spread))
    told = {"intervals": intervals.to_json(), "outputs": len(thresholds)}
    notes = notes_for_prediction(case, chosen, thresholds, novelty, **told)
    truth = outputs_of(targets.reshape(test.mean.shape))  # (N, D)
    predicted = quantities(case.test.target_name, case.settings.unit, truth.shape[1])
    columns = {f"target{suffix(i)}": rounded(column) for i, column in enumerate(truth.T)}
    rows = assessed_rows(chosen.posterior, case, notes, columns, novelty)
    errors, spread = outputs_of(test.mean) - truth, test_spread[:, 0] if chosen.has_draws else None
    findings = Findings(
        rows=rows,
        contenders=contenders,
        choice=choice,
        targets=truth,
        errors=errors,
        intervals=intervals,
        ends=_ends(test, intervals),
        plain=_ends(test, interval_fit(held, held_out, "plain", case.settings.seed)),
        columns=columns_of(case.test),
        spread=spread,
        quantities=predicted,
        ood=case.ood,
        calibration_count=len(held_out),
    )
    verdict = value_verdict(findings)
    return Assessment(
        case=case,
        columns=(*COLUMNS, *((JOINT,) if truth.shape[1] > 1 else ()), *(STRANGE_COLUMNS if case.ood else ())),
        contenders=contenders,
        choice=choice,
        verdict=verdict.sentences,
        is_usable=verdict.is_usable,
        terms=value_terms(findings),
        rows=rows,
        figures={}
        if case.settings.no_figures
        else shared_figures(case, contenders, chosen, COLUMNS, rows, novelty)
        | value_figures(contenders, chosen, targets, held_out, predicted[0].label),
        explorer=None if spread is None else value_explorer(spread, errors[:, 0], thresholds[0], predicted[0].label),
        thumbnails=pick_thumbnails(case, rows, None if spread is None else "epistemic_std"),
        details=pick_details(case, rows, None if spread is None else "epistemic_std"),
        notes=notes,
        novelty=novelty,
        facts={
            "test_count": len(targets),
            "calibration_count": len(held_out),
            "threshold": thresholds[0],
            "unit": predicted[0].unit,
            "target": predicted[0].name if len(predicted) == 1 else f"{len(predicted)} outputs",
            "no_novelty": why_not,
        },
    )


def as_values(targets: Tensor) -> Tensor:
    """Return targets as floats, without losing digits: large ones differ in digits that float32 does not hold."""
    return real(targets).to(at_least_single(real(targets).dtype))


def _thresholds(spread: Tensor) -> list[float]:
    """Return a threshold for each output, so that the flagged share of spreads (N, D) has one above it."""
    scale = flag_threshold(spread)  # (D,)
    ratio = torch.where(scale > 0, spread / scale.clamp_min(1e-300), 0.0).amax(1)
    return (scale * max(1.0, float(flag_threshold(ratio)))).tolist()


def interval_fit(held: GaussianPredictive, targets: Tensor, kind: str, seed: int) -> Intervals:
    """Return 90 % intervals of each output, fitted to calibration data."""
    shaped = targets.reshape(held.mean.shape)
    return fit_intervals(outputs_of(held.mean), outputs_of(held.std), outputs_of(shaped), kind=kind, seed=seed)


def _ends(seen: GaussianPredictive, intervals: Intervals) -> tuple[Tensor, Tensor]:
    """Return both ends of the intervals of each output, (N, D) each."""
    lower, upper = map(outputs_of, intervals.ends(seen.mean, seen.std))
    return lower, upper


def _judge(case: Case, candidate: Candidate) -> list[Contender]:
    """Predict the calibration data, with observation noise tuned on it. The noise of the losses was tuned on others."""
    (draws, targets, how), contenders = calibration_draws(case, candidate), []
    shaped = as_values(targets).reshape(draws.shape[1:])
    for size in affordable(candidate, len(draws), how["drawn"], case.settings.budget):
        some = draws[:size]
        losses = cross_fitted(
            len(shaped),
            lambda rows, some=some: _precision(some[:, rows], shaped[rows]),
            lambda precision, rows, some=some: _losses(some[:, rows], precision, shaped[rows]),
            seed=case.settings.seed,
        )
        tuned = {"precision": _precision(some, shaped)}
        contenders.append(Contender(candidate, size, tuned, charged(candidate, losses), draws=draws, **how))
    return contenders


def _precision(draws: Tensor, targets: Tensor) -> float | tuple[float, ...]:
    """Return the best precision of the noise, one for each output if there are several."""
    seen = summarised(gaussian(1.0).summary(), draws)
    if targets[0].numel() > 1:
        return tune_precision(seen, targets, per_output=True)
    return tune_precision(seen, targets)


def _losses(draws: Tensor, precision: float | tuple[float, ...], targets: Tensor) -> Tensor:
    return -outputs_of(summarised(gaussian(precision).summary(), draws).log_prob(targets)).mean(1)


def _test(
    held_out: Tensor, targets: Tensor, case: Case, contenders: Sequence[Contender], _: bool
) -> Iterator[ValueContender]:
    """Predict the test data and the strange data."""
    for contender in contenders:
        assert contender.draws is not None
        precision, kept = contender.tuned["precision"], {"keep_draws": True, **drawing(case, contender)}
        test = predict(contender.posterior, case.test, gaussian(precision), **kept)
        strange = predict(contender.posterior, case.ood, gaussian(precision), **kept) if case.ood else None
        held = summarised(gaussian(precision).summary(), contender.draws[: contender.num_samples])
        intervals = interval_fit(held, held_out, case.settings.intervals, case.settings.seed)
        seen, shaped = Seen(held, test, strange, intervals), targets.reshape(test.mean.shape)
        found = _metrics(seen, shaped, held_out) | {"passes": contender.passes}
        yield replace(contender, seen=seen, metrics=found, losses=_losses(test.draws, precision, shaped))


def _metrics(seen: Seen[GaussianPredictive], targets: Tensor, held_out: Tensor) -> dict[str, float]:
    test, held_out = seen.test, held_out.reshape(seen.calibration.mean.shape)
    losses = -test.log_prob(targets)
    crps = test.crps(targets)
    found = {
        "rmse": metrics.root_mean_squared_error(test.mean, targets),
        "nll": metrics.mean_score(losses),
        "crps": metrics.mean_score(crps),
        "sharpness": metrics.sharpness(test.std),
        **_normalised(seen, crps, -losses, targets, held_out),
    }
    if targets[0].numel() > 1:
        found["joint_nll"] = metrics.mean_score(-test.joint_log_prob(targets))
    for level in LEVELS:
        summary = metrics.interval_summary(*test.interval(level), targets)
        found[f"coverage_{level * 100:.0f}"] = summary.coverage
        found[f"width_{level * 100:.0f}"] = summary.mean_width
    if seen.intervals is not None and seen.intervals.is_known:
        lower, upper = seen.intervals.ends(test.mean, test.std)
        summary = metrics.interval_summary(lower, upper, targets)
        found |= {"conformal_coverage": summary.coverage, "conformal_width": summary.mean_width}
        held = outputs_of((targets >= lower) & (targets <= upper))
        every = [group for i in range(held.shape[1]) for group in fifths_of(outputs_of(test.mean)[:, i], held[:, i])]
        found |= {"worst_fifth": min(group.held for group in every)} if every else {}
    if float(test.std.max()) > float(test.std.min()) * (1 + 1e-6):
        found["rank_correlation"] = metrics.rank_correlation(test.std, (test.mean - targets).abs())
        if seen.ood is not None:
            found["ood_auroc"] = metrics.ood_auroc(first_output(test.std), first_output(seen.ood.std))
    return found


def _normalised(
    seen: Seen[GaussianPredictive], crps: Tensor, log_likelihood: Tensor, targets: Tensor, held_out: Tensor
) -> dict[str, float]:
    """Return scores on a scale from 0, the best constant spread on calibration data, to 100, the best at each point."""
    mean, calibrated = seen.test.mean, seen.calibration.mean
    error = targets - mean
    constant = metrics.best_constant_precision(calibrated, held_out, "crps") ** -0.5
    found = {
        "crps_normalised": metrics.normalised_score(crps, gaussian_crps(mean, constant, targets), crps_optimum(error))
    }
    keep = error != 0
    constant = metrics.best_constant_precision(calibrated, held_out, "log_likelihood") ** -0.5
    at_constant = gaussian_log_likelihood(mean, constant, targets)
    found["nll_normalised"] = metrics.normalised_score(
        log_likelihood[keep], at_constant[keep], log_likelihood_optimum(error[keep])
    )
    return found
