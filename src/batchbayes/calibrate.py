r"""Calibration on held-out data: observation noise, temperature, and conformal intervals and sets.

Each takes the predictive of calibration examples and their targets. Nothing here needs the network again: draws that
the predictive kept are scored over and over.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from batchbayes._common.checks import check_in_unit_interval, check_labels, refuse
from batchbayes._common.minimise import maximise
from batchbayes.likelihoods import Categorical
from batchbayes.metrics import mean_score
from batchbayes.predictive import CategoricalPredictive, GaussianPredictive
from batchbayes.scores import mixture_crps, mixture_log_likelihood

GRID = 33
"""Points of the coarse search, between whose best neighbours the fine one looks."""
STEPS = 20
"""Of the fine search, each of which shrinks the bracket by 0.62."""


def tune_precision(
    predictive: GaussianPredictive, targets: Tensor, objective: Literal["log_likelihood", "crps"] = "log_likelihood"
) -> float:
    r"""The precision tau of the observation noise under which held-out targets score best.

    The score is that of the mixture of all draws with noise of variance 1/tau, so the spread of the draws is not
    counted twice. Tau is searched for from 10 times below to 10,000 times above that of the error of the mean: where
    the draws explain all of the error, there is no best one, and the upper end is returned.

    >>> from batchbayes.likelihoods import gaussian
    >>> summary = gaussian(1.0).summary()
    >>> summary.add(torch.zeros(1, 4, 1))
    >>> held_out = summary.finish(draws=torch.zeros(1, 4, 1))
    >>> round(tune_precision(held_out, torch.tensor([2.0, -2.0, 2.0, -2.0])), 3)
    0.25
    """
    if objective not in ("log_likelihood", "crps"):
        refuse('objective "log_likelihood" or "crps"', repr(objective), "Choose one of the two.")
    draws, targets = predictive.draws.double(), targets.reshape(predictive.mean.shape).double()
    error = float((predictive.mean - targets).square().mean())
    if not 0 < error < float("inf"):
        refuse(
            "finite errors that are not all zero",
            f"a mean squared error of {error}",
            "Use held-out points that the network has not learnt by heart.",
        )

    def cost(log_precision: float) -> float:
        precision = math.exp(log_precision)
        if objective == "crps":
            return mean_score(mixture_crps(draws, precision, targets))
        return -mean_score(mixture_log_likelihood(draws, precision, targets))

    return math.exp(lowest(cost, -math.log(error) - math.log(10), -math.log(error) + math.log(1e4)))


def tune_temperature(predictive: CategoricalPredictive, labels: Tensor, likelihood: Categorical | None = None) -> float:
    r"""The temperature T for which $\log \frac1S \sum_s \mathrm{softmax}(z_s / T)_y$ is highest on held-out labels.

    With a single draw it is temperature scaling (Guo et al., ICML 2017); with several, the draws are softened or
    sharpened before they are averaged. Use the result as `categorical(temperature=T)`.

    >>> summary = Categorical().summary()
    >>> logits = torch.tensor([[[0.0, 4.0]]]).expand(1, 4, 2)
    >>> summary.add(logits)
    >>> round(tune_temperature(summary.finish(draws=logits), torch.tensor([1, 1, 1, 0])), 3)  # 4 / ln 3
    3.641
    """
    likelihood = likelihood or Categorical()
    check_labels(labels, predictive.log_probs)
    draws = predictive.draws.double()

    def cost(log_temperature: float) -> float:
        given = replace(likelihood, temperature=math.exp(log_temperature))(draws)
        return -mean_score(given.log_prob(labels).logsumexp(0)) + math.log(len(draws))

    return math.exp(lowest(cost, -math.log(20), math.log(20)))


def lowest(cost: Callable[[float], float], low: float, high: float) -> float:
    """Where a function of one number is lowest: on a grid first, then by golden section around its best point.

    >>> round(lowest(lambda x: (x - 0.3) ** 2, -2.0, 2.0), 4)
    0.3
    """
    grid = torch.linspace(low, high, GRID, dtype=torch.float64).tolist()
    best = min(range(GRID), key=lambda i: cost(grid[i]))
    around = grid[max(0, best - 1)], grid[min(GRID - 1, best + 1)]
    return maximise(lambda x: -cost(x), *around, steps=STEPS)[0]


@dataclass(frozen=True)
class ConformalIntervals:
    """Intervals mean ± width * std that hold a new target with probability `level`, whatever the model is worth."""

    level: float
    width: float

    def __call__(self, predictive: GaussianPredictive) -> tuple[Tensor, Tensor]:
        """Lower and upper ends, in the shape of the predictive's mean."""
        half = self.width * predictive.std
        return predictive.mean - half, predictive.mean + half


@dataclass(frozen=True)
class ConformalSets:
    """Sets of all classes with a probability of `threshold` or more, which hold the truth with probability `level`."""

    level: float
    threshold: float

    def __call__(self, predictive: CategoricalPredictive) -> Tensor:
        """Which classes are in the set, bool (N, ..., K); it may be empty where no class is probable enough."""
        return predictive.probs >= self.threshold


def conformal_intervals(predictive: GaussianPredictive, targets: Tensor, level: float = 0.9) -> ConformalIntervals:
    """Split-conformal intervals: the quantile of |error| / std on calibration examples scales the predicted std.

    The promise holds on average over calibration and test examples that are exchangeable, not for each input.
    Reference: Lei et al., JASA 113 (2018).
    """
    scores = (targets.reshape(predictive.mean.shape) - predictive.mean).abs() / predictive.std
    return ConformalIntervals(level, conformal_quantile(scores, level))


def conformal_sets(predictive: CategoricalPredictive, labels: Tensor, level: float = 0.9) -> ConformalSets:
    """Split-conformal sets by the probability of the true class on calibration examples.

    Reference: Sadinle, Lei & Wasserman, JASA 114 (2019).
    """
    check_labels(labels, predictive.log_probs)
    given = predictive.probs.gather(-1, labels.unsqueeze(-1))
    return ConformalSets(level, max(0.0, -conformal_quantile(-given, level)))


def conformal_quantile(scores: Tensor, level: float) -> float:
    r"""The $\lceil (n+1) \, level \rceil$-th smallest of n scores; infinite if there are too few for the level.

    >>> conformal_quantile(torch.arange(1.0, 10.0), 0.9), conformal_quantile(torch.ones(3), 0.9)
    (9.0, inf)
    """
    check_in_unit_interval("level", torch.tensor(level))
    ordered = scores.flatten().double().sort().values
    rank = math.ceil((len(ordered) + 1) * level - 1e-9)
    return float(ordered[rank - 1]) if 1 <= rank <= len(ordered) else float("inf" if rank > 0 else "-inf")
