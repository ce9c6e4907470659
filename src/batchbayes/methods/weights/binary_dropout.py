r"""Binary dropout whose rate is learnt.

What is random: for each input unit or input channel of the chosen layers, whether it is kept.
q(omega): $W = M diag(z) / (1 - p)$ with $z_i \sim Bernoulli(1 - p)$ and one rate p for each layer. The prior of the
weights is $N(0, s^2)$, and up to a constant $KL = ||M||^2 / (2 s^2 (1 - p)) - d H(p)$ for d input units, with the
entropy H of one mask. Training draws relaxed masks (the concrete distribution), because a gradient cannot pass through
a choice. Predictions draw binary ones.
Cost of a training step: as without noise. A draw: one uniform number for each input unit.
Reference: Gal, Hron, Kendall, "Concrete Dropout", NIPS 2017.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from batchbayes._common.signatures import Between, Positive, checked
from batchbayes.methods.weights.family import Family, require_scalable_inputs, scaled_columns, scaled_inputs
from batchbayes.methods.weights.sites import Site

TEMPERATURE = 0.1
"""How sharp the relaxed masks are; at zero they would be binary."""
ROUNDING = 1e-7


@dataclass(frozen=True, eq=False)
class MaskedWeights:
    """A weight in which whole input units are dropped."""

    mean: Tensor
    logit: Tensor
    """The logit of the dropout rate p, ()."""
    prior_std: float

    def sample(self, source: torch.Generator | None = None) -> Tensor:
        """Draw a binary mask; a relaxed one if a gradient shall pass through it."""
        inputs = self.mean.shape[1]
        if source is None and torch.is_grad_enabled():
            return scaled_columns(self.mean, self._relaxed(1, self.mean))
        device = self.mean.device if source is None else torch.device("cpu")
        uniform = torch.rand(inputs, generator=source, dtype=torch.float32, device=device).to(self.mean)
        kept = (uniform >= self.logit.sigmoid()).to(self.mean.dtype)
        return scaled_columns(self.mean, kept / torch.sigmoid(-self.logit))

    def outputs(self, site: Site, inputs: Tensor) -> Tensor:
        """Return the outputs for relaxed masks, one for each example."""
        return site.product(scaled_inputs(site, inputs, self._relaxed(len(inputs), inputs)), self.mean, site.bias)

    def _relaxed(self, count: int, like: Tensor) -> Tensor:
        """Return relaxed masks (count, inputs), divided by the share of inputs that are kept."""
        shape = count, self.mean.shape[1]
        uniform = torch.rand(shape, dtype=like.dtype, device=like.device).clamp(ROUNDING, 1 - ROUNDING)
        dropped = torch.sigmoid((self.logit + torch.logit(uniform)) / TEMPERATURE)
        return (1 - dropped) / torch.sigmoid(-self.logit)

    def divergence(self) -> Tensor:
        rate = self.logit.sigmoid().clamp(ROUNDING, 1 - ROUNDING)
        entropy = -(rate * rate.log() + (1 - rate) * torch.log1p(-rate))
        power = self.mean.square().sum() / (2 * self.prior_std**2 * (1 - rate))
        return power - self.mean.shape[1] * entropy


@checked
@dataclass(frozen=True)
class BinaryDropout(Family):
    """Dropout of the inputs of layers, with a rate for each layer that is learnt."""

    kind: ClassVar[str] = "binary-dropout"

    prior_std: Positive = 1.0
    initial_rate: Annotated[float, Between(0, 1, fix="pass a probability")] = 0.1

    def start(self, weight: Tensor, site: Site) -> dict[str, Tensor]:
        require_scalable_inputs(site)
        return {"logit": weight.new_tensor(math.log(self.initial_rate / (1 - self.initial_rate)))}

    def given(self, weight: Tensor, own: Mapping[str, Tensor], site: Site) -> MaskedWeights:
        return MaskedWeights(weight, own["logit"], self.prior_std)
