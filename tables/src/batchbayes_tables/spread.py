r"""How far targets scatter around their predictions, as a function of the inputs, learnt from held-out errors.

The variance of a target is $e^{2 \phi(x) \cdot \beta} + c\,v(x)$: data noise, and c times the variance v of the
predictions of networks and draws, which is model noise. $\phi$ has the spread that the networks predict, the predicted
mean, and the inputs that stay in a range, so that the spread is an additive function of the columns and grows with the
mean if the data says so. Errors of rows that the networks had not seen are its targets, with a likelihood of Student's
t, which a few outliers do not bend, and a penalty on the coefficients of the inputs that held-out folds choose.

A network alone underestimates the spread where it has learnt its rows by heart; held-out errors do not.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from batchbayes_tables.linear import minimised

PENALTIES = (30.0, 100.0, 300.0, 1000.0)
DEGREES = 5.0
"""Degrees of freedom of Student's t."""
SMALLEST = 1e-6
"""The smallest spread, in standard deviations of the targets."""
MOST_ROWS = 5000
"""Rows that the spread is learnt from. More are no more certain."""


class Outlook(NamedTuple):
    """What networks say about N rows."""

    mean: Tensor
    """(N,)"""
    log_spread: Tensor
    """The logarithm of the spread that networks predict, (N,)."""
    variance: Tensor
    """The variance of the predictions of networks and draws, (N,)."""


@dataclass(frozen=True, eq=False)
class Spread:
    """The fitted spread."""

    coefficients: Tensor
    """Of a constant, the predicted spread, the mean, and the inputs; then half the logarithm of c. (D + 4,)"""
    middle: float
    """The mean of the predicted spread in training."""
    limits: tuple[float, float]
    """The logarithm of the data noise stays in the range that training rows have."""

    def parts(self, outlook: Outlook, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the variances of data noise and of model noise, (N,) each, for inputs (N, D) that stay in a range."""
        exponent = (_features(outlook, inputs, self.middle) @ self.coefficients[:-1]).clamp(*self.limits)
        return (2 * exponent).exp(), (2 * self.coefficients[-1]).exp() * outlook.variance


def fit_spread(errors: Tensor, outlook: Outlook, inputs: Tensor, folds: Tensor) -> tuple[Spread, Tensor]:
    """Learn the spread from held-out errors (N,). Also return that of each row from rows of the other folds, (N,).

    All folds and penalties are fitted at once, (P, F + 1) problems; the last "fold" is empty.
    """
    middle, numbers = float(outlook.log_spread.mean()), folds.unique()
    features, some = _features(outlook, inputs.double(), middle), torch.arange(len(errors))
    if len(errors) > MOST_ROWS:
        some = torch.linspace(0, len(errors) - 1, MOST_ROWS).long()
    used = torch.stack([folds[some] != fold for fold in [*numbers, -1]]).double()
    penalty = torch.tensor(PENALTIES, dtype=torch.float64)[:, None]
    start = torch.zeros(len(PENALTIES), len(used), features.shape[1] + 1, dtype=torch.float64)
    start[..., 0], start[..., 1] = (errors.abs().mean() + SMALLEST).log(), 0.5
    own = features[some], outlook.variance[some], errors[some]

    def loss(found: Tensor) -> Tensor:
        prior = 4 * (found[..., 1] - 0.5).square() + 4 * found[..., 2].square() + found[..., -1].square()
        return (
            (_scores(found, *own) * used).sum() + (penalty * found[..., 3:-1].square().sum(-1)).sum() / 2 + prior.sum()
        )

    found = minimised(loss, start)
    held_out = (_scores(found, *own) * (1 - used)).sum((1, 2))
    best = found[int(held_out.argmin())]  # (F + 1, D + 4)
    exponents = features @ best[-1, :-1]
    every = _log_std(best, features, outlook.variance)  # (F + 1, N)
    place = torch.searchsorted(numbers, folds)
    spread = Spread(best[-1], middle, (float(exponents.min()), float(exponents.max())))
    return spread, every[place, torch.arange(len(errors))].exp()


def _features(outlook: Outlook, inputs: Tensor, middle: float) -> Tensor:
    own = torch.stack([torch.ones_like(outlook.mean), outlook.log_spread - middle, outlook.mean], 1)
    return torch.cat([own, inputs.double()], 1)


def _log_std(found: Tensor, features: Tensor, variance: Tensor) -> Tensor:
    """Return the logarithm of the spread of each row, (..., N), for coefficients (..., D + 4)."""
    exponents = (found[..., :-1] @ features.T).clamp(-12, 8)  # far beyond any target, in its standard deviations
    return 0.5 * ((2 * exponents).exp() + (2 * found[..., -1:]).exp() * variance + SMALLEST**2).log()


def _scores(found: Tensor, features: Tensor, variance: Tensor, errors: Tensor) -> Tensor:
    """Return the negative log density of each error, without its constant."""
    log_std = _log_std(found, features, variance)
    return log_std + (DEGREES + 1) / 2 * ((errors * (-log_std).exp()).square() / DEGREES).log1p()
