r"""Variance layers: weights with zero mean, in which only the variances carry what the network has learnt.

What is random: each weight $w_i$ of the chosen layers.
q(omega): $w_i = \sigma_i \epsilon_i$, with noise of zero mean and unit variance: Gaussian, $\pm 1$ (Bernoulli), or
uniform. The network at its means knows nothing; a draw predicts well, and the mean of draws better.
KL: zero with a log-uniform prior and with a prior whose variance is chosen for each weight (ARD), the limits of
variational dropout as alpha grows. With a Student-t prior of nu degrees of freedom and unit scale it is
$-\log(\sigma\sqrt{2\pi e}) - \log c_\nu + (\nu + 1)/2 \cdot E\log(1 + w^2/\nu)$, by the trapezium rule in $\log|w|$.
As nu goes to zero, its gradient with respect to sigma vanishes, too.
Cost of a training step: one product of a layer (Gaussian noise), as without noise. Bernoulli and uniform noise draws
one weight for a batch.
Reference: Neklyudov et al., "Variance Networks: When Expectation Does Not Meet Your Expectations", ICLR 2019.
Where we differ: their Bernoulli noise is +-1/2 and their uniform noise is U(-1/2, 1/2), which only scales sigma.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from batchbayes._common.signatures import Positive, checked
from batchbayes.methods.weights.family import TINY, Family, GaussianWeights, noise_like, standard_normal
from batchbayes.methods.weights.sites import Site

NODES = 64
"""Points of the quadrature."""


@dataclass(frozen=True, eq=False)
class VarianceWeights(GaussianWeights):
    """Weights with zero mean."""

    mean: Tensor
    variance: Tensor
    noise: str
    degrees: float | None
    """nu of the Student-t prior; None for priors whose KL is zero."""

    @cached_property
    def std(self) -> Tensor:
        return (self.variance + TINY).sqrt()

    def sample(self, source: torch.Generator | None = None) -> Tensor:
        normal = standard_normal(self.variance, source)
        if self.noise == "bernoulli":
            normal = normal.sign()
        elif self.noise == "uniform":
            normal = math.sqrt(3) * torch.erf(normal / math.sqrt(2))  # uniform between -sqrt(3) and sqrt(3)
        return self.std * normal

    def outputs(self, site: Site, inputs: Tensor) -> Tensor:
        variance = site.product(inputs.square(), self.variance)
        noise = (variance + TINY).sqrt() * noise_like(variance)
        if site.bias is None:
            return noise
        return noise + site.bias.view(-1, *[1] * (noise.ndim - 2)) if site.is_convolution else noise + site.bias

    def divergence(self) -> Tensor:
        if self.degrees is None:
            return self.variance.new_zeros(())
        return student_t_divergence(self.variance, self.degrees).sum()


@checked
@dataclass(frozen=True)
class Variance(Family):
    """Weights with zero mean and learnt variances."""

    kind: ClassVar[str] = "variance"
    has_means: ClassVar[bool] = False

    noise: Literal["gaussian", "bernoulli", "uniform"] = "gaussian"
    degrees: Positive | None = None
    """Degrees of freedom of a Student-t prior. None is the log-uniform prior or ARD, whose KL is zero."""

    @property
    def is_local(self) -> bool:
        return self.noise == "gaussian"

    def start(self, weight: Tensor, site: Site) -> dict[str, Tensor]:
        bound = max(1, math.prod(weight.shape[1:])) ** -0.5
        return {"std": torch.empty_like(weight).uniform_(-bound, bound)}

    def given(self, weight: Tensor, own: Mapping[str, Tensor], site: Site) -> VarianceWeights:
        return VarianceWeights(weight, own["std"].square(), self.noise, self.degrees)


def student_t_divergence(variance: Tensor, degrees: float) -> Tensor:
    """Return KL(N(0, variance) || Student-t) in nats, elementwise.

    >>> bool(student_t_divergence(torch.tensor(1.0, dtype=torch.float64), 1e6) < 1e-5)  # almost a Gaussian prior
    True
    """
    nodes, shares = _quadrature()
    spread = variance[..., None] * nodes.to(variance) ** 2 / degrees
    expected = (torch.log1p(spread) * shares.to(variance)).sum(-1)
    constant = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi)
    entropy = 0.5 * (2 * math.pi * math.e * variance).log()
    return (degrees + 1) / 2 * expected - constant - entropy


@cache
def _quadrature() -> tuple[Tensor, Tensor]:
    """Return points and shares that sum to one, for the mean of an even function of a standard normal number.

    In log |w| the logarithm of 1 + w^2 / nu is smooth for every nu. In w it has a sharp dip at zero if nu is small.
    """
    nodes = np.exp(np.linspace(-14, 2.2, NODES))
    shares = nodes * np.exp(-(nodes**2) / 2)
    return torch.from_numpy(nodes), torch.from_numpy(shares / shares.sum())
