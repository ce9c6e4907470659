"""Values: how a regression is compared."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

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
from batchbayes.report.compare.columns import JOINT, STRANGE_VALUES, VALUES
from batchbayes.report.compare.contenders import Contender, Seen, affordable, calibration_draws, compared_candidates
from batchbayes.report.compare.groups import columns_of
from batchbayes.report.compare.intervals import Intervals, fifths_of, fit_intervals
from batchbayes.report.compare.rows import Rows, first_output, outputs_of, rounded, suffix
from batchbayes.report.compare.task import Task, flag_threshold
from batchbayes.report.compare.tuning import cross_fitted
from batchbayes.report.page.explorer import value_explorer
from batchbayes.report.page.figures import LEVELS, value_figures
from batchbayes.report.read.case import Case
from batchbayes.report.result import Assessment
from batchbayes.report.words.values import Values, names_and_units, value_terms, value_verdict


class Regression(Task):
    """One value or several for each example."""

    columns = VALUES
    strange_columns = STRANGE_VALUES

    def fit(self, case: Case) -> list[Candidate]:
        return compared_candidates(case, gaussian(1.0), averaged=1)

    def judge(self, case: Case, candidate: Candidate) -> list[Contender]:
        """Predict the calibration data, with noise tuned on it. The noise of the losses was tuned on others."""
        (draws, how), contenders = calibration_draws(case, candidate), []
        shaped = as_values(case.held_out).reshape(draws.shape[1:])
        for size in affordable(candidate, len(draws), how["drawn"], case.settings.budget):
            some = draws[:size]
            losses = cross_fitted(
                len(shaped),
                lambda rows, some=some: _precision(some[:, rows], shaped[rows]),
                lambda precision, rows, some=some: _losses(some[:, rows], precision, shaped[rows]),
                seed=case.settings.seed,
            )
            tuned = {"precision": _precision(some, shaped)}
            contenders.append(Contender.judged(candidate, size, tuned, losses, draws=draws, **how))
        return contenders

    def test(self, case: Case, contenders: Sequence[Contender], is_told: bool) -> Iterator[Contender]:
        """Predict the test data and the strange data."""
        held_out, targets = as_values(case.held_out), as_values(case.truth)
        for contender in contenders:
            assert contender.draws is not None
            noise, kept = gaussian(contender.tuned["precision"]), {"keep_draws": True, **contender.drawing(case)}
            test = predict(contender.posterior, case.test, noise, **kept)
            strange = predict(contender.posterior, case.ood, noise, **kept) if case.ood else None
            held = summarised(noise.summary(), contender.draws[: contender.num_samples])
            intervals = interval_fit(held, held_out, case.settings.intervals, case.settings.seed)
            seen, shaped = Seen(test, held, strange, intervals), targets.reshape(test.mean.shape)
            yield replace(
                contender,
                seen=seen,
                metrics=value_metrics(seen, shaped, held_out) | {"passes": contender.passes},
                losses=_losses(test.draws, contender.tuned["precision"], shaped),
            )

    def uncertainty(self, case: Case, chosen: Contender) -> tuple[Tensor, Tensor]:
        held, test = (outputs_of(p.epistemic_variance.sqrt()) for p in (chosen.seen.calibration, chosen.seen.test))
        return held, test

    def threshold(self, scores: Tensor) -> list[float]:
        """Return a threshold for each output, so that the flagged share of spreads (N, D) has one above it."""
        scale = flag_threshold(scores)  # (D,)
        ratio = torch.where(scale > 0, scores / scale.clamp_min(1e-300), 0.0).amax(1)
        return (scale * max(1.0, float(flag_threshold(ratio)))).tolist()

    def notes(self, case: Case, chosen: Contender) -> dict[str, Any]:
        assert chosen.seen.intervals is not None
        return {"intervals": chosen.seen.intervals.to_json(), "outputs": outputs_of(chosen.seen.test.mean).shape[1]}

    def truth(self, case: Case, chosen: Contender) -> Rows:
        columns = enumerate(outputs_of(as_values(case.truth)).T)
        return {f"target{suffix(i)}": rounded(column) for i, column in columns}

    def told(self, found: Assessment, limit_count: int) -> Assessment:
        case, outputs, chosen = found.case, output_values(found), found.recommended
        first, threshold = outputs[0], found.notes["threshold"][0]
        truth, held_out = as_values(case.truth), as_values(case.held_out)
        spread = outputs_of(chosen.seen.test.epistemic_variance.sqrt())[:, 0] if chosen.has_draws else None
        verdict = value_verdict(found, outputs, columns_of(case.test))
        name = first.name if len(outputs) == 1 else f"{len(outputs)} outputs"
        return replace(
            found,
            columns=[*self.columns, *(JOINT if len(outputs) > 1 else ()), *found.columns[len(self.columns) :]],
            verdict=verdict.sentences,
            is_usable=verdict.is_usable,
            terms=value_terms(found, outputs, spread),
            figures={} if case.settings.no_figures else value_figures(found, truth, held_out, first.label),
            explorer=None if spread is None else value_explorer(spread, first.errors, threshold, first.label),
            facts={**found.facts, "threshold": threshold, "unit": first.unit, "target": name},
        )


def output_values(found: Assessment) -> list[Values]:
    """Return what the recommended method predicted for each output, and what is true."""
    case, seen = found.case, found.recommended.seen
    assert seen.intervals is not None
    truth = outputs_of(as_values(case.truth).reshape(seen.test.mean.shape))  # (N, D)
    plain = interval_fit(seen.calibration, as_values(case.held_out), "plain", case.settings.seed)
    own, simple = (list(map(outputs_of, each.ends(seen.test.mean, seen.test.std))) for each in (seen.intervals, plain))
    errors, in_plain = outputs_of(seen.test.mean) - truth, (truth >= simple[0]) & (truth <= simple[1])
    named = names_and_units(case.test.target_name, case.settings.unit, truth.shape[1])
    return [
        Values(*name, truth[:, i], errors[:, i], own[0][:, i], own[1][:, i], in_plain[:, i], reach.kind)
        for i, (name, reach) in enumerate(zip(named, seen.intervals.outputs, strict=True))
    ]


def as_values(targets: Tensor) -> Tensor:
    """Return targets as floats, without losing digits: large ones differ in digits that float32 does not hold."""
    return real(targets).to(at_least_single(real(targets).dtype))


def interval_fit(held: GaussianPredictive, targets: Tensor, kind: str, seed: int) -> Intervals:
    """Return 90 % intervals of each output, fitted to calibration data."""
    shaped = targets.reshape(held.mean.shape)
    return fit_intervals(outputs_of(held.mean), outputs_of(held.std), outputs_of(shaped), kind=kind, seed=seed)


def _precision(draws: Tensor, targets: Tensor) -> float | tuple[float, ...]:
    """Return the best precision of the noise, one for each output if there are several."""
    seen = summarised(gaussian(1.0).summary(), draws)
    if targets[0].numel() > 1:
        return tune_precision(seen, targets, per_output=True)
    return tune_precision(seen, targets)


def _losses(draws: Tensor, precision: float | tuple[float, ...], targets: Tensor) -> Tensor:
    return -outputs_of(summarised(gaussian(precision).summary(), draws).log_prob(targets)).mean(1)


def value_metrics(seen: Seen, targets: Tensor, held_out: Tensor) -> dict[str, float]:
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
        low, high = test.interval(level)
        summary = metrics.interval_summary(low, high, targets)
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
    seen: Seen, crps: Tensor, log_likelihood: Tensor, targets: Tensor, held_out: Tensor
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
