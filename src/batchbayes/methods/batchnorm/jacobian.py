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
    along = -directions.to(flat).T  # (D, Q)
    along = along.split([width for site in sites for width in (site.channels, site.channels)])
    passes = flat.shape[1] - contrasts
    tangents = flat.new_zeros(flat.shape[1], len(flat), len(directions))  # (K, n, Q): quicker to add up than (Q, n)
    for k in range(passes):
        one = torch.zeros_like(flat)
        one[:, k] = 1
        one[:, passes:] = -1
        gradients = torch.autograd.grad(outputs, seen, one.view_as(outputs), retain_graph=k + 1 < passes)
        for gradient, h, mean, log_std in zip(gradients, centred, along[::2], along[1::2], strict=True):
            sums, moments = _derivatives(gradient, h)
            tangents[k].addmm_(sums, mean).addmm_(moments, log_std)
    return outputs.detach(), tangents.permute(2, 1, 0).reshape(len(directions), *outputs.shape)


def _derivatives(gradient: Tensor, centred: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of g and of g (h - mean) over positions, (n, C) each; (n, C, ...) in whatever memory format it came."""
    if gradient.ndim == 2:
        return gradient, gradient * centred
    positions = tuple(range(2, gradient.ndim))
    return gradient.sum(positions), (gradient * centred).sum(positions)
