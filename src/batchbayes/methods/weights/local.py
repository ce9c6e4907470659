r"""The local reparametrisation: noise of the weights becomes noise of the outputs of a layer.

For one example x the output x W + b with Gaussian weights is Gaussian with mean x E[W] + b and variance x^2 Var[W]. So
the outputs are drawn, independently for each example: a gradient with far less variance than that of one weight for
all examples. The positions of a convolution share their weights, so their outputs are correlated. Here they are drawn
independently, with the right mean and variance at each position.

Reference: Kingma, Salimans, Welling, "Variational Dropout and the Local Reparameterization Trick", NIPS 2015.
"""

from typing import Any

import torch
from torch import Tensor

from batchbayes.methods.weights.sites import Site

TINY = 1e-16
"""It is added below square roots, whose derivative at zero is infinite."""


def local_outputs(site: Site, inputs: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return a draw of the outputs (N, ...) of a plain layer, given the mean and the variance of its weight."""
    return with_noise(site.product(inputs, mean, site.bias), site.product(inputs.square(), variance))


def with_noise(mean: Tensor, variance: Tensor) -> Tensor:
    """Draw N(mean, variance), elementwise, from the global generator. The variance is changed in place."""
    return _WithNoise.apply(mean, variance.add_(TINY), noise_like(variance))  # type: ignore[return-value]


class _WithNoise(torch.autograd.Function):
    """mean + sqrt(variance) noise, with few passes over the activations."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, variance: Tensor, noise: Tensor) -> Tensor:
        std = variance.sqrt()
        outputs = torch.addcmul(mean, std, noise)
        ctx.save_for_backward(noise.div_(std.mul_(2)))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradients[0], gradients[0] * ctx.saved_tensors[0], None


def noise_like(activations: Tensor) -> Tensor:
    """Return standard normal numbers in the shape and memory format of activations, from the global generator.

    `torch.randn_like` is five times slower for the channels-last format.
    """
    flat = torch.randn(activations.numel(), dtype=activations.dtype, device=activations.device)
    return flat.as_strided(activations.shape, activations.stride())
