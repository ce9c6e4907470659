r"""Gaussian mean field: each weight is an independent Gaussian.

What is random: each weight $w_i$ of the chosen layers.
q(omega): $w_i \sim N(\mu_i, \sigma_i^2)$, prior $N(0, s^2)$, and
$KL = \sum_i \log(s/\sigma_i) + (\sigma_i^2 + \mu_i^2) / (2 s^2) - 1/2$.
Empirical Bayes: for each layer the best prior variance is $s^2 = mean_i(\sigma_i^2 + \mu_i^2)$, in closed form.
Cost of a training step: two products of a layer instead of one. A draw: one normal number for each weight.
Reference: Blundell et al., "Weight Uncertainty in Neural Networks", ICML 2015.

Families of this kind write their gradients down in closed form. A training step of a small network spends most of its
time on passes over the weights and on single operations, not on products. So a layer has one operation of its own: it
computes the moments of its weights, draws its outputs, and returns the KL with them. Its gradients share what autograd
would compute several times.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from batchbayes._common.signatures import Positive, checked
from batchbayes.methods.weights.family import (
    TINY,
    Family,
    GaussianWeights,
    draw,
    exp,
    local_outputs,
    require_first_derivatives,
)
from batchbayes.methods.weights.sites import CONVOLUTIONS, Site

Moments = tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]
"""Mean and variance of each weight, the KL of all of them, and what the gradients need."""


class ClosedForm(Family):
    """A family that computes moments and KL of a weight at once, and their gradients."""

    @abstractmethod
    def moments(self, *parameters: Tensor) -> Moments:
        """Return the moments, given the weight of the network and the family's own parameters."""

    @abstractmethod
    def gradients(
        self, kept: tuple[Tensor, ...], by_mean: Tensor, by_variance: Tensor, by_kl: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the gradients of the parameters from those of the moments. May change `by_mean` and `by_variance`."""

    def given(self, weight: Tensor, own: Mapping[str, Tensor], site: Site) -> "ClosedFormWeights":
        return ClosedFormWeights(self, (weight, *own.values()))


@checked
@dataclass(frozen=True)
class MeanField(ClosedForm):
    """Independent Gaussian weights with a Gaussian prior."""

    kind: ClassVar[str] = "mean-field"

    prior_std: Positive | None = 1.0
    """s, the standard deviation of the prior. None sets it for each layer by empirical Bayes."""
    initial_std: Positive = 0.01
    """sigma before training."""

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


@dataclass(frozen=True, eq=False)
class ClosedFormWeights(GaussianWeights):
    """Gaussian weights of such a family."""

    family: ClosedForm
    parameters: tuple[Tensor, ...]
    divergences: list[Tensor] = field(default_factory=list)
    """The KL that came with the last outputs."""

    @cached_property
    def _moments(self) -> Any:
        return _Moments.apply(self.family, *self.parameters)

    @property
    def mean(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._moments[0]

    @property
    def variance(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._moments[1]

    def outputs(self, site: Site, inputs: Tensor) -> Tensor:
        product = product_of(site, inputs)
        if product is None or torch.is_autocast_enabled(inputs.device.type):
            return local_outputs(site, inputs, self.mean, self.variance)
        rows = inputs if inputs.ndim == 2 or site.is_convolution else inputs.reshape(-1, inputs.shape[-1])
        outputs, divergence = _NoisyProduct.apply(self.family, site, product, rows, site.bias, *self.parameters)  # type: ignore[misc]
        self.divergences[:] = [divergence]
        return outputs if rows is inputs else outputs.view(*inputs.shape[:-1], -1)

    def divergence(self) -> Tensor:
        return self.divergences[0] if self.divergences else self._moments[2]


class _Moments(torch.autograd.Function):
    """The moments and the KL of a weight, without outputs of a layer."""

    @staticmethod
    def forward(ctx: Any, family: ClosedForm, *parameters: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, variance, kl, kept = family.moments(*parameters)
        ctx.family = family
        ctx.save_for_backward(*kept)
        return mean, variance, kl

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        by_mean, by_variance, by_kl = gradients
        return None, *ctx.family.gradients(ctx.saved_tensors, by_mean.clone(), by_variance.clone(), by_kl)


Product = tuple[Any, ...]
"""What torch wants to know of a convolution, beginning with its stride. It is empty for a linear layer."""


def _outputs(product: Product, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.convolution(inputs, weight, bias, *product) if product else linear(inputs, weight, bias)


def _gradients(
    product: Product, by_outputs: Tensor, inputs: Tensor, weight: Tensor, wanted: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Return the gradients by inputs, weight and bias. `wanted` says whether the first and the last are needed."""
    if product:
        mask, biases = [wanted[0], True, wanted[1]], [len(weight)]
        return torch.ops.aten.convolution_backward(by_outputs, inputs, weight, biases, *product, mask)
    by_inputs = by_outputs @ weight if wanted[0] else None
    return by_inputs, by_outputs.T @ inputs, by_outputs.sum(0) if wanted[1] else None


class _NoisyProduct(torch.autograd.Function):
    """The outputs (n, ...) of a layer with noise, as by `local_outputs`, and the KL of its weights."""

    @staticmethod
    def forward(
        ctx: Any,
        family: ClosedForm,
        site: Site,
        product: Product,
        inputs: Tensor,
        bias: Tensor | None,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        mean, variance, kl, kept = family.moments(*parameters)
        mean, variance = site.in_format(mean), site.in_format(variance)
        squares, outputs = inputs * inputs, _outputs(product, inputs, mean, bias)
        slope = draw(outputs, _outputs(product, squares, variance, None).add_(TINY))
        ctx.family, ctx.product = family, product
        ctx.save_for_backward(inputs, squares, mean, variance, slope, *kept)
        return outputs, kl

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        require_first_derivatives()
        by_outputs, by_kl = gradients
        inputs, squares, mean, variance, slope, *kept = ctx.saved_tensors
        of_inputs, of_bias = ctx.needs_input_grad[3:5]
        by_inputs, by_mean, by_bias = _gradients(ctx.product, by_outputs, inputs, mean, (of_inputs, of_bias))
        by_squares, by_variance, _ = _gradients(ctx.product, by_outputs * slope, squares, variance, (of_inputs, False))
        if by_inputs is not None and by_squares is not None:
            by_inputs.addcmul_(inputs, by_squares, value=2)
        return None, None, None, by_inputs, by_bias, *ctx.family.gradients(kept, by_mean, by_variance, by_kl)


def product_of(site: Site, inputs: Tensor) -> Product | None:
    """Return the product of a plain layer; None for a convolution that is not one of the common kind."""
    layer = site.module
    if isinstance(layer, nn.Linear):
        return ()
    assert isinstance(layer, CONVOLUTIONS)
    padding = _padding(layer)
    if padding is None or inputs.ndim != layer.weight.ndim:
        return None
    return layer.stride, padding, layer.dilation, False, [0] * len(layer.stride), layer.groups


def _padding(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> Sequence[int] | None:
    """Return how many zeros are put around each axis; None if they are no zeros, or if the two sides differ.

    >>> _padding(nn.Conv2d(1, 1, (3, 5), padding="same")), _padding(nn.Conv2d(1, 1, 2, padding="same"))
    ([1, 2], None)
    """
    if layer.padding_mode != "zeros":
        return None
    if not isinstance(layer.padding, str):
        return layer.padding
    ends = list(layer._reversed_padding_repeated_twice)  # both ends of the last axis come first
    return ends[::-2] if ends[::2] == ends[1::2] else None
