r"""All draws at once in a file: one pass, how its outputs move, and the draws that are combined from them.

The forward and backward passes of the linear engine's reverse mode are traced once, for any number of inputs, as
operations that a file can hold. Forward mode is made of a few ordinary passes. Both give the outputs at the centre and
how they move along Q directions, (n, Q, ...). A draw is a combination of these, so S draws cost hardly more than one.
Draws of a last layer need its features alone.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from batchbayes.engines.linear import STEP, LinearPlan, plan_linear
from batchbayes.errors import BatchbayesError
from batchbayes.methods.batchnorm.jacobian import LEFT_OUT, WARMTH, affine_batch_norm, along_directions
from batchbayes.methods.batchnorm.omega import as_buffers
from batchbayes.methods.batchnorm.posterior import BatchNormPosterior
from batchbayes.methods.laplace.last_layer_laplace import LaplacePosterior
from batchbayes.network.function import Network
from batchbayes.predictive import at_least_single

TRACED = 97
"""Examples that a trace is made with. A number that is hardly the length of another axis, so that it stays free."""


class Moves(nn.Module):
    """From inputs to the outputs at the centre and their S deviations: all draws, (S, n, ...)."""

    def __init__(self, tangents: nn.Module, plan: LinearPlan, is_contrast: bool) -> None:
        super().__init__()
        self.tangents = tangents
        weights, index = plan.combinations.weights, plan.combinations.index
        self._index, self._weights = index, None if weights is None else weights[index]
        self._is_contrast = is_contrast
        held = [plan.directions.float(), self._index if self._weights is None else self._weights]
        self.num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in held)
        """What is held beside the network."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs, slopes = self.tangents(inputs)  # (n, ...), (n, Q, ...)
        if self._is_contrast:
            slopes = contrasted(outputs, slopes)
        moved = slopes.transpose(0, 1)  # (Q, n, ...)
        if self._weights is None:
            deviations = moved.index_select(0, self._index)
        else:
            deviations = (self._weights.to(moved.dtype) @ moved.flatten(1)).unflatten(1, moved.shape[1:])
        return outputs + deviations


def contrasted(logits: Tensor, slopes: Tensor) -> Tensor:
    """Return the slopes (n, Q, K) of contrasts with the best class, zero for classes that do not matter.

    This is what `jacobian.py` computes example by example, by ranks instead of sorting.
    """
    classes = torch.arange(logits.shape[1])
    above = logits[:, None, :] > logits[:, :, None]  # (n, K, K): class j is above class k
    tied = (logits[:, None, :] == logits[:, :, None]) & (classes[None, :] < classes[:, None])
    rank = (above | tied).to(torch.int64).sum(2)  # (n, K)
    best = (rank == 0).to(slopes.dtype)
    relative = slopes - (slopes * best[:, None]).sum(2, keepdim=True)
    first = (relative * (rank == 1).to(slopes.dtype)[:, None]).sum(2)  # (n, Q)
    temperature = 1 + WARMTH * first.square().mean(1, keepdim=True).sqrt().double().sqrt()
    probs = (logits.double() / temperature).softmax(1)
    covered = (probs[:, None, :] * (rank[:, None, :] <= rank[:, :, None]).double()).sum(2)
    needed = (covered < 1 - LEFT_OUT).to(torch.int64).sum(1, keepdim=True).clamp(1, logits.shape[1] - 1)
    return relative * ((rank >= 1) & (rank <= needed)).to(slopes.dtype)[:, None]


class Differences(nn.Module):
    """Forward mode: a pass at the centre, and one or two for each direction."""

    def __init__(self, network: Network, posterior: BatchNormPosterior, plan: LinearPlan) -> None:
        super().__init__()
        self.network, self._run, self._sides = network.module, network, plan.sides
        steps = (1.0,) if plan.sides == 1 else (STEP, -STEP)
        omegas = [posterior.center, *(posterior.center + side * d for d in plan.directions for side in steps)]
        self._omegas = [as_buffers(posterior.sites, posterior._statistics(omega)) for omega in omegas]

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        passes = (self._run(inputs, tensors=tensors) for tensors in self._omegas)
        middle, *others = (outputs.to(at_least_single(outputs.dtype)) for outputs in passes)
        if self._sides == 1:
            slopes = [other - middle for other in others]
        else:
            slopes = [(up - down) / (2 * STEP) for up, down in zip(others[::2], others[1::2], strict=True)]
        return middle, torch.stack(slopes, 1)


class Heads(nn.Module):
    """Draws of the last layer: its features, and what each draw makes of them."""

    def __init__(self, posterior: LaplacePosterior, network: Network, count: int, seed: int) -> None:
        super().__init__()
        self.network = network.module
        self._posterior = replace(posterior, layer=replace(posterior.layer, network=network))
        self._deviations = posterior.deviations(seed, range(count)).flatten(1)  # (S, K P)
        self.num_bytes = self._deviations.numel() * self._deviations.element_size()

    def forward(self, inputs: Tensor) -> Tensor:
        """Return all draws, (S, n, ...)."""
        outputs, moves = self._posterior.tangents(inputs, self._deviations)
        return outputs + moves


