"""Scores of predictions as in the tables of the MCBN paper, in the unit of the target.

CRPS is the score of a Gaussian with the mean and the variance of the draws. PLL, the predictive log-likelihood, is that
of the mixture of the draws. The precision tau of the observation noise is the one with the best score on the left-out
folds, within limits. The paper chooses it by CRPS, also for PLL. Constant uncertainty means the same predicted means
with one variance for all points.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

import batchbayes as bb
from batchbayes.tools import EngineName

PrecisionObjective = Literal["CRPS", "PLL"]
Limits = tuple[float, float]
ANY: Limits = (0.0, math.inf)
TINY = 1e-12
"""The smallest error in the best possible score: for an error of zero the best log-likelihood would be infinite."""


@dataclass(frozen=True, eq=False)
class DrawnPredictions:
    """Draws of the targets, (S, N), and the true targets, (N,), in the unit of the target."""

    draws: Tensor
    truth: Tensor

    @property
    def mean(self) -> Tensor:
        """Mean over draws, (N,)."""
        return self.draws.mean(0)

    @property
    def variance(self) -> Tensor:
        """Variance over draws, (N,), without observation noise."""
        return self.draws.var(0, correction=0)

    def std(self, precision: float) -> Tensor:
        """Return the standard deviation with observation noise, (N,)."""
        return (self.variance + 1 / precision).sqrt()

    def constant(self) -> "DrawnPredictions":
        """Return the same means without any variance."""
        return DrawnPredictions(self.mean[None], self.truth)


def draw_predictions(
    posterior: bb.Posterior,
    inputs: Tensor,
    truth: Tensor,
    in_units: Callable[[Tensor], Tensor],
    num_samples: int,
    seed: int,
    engine: EngineName = "sample",
) -> DrawnPredictions:
    """Predict inputs by draws from a posterior; `in_units` converts outputs to the unit of the target."""
    predictive = bb.predict(
        posterior, inputs, bb.gaussian(1.0), num_samples=num_samples, seed=seed, engine=engine, keep_draws=True
    )
    return DrawnPredictions(in_units(predictive.draws), truth)


def crps(drawn: DrawnPredictions, precision: float) -> Tensor:
    """Return the CRPS of a Gaussian with the mean and the total variance of the draws, (N,)."""
    return bb.metrics.gaussian_crps(drawn.mean, drawn.std(precision), drawn.truth)


def log_likelihood(drawn: DrawnPredictions, precision: float) -> Tensor:
    """Return the log-likelihood of the mixture of the draws with observation noise, (N,)."""
    return bb.metrics.mixture_log_likelihood(drawn.draws, precision, drawn.truth)


def tune_fold_precision(
    folds: Sequence[DrawnPredictions], objective: PrecisionObjective = "CRPS", limits: Limits = ANY
) -> tuple[float, float]:
    """Return the precision with the best mean score over folds, and that score (lower is better).

    If the draws alone scatter as much as the errors, CRPS prefers ever less noise. The upper limit decides then.

    >>> import torch
    >>> alone = DrawnPredictions(torch.zeros(1, 4), torch.tensor([2.0, -2.0, 2.0, -2.0]))
    >>> [round(value, 3) for value in tune_fold_precision([alone], "PLL")]
    [0.25, 2.112]
    """
    moments = [(fold.mean, fold.variance, fold.truth) for fold in folds]
    error = math.fsum(float((mean - truth).square().mean()) for mean, _, truth in moments) / len(folds)

    def cost(precision: float) -> float:
        if objective == "CRPS":
            scores = [
                bb.metrics.gaussian_crps(mean, (var + 1 / precision).sqrt(), truth) for mean, var, truth in moments
            ]
        else:
            scores = [-log_likelihood(fold, precision) for fold in folds]
        return math.fsum(map(bb.metrics.mean_score, scores)) / len(folds)

    best = min(max(bb.calibrate.search_precision(cost, error), limits[0]), limits[1])
    return best, cost(best)


def scores_of(drawn: DrawnPredictions, precision: float, constant_precision: float) -> dict[str, float]:
    """Return the scores of one run: plain, with constant uncertainty around the same means, and normalised."""
    error = (drawn.truth - drawn.mean).abs().clamp_min(TINY)
    own_crps, own_pll = crps(drawn, precision), log_likelihood(drawn, precision)
    constant_std = constant_precision**-0.5
    constant_crps = bb.metrics.gaussian_crps(drawn.mean, constant_std, drawn.truth)
    constant_pll = bb.metrics.gaussian_log_likelihood(drawn.mean, constant_std, drawn.truth)
    return {
        "rmse": bb.metrics.root_mean_squared_error(drawn.mean, drawn.truth),
        "crps": bb.metrics.mean_score(own_crps),
        "pll": bb.metrics.mean_score(own_pll),
        "constant_crps": bb.metrics.mean_score(constant_crps),
        "constant_pll": bb.metrics.mean_score(constant_pll),
        "crps_norm": bb.metrics.normalised_score(own_crps, constant_crps, bb.metrics.crps_optimum(error)),
        "pll_norm": bb.metrics.normalised_score(own_pll, constant_pll, bb.metrics.log_likelihood_optimum(error)),
        "precision": precision,
        "constant_precision": constant_precision,
    }


def score_runs(
    folds: Sequence[DrawnPredictions], tests: Sequence[DrawnPredictions], limits: Limits
) -> list[dict[str, float]]:
    """Tune both precisions by CRPS on the left-out folds, and return the scores of each test run."""
    precision, _ = tune_fold_precision(folds, limits=limits)
    constant, _ = tune_fold_precision([fold.constant() for fold in folds], limits=limits)
    return [scores_of(test, precision, constant) for test in tests]


def rounded(values: Tensor, digits: int = 5) -> tuple[float, ...]:
    """Return numbers with a few significant digits, for results that only a figure needs.

    >>> import torch
    >>> rounded(torch.tensor([0.123456, 123.456]), 2)
    (0.12, 120.0)
    """
    return tuple(float(f"{value:.{digits}g}") for value in values.tolist())
