r"""The curvature of the log-likelihood in the weights W (K, P) of the last layer, in its own eigenvectors.

With features $\phi_n$ and $\Lambda_n = -\nabla_f^2 \log p(y_n \mid f_n)$, (K, K), it is
$H = \sum_n \Lambda_n \otimes \phi_n\phi_n^\top$. Outputs are linear in W, so this is the exact curvature. With a
Gaussian prior of precision $\delta$ the posterior precision is $H + \delta I$, and only its eigenvalues depend on
$\delta$.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchbayes.errors import BatchbayesError
from batchbayes.likelihoods import Bernoulli, Categorical, Gaussian
from batchbayes.network.function import Network, modules_by_name
from batchbayes.network.tap import tap
from batchbayes.patch import Patch

MATRICES = 2**22
"""At most this many numbers are in the matrices (n, K, K) of some examples (32 MiB)."""


@dataclass(frozen=True, eq=False)
class FullCurvature:
    """All of H."""

    kind: ClassVar[str] = "full"
    vectors: Tensor
    """(K P, K P), in columns."""
    eigenvalues: Tensor
    """(K P,)"""

    def deviations(self, normals: Tensor, prior_precision: float) -> Tensor:
        r"""Turn standard normal numbers (S, K, P) into draws from $N(0, (H + \delta I)^{-1})$, (S, K, P)."""
        scaled = normals.flatten(1) * (self.eigenvalues + prior_precision).rsqrt()
        return (scaled @ self.vectors.T).view_as(normals)

    def moves(self, features: Tensor, prior_precision: float) -> Callable[[Tensor], Tensor]:
        """Return how outputs at features (n, P) move, (n, K), as a function of the normal numbers (K, P) of a draw."""
        return lambda normals: features @ self.deviations(normals[None], prior_precision)[0].T

    def output_covariance(self, features: Tensor, prior_precision: float) -> Tensor:
        """Return the covariance of the outputs at features (n, P), (n, K, K)."""
        half = self.vectors * (self.eigenvalues + prior_precision).rsqrt()
        root = half.unflatten(0, (-1, features.shape[1]))  # (K, P, K P)
        seen = torch.einsum("np,kpd->nkd", features, root)
        return seen @ seen.mT

    def output_variance(self, features: Tensor, prior_precision: float) -> Tensor:
        """Return the variance of each output at features (n, P), (n, K)."""
        size = max(1, MATRICES // max(1, self.vectors.shape[0] ** 2 // features.shape[1]))
        parts = [self.output_covariance(part, prior_precision) for part in features.split(size)]
        return torch.cat([part.diagonal(dim1=1, dim2=2) for part in parts])


@dataclass(frozen=True, eq=False)
class KroneckerCurvature:
    r"""$B \otimes A$ with B (K, K) and A (P, P). It is exact if all $\Lambda_n$ are equal, as in regression."""

    kind: ClassVar[str] = "Kronecker"
    output_vectors: Tensor
    """(K, K), in columns."""
    feature_vectors: Tensor
    """(P, P), in columns."""
    eigenvalues: Tensor
    """(K, P)"""

    def deviations(self, normals: Tensor, prior_precision: float) -> Tensor:
        scaled = normals * (self.eigenvalues + prior_precision).rsqrt()
        return self.output_vectors @ scaled @ self.feature_vectors.T

    def moves(self, features: Tensor, prior_precision: float) -> Callable[[Tensor], Tensor]:
        scale, along = (self.eigenvalues + prior_precision).rsqrt(), features @ self.feature_vectors
        return lambda normals: along @ (normals * scale).T @ self.output_vectors.T  # weights would cost much more

    def output_covariance(self, features: Tensor, prior_precision: float) -> Tensor:
        variances = self._along(features, prior_precision)
        return (self.output_vectors * variances[:, None, :]) @ self.output_vectors.T

    def output_variance(self, features: Tensor, prior_precision: float) -> Tensor:
        return self._along(features, prior_precision) @ self.output_vectors.square().T

    def _along(self, features: Tensor, prior_precision: float) -> Tensor:
        """Return the variances along the output vectors, (n, K)."""
        return (features @ self.feature_vectors).square() @ (self.eigenvalues + prior_precision).reciprocal().T


def curvature_of(
    batches: Iterable[tuple[Tensor, Tensor]], likelihood: object, outputs: int, features: int, *, full: bool
) -> FullCurvature | KroneckerCurvature:
    """Return the curvature of a training set, whose batches have features (n, P) and outputs (n, K)."""
    if full:
        total = torch.zeros(outputs, features, outputs, features, dtype=torch.float64)
        size = max(1, MATRICES // outputs**2)
        for seen, made in batches:
            for part, rows in zip(seen.split(size), made.split(size), strict=True):
                total += full_curvature(part, output_hessians(likelihood, rows))
        values, vectors = torch.linalg.eigh(total.flatten(2).flatten(0, 1))
        return FullCurvature(vectors, values.clamp_min(0))
    of_features, of_outputs = (torch.zeros(size, size, dtype=torch.float64) for size in (features, outputs))
    count = 0
    for seen, made in batches:
        of_features += seen.T @ seen
        of_outputs += summed_hessian(likelihood, made)
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
        probs = likelihood(outputs[None]).probs[0].view_as(outputs)  # a report takes (n, 1) as (n,)
        return (probs * (1 - probs)).diag_embed() / likelihood.temperature**2
    raise BatchbayesError(
        expected="bb.gaussian(...), bb.categorical() or bb.bernoulli() with logits, for the Laplace approximation",
        got=f"{likelihood!r}"[:200],
        fix="use one of these",
    )


def summed_hessian(likelihood: object, outputs: Tensor) -> Tensor:
    """Return the sum over examples of `output_hessians`, (K, K), without a matrix for each example.

    >>> from batchbayes.likelihoods import categorical
    >>> outputs = torch.zeros(6, 2)
    >>> summed_hessian(categorical(), outputs), output_hessians(categorical(), outputs).sum(0)[0]
    (tensor([[ 1.5000, -1.5000],
            [-1.5000,  1.5000]]), tensor([ 1.5000, -1.5000]))
    """
    if isinstance(likelihood, Categorical) and not likelihood.probabilities:
        probs = likelihood(outputs[None]).probs[0]
        return (probs.sum(0).diag() - probs.T @ probs) / likelihood.temperature**2
    size = max(1, MATRICES // outputs.shape[1] ** 2)
    return torch.stack([output_hessians(likelihood, rows).sum(0) for rows in outputs.split(size)]).sum(0)


@dataclass(frozen=True, eq=False)
class LastLayer:
    """The linear layer that makes the outputs of a network."""

    network: Network
    name: str

    @property
    def module(self) -> nn.Linear:
        return modules_by_name(self.network.module, nn.Linear)[self.name]

    @property
    def mean(self) -> Tensor:
        """The present weights (K, P) in float64; if there is a bias, it is the last column."""
        return joined(self.module).double().cpu()

    def with_weights(self, weights: Tensor) -> Patch:
        """Return the network with other weights (K, P) in this layer alone, also if an embedding shares its weights.

        The layer computes in float64 where the device has it: large weights may cancel.
        """
        self.network.warn_if_changed()
        own = self.module.weight
        weight = weights.to(own.device, own.dtype if own.device.type == "mps" else torch.float64)
        if self.module.bias is None:
            return Patch(self.network, heads={self.name: (weight,)})
        return Patch(self.network, heads={self.name: (weight[:, :-1].contiguous(), weight[:, -1].contiguous())})

    @torch.no_grad()
    def run(self, inputs: Any) -> tuple[Tensor, Tensor]:
        """Return features (n, P), with a one for the bias, in float64, and the outputs of the network.

        The outputs are (n, K), or (n,) if the network takes the axis of a single output away.
        """
        self.network.warn_if_changed()
        seen, order, outputs = tap(self.network, inputs, [self.name])
        if len(order) != 1 or seen[self.name].ndim != 2:
            raise BatchbayesError(
                expected=f"one row of features for each example at the last layer {self.name!r}",
                got=f"{len(order)} calls of it"
                if len(order) != 1
                else f"features of shape {(*seen[self.name].shape,)}",
                fix="name another layer with layer=, or use a network with one output row for each example",
            )
        features = seen[self.name].double().cpu()
        if self.module.bias is not None:
            features = F.pad(features, (0, 1), value=1.0)
        return features, outputs


def joined(layer: nn.Linear) -> Tensor:
    """Return a copy of the weights (K, P) of a layer, its bias in the last column."""
    parts = [layer.weight] if layer.bias is None else [layer.weight, layer.bias[:, None]]
    return torch.cat(parts, 1).detach()


def as_rows(outputs: Tensor) -> Tensor:
    """Return outputs (n, K) or (n,) as (n, K)."""
    return outputs[:, None] if outputs.ndim == 1 else outputs


@torch.no_grad()
def find_last_layer(network: Network, inputs: Any, name: str | None) -> LastLayer:
    """Return the linear layer whose result is the output of the network, or refuse the network."""
    layers = modules_by_name(network.module, nn.Linear)
    seen, _, outputs = tap(network, inputs, layers)
    if not bool(torch.isfinite(outputs).all()):
        fix = "look for NaN in the weights and in the data"
        raise BatchbayesError("finite outputs of the network", "NaN or infinity for the first training batch", fix)
    for found in [name] if name is not None else reversed(layers):
        if found in seen and _makes(layers[found], seen[found], outputs):
            return LastLayer(network, found)
    raise BatchbayesError(
        expected=f"a linear layer {'' if name is None else repr(name) + ' '}whose result is the output of the network",
        got=f"{type(network.module).__name__}, whose linear layers are {', '.join(list(layers)[-6:]) or 'none'}",
        fix="name the right one with layer=, and let the network return logits or means, without a softmax after it",
    )


def _makes(layer: nn.Linear, features: Tensor, outputs: Tensor) -> bool:
    """Whether a layer turns these features into these outputs. Outputs (N,) are those of a layer with one output."""
    made, outputs = F.linear(features, layer.weight, layer.bias), as_rows(outputs)
    return made.shape == outputs.shape and torch.allclose(made, outputs, rtol=1e-3, atol=1e-4)
