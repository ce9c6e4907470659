"""How predictions of the MCBN tables are scored: CRPS of the matched Gaussian, log-likelihood of the mixture (PLL).

All in the units of the target. The precision tau of the observation noise is the one that scores best on the folds left
out, within limits: by CRPS in the paper, for PLL too. CU ("constant uncertainty") is the same mean with one variance
for all points.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from batchbayes.calibrate import lowest
from batchbayes.engines.choose import EngineName
from batchbayes.errors import BatchbayesError
from batchbayes.likelihoods import gaussian
from batchbayes.metrics import mean_score, normalised_score, root_mean_squared_error
from batchbayes.posterior import Posterior
from batchbayes.prediction import predict
from batchbayes.scores import (
    crps_optimum,
    gaussian_crps,
    gaussian_log_likelihood,
    log_likelihood_optimum,
    mixture_log_likelihood,
)

Objective = Literal["CRPS", "PLL"]
Limits = tuple[float, float]
ANY: Limits = (0.0, math.inf)
TINY = 1e-12
"""Errors below it count as this large, where the best log-likelihood would be infinite."""


@dataclass(frozen=True, eq=False)
class Drawn:
    """Predictions in the unit of the target, (S, N), and the truth, (N,)."""

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
        """Total standard deviation, (N,)."""
        return (self.variance + 1 / precision).sqrt()

    def constant(self) -> "Drawn":
        """The same mean without any spread."""
        return Drawn(self.mean[None], self.truth)


def draw(
    posterior: Posterior,
    inputs: Tensor,
    truth: Tensor,
    in_units: Callable[[Tensor], Tensor],
    num_samples: int,
    seed: int,
    engine: EngineName = "sample",
) -> Drawn:
    """Predict inputs by a posterior."""
    predictive = predict(
        posterior, inputs, gaussian(1.0), num_samples=num_samples, seed=seed, engine=engine, keep_draws=True
    )
    return Drawn(in_units(predictive.draws), truth)


def crps(drawn: Drawn, precision: float) -> Tensor:
    """Of a Gaussian with the mean and the total variance of the draws, (N,)."""
    return gaussian_crps(drawn.mean, drawn.std(precision), drawn.truth)


def log_likelihood(drawn: Drawn, precision: float) -> Tensor:
    """Of the mixture of the draws with observation noise, (N,)."""
    return mixture_log_likelihood(drawn.draws, precision, drawn.truth)


def tune_precision(folds: Sequence[Drawn], objective: Objective = "CRPS", limits: Limits = ANY) -> tuple[float, float]:
    """The precision with the best score, averaged over folds, and that score (of which lower is better).

    Where draws alone scatter as far as errors, CRPS asks for ever less noise: there the limits decide.

    >>> import torch
    >>> alone = Drawn(torch.zeros(1, 4), torch.tensor([2.0, -2.0, 2.0, -2.0]))
    >>> [round(value, 3) for value in tune_precision([alone], "PLL")]
    [0.25, 2.112]
    """
    moments = [(fold.mean, fold.variance, fold.truth) for fold in folds]
    error = math.fsum(float((mean - truth).square().mean()) for mean, _, truth in moments) / len(folds)
    if not 0 < error < math.inf:
        raise BatchbayesError(
            expected="finite errors that are not all zero on the folds left out",
            got=f"a mean squared error of {error}",
            fix="use held-out points that the network has not learnt by heart",
        )

    def cost(log_precision: float) -> float:
        precision = math.exp(log_precision)
        if objective == "CRPS":
            scores = [gaussian_crps(mean, (var + 1 / precision).sqrt(), truth) for mean, var, truth in moments]
        else:
            scores = [-log_likelihood(fold, precision) for fold in folds]
        return math.fsum(map(mean_score, scores)) / len(folds)

    free = math.exp(lowest(cost, -math.log(error) - math.log(10), -math.log(error) + math.log(1e4)))
    best = min(max(free, limits[0]), limits[1])
    return best, cost(math.log(best))


def scores_of(drawn: Drawn, precision: float, constant_precision: float) -> dict[str, float]:
    """One run in numbers: raw scores, those of constant uncertainty around the same mean, and normalised ones."""
    error = (drawn.truth - drawn.mean).abs().clamp_min(TINY)
    own_crps, own_pll = crps(drawn, precision), log_likelihood(drawn, precision)
    constant_std = constant_precision**-0.5
    constant_crps = gaussian_crps(drawn.mean, constant_std, drawn.truth)
    constant_pll = gaussian_log_likelihood(drawn.mean, constant_std, drawn.truth)
    return {
        "rmse": root_mean_squared_error(drawn.mean, drawn.truth),
        "crps": mean_score(own_crps),
        "pll": mean_score(own_pll),
        "constant_crps": mean_score(constant_crps),
        "constant_pll": mean_score(constant_pll),
        "crps_norm": normalised_score(own_crps, constant_crps, crps_optimum(error)),
        "pll_norm": normalised_score(own_pll, constant_pll, log_likelihood_optimum(error)),
        "precision": precision,
        "constant_precision": constant_precision,
    }


def scored(folds: Sequence[Drawn], tests: Sequence[Drawn], limits: Limits) -> list[dict[str, float]]:
    """Tune both precisions on the folds left out, by CRPS, and score each test run."""
    precision, _ = tune_precision(folds, limits=limits)
    constant, _ = tune_precision([fold.constant() for fold in folds], limits=limits)
    return [scores_of(test, precision, constant) for test in tests]
