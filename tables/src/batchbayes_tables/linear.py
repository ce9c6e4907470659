"""A linear part beside the networks: ridge or logistic regression on the same inputs, for each fold and seed.

With bins of the columns as inputs this is an additive model with piecewise linear terms. On few rows it is often
better than networks; held-out rows choose how much it counts.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

RIDGE_PENALTIES = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
LOGISTIC_PENALTIES = (1.0, 3.0, 10.0, 30.0, 100.0)
"""Penalties on the squared coefficients of standardised inputs, as numbers of rows."""
UNITS_OF_BINS = (0.0, 0.25)
"""What bins are multiplied by for logistic regression. At 0.25, their penalty is 16 times as large as for numbers."""
POOL_PENALTY = 30.0
"""Penalty on the squared distance of weights of models from equal ones, as a number of rows."""
ITERATIONS = 60
MOST_ROWS = 5000
"""Rows that a logistic regression is fitted to. With more, networks hardly need it."""


@dataclass(frozen=True, eq=False)
class Linear:
    """G linear functions."""

    weight: Tensor
    """(G, Q, K)"""
    bias: Tensor
    """(G, 1, K)"""

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the outputs of all functions, (G, N, K)."""
        return inputs.double() @ self.weight + self.bias

    def held_out(self, inputs: Tensor, folds: Tensor) -> Tensor:
        """Return for each row the outputs of the functions that left it out, (R, N, K), for folds (R, N)."""
        number = torch.arange(len(folds))[:, None] * (len(self.weight) // len(folds)) + folds
        return self(inputs)[number, torch.arange(inputs.shape[0])]


def ridge(inputs: Tensor, targets: Tensor, folds: Tensor) -> tuple[Linear, Tensor]:
    """Fit ridge regressions without each fold, with the penalty that is best for the first seed.

    Targets are (N, K), and each column has a penalty of its own. Also returns the predictions of the first seed for
    the rows that were held out, (N, K).
    """
    x, y, columns = inputs.double(), targets.double(), torch.arange(targets.shape[1])
    parts = [[_ridge(x[own != fold], y[own != fold]) for fold in own.unique()] for own in folds]
    held_out = torch.stack(
        [Linear(*_joined(parts[0], i)).held_out(x, folds[:1])[0] for i in range(len(RIDGE_PENALTIES))]
    )
    best = (held_out - y).abs().mean(1).argmin(0)  # (K,)
    all_parts = [part for own in parts for part in own]
    weight = torch.stack([torch.stack([each[0] for each in part])[best, :, columns].T for part in all_parts])
    bias = torch.stack([torch.stack([each[1] for each in part])[best, :, columns].T for part in all_parts])
    return Linear(weight, bias), held_out[best, :, columns].T


def _joined(parts: list[list[tuple[Tensor, Tensor]]], penalty: int) -> tuple[Tensor, Tensor]:
    return torch.stack([part[penalty][0] for part in parts]), torch.stack([part[penalty][1] for part in parts])


def _ridge(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the weights (Q, K) and biases (1, K) for all penalties, from one eigendecomposition."""
    middle, level = x.mean(0, keepdim=True), y.mean(0, keepdim=True)
    values, vectors = torch.linalg.eigh((x - middle).T @ (x - middle))
    projected = vectors.T @ ((x - middle).T @ (y - level))
    found = []
    for penalty in RIDGE_PENALTIES:
        weight = vectors @ (projected / (values.clamp_min(0) + penalty)[:, None])
        found.append((weight, level - middle @ weight))
    return found


def logistic(inputs: Tensor, targets: Tensor, folds: Tensor, is_bin: Tensor) -> Linear:
    """Fit multinomial logistic regressions without each fold, as is best for the first seed.

    Targets are probabilities of classes, (N, K). All penalties are tried, without the inputs that are bins and with.
    """
    x, y = inputs.double(), targets.double()
    units = [torch.where(is_bin, unit, 1.0).double() for unit in UNITS_OF_BINS]  # a penalty keeps weights of 0 at 0
    tried = [_logistic(x, y, folds[:1], unit, LOGISTIC_PENALTIES) for unit in units]
    scores = torch.stack([-(y * fit.held_out(x, folds[:1])[0].log_softmax(-1)).sum() for fits in tried for fit in fits])
    kind, penalty = divmod(int(scores.argmin()), len(LOGISTIC_PENALTIES))
    best = tried[kind][penalty]
    if len(folds) == 1:
        return best
    more = _logistic(x, y, folds[1:], units[kind], LOGISTIC_PENALTIES[penalty : penalty + 1])[0]
    return Linear(torch.cat([best.weight, more.weight]), torch.cat([best.bias, more.bias]))


def _logistic(x: Tensor, y: Tensor, folds: Tensor, unit: Tensor, penalties: tuple[float, ...]) -> list[Linear]:
    """Fit all folds, seeds and penalties at once, to inputs times a unit of each of them, (Q,)."""
    if len(x) > MOST_ROWS:
        some = torch.linspace(0, len(x) - 1, MOST_ROWS).long()
        x, y, folds = x[some], y[some], folds[:, some]
    used = torch.stack([own != fold for own in folds for fold in own.unique()]).double()  # (G, N)
    penalty = torch.tensor(penalties, dtype=torch.float64)[:, None, None, None]
    start = torch.zeros(len(penalties), len(used), x.shape[1] + 1, y.shape[1], dtype=torch.float64)
    wide = torch.cat([x * unit, torch.ones_like(x[:, :1])], 1)

    def loss(weight: Tensor) -> Tensor:
        scores = -(y * (wide @ weight).log_softmax(-1)).sum(-1)  # (P, G, N)
        return (scores * used).sum() + (penalty * weight[..., :-1, :].square()).sum() / 2

    found = minimised(loss, start)
    return [Linear(unit[:, None] * each[:, :-1], each[:, -1:]) for each in found]


def minimised(loss: Callable[[Tensor], Tensor], start: Tensor, iterations: int = ITERATIONS) -> Tensor:
    """Return where a smooth function is smallest, by L-BFGS."""
    values = start.clone().requires_grad_()
    optimiser = torch.optim.LBFGS([values], max_iter=iterations, history_size=20, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        found = loss(values)
        found.backward()
        return found

    with torch.enable_grad():
        optimiser.step(closure)
    return values.detach()


def pool_weights(log_probs: Tensor, targets: Tensor) -> Tensor:
    """Return weights (M,) of zero or more with which the log probabilities of M models, (M, N, K), are added up.

    Their sum gives the probabilities of classes by `softmax`: a geometric mean, and a temperature. Few rows hardly move
    the weights from 1 / M. There is no constant, so that the shares of classes are those that the models say.
    """
    start = torch.full((len(log_probs),), 1 / len(log_probs), dtype=torch.float64)

    def loss(roots: Tensor) -> Tensor:
        weights = roots.square()
        scores = -(targets * pooled(log_probs, weights)).sum()
        return scores + POOL_PENALTY / 2 * (weights - start).square().sum()

    return minimised(loss, start.sqrt()).square()


def pooled(log_probs: Tensor, weights: Tensor) -> Tensor:
    """Return the log probabilities (N, K) of M models together."""
    return torch.tensordot(weights, log_probs, 1).log_softmax(-1)
