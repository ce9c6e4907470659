r"""What a family of weight distributions is, and Gaussian weights, which most families have.

Axes: a weight W is (outputs, inputs) or (outputs, inputs, kernel ...).

The local reparametrisation: noise of the weights becomes noise of the outputs of a layer.

For one example x the output x W + b with Gaussian weights is Gaussian with mean x E[W] + b and variance x^2 Var[W]. So
the outputs are drawn, independently for each example: a gradient with far less variance than that of one weight for
all examples. The positions of a convolution share their weights, so their outputs are correlated. Here they are drawn
independently, with the right mean and variance at each position.

Reference: Kingma, Salimans, Welling, "Variational Dropout and the Local Reparameterization Trick", NIPS 2015.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from batchbayes.errors import BatchbayesError
from batchbayes.methods.weights.sites import Site


class WeightDistribution(Protocol):
    """The distribution of one weight, at the present parameters."""

    @property
    def mean(self) -> Tensor:
        """The mean of the weight."""
        ...

    def sample(self, source: torch.Generator | None = None) -> Tensor:
        """Draw the weight, from a generator or from torch's global one. Gradients pass through."""
        ...

    def outputs(self, site: Site, inputs: Tensor) -> Tensor:
        """Return the outputs of a plain layer with noise that is independent for each example, with the bias."""
        ...

    def divergence(self) -> Tensor:
        """Return KL(q || prior) of the weight, in nats. If it has no closed form, an unbiased estimate."""
        ...


class Family(ABC):
    """A family of distributions of a weight, for any layer. Its fields are JSON values.

    The parameters of a distribution are the weight of the network itself, mostly as the mean, and the family's own.
    """

    kind: ClassVar[str]
    """Its name in files."""
    has_means: ClassVar[bool] = True
    """Whether the weight of the network is a parameter. If not, it is zero and is not trained."""

    @property
    def is_local(self) -> bool:
        """Whether `outputs` draws noise for each example. If not, training draws one weight for each batch."""
        return True

    @abstractmethod
    def start(self, weight: Tensor, site: Site) -> dict[str, Tensor]:
        """Return initial values of the family's own parameters, by name."""

    @abstractmethod
    def given(self, weight: Tensor, own: Mapping[str, Tensor], site: Site) -> WeightDistribution:
        """Return the distribution at the present parameters."""


class GaussianWeights(ABC):
    """Independent Gaussian weights W ~ N(mean, variance). What the prior is, a family says."""

    mean: Tensor
    variance: Tensor

    @cached_property
    def std(self) -> Tensor:
        """The standard deviation of each weight. Many draws share it."""
        return self.variance.sqrt()

    def sample(self, source: torch.Generator | None = None) -> Tensor:
        noise = standard_normal(self.mean, source)
        return torch.addcmul(self.mean, self.std, noise, out=None if torch.is_grad_enabled() else noise)

    @abstractmethod
    def divergence(self) -> Tensor: ...

    def outputs(self, site: Site, inputs: Tensor) -> Tensor:
        return local_outputs(site, inputs, self.mean, self.variance)


def standard_normal(like: Tensor, source: torch.Generator | None) -> Tensor:
    """Return standard normal numbers in the shape of a tensor. A generator draws them on the CPU, on every device."""
    if source is None:
        return torch.randn_like(like)
    numbers = torch.randn(like.shape, generator=source, dtype=like.dtype)
    if numbers.stride() == like.stride() and numbers.device == like.device:
        return numbers
    return torch.empty_like(like).copy_(numbers)


def exp(logarithm: Tensor, factor: float = 1.0) -> Tensor:
    """Return exp(factor * logarithm). On a CPU it is three times as fast as torch's.

    >>> exp(torch.tensor([0.0, 1.0]))
    tensor([1.0000, 2.7183])
    """
    return torch.mul(logarithm, factor / math.log(2)).exp2_()


def log2(numbers: Tensor) -> Tensor:
    """Return the binary logarithm of positive numbers, without gradients. numpy's is thrice as fast as torch's.

    >>> log2(torch.tensor([1.0, 8.0]))
    tensor([0., 3.])
    """
    if numbers.device.type != "cpu" or numbers.dtype not in (torch.float32, torch.float64):
        return numbers.log2()
    found = torch.empty_like(numbers)
    np.log2(numbers.numpy(), out=found.numpy())
    return found


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


def scaled_columns(weight: Tensor, factors: Tensor) -> Tensor:
    """Multiply a weight (outputs, inputs, ...) by one factor for each of its inputs."""
    return weight * factors.view(1, -1, *[1] * (weight.ndim - 2))


def scaled_inputs(site: Site, inputs: Tensor, factors: Tensor) -> Tensor:
    """Multiply the inputs of a layer by factors (N, units or channels), those of each example by its own."""
    ones = [1] * (inputs.ndim - 2)
    shape = (len(factors), -1, *ones) if site.is_convolution else (len(factors), *ones, factors.shape[1])
    return inputs * factors.view(shape)


def require_scalable_inputs(site: Site) -> None:
    """Refuse a layer whose inputs cannot be multiplied by factors of their own."""
    if not site.is_plain or getattr(site.module, "groups", 1) > 1:
        raise BatchbayesError(
            expected="linear layers and convolutions of one group, whose inputs can be dropped",
            got=f"{site.module_name}, a {type(site.module).__name__} that works in another way",
            fix="name the other layers by layers=, or choose another family",
        )
