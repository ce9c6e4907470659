r"""Multiplicative normalising flows: Gaussian weights whose means are scaled by a random vector of a flexible density.

What is random: each weight of the chosen layers, and a vector z with one number for each input of a linear layer or for
each filter of a convolution.
q(omega): $z = T_q(z_0)$, $z_0 \sim N(m, s^2)$, through masked RealNVP steps; $w_{ij} \sim N(z_i \mu_{ij},
\sigma_{ij}^2)$. Prior N(0, 1). The density of W alone is an integral over z. It is bounded by an auxiliary r(z | W), a
Gaussian whose moments depend on W, seen through another flow, so that
$KL \le E[KL(N(z\mu, \sigma^2) || N(0, 1)) + \log q(z) - \log r(z | W)]$. One draw of z and W estimates it.
Cost of a training step: two products and one small flow for each example. A draw: a flow and a normal for each weight.
Reference: Louizos, Welling, "Multiplicative Normalizing Flows for Variational Bayesian Neural Networks", ICML 2017.
Masks are drawn anew in each pass, as in the authors' code.
Where we differ: biases are not random, sigma is not clipped, and the flows start close to z = 1, so that training can
start from the weights of a network.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from batchbayes._common.signatures import Least, Positive, checked
from batchbayes.methods.weights.family import Family, standard_normal, with_noise
from batchbayes.methods.weights.sites import Site

HIDDEN = {"q": 50, "r": 100}
"""Units in the hidden layer of the flows."""
GATE_BIAS = 2.0


@dataclass(frozen=True, eq=False)
class FlowWeights:
    """Gaussian weights with means z * mu. The methods draw z."""

    weight: Tensor
    """mu."""
    own: Mapping[str, Tensor]
    num_steps: int
    by_filter: bool
    """Whether z has a number for each output, as in convolutions, or for each input."""
    drawn: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """z of the first example in the last pass, and its log determinant. The next estimate of the KL uses it."""

    @property
    def mean(self) -> Tensor:
        """The weight at the flow of the mean of z_0, with half of each mask. It is close to the mean, not equal."""
        z, _ = self._transform("q", self.own["z_mean"], None, is_mean=True)
        return self.weight * self._on_weight(z)

    def sample(self, source: torch.Generator | None = None) -> Tensor:
        z, _ = self._draw_z(1, source)
        noise = standard_normal(self.weight, source)
        return torch.addcmul(self.weight * self._on_weight(z[0]), self.own["log_std"].exp(), noise)

    def outputs(self, site: Site, inputs: Tensor) -> Tensor:
        """Return the outputs with one z for each example, and Gaussian noise in each output."""
        z, log_det = self._draw_z(len(inputs), None)
        self.drawn[:] = [(z[0], log_det[0])]
        axes = [1] * (inputs.ndim - 2)
        variance = site.product(inputs.square(), (2 * self.own["log_std"]).exp())
        if self.by_filter:
            mean = site.product(inputs, self.weight) * z.view(*z.shape, *axes)
            mean = mean if site.bias is None else mean + site.bias.view(-1, *axes)
        else:
            mean = site.product(inputs * z.view(len(z), *axes, -1), self.weight, site.bias)
        return with_noise(mean, variance)

    def divergence(self) -> Tensor:
        """Estimate the bound of the KL with one draw of z and W."""
        if not self.drawn:
            self.drawn.extend(zip(*self._draw_z(1, None), strict=True))
        (z, log_det), log_std = self.drawn.pop(), self.own["log_std"]
        mean = self.weight * self._on_weight(z)
        weight = torch.addcmul(mean, log_std.exp(), torch.randn_like(mean))
        gaussian = 0.5 * ((2 * log_std).exp() + mean.square() - 1).sum() - log_std.sum()
        entropy = 0.5 * (1 + math.log(2 * math.pi) + self.own["z_log_var"]).sum()  # of z_0
        return gaussian - entropy - log_det - self.log_auxiliary(z, weight)

    def log_auxiliary(self, z: Tensor, weight: Tensor) -> Tensor:
        """Return log r(z | W)."""
        rows = weight.flatten(1) if self.by_filter else weight.transpose(0, 1).flatten(1)  # (z, rest)
        statistic = torch.tanh(self.own["r_weights"] @ rows).mean()
        mean, log_precision = self.own["r_mean"] * statistic, self.own["r_log_precision"] * statistic
        seen, log_det = self._transform("r", z, None)
        quadratic = log_precision.exp() * (seen - mean).square()
        return 0.5 * (log_precision - quadratic - math.log(2 * math.pi)).sum() + log_det

    def _draw_z(self, count: int, source: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Draw z (count, size), and return the log determinant of the flow (count,) too."""
        mean = self.own["z_mean"].expand(count, -1)
        start = mean + (0.5 * self.own["z_log_var"]).exp() * standard_normal(mean, source)
        return self._transform("q", start, source)

    def _transform(
        self, which: str, z: Tensor, source: torch.Generator | None, *, is_mean: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Run a flow on z (..., size), and return the log determinant (...) too."""
        log_det = z.new_zeros(z.shape[:-1])
        for step in range(self.num_steps):
            hidden, hidden_bias, shift_and_gate, its_bias = (self.own[f"{which}{step}_{part}"] for part in _PARTS)
            mask = torch.full_like(z, 0.5) if is_mean else _coins(z, source)
            units = torch.tanh(F.linear(mask * z, hidden, hidden_bias))
            shift, gate = F.linear(units, shift_and_gate, its_bias).to(z.dtype).chunk(2, -1)
            log_det = log_det + (F.logsigmoid(gate) * (1 - mask)).sum(-1)
            z = torch.lerp(torch.lerp(shift, z, gate.sigmoid()), z, mask)
        return z, log_det

    def _on_weight(self, z: Tensor) -> Tensor:
        """Shape z (size,) so that it multiplies the weight."""
        ones = [1] * (self.weight.ndim - 2)
        return z.view(-1, 1, *ones) if self.by_filter else z.view(1, -1, *ones)


_PARTS = ("hidden", "hidden_bias", "shift_and_gate", "shift_and_gate_bias")


def _coins(like: Tensor, source: torch.Generator | None) -> Tensor:
    """Return zeros and ones in the shape of a tensor. A generator draws them on the CPU, on every device."""
    if source is None:
        return torch.empty_like(like).bernoulli_()
    return torch.empty(like.shape, dtype=like.dtype).bernoulli_(generator=source).to(like.device)


@checked
@dataclass(frozen=True)
class MultiplicativeFlow(Family):
    """Gaussian weights whose means are scaled by a normalising flow."""

    kind: ClassVar[str] = "multiplicative-flow"

    num_steps: Annotated[int, Least(0)] = 2
    """Steps of each of the two flows."""
    initial_std: Positive = 1e-3
    """sigma before training."""

    def start(self, weight: Tensor, site: Site) -> dict[str, Tensor]:
        size = len(weight) if site.is_convolution else weight.shape[1]
        own = {
            "log_std": torch.full_like(weight, math.log(self.initial_std)),
            "z_mean": weight.new_ones(size),
            "z_log_var": weight.new_full((size,), math.log(0.1)),
            **{f"r_{part}": torch.randn(size).to(weight) / size**0.5 for part in ("weights", "mean", "log_precision")},
        }
        for which, hidden in HIDDEN.items():
            for step in range(self.num_steps):
                parts = (
                    torch.randn(hidden, size) * (2 / (hidden + size)) ** 0.5, torch.zeros(hidden),
                    torch.randn(2 * size, hidden) * 0.01, torch.tensor([1.0, GATE_BIAS]).repeat_interleave(size),
                )  # fmt: skip
                own |= {f"{which}{step}_{part}": value.to(weight) for part, value in zip(_PARTS, parts, strict=True)}
        return own

    def given(self, weight: Tensor, own: Mapping[str, Tensor], site: Site) -> FlowWeights:
        return FlowWeights(weight, own, self.num_steps, site.is_convolution)
