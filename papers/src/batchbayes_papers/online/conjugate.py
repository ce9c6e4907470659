r"""Linear regression on fixed features with unknown noise: data in parts gives exactly what all data at once gives.

$y = \phi(x)^\top w + \varepsilon$ with $\varepsilon\sim N(0, \sigma^2)$ and $w_i\sim N(0, \sigma^2 v_{g(i)})$. The
noise $\sigma^2$ has an inverse gamma distribution, so the posterior of weights and noise is known in closed form, and
predictions have Student's t distribution. The state holds three sums over all examples so far, $\Phi^\top\Phi$,
$\Phi^\top y$ and $y^\top y$; no example is kept.

The variances v, one for each group of features, are those of the highest marginal likelihood of all data so far, which
depends on the sums only. They are found by MacKay's fixed point: $v_g$ such that the size of the weights of a group
agrees with how many of them the data determines.

Reference: MacKay, "Bayesian Interpolation", Neural Computation 1992.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.distributions import StudentT

from batchbayes import BatchbayesError
from batchbayes.tools import require_data, require_finite, shaped_like, whole_number
from batchbayes_papers.online.parts import DataPart, read_state, require_finite_weights, write_state

VARIANCE = 20.0
"""Where the search for the variances of the weights starts. It also counts as one weight of that size in each group."""
SHAPE, RATE = 1.0, 0.01
"""The inverse gamma distribution of the noise: two examples with errors of 0.1, for targets of about unit variance."""
MOST_STEPS = 200


class Fitted(NamedTuple):
    """The posterior, for features that are multiplied by the roots of their prior variances."""

    scales: Tensor
    """(P,)"""
    mean: Tensor
    """(P,)"""
    root: Tensor
    """The Cholesky factor of the precision times the noise, (P, P)."""
    shape: float
    rate: float


@dataclass(frozen=True, eq=False)
class ConjugateRegression:
    """What all parts so far say about the weights (P,) of a linear layer with one output, and about the noise.

    >>> features = torch.tensor([[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]])
    >>> state = ConjugateRegression.start([1, 1]).update((features, torch.tensor([0.0, 0.5, 1.0])))
    >>> state.predictive(torch.tensor([[4.0, 1.0]])).mean
    tensor([[1.9778]], dtype=torch.float64)
    """

    groups: tuple[int, ...]
    """How many neighbouring features share a variance of their weights."""
    of_features: Tensor
    """(P, P)"""
    of_targets: Tensor
    """(P,)"""
    of_squares: Tensor
    num_examples: int = 0
    num_parts: int = 0

    @classmethod
    def start(cls, groups: Sequence[int]) -> Self:
        """Return what is known before the first part. `groups` has the sizes of the groups of features."""
        sizes = tuple(whole_number("a size of a group", size) for size in groups)
        zeros = torch.zeros(sum(sizes), sum(sizes), dtype=torch.float64)
        return cls(sizes, zeros, zeros.sum(0), zeros.sum())

    def update(self, part: DataPart) -> Self:
        """Return the state after one more part: features (N, P), and targets (N,) or (N, 1) of about unit variance."""
        require_data(*part)
        features = self._fitting(part[0])
        targets = shaped_like(part[1], features[:, :1].shape)[:, 0].double()
        of_features, of_targets = features.T @ features, features.T @ targets
        require_finite_weights([of_features, of_targets, targets @ targets], self.num_parts)
        return replace(
            self,
            of_features=self.of_features + of_features,
            of_targets=self.of_targets + of_targets,
            of_squares=self.of_squares + targets @ targets,
            num_examples=self.num_examples + len(features),
            num_parts=self.num_parts + 1,
        )

    def _fitting(self, features: Tensor) -> Tensor:
        if features.ndim != 2 or features.shape[1] != len(self.of_targets):
            raise BatchbayesError(
                expected=f"features of shape (N, {len(self.of_targets)})",
                got=f"shape {tuple(features.shape)}",
                fix="pass the features whose groups `start` got",
            )
        return require_finite(features, "the features").double()

    @cached_property
    def variances(self) -> Tensor:
        """The prior variance of the weights of each group, divided by that of the noise."""
        index = torch.arange(len(self.groups)).repeat_interleave(torch.tensor(self.groups))
        found = torch.full((len(self.groups),), VARIANCE, dtype=torch.float64)
        for _ in range(MOST_STEPS):
            fitted = self._fitted(found[index])
            freedom = 1 - torch.cholesky_inverse(fitted.root).diagonal()
            sizes = fitted.mean.square() * fitted.shape / fitted.rate
            freedom, sizes = (torch.zeros_like(found).index_add_(0, index, each) for each in (freedom, sizes))
            before, found = found, (found * sizes + VARIANCE) / (freedom + 1)
            if float((found / before).log().abs().max()) < 1e-7:
                break
        return found

    def _fitted(self, variances: Tensor) -> Fitted:
        scales = variances.sqrt()
        precision = scales[:, None] * self.of_features * scales + torch.eye(len(scales), dtype=torch.float64)
        root, targets = torch.linalg.cholesky(precision), scales * self.of_targets
        mean = torch.cholesky_solve(targets[:, None], root)[:, 0]
        squares = float(self.of_squares - targets @ mean)
        return Fitted(scales, mean, root, SHAPE + self.num_examples / 2, RATE + max(squares, 0) / 2)

    @cached_property
    def _posterior(self) -> Fitted:
        return self._fitted(self.variances.repeat_interleave(torch.tensor(self.groups)))

    @property
    def noise_std(self) -> float:
        """The standard deviation of the noise that is most likely."""
        return (self._posterior.rate / (self._posterior.shape + 1)) ** 0.5

    def predictive(self, features: Tensor) -> StudentT:
        """Return the distribution of targets (n, 1), noise included, with `mean`, `stddev` and `log_prob`."""
        found = self._posterior
        scaled = self._fitting(features) * found.scales
        doubt = torch.linalg.solve_triangular(found.root, scaled.T, upper=False).square().sum(0)
        std = (found.rate / found.shape * (1 + doubt)).sqrt()
        return StudentT(2 * found.shape, (scaled @ found.mean)[:, None], std[:, None])

    def log_prob(self, features: Tensor, targets: Tensor) -> Tensor:
        """Return the log density of targets (n,) or (n, 1), as (n, 1)."""
        found = self.predictive(features)
        return found.log_prob(shaped_like(targets, found.mean.shape).double())

    def _tensors(self) -> dict[str, Tensor]:
        return {"of_features": self.of_features, "of_targets": self.of_targets, "of_squares": self.of_squares}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, whole or not at all."""
        write_state(path, {"num_parts": self.num_parts, "num_examples": self.num_examples}, self._tensors())

    def restored(self, path: str | os.PathLike[str]) -> Self:
        """Return what `save` wrote, for the same groups of features."""
        header, tensors = read_state(path, self._tensors())
        return replace(self, **tensors, **header)


