"""Summaries of real-valued predictions: error, intervals, sharpness, and the best constant variance.

Scores of real-valued predictions against targets (N, ...).

Each element has its own score: a target (N, D) gives scores (N, D). A prediction is one of three things: a Gaussian
(mean, std), a set of draws (S, N, ...), or a mixture of Gaussians, which are the draws with observation noise of a
given precision tau.
"""

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
    real,
    require_choice,
)
from batchbayes._common.signatures import checked
from batchbayes.errors import BatchbayesError

_BISECTIONS = 64
"""Enough to halve any interval of log std down to the spacing of float64."""


@dataclass(frozen=True)
class Intervals:
    """The share of targets inside their intervals, and the mean width of the intervals."""

    coverage: float
    mean_width: float


@checked
def root_mean_squared_error(prediction: Values, target: Values) -> float:
    r"""Return the root of the mean squared error (RMSE), $\sqrt{\frac1N \sum_i (y_i - \hat y_i)^2}$.

    Shapes: prediction (N, ...), target (N, ...) -> number.

    >>> root_mean_squared_error(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 7.0]))
    5.0
    """
    return float(_errors(prediction, target).square().mean().sqrt())


@checked
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
    require_choice("an objective", objective, ("crps", "log_likelihood"))
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


@checked
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
    lower, upper, target = (part.detach().cpu() for part in (lower, upper, target))
    if swapped := int((~_at_most(lower, upper)).sum()):
        got = f"{swapped} the other way round"
        raise BatchbayesError(expected="lower ends at or below upper ends", got=got, fix="swap the two arguments")
    inside = _at_most(lower, target) & _at_most(target, upper)
    width = upper.double() - lower.double()
    check_no_nan("the widths", width)
    return Intervals(float(inside.double().mean()), float(width.mean()))


def _at_most(first: Tensor, second: Tensor) -> Tensor:
    """Return first <= second. Integers are compared with each other exactly, and with others in float64."""
    if first.is_floating_point() == second.is_floating_point():
        return first <= second
    return first.double() <= second.double()


@checked
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


_HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


@checked
def absolute_error(prediction: Values, target: Values) -> Tensor:
    r"""Return the absolute error, $|y - \hat y|$. Shapes: prediction (N, ...), target (N, ...) -> (N, ...).

    >>> absolute_error(torch.tensor([1.0, 2.0]), torch.tensor([1.5, 0.0]))
    tensor([0.5000, 2.0000])
    """
    check_truth(prediction, target)
    prediction = real(prediction)
    return (real(target) - prediction).abs().to(prediction.dtype)


@checked
def gaussian_log_likelihood(mean: Values, std: Values | float, target: Values) -> Tensor:
    r"""Return the log-density of a Gaussian, $-\frac12 \log 2\pi - \log\sigma - (y - \mu)^2 / 2\sigma^2$.

    Shapes: mean (N, ...), std one number or (N, ...), target (N, ...) -> (N, ...).

    >>> gaussian_log_likelihood(torch.tensor([0.0]), 2.0, torch.tensor([1.0]))
    tensor([-1.7371])
    """
    check_truth(mean, target)
    mean = real(mean)
    std = _scale("std", std, mean, mean.shape)
    return (-_HALF_LOG_TWO_PI - std.log() - 0.5 * ((real(target) - mean) / std).square()).to(mean.dtype)


@checked
def mixture_log_likelihood(draws: Values, precision: Values | float, target: Values) -> Tensor:
    r"""Return the log-density of the mixture of draws with Gaussian noise, $\log \frac1S \sum_s N(y; f_s, 1/\tau)$.

    This is the mixture itself, not the Gaussian with the same mean and variance. Shapes: draws (S, N, ...), precision
    one number, (N, ...) or (S, N, ...), target (N, ...) -> (N, ...). Reference: Gal & Ghahramani, ICML 2016.

    >>> mixture_log_likelihood(torch.tensor([[0.0], [2.0]]), 1.0, torch.tensor([0.0]))
    tensor([-1.4852])
    """
    draws = _checked_draws(draws, target)
    precision = _scale("precision", precision, draws, target.shape, draws.shape).double()
    return log_density_of_mixture(draws.double(), precision, target.double()).to(draws.dtype)


def log_density_of_mixture(draws: Tensor, precision: Tensor, target: Tensor) -> Tensor:
    """Compute `mixture_log_likelihood` of tensors in float64 that were checked, for use inside of a search."""
    terms = 0.5 * precision.log() - 0.5 * precision * (target - draws).square()  # (S, N, ...)
    return torch.logsumexp(terms, 0) - math.log(len(draws)) - _HALF_LOG_TWO_PI


@checked
def gaussian_crps(mean: Values, std: Values | float, target: Values) -> Tensor:
    r"""Return the continuous ranked probability score (CRPS) of a Gaussian. Lower is better.

    It is $\sigma [z (2 \Phi(z) - 1) + 2 \varphi(z) - 1 / \sqrt\pi]$ with $z = (y - \mu)/\sigma$, in the unit of the
    target. Shapes: mean (N, ...), std one number or (N, ...), target (N, ...) -> (N, ...).
    Reference: Gneiting & Raftery, JASA 102 (2007), section 4.2.

    >>> gaussian_crps(torch.tensor([0.0]), 1.0, torch.tensor([1.0]))
    tensor([0.6024])
    """
    check_truth(mean, target)
    mean = real(mean)
    std = _scale("std", std, mean, mean.shape)
    return (_mean_absolute_gaussian(real(target) - mean, std) - std / math.sqrt(math.pi)).to(mean.dtype)


