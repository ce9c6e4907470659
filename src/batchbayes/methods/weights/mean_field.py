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
from typing import ClassVar

from torch import Tensor

from batchbayes._common.checks import finite_number
from batchbayes.methods.weights.family import Family, GaussianWeights, full
from batchbayes.methods.weights.sites import Site


@dataclass(frozen=True, eq=False)
class MeanFieldWeights(GaussianWeights):
    """Gaussian weights with a Gaussian prior."""

    log_std: Tensor
    prior_std: float | None

    def divergence(self) -> Tensor:
        count, power = self.mean.numel(), self.variance.sum() + self.mean.square().sum()
        if self.prior_std is None:
            return 0.5 * count * (power / count).log() - self.log_std.sum()
        constant = count * (math.log(self.prior_std) - 0.5)
        return constant - self.log_std.sum() + power / (2 * self.prior_std**2)


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
        return MeanFieldWeights(weight, (2 * own["log_std"]).exp(), own["log_std"], self.prior_std)
