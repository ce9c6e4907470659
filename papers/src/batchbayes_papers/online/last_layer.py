"""The last layer on fixed features: a Gaussian with a full covariance.

Its mean is the maximum of the log-likelihood of the part plus the log density of the former Gaussian, and its precision
adds the curvature there (the Laplace approximation). In a regression this is exact.

For classes, `num_draws` averages log-likelihood and curvature over draws of the outputs from the new Gaussian. That is
the best Gaussian by the ELBO (variational inference). It costs more steps, but curvature at the maximum alone is far
too small where the classes of a part can be told apart.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from batchbayes import BatchbayesError
from batchbayes.methods.laplace.curvature import full_curvature, output_hessians
from batchbayes.tools import (
    Categorical,
    TargetLikelihood,
    check_labels,
    finite_number,
    generator,
    require_data,
    require_finite,
    whole_number,
)
from batchbayes_papers.online.parts import DataPart, read_state, require_finite_weights, write_state

CHUNK = 500
"""Number of examples whose covariances of outputs are computed at once."""


@dataclass(frozen=True, eq=False)
class OnlineLastLayer:
    """A Gaussian with a full precision over the weights (K, P) of a linear layer on fixed features, in float64."""

    likelihood: TargetLikelihood[Any]
    mean: Tensor
    """(K, P)"""
    precision: Tensor
    """(K P, K P)"""
    num_parts: int = 0
    num_draws: int = 0

    @classmethod
    def start(
        cls,
        num_outputs: int,
        num_features: int,
        likelihood: TargetLikelihood[Any],
        prior_precision: float = 1.0,
        *,
        num_draws: int = 0,
    ) -> Self:
        """Return the prior N(0, 1 / prior_precision).

        Args:
            num_outputs: classes, or targets.
            num_features: with the column of ones, if there is one.
            likelihood: `bb.categorical()`, for example.
            prior_precision: one over the variance of each weight.
            num_draws: of the outputs of each example in an update, 32 for example; 0 for a Laplace approximation.
        """
        finite_number("prior_precision", prior_precision, above=0, fix="pass 1, for example")
        whole_number("num_draws", num_draws, least=0)
        size = whole_number("num_outputs", num_outputs) * whole_number("num_features", num_features)
        prior = prior_precision * torch.eye(size, dtype=torch.float64)
        mean = torch.zeros(num_outputs, num_features, dtype=torch.float64)
        return cls(likelihood, mean, prior, num_draws=num_draws)

    @torch.no_grad()
    def update(self, part: DataPart, *, steps: int = 20) -> Self:
        """Return the posterior after one more part: features (N, P), with a column of ones for a bias, and targets.

        The maximum is found by Newton's method. For real targets the first step is exact.
        """
        require_data(*part)
        features, targets = self._fitting(part[0]), part[1]
        outputs = features @ self.mean.T
        fitting = self.likelihood.fitting(outputs[None], targets)
        if isinstance(self.likelihood, Categorical):
            check_labels(targets, features.shape[:1], len(self.mean), "labels of a part")
        mean, precision, spread = self.mean, None, torch.zeros_like(outputs)[None]
        for _ in range(steps):
            gradient, curvature = self._derivatives(features, fitting, mean, spread)
            with _words_for_singular():
                move = torch.linalg.solve(curvature, gradient.flatten()).view_as(mean)
            mean = mean - self._damped(features, fitting, mean, move, spread) * move
            if self.num_draws:
                precision = curvature if precision is None else (precision + curvature) / 2  # without it, it may swing
                spread = self._spread(features, precision)
            if float(move.abs().max()) < (1e-3 if self.num_draws else 1e-10):
                break
        require_finite_weights([mean], self.num_parts)
        precision = self._derivatives(features, fitting, mean, spread)[1]
        return replace(self, mean=mean, precision=precision, num_parts=self.num_parts + 1)

    def _spread(self, features: Tensor, precision: Tensor) -> Tensor:
        """Return by how much draws of the outputs differ from their mean, (S, N, K). Each comes with its negative."""
        shape = (-(-self.num_draws // 2), len(features), len(self.mean))
        normals = torch.randn(shape, generator=generator(self.num_parts, "spread"), dtype=torch.float64)
        half = (_root(_output_covariance(features, precision)) @ normals[..., None])[..., 0]
        return torch.cat([half, -half])

    def _fitting(self, features: Tensor) -> Tensor:
        """Return features (N, P) in float64 on the CPU, or refuse them."""
        if features.ndim != 2 or features.shape[1] != self.mean.shape[1]:
            raise BatchbayesError(
                expected=f"features of shape (N, {self.mean.shape[1]})",
                got=f"shape {tuple(features.shape)}",
                fix="pass the features that the prior was made for, with a column of ones if it has a bias",
            )
        return features.cpu().double()

    def _loss(self, features: Tensor, fitting: Tensor, weights: Tensor, spread: Tensor) -> float:
        """Return the negative log-likelihood of a part minus the log of the former Gaussian, up to a constant."""
        away = (weights - self.mean).flatten()
        fit = -self.likelihood(features @ weights.T + spread).log_prob(fitting).sum() / len(spread)
        return float(fit + 0.5 * away @ self.precision @ away)

    def _damped(self, features: Tensor, fitting: Tensor, mean: Tensor, move: Tensor, spread: Tensor) -> float:
        """Return the longest step of 1, 1/2, 1/4, ... that does not raise the loss."""
        before, step = self._loss(features, fitting, mean, spread), 1.0
        while step > 1e-6 and self._loss(features, fitting, mean - step * move, spread) > before + 1e-9 * abs(before):
            step /= 2
        return step

    def _derivatives(self, features: Tensor, fitting: Tensor, weights: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient (K, P) of the loss and its second derivatives (K P, K P)."""
        outputs = features @ weights.T + spread  # (S, N, K)
        with torch.enable_grad():
            leaf = outputs.clone().requires_grad_()
            (slope,) = torch.autograd.grad(-self.likelihood(leaf).log_prob(fitting).sum() / len(spread), leaf)
        hessians = torch.zeros(*outputs.shape[1:], outputs.shape[2], dtype=torch.float64)
        for draw in outputs:
            hessians += output_hessians(self.likelihood, draw) / len(spread)
        gradient = slope.sum(0).T @ features + (self.precision @ (weights - self.mean).flatten()).view_as(weights)
        return gradient, self.precision + full_curvature(features, hessians).flatten(2).flatten(0, 1)

    def outputs(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean (n, K) and covariance (n, K, K) of the outputs, in closed form."""
        features = self._fitting(require_finite(features, "the features"))
        return features @ self.mean.T, _output_covariance(features, self.precision)

    def log_prob(self, features: Tensor, targets: Tensor, num_samples: int = 64, seed: int = 0) -> Tensor:
        r"""Return $\log\frac1S\sum_s p(y\mid f_s)$ over draws of the outputs, (N, ...)."""
        whole_number("num_samples", num_samples)
        mean, covariance = self.outputs(features)
        normals = torch.randn(num_samples, *mean.shape, generator=generator(seed, "outputs"), dtype=torch.float64)
        draws = mean + (_root(covariance) @ normals[..., None])[..., 0]
        fitting = self.likelihood.fitting(draws, targets)
        return self.likelihood(draws).log_prob(fitting).logsumexp(0) - math.log(num_samples)

    def _tensors(self) -> dict[str, Tensor]:
        return {"mean": self.mean, "precision": self.precision}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, whole or not at all."""
        write_state(path, {"num_parts": self.num_parts}, self._tensors())

    def restored(self, path: str | os.PathLike[str]) -> Self:
        """Return what `save` wrote, for the same likelihood."""
        header, tensors = read_state(path, self._tensors())
        return replace(self, **tensors, **header)


def _output_covariance(features: Tensor, precision: Tensor) -> Tensor:
    """Return the covariance (n, K, K) of the outputs of features (n, P), by the precision (K P, K P) of the weights."""
    with _words_for_singular():
        root, size = torch.linalg.cholesky(precision), len(precision)
    inverse = torch.linalg.solve_triangular(root, torch.eye(size, dtype=torch.float64), upper=False)  # (K P, K P)
    blocks = inverse.reshape(-1, features.shape[1])  # (K P K, P)
    halves = ((rows @ blocks.T).unflatten(1, (size, -1)) for rows in features.split(CHUNK))  # (n, K P, K)
    return torch.cat([half.mT @ half for half in halves])


@contextmanager
def _words_for_singular() -> Iterator[None]:
    try:
        yield
    except torch.linalg.LinAlgError as error:  # pyright: ignore[reportPrivateImportUsage]
        raise BatchbayesError(
            expected="a precision of the weights that can be inverted in float64",
            got="one that is almost singular",
            fix="raise prior_precision, or scale the features to about unit variance",
        ) from error


def _root(covariance: Tensor) -> Tensor:
    return torch.linalg.cholesky(covariance + 1e-12 * torch.eye(covariance.shape[-1], dtype=torch.float64))
