r"""Means of scores, and scores on a scale from 0 (constant variance) to 100 (the best variance for each point).

The best score that a Gaussian with a given mean can reach at a point with a known error e = y - mean.

The variance is chosen for each point when the error is already known. So this score is a bound: no estimate of
uncertainty around the same mean can do better. `metrics.normalised_score` gives it the value 100.

Log-likelihood that does not reward calibration alone, and its translation into numbers of independent networks.

The log-likelihood of two methods can differ only because one of them has the better temperature, and a temperature is
easily tuned. So methods are compared each at its best temperature. Reference: Ashukha, Lyzhov, Molchanov & Vetrov,
"Pitfalls of In-Domain Uncertainty Estimation and Ensembling in Deep Learning", ICLR 2020.
"""

import math

import torch
from torch import Tensor

from batchbayes._common.checks import (
    Values,
    check_finite,
    check_labels,
    check_no_nan,
    check_not_empty,
    check_same_shape,
    real,
    whole_number,
)
from batchbayes._common.rng import generator
from batchbayes._common.signatures import checked
from batchbayes._common.tune import tune
from batchbayes.errors import BatchbayesError


@checked
def mean_score(scores: Values) -> float:
    r"""Return the mean over all elements, $\frac1N \sum_i s_i$. Shapes: (N, ...) -> number.

    >>> mean_score(torch.tensor([1.0, 4.0]))
    2.5
    """
    check_not_empty("scores", scores)
    check_no_nan("scores", scores)
    return float(scores.detach().mean(dtype=torch.float64))


@checked
def negative_log_likelihood(log_likelihood: Values) -> float:
    r"""Return the mean negative log-likelihood in nats, $-\frac1N \sum_i \log p(y_i)$.

    It is infinite if one true value has probability zero. Shapes: (N, ...) -> number.

    >>> negative_log_likelihood(torch.tensor([-1.0, -2.0]))
    1.5
    """
    return 0.0 - mean_score(log_likelihood)  # a minus sign would make -0.0 of a mean of zero


@checked
def normalised_score(score: Values, constant: Values, optimum: Values) -> float:
    r"""Return a score on a scale from 0, the best constant variance, to 100, the best variance for each point.

    It is $100 (\bar m - \bar m_{const}) / (\bar m_{opt} - \bar m_{const})$, a ratio of means over the examples. A value
    below zero is worse than a constant variance. It works for CRPS and for log-likelihood, because the direction of the
    score cancels. All three scores must be of the same predicted means (see `best_constant_precision` and
    `scores.optima`). Shapes: each of the three (N, ...) -> number. Reference: Teye, Azizpour & Smith, ICML 2018.

    >>> normalised_score(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 2.0]), torch.tensor([0.5, 1.5]))
    50.0
    """
    check_same_shape("constant", constant, "score", score)
    check_same_shape("optimum", optimum, "score", score)
    at_constant, at_optimum = mean_score(constant), mean_score(optimum)
    span = at_optimum - at_constant
    if span == 0 or not math.isfinite(span):
        raise BatchbayesError(
            expected="a finite optimum that differs from the constant-variance score",
            got=f"means {at_optimum} and {at_constant}",
            fix="check that all three are the same score; if all errors are equal, this scale does not exist",
        )
    return 100 * ((mean_score(score) - at_constant) / span)


_ROOT_LOG_TWO = math.sqrt(math.log(2))


@checked
def crps_optimal_std(error: Values) -> Tensor:
    r"""Return the standard deviation with the lowest CRPS, $\sigma^* = |e| / \sqrt{\ln 2} = 1.2011 |e|$.

    It is the only root of the derivative of the CRPS by $\sigma$, $2\varphi(e/\sigma) - 1/\sqrt\pi$.
    Shapes: (N, ...) -> (N, ...).

    >>> import torch
    >>> crps_optimal_std(torch.tensor([-2.0]))
    tensor([2.4022])
    """
    check_finite("error", error)
    return real(error).abs() / _ROOT_LOG_TWO


@checked
def crps_optimum(error: Values) -> Tensor:
    r"""Return the CRPS at `crps_optimal_std`, $(2\Phi(\sqrt{\ln 2}) - 1) |e| = 0.594904 |e|$.

    Shapes: (N, ...) -> (N, ...).

    >>> import torch
    >>> crps_optimum(torch.tensor([-2.0]))
    tensor([1.1898])
    """
    check_finite("error", error)
    return real(error).abs() * math.erf(_ROOT_LOG_TWO / math.sqrt(2))


@checked
def log_likelihood_optimal_precision(error: Values) -> Tensor:
    r"""Return the precision with the highest log-likelihood, $\tau^* = 1 / e^2$. Shapes: (N, ...) -> (N, ...).

    >>> import torch
    >>> log_likelihood_optimal_precision(torch.tensor([-2.0]))
    tensor([0.2500])
    """
    _check_not_zero(error)
    return real(error).square().reciprocal()


