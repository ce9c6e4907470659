"""What a plain layer computes from its input and its weight, and the gradients of that, as functions of tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from batchbayes.methods.weights.sites import CONVOLUTIONS, Site


class LinearProduct:
    """The product of a linear layer, of inputs (n, inputs)."""

    def outputs(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product of the inputs with a weight, plus the bias."""
        return linear(inputs, weight, bias)

    def gradients(
        self, by_outputs: Tensor, inputs: Tensor, weight: Tensor, wanted: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """Return the gradients by inputs, weight and bias. `wanted` says whether the first and the last are needed."""
        by_inputs = by_outputs @ weight if wanted[0] else None
        return by_inputs, by_outputs.T @ inputs, by_outputs.sum(0) if wanted[1] else None


@dataclass(frozen=True)
class Convolution:
    """A convolution with zeros around the input, as many on either side."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int

    def outputs(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.convolution(inputs, weight, bias, *self._options())

    def gradients(
        self, by_outputs: Tensor, inputs: Tensor, weight: Tensor, wanted: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor, Tensor | None]:
        mask, biases = [wanted[0], True, wanted[1]], [len(weight)]
        return torch.ops.aten.convolution_backward(by_outputs, inputs, weight, biases, *self._options(), mask)

    def _options(self) -> tuple[Any, ...]:
        """Return what torch wants to know of a convolution that is not transposed."""
        return self.stride, self.padding, self.dilation, False, [0] * len(self.stride), self.groups


Product = LinearProduct | Convolution


def product_of(site: Site, inputs: Tensor) -> Product | None:
    """Return the product of a plain layer; None for a convolution that is not one of the common kind."""
    layer = site.module
    if isinstance(layer, nn.Linear):
        return LinearProduct()
    assert isinstance(layer, CONVOLUTIONS)
    padding = _padding(layer)
    if padding is None or inputs.ndim != layer.weight.ndim:
        return None
    return Convolution(layer.stride, padding, layer.dilation, layer.groups)


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
