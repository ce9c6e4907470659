"""Gaussian families whose gradients are written down in closed form, so that a training step is cheap.

A training step of a small network spends most of its time on passes over the weights and on single operations, not on
products. So a layer has one operation of its own: it computes the moments of its weights, draws its outputs, and
returns the KL with them. Its gradients share what autograd would compute several times.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from batchbayes.methods.weights.family import Family, GaussianWeights
from batchbayes.methods.weights.local import TINY, draw, local_outputs, require_first_derivatives
from batchbayes.methods.weights.products import Product, product_of
from batchbayes.methods.weights.sites import Site

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
        squares, outputs = inputs * inputs, product.outputs(inputs, mean, bias)
        slope = draw(outputs, product.outputs(squares, variance, None).add_(TINY))
        ctx.family, ctx.product = family, product
        ctx.save_for_backward(inputs, squares, mean, variance, slope, *kept)
        return outputs, kl

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        require_first_derivatives()
        by_outputs, by_kl = gradients
        inputs, squares, mean, variance, slope, *kept = ctx.saved_tensors
        of_inputs, of_bias = ctx.needs_input_grad[3:5]
        by_inputs, by_mean, by_bias = ctx.product.gradients(by_outputs, inputs, mean, (of_inputs, of_bias))
        by_squares, by_variance, _ = ctx.product.gradients(by_outputs * slope, squares, variance, (of_inputs, False))
        if of_inputs:
            by_inputs.addcmul_(inputs, by_squares, value=2)
        return None, None, None, by_inputs, by_bias, *ctx.family.gradients(kept, by_mean, by_variance, by_kl)
