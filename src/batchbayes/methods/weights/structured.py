r"""Structured sparsity: whole neurons and filters become noise and can be left out.

What is random: a factor $z_i$ for each input unit or input channel of the chosen layers.
q(omega): $W = M diag(z)$ with $\log z_i \sim N(\mu_i, \sigma_i^2)$, cut off outside of [-20, 0]. The prior is
$p(z) \propto 1/z$ on the same interval, so $\log z$ is uniform, and the KL has a closed form. A unit with
$E[z_i] < sd[z_i]$ is pruned: its factor is zero in training, in draws and in the means. The unit that feeds it can be
taken out of the network, which makes it smaller and faster, where single zeros do not.
Cost of a training step: as without noise, and one normal quantile for each input unit of each example.
Reference: Neklyudov, Molchanov, Ashukha, Vetrov, "Structured Bayesian Pruning via Log-Normal Multiplicative Noise",
NIPS 2017.
Where we differ: mu is $-softplus$ of a parameter, so that it never leaves the interval at its upper end. The KL counts
pruned units as if they still had noise.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

from batchbayes._common.signatures import Finite, checked
from batchbayes.methods.weights.family import Family, require_scalable_inputs, scaled_columns, scaled_inputs
from batchbayes.methods.weights.sites import Site

LOWEST = -20.0
"""The logarithm of a factor lies between this and zero."""
LEAST_RATIO = 1.0
"""Units whose factor has a smaller mean, in standard deviations, are pruned."""
ROUNDING = 1e-9
START = -4.0
"""The parameter of mu at the start: a factor of 0.98."""


@dataclass(frozen=True, eq=False)
class ScaledUnits:
    """A weight whose input units have random factors. Numbers of units are computed in float64."""

    weight: Tensor
    mu: Tensor
    """The mean of log z before it is cut off, (inputs,)."""
    sigma: Tensor
    """Its standard deviation, (inputs,)."""

    @cached_property
    def ends(self) -> tuple[Tensor, Tensor]:
        """The interval of log z in standard deviations around mu."""
        return (LOWEST - self.mu) / self.sigma, -self.mu / self.sigma

    @cached_property
    def log_inside(self) -> Tensor:
        """The logarithm of the share of the normal distribution that is in the interval."""
        return log_share(*self.ends)

    def moment(self, power: int) -> Tensor:
        """Return E[z^power]."""
        shift = power * self.sigma
        low, high = (end - shift for end in self.ends)
        return (power * self.mu + shift.square() / 2 + log_share(low, high) - self.log_inside).exp()

    @cached_property
    def is_kept(self) -> Tensor:
        """Which input units are not pruned, bool (inputs,)."""
        mean = self.moment(1)
        variance = (self.moment(2) - mean.square()).clamp(min=0)
        return (mean >= LEAST_RATIO * variance.sqrt()).detach()

    @property
    def mean(self) -> Tensor:
        return scaled_columns(self.weight, (self.moment(1) * self.is_kept).to(self.weight.dtype))

    def factors(self, uniform: Tensor) -> Tensor:
        """Turn numbers from 0 to 1, (..., inputs), into factors."""
        below = torch.special.ndtr(self.ends[0])
        quantile = (below + self.log_inside.exp() * uniform).clamp(ROUNDING, 1 - ROUNDING)
        logarithm = self.mu + self.sigma * torch.special.ndtri(quantile)
        return logarithm.clamp(LOWEST, 0).exp() * self.is_kept

    def sample(self, source: torch.Generator | None = None) -> Tensor:
        device = self.mu.device if source is None else torch.device("cpu")
        uniform = torch.rand(len(self.mu), generator=source, dtype=torch.float64, device=device)
        return scaled_columns(self.weight, self.factors(uniform.to(self.mu.device)).to(self.weight.dtype))

    def outputs(self, site: Site, inputs: Tensor) -> Tensor:
        """Return the outputs with factors of their own for each example."""
        uniform = torch.rand(len(inputs), len(self.mu), dtype=torch.float64, device=self.mu.device)
        factors = self.factors(uniform).to(inputs.dtype)
        return site.product(scaled_inputs(site, inputs, factors), self.weight, site.bias)

    def divergence(self) -> Tensor:
        low, high = self.ends
        edges = (low * normal_density(low) - high * normal_density(high)) / (2 * self.log_inside.exp())
        entropy = 0.5 * math.log(2 * math.pi * math.e) + self.sigma.log() + self.log_inside + edges
        return (math.log(-LOWEST) - entropy).sum().to(self.weight.dtype)


@checked
@dataclass(frozen=True)
class StructuredSparsity(Family):
    """Random factors of input units and channels with the prior p(z) proportional to 1 / z, which prunes them.

    >>> import batchbayes as bb
    >>> posterior = bb.noisy(torch.nn.Linear(4, 2), StructuredSparsity()).posterior()
    >>> posterior.distributions["weight"].is_kept
    tensor([True, True, True, True])
    """

    kind: ClassVar[str] = "structured-sparsity"

    initial_log_std: Finite = -3.0
    """log sigma before training."""

    def start(self, weight: Tensor, site: Site) -> dict[str, Tensor]:
        require_scalable_inputs(site)
        inputs = weight.shape[1]
        return {"log_std": weight.new_full((inputs,), self.initial_log_std), "place": weight.new_full((inputs,), START)}

    def given(self, weight: Tensor, own: Mapping[str, Tensor], site: Site) -> ScaledUnits:
        mu = -softplus(own["place"].double()).clamp(max=-LOWEST)
        return ScaledUnits(weight, mu, own["log_std"].double().clamp(-20, 5).exp())


def log_share(low: Tensor, high: Tensor) -> Tensor:
    """Return the log probability that a standard normal number is between two others, by the tail where it is exact.

    >>> log_share(torch.tensor([-40.0, 30.0]), torch.tensor([-30.0, 40.0]))
    tensor([-454.3213, -454.3213])
    """
    mirrored = low > 0
    first, last = torch.where(mirrored, -high, low), torch.where(mirrored, -low, high)
    most = torch.special.log_ndtr(last)
    return most + torch.log1p(-(torch.special.log_ndtr(first) - most).exp())


def normal_density(value: Tensor) -> Tensor:
    """Return the density of a standard normal number."""
    return (-value.square() / 2).exp() / math.sqrt(2 * math.pi)