def linear_moves(
    posterior: BatchNormPosterior, network: Network, ready: Tensor, num_samples: int, seed: int, *, contrasts: bool
) -> Moves:
    """Return the module that makes all draws as `engine="linear"` does, on a copy of the posterior's network."""
    outputs = posterior.function(posterior.center)(ready[:1])
    plan = plan_linear(posterior, outputs[0].numel(), num_samples, seed, contrasts=contrasts)
    if plan.mode == "leading":
        raise BatchbayesError(
            expected="a linear engine with one backward pass for each output, which a file can hold",
            got=f"{outputs[0].numel()} classes, of which only those that matter are followed",
            fix='assess with --engine sample, or export with engine="sample" after calibrating with it',
        )
    if plan.mode == "forward":
        return Moves(Differences(network, posterior, plan), plan, is_contrast=False)
    is_contrast = contrasts and outputs.ndim == 2 and outputs.shape[1] > 1
    return Moves(traced_tangents(posterior, network, ready, plan), plan, is_contrast)


def traced_tangents(posterior: BatchNormPosterior, network: Network, ready: Tensor, plan: LinearPlan) -> nn.Module:
    """Return forward and backward passes as one module: inputs to outputs (n, ...) and slopes (n, Q, ...)."""
    sites = posterior.sites  # the file wants tensors of their own, and no parts of larger ones
    statistics = [(mean.clone(), variance.clone()) for mean, variance in posterior._statistics(posterior.center)]
    along = [(m.clone(), s.clone()) for m, s in along_directions(sites, statistics, plan.directions)]
    table = {**core_aten_decompositions(), torch.ops.aten.convolution_backward.default: _convolution_backward}
    seen: list[tuple[int, Tensor]] = []

    def see(number: int, h: Tensor) -> Tensor:
        h = h.view_as(h) if h.requires_grad else h.detach().requires_grad_()
        seen.append((number, h))
        return h

    before = {site.name: partial(see, number) for number, site in enumerate(sites)}

    # Prepared before the trace, because that compares tensors.
    with network.prepared(tensors=as_buffers(sites, statistics), before=before) as call:

        def run(inputs: Tensor) -> tuple[Tensor, Tensor]:
            seen.clear()
            with torch.enable_grad(), affine_batch_norm():
                outputs = call(inputs)
                return outputs.detach(), _slopes(outputs, seen, along)

        examples = ready[torch.arange(TRACED) % len(ready)]
        return make_fx(run, decomposition_table=table, tracing_mode="symbolic", _allow_non_fake_inputs=True)(examples)


def _slopes(outputs: Tensor, seen: Sequence[tuple[int, Tensor]], along: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the derivatives of outputs (n, ...) along Q directions, (n, Q, ...), by a backward pass for each."""
    flat = outputs.flatten(1) if outputs.ndim > 1 else outputs[:, None]
    found = []
    for output in flat.unbind(1):
        gradients = torch.autograd.grad(output.sum(), [h for _, h in seen], retain_graph=True, allow_unused=True)
        total = torch.zeros(1, dtype=outputs.dtype)
        for gradient, (number, h) in zip(gradients, seen, strict=True):
            if gradient is not None:
                means, log_stds = (part.to(outputs.dtype) for part in along[number])
                total = total - _summed(gradient, outputs) @ means - _summed(gradient * h.detach(), outputs) @ log_stds
        found.append(total)
    slopes = torch.stack(found, 2)  # (n, Q, K)
    return slopes.reshape(*slopes.shape[:2], *outputs.shape[1:])


def _summed(values: Tensor, outputs: Tensor) -> Tensor:
    """Sum (rows, C, ...) over positions and over the rows of each example, to (n, C)."""
    summed = values if values.ndim == 2 else values.sum(tuple(range(2, values.ndim)))
    if summed.shape[0] == outputs.shape[0]:
        return summed
    return summed.unflatten(0, (outputs.shape[0], -1)).sum(1)


def _convolution_backward(
    gradient: Tensor, inputs: Tensor, weight: Tensor, bias_sizes: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int, mask: Any,
) -> tuple[Tensor, None, None]:  # fmt: skip
    """Return the gradient of a convolution with respect to its inputs: a convolution the other way round."""
    left_over = [0] * len(stride)
    if not transposed:
        left_over = [
            inputs.shape[2 + i]
            - ((gradient.shape[2 + i] - 1) * stride[i] - 2 * padding[i] + dilation[i] * (weight.shape[2 + i] - 1) + 1)
            for i in range(len(stride))
        ]
    back = torch.ops.aten.convolution(
        gradient, weight, None, stride, padding, dilation, not transposed, left_over, groups
    )
    return back, None, None
