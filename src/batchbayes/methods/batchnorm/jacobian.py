r"""How a network's outputs move with omega, for each example, by one backward pass an output.

A layer that normalises by $(\mu + d\mu, \log s + d\log s)$ instead of $(\mu, \log s)$ does what it would do to the
input $h - d\mu - (h - \mu)\, d\log s$, to first order. So the gradient g of an output with respect to the layer's
input gives both derivatives: $-\sum g$ and $-\sum g (h - \mu)$ over the positions of a channel. In evaluation mode
examples do not mix, so one backward pass of the sum over examples gives them for every example at once. Only inputs are
touched: it works for subclasses with an activation inside.

Where one number added to all K outputs of an example changes nothing, as under a softmax, K - 1 passes suffice: the
contrasts of the other outputs with the last, which then does not move.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from batchbayes.functional import Network, affine_batch_norm, inputs_seen, statistics_in_place
from batchbayes.methods.batchnorm.sites import Site


def tangents_by_reverse_mode(
    network: Network,
    sites: Sequence[Site],
    statistics: Sequence[tuple[Tensor, Tensor]],
    inputs: Tensor,
    directions: Tensor,
    contrasts: bool = False,
) -> tuple[Tensor, Tensor]:
    """Outputs at `statistics` (n, ...), and their derivatives along Q directions of omega, (Q, n, ...)."""
    seen: list[Tensor] = []

    def see(_: str, h: Tensor) -> Tensor:
        # A node of the graph that this layer alone uses: the input itself may go elsewhere too (a shortcut).
        seen.append(h.view_as(h) if h.requires_grad else h.detach().requires_grad_())
        return seen[-1]

    layers = {site.name: site.layer for site in sites}
    in_place = statistics_in_place(layers.values(), statistics)
    with torch.enable_grad(), in_place, inputs_seen(layers, see), affine_batch_norm():
        outputs = network(inputs)
    if not sites:
        return outputs.detach(), outputs.new_zeros(len(directions), *outputs.shape)
    flat = outputs.detach().reshape(len(inputs), -1)  # (n, K)
    centred = [h.detach() - m.view(-1, *[1] * (h.ndim - 2)) for h, (m, _) in zip(seen, statistics, strict=True)]
    directions, passes = -directions.to(flat), flat.shape[1] - contrasts
    tangents = flat.new_zeros(flat.shape[1], len(directions), len(flat))  # (K, Q, n)
    row = flat.new_empty(len(flat), directions.shape[1])  # (n, D)
    for k in range(passes):
        one = torch.zeros_like(flat)
        one[:, k] = 1
        one[:, passes:] = -1
        gradients = torch.autograd.grad(outputs, seen, one.view_as(outputs), retain_graph=k + 1 < passes)
        _write_derivatives(row, gradients, centred)
        torch.mm(directions, row.T, out=tangents[k])
    return outputs.detach(), tangents.movedim(0, -1).reshape(len(directions), *outputs.shape)


def _write_derivatives(row: Tensor, gradients: Sequence[Tensor], centred: Sequence[Tensor]) -> None:
    """Sums of g and of g (h - mean) over the positions of (n, C, ...), site after site, into (n, D)."""
    start = 0
    for gradient, h in zip(gradients, centred, strict=True):
        channels = gradient.shape[1]
        sums, moments = row[:, start : start + 2 * channels].split(channels, dim=1)
        if gradient.ndim == 2:
            sums.copy_(gradient)
            torch.mul(gradient, h, out=moments)
        else:
            sums.copy_(gradient.flatten(2).sum(-1))
            moments.copy_(torch.linalg.vecdot(gradient.flatten(2), h.flatten(2)))
        start += 2 * channels
