r"""How a network's outputs move with omega, for each example, by one backward pass an output.

A layer that normalises by $(\mu + d\mu, \log s + d\log s)$ instead of $(\mu, \log s)$ does what it would do to the
input $h - d\mu - (h - \mu)\, d\log s$, to first order. So the gradient g of an output with respect to the layer's
input gives both derivatives: $-\sum g$ and $-\sum g (h - \mu)$ over the positions of a channel. In evaluation mode
examples do not mix, so one backward pass of the sum over examples gives them for every example at once. Only inputs are
touched: it works for subclasses with an activation inside.

A layer may see several rows of each example (time steps), one example after the other.

Where one number added to all K outputs of an example changes nothing, as under a softmax, K - 1 passes suffice: the
contrasts of the other outputs with the last, which then does not move.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from batchbayes.errors import BatchbayesError
from batchbayes.methods.batchnorm.omega import by_site
from batchbayes.methods.batchnorm.sites import Site
from batchbayes.network import Network, affine_batch_norm, inputs_seen, statistics_in_place


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

    def see(name: str, h: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            raise _unfit("a network without no_grad in its forward pass", f"{name} under no_grad")
        if len(h) % len(inputs):
            raise _unfit("as many rows for every example", f"{len(h)} rows at {name} for {len(inputs)} examples")
        # A node of the graph that this layer alone uses: the input itself may go elsewhere too (a shortcut).
        seen.append(h.view_as(h) if h.requires_grad else h.detach().requires_grad_())
        return seen[-1]

    layers = {site.name: site.layer for site in sites}
    in_place = statistics_in_place(layers.values(), statistics)
    with torch.enable_grad(), in_place, inputs_seen(layers, see), affine_batch_norm():
        outputs = network(inputs)
    flat = outputs.detach().reshape(len(inputs), -1)  # (n, K)
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    along = _along(sites, statistics, directions.to(flat))
    products = {(h.shape, h.dtype): torch.empty_like(h, requires_grad=False) for h in seen}  # written again and again
    passes = flat.shape[1] - contrasts
    tangents = flat.new_zeros(flat.shape[1], len(flat), len(directions))  # (K, n, Q): quicker to add up than (Q, n)
    for k in range(passes):
        one = torch.zeros_like(flat, dtype=outputs.dtype)
        one[:, k] = 1
        one[:, passes:] = -1
        retain = k + 1 < passes
        gradients = torch.autograd.grad(outputs, seen, one.view_as(outputs), retain_graph=retain, allow_unused=True)
        for gradient, h, (mean, log_std) in zip(gradients, seen, along, strict=True):
            if gradient is not None:  # a layer of another head moves nothing
                product = torch.mul(gradient, h.detach(), out=products[h.shape, h.dtype])
                tangents[k].addmm_(_summed(gradient, flat), mean).addmm_(_summed(product, flat), log_std)
    return outputs.detach(), tangents.permute(2, 1, 0).reshape(len(directions), *outputs.shape)


def _along(
    sites: Sequence[Site], statistics: Sequence[tuple[Tensor, Tensor]], directions: Tensor
) -> list[tuple[Tensor, Tensor]]:
    r"""What each site multiplies $\sum g$ and $\sum g h$ by, (C, Q) each: the mean of h goes with the former."""
    found = []
    for (mean, _), (d_mean, d_log_std) in zip(statistics, by_site(sites, directions), strict=True):
        found.append(((mean.to(directions) * d_log_std - d_mean).T, -d_log_std.T))
    return found


def _summed(values: Tensor, like: Tensor) -> Tensor:
    """(rows, C, ...) over positions and over the rows of an example, (n, C)."""
    summed = (values if values.ndim == 2 else values.sum(tuple(range(2, values.ndim)))).to(like.dtype)
    return summed if len(summed) == len(like) else summed.view(len(like), -1, summed.shape[1]).sum(1)


def _unfit(expected: str, got: str) -> BatchbayesError:
    return BatchbayesError(expected=f"{expected}, for reverse mode", got=got, fix='use engine="sample"')