def negative_log_evidence(scaled: Tensor, targets: Tensor) -> Tensor:
    """Return minus the log marginal likelihood of targets (N,), up to a constant. The noise is integrated out, too.

    `scaled` are features (N, P) that are multiplied by the roots of the variances of their weights.
    """
    return _Evidence.apply(scaled, targets)  # type: ignore[return-value]


class _Evidence(torch.autograd.Function):
    r"""$L = \frac12\log|K| + a\log(b + \frac12 y^\top K^{-1}y)$ with $K = \Phi\Phi^\top + I$, a shape and b rate.

    Its gradient is $(K^{-1} - \frac{a}{b + y^\top\alpha/2}\alpha\alpha^\top)\Phi$ with $\alpha = K^{-1}y$: one
    product of large matrices, where autograd takes two and several triangular solves.
    """

    @staticmethod
    def forward(ctx: Any, scaled: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        root = torch.linalg.cholesky(scaled @ scaled.T + torch.eye(len(scaled), dtype=scaled.dtype))
        alpha = torch.cholesky_solve(targets[:, None], root)
        shape, rate = SHAPE + len(targets) / 2, RATE + targets @ alpha[:, 0] / 2
        ctx.save_for_backward(scaled, root, alpha, shape / rate)
        return root.diagonal().log().sum() + shape * rate.log()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        scaled, root, alpha, ratio = ctx.saved_tensors
        inverse = torch.cholesky_inverse(root) - ratio * alpha @ alpha.T
        return gradient * (inverse @ scaled), None
