"""Summaries of real-valued predictions: error, intervals, sharpness, and the best constant variance."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from batchbayes._common.checks import (
    Values,
    check_finite,
    check_no_nan,
    check_not_empty,
    check_positive,
    check_same_shape,
    check_truth,
    takes_arrays,
)
from batchbayes.errors import BatchbayesError, unknown_name

_BISECTIONS = 64
"""Enough to halve any interval of log std down to the spacing of float64."""


@dataclass(frozen=True)
class Intervals:
    """The share of targets inside their intervals, and the mean width of the intervals."""

    coverage: float
    mean_width: float


@takes_arrays
def root_mean_squared_error(prediction: Values, target: Values) -> float:
    r"""Return the root of the mean squared error (RMSE), $\sqrt{\frac1N \sum_i (y_i - \hat y_i)^2}$.

    Shapes: prediction (N, ...), target (N, ...) -> number.

    >>> root_mean_squared_error(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 7.0]))
    5.0
    """
    return float(_errors(prediction, target).square().mean().sqrt())


@takes_arrays
def best_constant_precision(prediction: Values, target: Values, objective: Literal["crps", "log_likelihood"]) -> float:
    r"""Return the precision of the best Gaussian with one variance for all points, around the given means.

    This is the baseline of constant uncertainty: CUBN for the means of MCBN, CUDO for the means of MC dropout. Fit it
    on held-out points, and score it by `gaussian_crps(mean, precision**-0.5, target)`. For the log-likelihood the best
    precision is $\tau = 1 / \overline{e^2}$. The mean CRPS is convex in $\sigma$. Its minimum solves
    $\frac1N \sum_i \exp(-e_i^2 / 2 \sigma^2) = 1 / \sqrt 2$, which is done by bisection.
    Shapes: prediction (N, ...), target (N, ...) -> number. Reference: Teye, Azizpour & Smith, ICML 2018.

    >>> prediction, target = torch.zeros(3), torch.tensor([1.0, 2.0, 3.0])
    >>> round(best_constant_precision(prediction, target, "log_likelihood"), 6)
    0.214286
    >>> round(best_constant_precision(prediction, target, "crps"), 6)
    0.163601
    """
    error = _errors(prediction, target).abs().flatten()
    if objective not in ("crps", "log_likelihood"):
        raise unknown_name("an objective", objective, ("crps", "log_likelihood"))
    needed = 0.0 if objective == "log_likelihood" else 1 - math.sqrt(0.5)
    nonzero = error[error > 0]
    if len(nonzero) <= needed * len(error):
        raise BatchbayesError(
            expected=f"more than {needed:.0%} of the errors other than zero",
            got=f"{len(nonzero)} of {len(error)}",
            fix="use held-out points, because the best constant variance of these would be zero",
        )
    if objective == "log_likelihood":
        return 1 / float(error.square().mean())
    # For a std below 1/40 of the smallest error, only errors of zero have terms above zero. For a std above the
    # optimum of the largest error, every term is at least 1/sqrt(2).
    low = math.log(float(nonzero.min()) / 40)
    high = math.log(float(nonzero.max()) / math.sqrt(math.log(2)))
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        too_wide = float(torch.exp(-0.5 * (error / math.exp(middle)).square()).mean()) > math.sqrt(0.5)
        low, high = (low, middle) if too_wide else (middle, high)
    return math.exp(-(low + high))


@takes_arrays
def interval_summary(lower: Values, upper: Values, target: Values) -> Intervals:
    r"""Return the share of targets in $[l_i, u_i]$ (ends included), and the mean of $u_i - l_i$.

    The ends of the central interval at level $1 - \alpha$ are the quantiles $\alpha/2$ and $1 - \alpha/2$ of the
    predictive. Ends may be infinite, as those of conformal intervals from too few examples are; the mean width is then
    infinite too. Shapes: each of the three (N, ...) -> two numbers.

    >>> interval_summary(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 3.0]), torch.tensor([1.0, 4.0]))
    Intervals(coverage=0.5, mean_width=2.0)
    """
    check_same_shape("lower", lower, "target", target)
    check_same_shape("upper", upper, "target", target)
    check_not_empty("target", target)
    check_finite("target", target)
    check_no_nan("lower", lower)
    check_no_nan("upper", upper)
    if swapped := int((lower > upper).sum()):
        got = f"{swapped} the other way round"
        raise BatchbayesError(expected="lower ends at or below upper ends", got=got, fix="swap the two arguments")
    inside = (lower <= target) & (target <= upper)
    width = upper.double() - lower.double()
    check_no_nan("the widths", width)
    return Intervals(float(inside.double().mean()), float(width.mean()))


@takes_arrays
def sharpness(std: Values) -> float:
    r"""Return the root of the mean predicted variance, $\sqrt{\frac1N \sum_i \sigma_i^2}$. Lower is sharper.

    For a calibrated Gaussian it is equal to the RMSE. Shapes: (N, ...) -> number.
    Reference: Kuleshov, Fenner & Ermon, ICML 2018 (they use the variance).

    >>> sharpness(torch.tensor([1.0, 7.0]))
    5.0
    """
    check_not_empty("std", std)
    check_positive("std", std)
    return float(std.double().square().mean().sqrt())


def _errors(prediction: Tensor, target: Tensor) -> Tensor:
    check_truth(prediction, target)
    check_not_empty("the prediction", prediction)
    return target.detach().double() - prediction.detach().double()
