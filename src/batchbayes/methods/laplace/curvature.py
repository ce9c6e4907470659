r"""The curvature of the log-likelihood in the weights W (K, P) of the last layer, in its own eigenvectors.

With features $\phi_n$ and $\Lambda_n = -\nabla_f^2 \log p(y_n \mid f_n)$, (K, K), it is
$H = \sum_n \Lambda_n \otimes \phi_n\phi_n^\top$. Outputs are linear in W, so this is the exact curvature. With a
Gaussian prior of precision $\delta$ the posterior precision is $H + \delta I$, and only its eigenvalues depend on
$\delta$.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from batchbayes.errors import BatchbayesError
from batchbayes.likelihoods import Bernoulli, Categorical, Gaussian


@dataclass(frozen=True, eq=False)
class FullCurvature:
    """All of H."""

    vectors: Tensor
    """(K P, K P), in columns."""
    eigenvalues: Tensor
    """(K P,)"""

    def deviations(self, normals: Tensor, prior_precision: float) -> Tensor:
        r"""Turn standard normal numbers (S, K, P) into draws from $N(0, (H + \delta I)^{-1})$, (S, K, P)."""
        scaled = normals.flatten(1) * (self.eigenvalues + prior_precision).rsqrt()
        return (scaled @ self.vectors.T).view_as(normals)

    def output_covariance(self, features: Tensor, prior_precision: float) -> Tensor:
        """Return the covariance of the outputs at features (n, P), (n, K, K)."""
        half = self.vectors * (self.eigenvalues + prior_precision).rsqrt()
        root = half.unflatten(0, (-1, features.shape[1]))  # (K, P, K P)
        seen = torch.einsum("np,kpd->nkd", features, root)
        return seen @ seen.mT


@dataclass(frozen=True, eq=False)
class KroneckerCurvature:
    r"""$B \otimes A$ with B (K, K) and A (P, P). It is exact if all $\Lambda_n$ are equal, as in regression."""

    output_vectors: Tensor
    """(K, K), in columns."""
    feature_vectors: Tensor
    """(P, P), in columns."""
    eigenvalues: Tensor
    """(K, P)"""

    def deviations(self, normals: Tensor, prior_precision: float) -> Tensor:
        scaled = normals * (self.eigenvalues + prior_precision).rsqrt()
        return self.output_vectors @ scaled @ self.feature_vectors.T

    def output_covariance(self, features: Tensor, prior_precision: float) -> Tensor:
        variances = (features @ self.feature_vectors).square() @ (self.eigenvalues + prior_precision).reciprocal().T
        return (self.output_vectors * variances[:, None, :]) @ self.output_vectors.T


def curvature_of(
    batches: Iterable[tuple[Tensor, Tensor]], outputs: int, features: int, *, full: bool
) -> FullCurvature | KroneckerCurvature:
    """Return the curvature of a training set, whose batches have features (n, P) and second derivatives (n, K, K)."""
    if full:
        total = torch.zeros(outputs, features, outputs, features, dtype=torch.float64)
        for seen, hessians in batches:
            total += full_curvature(seen, hessians)
        values, vectors = torch.linalg.eigh(total.flatten(2).flatten(0, 1))
        return FullCurvature(vectors, values.clamp_min(0))
    of_features, of_outputs = (torch.zeros(size, size, dtype=torch.float64) for size in (features, outputs))
    count = 0
    for seen, hessians in batches:
        of_features += seen.T @ seen
        of_outputs += hessians.sum(0)
        count += len(seen)
    output_values, output_vectors = torch.linalg.eigh(of_outputs / count)
    feature_values, feature_vectors = torch.linalg.eigh(of_features)
    products = output_values.clamp_min(0)[:, None] * feature_values.clamp_min(0)
    return KroneckerCurvature(output_vectors, feature_vectors, products)


def full_curvature(features: Tensor, hessians: Tensor) -> Tensor:
    r"""Return $\sum_n \Lambda_n \otimes \phi_n\phi_n^\top$ of features (n, P) and matrices (n, K, K), (K, P, K, P)."""
    outputs, width = hessians.shape[1], features.shape[1]
    found = torch.empty(outputs, width, outputs, width, dtype=features.dtype)
    for k, j in torch.combinations(torch.arange(outputs), with_replacement=True).tolist():
        found[k, :, j] = found[j, :, k] = (features * hessians[:, k, j, None]).T @ features
    return found


def output_hessians(likelihood: object, outputs: Tensor) -> Tensor:
    r"""Return $-\nabla_f^2\log p(y\mid f)$ for outputs (n, K), (n, K, K). It does not depend on the targets.

    >>> from batchbayes.likelihoods import gaussian
    >>> output_hessians(gaussian(precision=4.0), torch.zeros(1, 2))
    tensor([[[4., 0.],
             [0., 4.]]])
    """
    if isinstance(likelihood, Gaussian):
        likelihood(outputs[None])  # refuses precisions that are not one for each output
        precision = torch.as_tensor(likelihood.precision, dtype=outputs.dtype).expand(outputs.shape[1])
        return precision.diag().expand(len(outputs), -1, -1)
    if isinstance(likelihood, Categorical) and not likelihood.probabilities:
        probs = likelihood(outputs[None]).probs[0]
        return (probs.diag_embed() - probs[:, :, None] * probs[:, None, :]) / likelihood.temperature**2
    if isinstance(likelihood, Bernoulli) and not likelihood.probabilities:
        probs = likelihood(outputs[None]).probs[0]
        return (probs * (1 - probs)).diag_embed() / likelihood.temperature**2
    raise BatchbayesError(
        expected="bb.gaussian(...), bb.categorical() or bb.bernoulli() with logits, for the Laplace approximation",
        got=f"{likelihood!r}"[:200],
        fix="use one of these",
    )
