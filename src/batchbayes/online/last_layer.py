"""The last layer on fixed features: a Gaussian with a full covariance.

Its mean is the maximum of the log-likelihood of the part plus the log density of the former Gaussian, and its precision
adds the curvature there (the Laplace approximation). In a regression this is exact.
"""

import math
import os
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from batchbayes._common.checks import check_labels, finite_number
from batchbayes._common.rng import generator
from batchbayes.batches import require_finite
from batchbayes.errors import BatchbayesError
from batchbayes.likelihoods import Categorical, TargetLikelihood
from batchbayes.methods.laplace.curvature import output_hessians
from batchbayes.online.parts import Part, read_state, require_finite_weights, require_same_shapes, write_state
from batchbayes.training.batches import require_data


@dataclass(frozen=True, eq=False)
class LastLayer:
    """A Gaussian with a full precision over the weights (K, P) of a linear layer on fixed features, in float64."""

    likelihood: TargetLikelihood[Any]
    mean: Tensor
    """(K, P)"""
    precision: Tensor
    """(K P, K P)"""
    num_parts: int = 0

    @classmethod
    def start(
        cls, num_outputs: int, num_features: int, likelihood: TargetLikelihood[Any], prior_precision: float = 1.0
    ) -> Self:
        """Return the prior N(0, 1 / prior_precision)."""
        finite_number("prior_precision", prior_precision, above=0, fix="pass 1, for example")
        size = num_outputs * num_features
        prior = prior_precision * torch.eye(size, dtype=torch.float64)
        return cls(likelihood, torch.zeros(num_outputs, num_features, dtype=torch.float64), prior)

    @torch.no_grad()
    def update(self, part: Part, *, steps: int = 20) -> Self:
        """Return the posterior after one more part: features (N, P), with a column of ones for a bias, and targets.

        The maximum is found by Newton's method. For real targets the first step is exact.
        """
        require_data(*part)
        features, targets = self._fitting(part[0]), part[1]
        outputs = features @ self.mean.T
        fitting = self.likelihood.fitting(outputs[None], targets)
        if isinstance(self.likelihood, Categorical):
            check_labels(targets, features.shape[:1], len(self.mean), "labels of a part")
        mean = self.mean
        for _ in range(steps):
            gradient, curvature = self._derivatives(features, fitting, mean)
            move = torch.linalg.solve(curvature, gradient.flatten()).view_as(mean)
            mean = mean - self._damped(features, fitting, mean, move) * move
            if float(move.abs().max()) < 1e-10:
                break
        require_finite_weights([mean], self.num_parts)
        return replace(
            self, mean=mean, precision=self._derivatives(features, fitting, mean)[1], num_parts=self.num_parts + 1
        )

    def _fitting(self, features: Tensor) -> Tensor:
        """Return features (N, P) in float64, or refuse them."""
        if features.ndim != 2 or features.shape[1] != self.mean.shape[1]:
            raise BatchbayesError(
                expected=f"features of shape (N, {self.mean.shape[1]})",
                got=f"shape {tuple(features.shape)}",
                fix="pass the features that the prior was made for, with a column of ones if it has a bias",
            )
        return features.double()

    def loss(self, features: Tensor, fitting: Tensor, weights: Tensor) -> float:
        """Return the negative log-likelihood of a part minus the log of the former Gaussian, up to a constant."""
        away = (weights - self.mean).flatten()
        fit = -self.likelihood((features @ weights.T)[None]).log_prob(fitting).sum()
        return float(fit + 0.5 * away @ self.precision @ away)

    def _damped(self, features: Tensor, fitting: Tensor, mean: Tensor, move: Tensor) -> float:
        """Return the longest step of 1, 1/2, 1/4, ... that does not raise the loss."""
        before, step = self.loss(features, fitting, mean), 1.0
        while step > 1e-6 and self.loss(features, fitting, mean - step * move) > before + 1e-9 * abs(before):
            step /= 2
        return step

    def _derivatives(self, features: Tensor, fitting: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        outputs = features @ weights.T
        with torch.enable_grad():
            leaf = outputs.clone().requires_grad_()
            (slope,) = torch.autograd.grad(-self.likelihood(leaf[None]).log_prob(fitting).sum(), leaf)
        gradient = slope.T @ features + (self.precision @ (weights - self.mean).flatten()).view_as(weights)
        hessians = output_hessians(self.likelihood, outputs)
        curvature = torch.einsum("nkl,np,nq->kplq", hessians, features, features)
        return gradient, self.precision + curvature.flatten(2).flatten(0, 1)

    def outputs(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean (n, K) and covariance (n, K, K) of the outputs, in closed form."""
        features = self._fitting(require_finite(features, "the features"))
        root = torch.linalg.cholesky(self.precision)
        jacobian = torch.einsum("kl,np->nklp", torch.eye(len(self.mean), dtype=torch.float64), features).flatten(2)
        half = torch.linalg.solve_triangular(root, jacobian.flatten(0, 1).T, upper=False)  # (K P, n K)
        half = half.T.unflatten(0, (len(features), -1))
        return features @ self.mean.T, half @ half.mT

    def log_prob(self, features: Tensor, targets: Tensor, num_samples: int = 64, seed: int = 0) -> Tensor:
        r"""Return $\log\frac1S\sum_s p(y\mid f_s)$ over draws of the outputs, (N, ...)."""
        mean, covariance = self.outputs(features)
        jitter = 1e-12 * torch.eye(len(self.mean), dtype=torch.float64)
        normals = torch.randn(num_samples, *mean.shape, generator=generator(seed, "outputs"), dtype=torch.float64)
        draws = mean + (torch.linalg.cholesky(covariance + jitter) @ normals[..., None])[..., 0]
        fitting = self.likelihood.fitting(draws, targets)
        return self.likelihood(draws).log_prob(fitting).logsumexp(0) - math.log(num_samples)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, whole or not at all."""
        write_state(path, {"num_parts": self.num_parts}, {"mean": self.mean, "precision": self.precision})

    def restored(self, path: str | os.PathLike[str]) -> Self:
        """Return what `save` wrote, for the same likelihood."""
        header, file = read_state(path)
        own = {"mean": self.mean.shape, "precision": self.precision.shape}
        require_same_shapes(own, {name: tensor.shape for name, tensor in file.items()}, path)
        return replace(self, **dict(file), **header)
