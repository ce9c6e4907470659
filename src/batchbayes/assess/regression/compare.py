"""Assessment of a regression."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from batchbayes.assess.candidates import Fitted, drawing, fit_all, notes_for_new_data, own_network
from batchbayes.assess.choice import choose
from batchbayes.assess.classification.compare import STRANGE
from batchbayes.assess.explorer import value_explorer
from batchbayes.assess.job import FLAGGED_SHARE, Assessment, Column, Job, Loaded, Scored
from batchbayes.assess.regression.figures import LEVELS, central, first_output, value_figures
from batchbayes.assess.regression.verdict import value_verdict
from batchbayes.assess.tables import Table, joined, value_table
from batchbayes.assess.thumbnails import pick_details, pick_thumbnails
from batchbayes.calibrate import ConformalIntervals, conformal_intervals, tune_precision
from batchbayes.likelihoods import gaussian
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
from batchbayes.predictive import GaussianPredictive
from batchbayes.scores import crps_optimum, gaussian_crps, gaussian_log_likelihood, log_likelihood_optimum, mixture_crps

INTERVALS = "Do intervals hold the target?"
COLUMNS = (
    Column("rmse", "RMSE", "lower", 3, "root of the mean squared error, in units of the target"),
    Column("nll", "NLL", "lower", 3, "negative log-likelihood: the surprise at the truth, in nats"),
    Column("crps", "CRPS", "lower", 3, "distance of the prediction from the truth, in units of the target"),
    Column("crps_normalised", "CRPS, 0 to 100", "higher", 1, "0: the best constant spread, 100: the best per point"),
    Column("nll_normalised", "PLL, 0 to 100", "higher", 1, "the same scale for the log-likelihood"),
    Column("sharpness", "Sharpness", "lower", 3, "root of the mean predicted variance: compare with the RMSE"),
    Column("rank_correlation", "Rank correlation", "higher", 3, "of predicted spread and absolute error"),
    Column(
        "coverage_90", "90 % hold", "target", 1, "share of targets in 90 % intervals",
        percent=True, target=0.9, group=INTERVALS,
    ),
    Column("width_90", "Width", "lower", 3, "mean width of the 90 % intervals", group=INTERVALS),
    Column(
        "conformal_coverage", "Conformal hold", "target", 1, "share of targets in conformal 90 % intervals",
        percent=True, target=0.9, group=INTERVALS,
    ),
    Column("conformal_width", "Width", "lower", 3, "mean width of conformal 90 % intervals", group=INTERVALS),
)  # fmt: skip
OOD_COLUMNS = (
    Column("ood_auroc", "AUROC", "higher", 3, "how well the spread tells strange from test inputs", group=STRANGE),
)


@dataclass(frozen=True, eq=False)
class Contender:
    """A method with its predictions everywhere."""

    name: str
    about: str
    precision: float
    calibration: GaussianPredictive
    test: GaussianPredictive
    ood: GaussianPredictive | None
    conformal: ConformalIntervals
    settings: dict[str, Any]


def assess_regression(job: Job, loaded: Loaded) -> Assessment:
    """Compare the methods on the test data, and say which to use."""
    fitted = fit_all(job, loaded, gaussian(1.0))
    held_out, targets = loaded.calibration.targets().float(), loaded.test.targets().float()
    contenders = _contenders(job, loaded, fitted, held_out)
    scored = [_score(contender, targets, held_out) for contender in contenders]
    choice = choose(scored)
    chosen = next(c for c in contenders if c.name == choice.recommended)
    drawn = next(c for c in contenders if c.name == fitted[0].tuned_name)
    threshold = float(_spread(drawn.calibration).double().quantile(1 - FLAGGED_SHARE))
    unit = loaded.test.target_name or "target"
    table = _table(loaded, chosen, drawn, targets, threshold)
    errors = first_output(chosen.test.mean - targets.reshape(chosen.test.mean.shape))
    return Assessment(
        task="regression",
        columns=(*COLUMNS, *(OOD_COLUMNS if loaded.ood else ())),
        scored=scored,
        recommended=choice.recommended,
        verdict=value_verdict(scored, choice, _spread(drawn.test), errors, targets, loaded.ood),
        table=table,
        figures=value_figures(contenders, drawn, targets, held_out, fitted[0], unit),
        explorer=value_explorer(_spread(drawn.test), errors, threshold, unit),
        thumbnails=pick_thumbnails(loaded, table, "epistemic_std"),
        details=pick_details(loaded, table, "epistemic_std"),
        posterior=fitted[0].tuned.posterior,
        notes={
            "task": "regression",
            "precision": chosen.precision,
            "draw_precision": drawn.precision,
            "conformal_width": chosen.conformal.width,
            **notes_for_new_data(job, chosen.settings, drawn.settings, threshold),
        },
        facts={"test_count": len(targets), "calibration_count": len(held_out), "threshold": threshold, "unit": unit},
    )


def _contenders(job: Job, loaded: Loaded, fitted: Sequence[Fitted], held_out: Tensor) -> list[Contender]:
    """In the order of simplicity: by itself, tuned, as trained; each with noise tuned on calibration data."""
    noise = "observation noise tuned on calibration data"
    about = f"mean of {job.num_samples} draws at the batch size that suits calibration data best, {noise}"
    contenders = [
        _contender(job, loaded, own_network(loaded), held_out, "deterministic", f"the network as it is, {noise}")
    ]
    contenders += [_contender(job, loaded, f.tuned.posterior, held_out, f.tuned_name, about) for f in fitted]
    about = f"mean of {job.num_samples} draws at the batch size of training, {noise}"
    return contenders + [_contender(job, loaded, f.trained, held_out, f.trained_name, about) for f in fitted]


def _contender(job: Job, loaded: Loaded, posterior, held_out: Tensor, name: str, about: str) -> Contender:
    maker = drawing(job)
    plain = maker.bundle(posterior, loaded.calibration, [gaussian(1.0)], keep_draws=True).predictives[0]
    precision = tune_precision(plain, held_out)
    likelihood = gaussian(precision)
    summary = likelihood.summary()
    summary.add(plain.draws)
    calibration = summary.finish(plain.draws)
    test = maker.bundle(posterior, loaded.test, [likelihood], keep_draws=True)
    strange = maker.bundle(posterior, loaded.ood, [likelihood], keep_draws=True).predictives[0] if loaded.ood else None
    network = posterior.method == "deterministic"
    settings = {
        "network": network,
        "batch_size": None if network else posterior.batch_size,
        "precision": precision,
        "engine": test.engine,
    }
    conformal = conformal_intervals(calibration, held_out)
    return Contender(name, about, precision, calibration, test.predictives[0], strange, conformal, settings)


def _spread(predictive: GaussianPredictive) -> Tensor:
    """How far the draws scatter, (N,): what tells one input from another, whichever method gives the answer."""
    return first_output(predictive.epistemic_variance).sqrt()


def _score(contender: Contender, targets: Tensor, held_out: Tensor) -> Scored:
    seen = contender.test
    targets, held_out = targets.reshape(seen.mean.shape), held_out.reshape(contender.calibration.mean.shape)
    losses = -seen.log_prob(targets)
    crps = mixture_crps(seen.draws, contender.precision, targets)
    metrics = {
        "rmse": root_mean_squared_error(seen.mean, targets),
        "nll": mean_score(losses),
        "crps": mean_score(crps),
        "sharpness": sharpness(seen.std),
        **_normalised(contender, crps, -losses, targets, held_out),
    }
    for level in LEVELS:
        summary = interval_summary(*central(seen, level), targets)
        metrics[f"coverage_{level * 100:.0f}"] = summary.coverage
        metrics[f"width_{level * 100:.0f}"] = summary.mean_width
    if math.isfinite(contender.conformal.width):
        summary = interval_summary(*contender.conformal(seen), targets)
        metrics |= {"conformal_coverage": summary.coverage, "conformal_width": summary.mean_width}
    if float(seen.std.max()) > float(seen.std.min()) * (1 + 1e-6):
        metrics["rank_correlation"] = rank_correlation(seen.std, (seen.mean - targets).abs())
        if contender.ood is not None:
            both = torch.cat([first_output(seen.std), first_output(contender.ood.std)])
            is_strange = torch.arange(len(both)) >= len(seen.std)
            metrics["ood_auroc"] = area_under_roc(count_by_score(both, is_strange))
    return Scored(contender.name, contender.about, metrics, losses.flatten(1).mean(1), contender.settings)


def _normalised(
    contender: Contender, crps: Tensor, log_likelihood: Tensor, targets: Tensor, held_out: Tensor
) -> dict[str, float]:
    """Between the best constant spread around the same means, of calibration data, and the best at each point."""
    mean, calibrated = contender.test.mean, contender.calibration.mean
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


def _table(loaded: Loaded, chosen: Contender, drawn: Contender, targets: Tensor, threshold: float) -> Table:
    table = value_table(
        chosen.test,
        drawn.test,
        source="test",
        rows=loaded.test.rows(),
        targets=targets,
        threshold=threshold,
        intervals=chosen.conformal(chosen.test),
    )
    if loaded.ood is None or chosen.ood is None or drawn.ood is None:
        return table
    strange = value_table(
        chosen.ood,
        drawn.ood,
        source="ood",
        rows=loaded.ood.rows(),
        targets=None,
        threshold=threshold,
        intervals=chosen.conformal(chosen.ood),
    )
    return joined(table, strange)
