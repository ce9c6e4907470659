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

from batchbayes.errors import BatchbayesError
from batchbayes.methods.weights.sites import Site

TINY = 1e-16
"""It is added below square roots, whose derivative at zero is infinite."""


def local_outputs(site: Site, inputs: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return a draw of the outputs (N, ...) of a plain layer, given the mean and the variance of its weight."""
    return with_noise(site.product(inputs, mean, site.bias), site.product(inputs * inputs, variance))


def with_noise(mean: Tensor, variance: Tensor) -> Tensor:
    """Draw N(mean, variance), elementwise, from the global generator. The draw takes the place of the mean."""
    return _WithNoise.apply(mean, variance)  # type: ignore[return-value]


class _WithNoise(torch.autograd.Function):
    """mean + sqrt(variance) noise, with few passes over the activations."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, variance: Tensor) -> Tensor:
        ctx.mark_dirty(mean)
        ctx.save_for_backward(draw(mean, variance + TINY))
        return mean

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        require_first_derivatives()
        return gradients[0], gradients[0] * ctx.saved_tensors[0]


def require_first_derivatives() -> None:
    """Refuse a backward pass whose result is differentiated again: what it reads is kept without gradients."""
    if torch.is_grad_enabled():
        raise BatchbayesError(
            expected="first derivatives alone of a layer with noise in its outputs",
            got="a derivative that is differentiated again (create_graph=True)",
            fix='pass estimator="weights", which draws the weights themselves, or name the other layers by layers=',
        )


def draw(mean: Tensor, variance: Tensor) -> Tensor:
    """Put a draw of N(mean, variance) in the place of the mean. The variance is positive and is used up.

    Returns:
        The derivative of the draw by the variance, noise / (2 std).
    """
    half_noise, std = noise_like(variance, std=0.5), variance.sqrt_()
    mean.addcmul_(std, half_noise, value=2)
    return half_noise.div_(std)


def noise_like(activations: Tensor, std: float = 1.0) -> Tensor:
    """Return normal numbers in the shape and memory format of activations, from the global generator.

    A tensor in the channels-last format is filled in the order of its memory, which is five times as fast.
    """
    if activations.is_contiguous():
        return torch.empty_like(activations).normal_(std=std)
    flat = torch.empty(activations.numel(), dtype=activations.dtype, device=activations.device).normal_(std=std)
    return flat.as_strided(activations.shape, activations.stride())
