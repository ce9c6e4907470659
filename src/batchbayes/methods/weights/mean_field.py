r"""Gaussian mean field: each weight is an independent Gaussian.

What is random: each weight $w_i$ of the chosen layers.
q(omega): $w_i \sim N(\mu_i, \sigma_i^2)$, prior $N(0, s^2)$, and
$KL = \sum_i \log(s/\sigma_i) + (\sigma_i^2 + \mu_i^2) / (2 s^2) - 1/2$.
Empirical Bayes: for each layer the best prior variance is $s^2 = mean_i(\sigma_i^2 + \mu_i^2)$, in closed form.
Cost of a training step: two products of a layer instead of one. A draw: one normal number for each weight.
Reference: Blundell et al., "Weight Uncertainty in Neural Networks", ICML 2015.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from batchbayes._common.checks import finite_number
from batchbayes.methods.weights.family import Family, GaussianWeights, exp, full
from batchbayes.methods.weights.sites import Site


@dataclass(frozen=True, eq=False)
class MeanFieldWeights(GaussianWeights):
    """Gaussian weights, and the KL between them and a Gaussian prior."""

    kl: Tensor

    def divergence(self) -> Tensor:
        return self.kl


@dataclass(frozen=True)
class MeanField(Family):
    """Independent Gaussian weights with a Gaussian prior."""

    kind: ClassVar[str] = "mean-field"

    prior_std: float | None = 1.0
    """s, the standard deviation of the prior. None sets it for each layer by empirical Bayes."""
    initial_std: float = 0.01
    """sigma before training."""

    def __post_init__(self) -> None:
        if self.prior_std is not None:
            finite_number("a prior_std", self.prior_std, above=0, fix="pass a positive number, or None")
        finite_number("an initial_std", self.initial_std, above=0, fix="pass a positive number")

    def start(self, weight: Tensor, site: Site) -> dict[str, Tensor]:
        return {"log_std": full(weight, math.log(self.initial_std))}

    def given(self, weight: Tensor, own: Mapping[str, Tensor], site: Site) -> MeanFieldWeights:
        return MeanFieldWeights(weight, *_Moments.apply(weight, own["log_std"], self.prior_std))  # type: ignore[misc]


def moments(mean: Tensor, log_std: Tensor, prior_std: float | None) -> tuple[Tensor, Tensor]:
    """Return the variance of each weight, and the KL of all of them."""
    variance, count = exp(2 * log_std), mean.numel()
    power = variance.sum() + torch.linalg.vector_norm(mean).square()
    if prior_std is None:
        return variance, 0.5 * count * (power / count).log() - log_std.sum()
    return variance, count * (math.log(prior_std) - 0.5) - log_std.sum() + power / (2 * prior_std**2)


class _Moments(torch.autograd.Function):
    """`moments` with its gradient in closed form, which takes few passes over the weights."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, log_std: Tensor, prior_std: float | None) -> tuple[Tensor, Tensor]:
        variance, kl = moments(mean, log_std, prior_std)
        ctx.save_for_backward(mean, variance)
        ctx.prior_std = prior_std
        return variance, kl

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        by_variance, by_kl = gradients
        mean, variance = ctx.saved_tensors
        if ctx.prior_std is None:
            by_power = 0.5 * by_kl * mean.numel() / (variance.sum() + mean.square().sum())
        else:
            by_power = by_kl / (2 * ctx.prior_std**2)
        by_log_std = torch.addcmul(-by_kl, by_variance + by_power, variance, value=2)
        return mean * (2 * by_power), by_log_std, None
