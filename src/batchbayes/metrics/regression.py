"""Summaries of real-valued predictions: error, intervals, sharpness, and the best constant variance."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from batchbayes._common.checks import check_finite, check_not_empty, check_positive, check_same_shape, refuse

# Enough to halve any bracket of log std down to the spacing of float64.
_BISECTIONS = 64


@dataclass(frozen=True)
class Intervals:
    """How often intervals hold the target, and how wide they are."""

    coverage: float
    mean_width: float


def root_mean_squared_error(prediction: Tensor, target: Tensor) -> float:
    r"""Root of the mean squared error, :math:`\sqrt{\tfrac1N \sum_i (y_i - \hat y_i)^2}`.

    Shapes: prediction (N, ...), target (N, ...) -> number.

    >>> root_mean_squared_error(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 7.0]))
    5.0
    """
    return float(_errors(prediction, target).square().mean().sqrt())


def best_constant_precision(prediction: Tensor, target: Tensor, objective: Literal["crps", "log_likelihood"]) -> float:
    r"""Precision of the best Gaussian with one variance for all points, around the given means.

    It is the constant-uncertainty baseline: CUBN if the means are those of MCBN, CUDO if those of MC dropout.
    Fit it on held-out points; score it by ``gaussian_crps(mean, precision**-0.5, target)``. For the
    log-likelihood the optimum is :math:`\tau = 1 / \overline{e^2}`. The mean CRPS is convex in
    :math:`\sigma`, and its one minimum, found by bisection, solves

    .. math:: \tfrac1N \sum_i \exp(-e_i^2 / 2 \sigma^2) = 1 / \sqrt 2.

    Shapes: prediction (N, ...), target (N, ...) -> number. Reference: Teye, Azizpour & Smith, ICML 2018.

    >>> prediction, target = torch.zeros(3), torch.tensor([1.0, 2.0, 3.0])
    >>> round(best_constant_precision(prediction, target, "log_likelihood"), 6)
    0.214286
    >>> round(best_constant_precision(prediction, target, "crps"), 6)
    0.163601
    """
    error = _errors(prediction, target).abs().flatten()
    if objective not in ("crps", "log_likelihood"):
        refuse('objective "crps" or "log_likelihood"', repr(objective), "Choose one of the two.")
    needed = 0.0 if objective == "log_likelihood" else 1 - math.sqrt(0.5)
    nonzero = error[error > 0]
    if len(nonzero) <= needed * len(error):
        refuse(
            f"more than {needed:.0%} of the errors other than zero",
            f"{len(nonzero)} of {len(error)}",
            "The best constant variance would be zero, a point prediction: fit it on held-out points.",
        )
    if objective == "log_likelihood":
        return 1 / float(error.square().mean())
    # Below a 40th of the least error every term but those of zero errors is nought; above the largest
    # per-point optimum every term is at least 1/sqrt(2).
    low = math.log(float(nonzero.min()) / 40)
    high = math.log(float(nonzero.max()) / math.sqrt(math.log(2)))
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        too_wide = float(torch.exp(-0.5 * (error / math.exp(middle)).square()).mean()) > math.sqrt(0.5)
        low, high = (low, middle) if too_wide else (middle, high)
    return math.exp(-(low + high))


def interval_summary(lower: Tensor, upper: Tensor, target: Tensor) -> Intervals:
    r"""Share of targets in :math:`[l_i, u_i]` (ends included), and the mean of :math:`u_i - l_i`.

    For the central interval at level :math:`1 - \alpha` the ends are the quantiles :math:`\alpha/2` and
    :math:`1 - \alpha/2` of the predictive. Shapes: three times (N, ...) -> two numbers.

    >>> interval_summary(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 3.0]), torch.tensor([1.0, 4.0]))
    Intervals(coverage=0.5, mean_width=2.0)
    """
    check_same_shape("lower", lower, "target", target)
    check_same_shape("upper", upper, "target", target)
    for name, tensor in (("lower", lower), ("upper", upper), ("target", target)):
        check_not_empty(name, tensor)
        check_finite(name, tensor)
    swapped = int((lower > upper).sum())
    if swapped:
        refuse("lower ends at or below upper ends", f"{swapped} the other way round", "Swap the two arguments.")
    inside = (lower <= target) & (target <= upper)
    width = upper.double() - lower.double()
    return Intervals(float(inside.double().mean()), float(width.mean()))


def sharpness(std: Tensor) -> float:
    r"""Root of the mean predicted variance, :math:`\sqrt{\tfrac1N \sum_i \sigma_i^2}`; lower is sharper.

    Compare it with the RMSE: a calibrated Gaussian has both equal. Shapes: (N, ...) -> number.
    Reference: Kuleshov, Fenner & Ermon, ICML 2018 (who take the variance).

    >>> sharpness(torch.tensor([1.0, 7.0]))
    5.0
    """
    check_not_empty("std", std)
    check_positive("std", std)
    return float(std.double().square().mean().sqrt())


def _errors(prediction: Tensor, target: Tensor) -> Tensor:
    check_same_shape("target", target, "the prediction", prediction)
    check_not_empty("the prediction", prediction)
    check_finite("the prediction", prediction)
    check_finite("target", target)
    return target.double() - prediction.double()
