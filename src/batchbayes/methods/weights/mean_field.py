r"""Gaussian mean field: each weight is an independent Gaussian.

What is random: each weight $w_i$ of the chosen layers.
q(omega): $w_i \sim N(\mu_i, \sigma_i^2)$, prior $N(0, s^2)$, and
$KL = \sum_i \log(s/\sigma_i) + (\sigma_i^2 + \mu_i^2) / (2 s^2) - 1/2$.
Empirical Bayes: for each layer the best prior variance is $s^2 = mean_i(\sigma_i^2 + \mu_i^2)$, in closed form.
Cost of a training step: two products of a layer instead of one. A draw: one normal number for each weight.
Reference: Blundell et al., "Weight Uncertainty in Neural Networks", ICML 2015.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from batchbayes._common.checks import finite_number
from batchbayes.methods.weights.closed_form import ClosedForm, Moments
from batchbayes.methods.weights.family import exp
from batchbayes.methods.weights.sites import Site


@dataclass(frozen=True)
class MeanField(ClosedForm):
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
        return {"log_std": torch.full_like(weight, math.log(self.initial_std))}

    def moments(self, *parameters: Tensor) -> Moments:
        mean, log_std = parameters
        variance, flat = exp(log_std, 2), mean.reshape(-1)
        power, count = variance.sum() + flat.dot(flat), mean.numel()
        if self.prior_std is None:
            kl = 0.5 * count * (power / count).log() - log_std.sum()
        else:
            constant = count * (math.log(self.prior_std) - 0.5)
            kl = constant - torch.sub(log_std.sum(), power, alpha=0.5 / self.prior_std**2)
        return mean, variance, kl, (mean, variance, power)

    def gradients(
        self, kept: tuple[Tensor, ...], by_mean: Tensor, by_variance: Tensor, by_kl: Tensor
    ) -> tuple[Tensor, ...]:
        mean, variance, power = kept
        by_power = by_kl * (0.5 * mean.numel() / power if self.prior_std is None else 0.5 / self.prior_std**2)
        by_variance.add_(by_power)
        by_log_std = torch.addcmul(-by_kl, by_variance, variance, value=2, out=by_variance)
        return by_mean.addcmul_(mean, by_power, value=2), by_log_std