@checked
def log_likelihood_optimum(error: Values) -> Tensor:
    r"""Return the log-likelihood at `log_likelihood_optimal_precision`, $-\frac12 - \frac12 \log 2\pi - \log|e|$.

    It grows without limit as the error goes to zero, so an error of zero is not allowed. Shapes: (N, ...) -> (N, ...).

    >>> import torch
    >>> log_likelihood_optimum(torch.tensor([-2.0]))
    tensor([-2.1121])
    """
    _check_not_zero(error)
    return -0.5 - 0.5 * math.log(2 * math.pi) - real(error).abs().log()


def _check_not_zero(error: Tensor) -> None:
    check_finite("error", error)
    if zeros := int((error == 0).sum()):
        raise BatchbayesError(
            expected="errors other than zero, where the best log-likelihood is infinite",
            got=f"{zeros} zero",
            fix="drop these points from all scores that are compared, or compare by CRPS",
        )


@checked
def calibrated_log_likelihood(log_probs: Values, labels: Values, *, repeats: int = 5, seed: int = 0) -> float:
    r"""Return the mean log-likelihood at the best temperature, in nats. Higher is better.

    A temperature T changes the mean probabilities p of a method to $p^{1/T} / \sum_k p_k^{1/T}$. The examples are split
    into random halves. The temperature that is best on one half is used for the other half, and the result is the mean
    over both halves and over `repeats` splits. So no example takes part in the choice of its own temperature.
    Shapes: log-probabilities (N, K) and labels (N,) -> number.

    >>> log_probs = torch.tensor([[0.9, 0.1]]).log().expand(400, 2)
    >>> labels = (torch.arange(400) % 4 == 0).long()  # three of four are right: the probabilities are too high
    >>> calibrated_log_likelihood(log_probs, labels) > float(log_probs.gather(1, labels[:, None]).mean())
    True
    """
    check_not_empty("labels", labels)
    check_no_nan("log_probs", log_probs)
    check_labels(labels, log_probs.shape[:-1], log_probs.shape[-1])
    whole_number("repeats", repeats)
    if len(labels) < 2:
        raise BatchbayesError(expected="two examples or more", got=f"{len(labels)}", fix="pass more examples")
    log_probs, labels = log_probs.double().clamp_min(-1e4), labels.long().unsqueeze(-1)
    random, scores = generator(seed, "calibrated log-likelihood"), []
    for _ in range(repeats):
        order = torch.randperm(len(labels), generator=random)
        halves = order[: len(order) // 2], order[len(order) // 2 :]
        for fitted, rest in (halves, halves[::-1]):
            known = log_probs[fitted], labels[fitted]
            best = tune(lambda u, known=known: -float(_scores(*known, u).mean()), -math.log(20), math.log(20)).log
            scores.append(_scores(log_probs[rest], labels[rest], best))
    return float(torch.cat(scores).mean())


def _scores(log_probs: Tensor, labels: Tensor, log_temperature: float) -> Tensor:
    """Return the log-probability of each label (n, 1) at a temperature, (n, 1)."""
    return (log_probs / math.exp(log_temperature)).log_softmax(-1).gather(-1, labels)


@checked
def deep_ensemble_equivalent(value: float, sizes: Values, ensemble_values: Values) -> float:
    r"""Return how many independently trained networks reach a calibrated log-likelihood.

    It is the smallest real number $l \ge 1$ at which the curve of ensembles reaches the value,
    $\min \{ l : \mathrm{CLL}_{DE}(l) \ge v \}$. Between the sizes that were measured the curve is linear. The result is
    infinite if no ensemble that was measured is as good.

    Args:
        value: the calibrated log-likelihood of a method.
        sizes: numbers of networks, ascending, (G,).
        ensemble_values: the calibrated log-likelihood of ensembles of these sizes, best as a mean over several, (G,).

    >>> round(deep_ensemble_equivalent(-0.25, [1, 2, 4], [-0.4, -0.3, -0.2]), 3)
    3.0
    """
    at, curve = sizes.double(), ensemble_values.double()
    rising = at.ndim == 1 and len(at) > 0 and bool((at.diff() > 0).all()) and float(at[0]) >= 1
    if not rising or at.shape != curve.shape or not bool(curve.isfinite().all()) or not math.isfinite(value):
        raise BatchbayesError(
            expected="ascending sizes of 1 or more, a finite value for each of them, and a finite value",
            got=f"sizes of shape {tuple(at.shape)}, values of shape {tuple(curve.shape)} and {value}",
            fix="pass sizes such as [1, 2, 5, 10], and one value for each",
        )
    reached = (curve >= value).nonzero()[:, 0]
    if not len(reached):
        return math.inf
    after = int(reached[0])
    if after == 0:
        return float(at[0])
    before = after - 1
    share = (value - float(curve[before])) / float(curve[after] - curve[before])
    return float(at[before] + share * (at[after] - at[before]))
