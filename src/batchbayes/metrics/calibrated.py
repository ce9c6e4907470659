r"""Log-likelihood that does not reward calibration alone, and its translation into numbers of independent networks.

The log-likelihood of two methods can differ only because one of them has the better temperature, and a temperature is
easily tuned. So methods are compared each at its best temperature. Reference: Ashukha, Lyzhov, Molchanov & Vetrov,
"Pitfalls of In-Domain Uncertainty Estimation and Ensembling in Deep Learning", ICLR 2020.
"""

import math

import torch
from torch import Tensor

from batchbayes._common.checks import Values, check_labels, check_no_nan, check_not_empty, takes_arrays, whole_number
from batchbayes._common.minimise import minimise
from batchbayes._common.rng import generator
from batchbayes.errors import BatchbayesError


@takes_arrays
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
    random, scores = generator(seed, "calibrated log-likelihood"), []
    for _ in range(repeats):
        order = torch.randperm(len(labels), generator=random)
        halves = order[: len(order) // 2], order[len(order) // 2 :]
        for fitted, rest in (halves, halves[::-1]):
            temperature = _best_temperature(log_probs[fitted], labels[fitted])
            scores.append(_scores(log_probs[rest], labels[rest], temperature))
    return float(torch.cat(scores).mean())


def _best_temperature(log_probs: Tensor, labels: Tensor) -> float:
    def cost(log_temperature: float) -> float:
        return -float(_scores(log_probs, labels, math.exp(log_temperature)).mean())

    return math.exp(minimise(cost, -math.log(20), math.log(20))[0])


def _scores(log_probs: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Return the log-probability of each label at a temperature, (n,)."""
    scaled = (log_probs.double().clamp_min(-1e4) / temperature).log_softmax(-1)
    return scaled.gather(-1, labels.long().unsqueeze(-1)).squeeze(-1)


@takes_arrays
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