@checked
def sample_crps(draws: Values, target: Values, estimator: Literal["nrg", "fair"]) -> Tensor:
    r"""Estimate the CRPS from draws without observation noise.

    It is $\frac1S \sum_s |f_s - y| - \frac1{2C} \sum_{s,t} |f_s - f_t|$. The estimator "nrg" has $C = S^2$. It is the
    score of the S points themselves, and is biased upwards as a score of the distribution that they come from (by
    about 2 % at S = 50). The estimator "fair" has $C = S (S - 1)$. It has no bias, may be negative, and needs two
    draws. Name the estimator wherever the number is shown. The cost is O(S log S).
    Shapes: draws (S, N, ...), target (N, ...) -> (N, ...). Reference: Ferro, QJRMS 140 (2014).

    >>> draws = torch.tensor([[0.0], [1.0], [3.0]])
    >>> sample_crps(draws, torch.tensor([1.0]), "nrg"), sample_crps(draws, torch.tensor([1.0]), "fair")
    (tensor([0.3333]), tensor([0.]))
    """
    draws = _checked_draws(draws, target)
    num_draws = len(draws)
    require_choice("an estimator", estimator, ("nrg", "fair"))
    if estimator == "fair" and num_draws < 2:
        fix = 'draw more, or use estimator="nrg"'
        raise BatchbayesError(expected="at least two draws for the fair estimator", got=f"{num_draws}", fix=fix)
    pairs = num_draws**2 if estimator == "nrg" else num_draws * (num_draws - 1)
    residual = draws.double() - target.double()  # (S, N, ...); this does not change differences of draws
    # Half of the sum of |a - b| over all pairs: the i-th smallest draw is added i - 1 times and subtracted S - i times.
    weights = 2 * torch.arange(num_draws, dtype=torch.float64, device=draws.device) - (num_draws - 1)
    spread = torch.tensordot(weights, residual.sort(dim=0).values, dims=1)  # (N, ...)
    return (residual.abs().mean(0) - spread / pairs).to(draws.dtype)


@checked
def mixture_crps(draws: Values, precision: Values | float, target: Values) -> Tensor:
    r"""Return the exact CRPS of the mixture of draws with Gaussian noise of variance $\sigma_s^2 = 1/\tau_s$.

    It is $\frac1S \sum_s A(y - f_s, \sigma_s^2) - \frac1{2 S^2} \sum_{s,t} A(f_s - f_t, \sigma_s^2 + \sigma_t^2)$ with
    $A(m, v) = E|N(m, v)|$. It takes O(S^2) time and O(S) memory for each example. Shapes: draws (S, N, ...), precision
    one number, (N, ...) or (S, N, ...), target (N, ...) -> (N, ...). Reference: Grimit et al., QJRMS 132 (2006).

    >>> mixture_crps(torch.tensor([[0.0], [2.0]]), 1.0, torch.tensor([0.0]))
    tensor([0.6002])
    """
    draws = _checked_draws(draws, target)
    precision = _scale("precision", precision, draws, target.shape, draws.shape).double()
    return crps_of_mixture(draws.double(), precision, target.double()).to(draws.dtype)


def crps_of_mixture(draws: Tensor, precision: Tensor, target: Tensor) -> Tensor:
    """Compute `mixture_crps` of tensors in float64 that were checked, for use inside of a search."""
    variance = precision.reciprocal().expand_as(draws)  # (S, N, ...)
    spread = variance.sqrt().sum(0) / math.sqrt(math.pi)  # the pairs s = t
    for s in range(len(draws) - 1):
        pair_std = (variance[s] + variance[s + 1 :]).sqrt()
        spread = spread + _mean_absolute_gaussian(draws[s] - draws[s + 1 :], pair_std).sum(0)
    distance = _mean_absolute_gaussian(target - draws, variance.sqrt()).mean(0)
    return distance - spread / len(draws) ** 2


def _mean_absolute_gaussian(mean: Tensor, std: Tensor) -> Tensor:
    """Return E|X| of a Gaussian X."""
    z = mean / std
    return mean * torch.erf(z / math.sqrt(2)) + std * math.sqrt(2 / math.pi) * torch.exp(-0.5 * z.square())


def _scale(name: str, value: Tensor | float, like: Tensor, *shapes: torch.Size) -> Tensor:
    """Return a positive number, or a tensor of one of the shapes, as a tensor."""
    try:
        scale = torch.as_tensor(value, dtype=like.dtype, device=like.device)
    except (TypeError, ValueError, RuntimeError) as error:
        got = f"a {type(value).__name__}"
        raise BatchbayesError(expected=f"{name} as a number or a tensor", got=got, fix="pass a number") from error
    if scale.ndim and scale.shape not in shapes:
        allowed = " or ".join(str(tuple(shape)) for shape in shapes)
        raise BatchbayesError(
            expected=f"{name} as one number or of shape {allowed}",
            got=f"{tuple(scale.shape)}",
            fix="expand it to that shape",
        )
    check_positive(name, scale)
    return scale


def _checked_draws(draws: Tensor, target: Tensor) -> Tensor:
    """Return draws that fit the target, integers as float64."""
    if draws.ndim != target.ndim + 1 or draws.shape[1:] != target.shape or len(draws) == 0:
        raise BatchbayesError(
            expected=f"draws of shape (S, *{tuple(target.shape)}) with S of at least 1",
            got=f"{tuple(draws.shape)}",
            fix="put the draws first; use prediction[None] to make one draw of a single prediction",
        )
    check_finite("draws", draws)
    check_finite("target", target)
    return real(draws)
