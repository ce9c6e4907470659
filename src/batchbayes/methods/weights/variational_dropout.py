r"""Multiplicative Gaussian noise: with a fixed rate (Gaussian dropout), or with a rate that is learnt.

What is random: each weight $w_i$ of the chosen layers.
q(omega): $w_i \sim N(\theta_i, \alpha \theta_i^2)$, that is $\theta_i$ times noise $N(1, \alpha)$. In variational
dropout one alpha is learnt for each layer, for each neuron (row or filter) or for each weight. The prior is
log-uniform, with the approximate KL of `sparse`, or a Gaussian whose variance is chosen for each weight (automatic
relevance determination, ARD), with $KL = 0.5 \log(1 + 1/\alpha)$ for each weight. In Gaussian dropout alpha is fixed,
and there is no KL. If alpha is shared, it can grow without limit while the network still works: only the variances then
carry information.
Cost of a training step: two products of a layer instead of one.
References: Kingma, Salimans, Welling, "Variational Dropout and the Local Reparameterization Trick", NIPS 2015;
Kharitonov, Molchanov, Vetrov, "Variational Dropout via Empirical Bayes", 2018 (ARD); Neklyudov et al., "Variance
Networks: When Expectation Does Not Meet Your Expectations", ICLR 2019 (sharing).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor

from batchbayes._common.signatures import Between, Finite, checked
from batchbayes.methods.weights.family import Family, GaussianWeights
from batchbayes.methods.weights.sites import Site
from batchbayes.methods.weights.sparse import log_uniform_divergence

LIMIT = 20.0
"""The largest |log alpha|."""


@dataclass(frozen=True, eq=False)
class MultipliedWeights(GaussianWeights):
    """Gaussian weights whose spread is a multiple of their mean."""

    mean: Tensor
    alpha: Tensor | float
    log_alpha: Tensor | None = None
    """None if alpha is fixed."""
    prior: str = "log-uniform"

    @cached_property
    def variance(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.alpha * self.mean.square()

    @cached_property
    def std(self) -> Tensor:
        return self.alpha**0.5 * self.mean.abs()  # the root of a variance of zero has no gradient

    def divergence(self) -> Tensor:
        if self.log_alpha is None:
            return self.mean.new_zeros(())
        share = self.mean.numel() / self.log_alpha.numel()
        by_ard = self.prior == "ard"
        each = 0.5 * F.softplus(-self.log_alpha) if by_ard else log_uniform_divergence(self.log_alpha)
        return share * each.sum()


@checked
@dataclass(frozen=True)
class VariationalDropout(Family):
    """Weights with multiplicative Gaussian noise whose rate alpha is learnt."""

    kind: ClassVar[str] = "variational-dropout"

    alpha_for_each: Literal["layer", "neuron", "weight"] = "layer"
    prior: Literal["log-uniform", "ard"] = "log-uniform"
    initial_log_alpha: Finite = -5.0

    def start(self, weight: Tensor, site: Site) -> dict[str, Tensor]:
        ones = [1] * (weight.ndim - 1)
        shape = {"layer": [1, *ones], "neuron": [len(weight), *ones], "weight": weight.shape}[self.alpha_for_each]
        return {"log_alpha": weight.new_full(tuple(shape), self.initial_log_alpha)}

    def given(self, weight: Tensor, own: Mapping[str, Tensor], site: Site) -> MultipliedWeights:
        log_alpha = own["log_alpha"].clamp(-LIMIT, LIMIT)
        return MultipliedWeights(weight, log_alpha.exp(), log_alpha, self.prior)


@checked
@dataclass(frozen=True)
class GaussianDropout(Family):
    """Weights with multiplicative noise N(1, alpha) of a fixed rate: what variational dropout learns."""

    kind: ClassVar[str] = "gaussian-dropout"

    alpha: Annotated[float, Between(0, fix="pass p / (1 - p) for a dropout rate p")] = 0.25
    """The variance of the noise. Binary dropout with probability p has p / (1 - p)."""

    def start(self, weight: Tensor, site: Site) -> dict[str, Tensor]:
        return {}

    def given(self, weight: Tensor, own: Mapping[str, Tensor], site: Site) -> MultipliedWeights:
        return MultipliedWeights(weight, self.alpha)
