r"""How a network's outputs move with omega, for each example, by one backward pass for each output.

A layer that normalises by $(\mu + d\mu, \log s + d\log s)$ instead of $(\mu, \log s)$ does, to first order, what it
would do to the input $h - d\mu - (h - \mu)\, d\log s$. So the gradient g of an output with respect to the layer's input
gives both derivatives: $-\sum g$ and $-\sum g (h - \mu)$ over the positions of a channel. In evaluation mode examples
do not mix, so one backward pass of the sum over examples gives the derivatives for every example at once. Only inputs
are touched, so this works for subclasses with an activation inside.

A layer may see several rows of each example (time steps), one example after the other.

Under a softmax it changes nothing to add one number to all K outputs of an example. Then K - 1 passes are enough: the
contrasts of the other outputs with the last output, which does not move.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from batchbayes.errors import BatchbayesError
from batchbayes.methods.batchnorm.collect import in_place
from batchbayes.methods.batchnorm.omega import by_site
from batchbayes.methods.batchnorm.sites import Site
from batchbayes.network import Network


def tangents_by_reverse_mode(
    network: Network,
    sites: Sequence[Site],
    statistics: Sequence[tuple[Tensor, Tensor]],
    inputs: Tensor,
    directions: Tensor,
    contrasts: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return outputs at `statistics` (n, ...), and their derivatives along Q directions of omega, (Q, n, ...)."""
    seen: list[Tensor] = []

    def see(name: str, h: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            raise _unfit("a network without no_grad in its forward pass", f"{name} under no_grad")
        if len(h) % len(inputs):
            raise _unfit("the same number of rows for every example", f"{len(h)} rows at {name} for {len(inputs)}")
        # A node of the graph that this layer alone uses: the input itself may go elsewhere too (a shortcut).
        seen.append(h.view_as(h) if h.requires_grad else h.detach().requires_grad_())
        return seen[-1]

    before = {site.name: partial(see, site.name) for site in sites}
    with torch.enable_grad(), affine_batch_norm():
        outputs = network(inputs, tensors=in_place(sites, statistics), before=before)
    flat = outputs.detach().reshape(len(inputs), -1)  # (n, K)
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    along = _along(sites, statistics, directions.to(flat))
    products = {(h.shape, h.dtype): torch.empty_like(h, requires_grad=False) for h in seen}  # reused in every pass
    passes = flat.shape[1] - contrasts
    tangents = flat.new_zeros(flat.shape[1], len(flat), len(directions))  # (K, n, Q): quicker to sum than (Q, n)
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
    r"""Return what each site multiplies $\sum g$ and $\sum g h$ by, (C, Q) each; the first includes the mean of h."""
    found = []
    for (mean, _), (d_mean, d_log_std) in zip(statistics, by_site(sites, directions), strict=True):
        found.append(((mean.to(directions) * d_log_std - d_mean).T, -d_log_std.T))
    return found


def _summed(values: Tensor, like: Tensor) -> Tensor:
    """Sum (rows, C, ...) over positions and over the rows of each example, to (n, C)."""
    summed = (values if values.ndim == 2 else values.sum(tuple(range(2, values.ndim)))).to(like.dtype)
    return summed if len(summed) == len(like) else summed.view(len(like), -1, summed.shape[1]).sum(1)


def _unfit(expected: str, got: str) -> BatchbayesError:
    return BatchbayesError(expected=f"{expected}, for reverse mode", got=got, fix='use engine="sample"')


class affine_batch_norm(TorchFunctionMode):  # noqa: N801
    """Inside the block, batch norm by given statistics is computed as one multiplication and one addition.

    Torch's own backward pass of it reads the input again for gradients that are not needed here, and is three times as
    slow.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.batch_norm or kwargs.get("training"):
            return func(*args, **kwargs)
        return _affine(*args, **kwargs) if args[0].dtype == args[2].dtype else func(*args, **kwargs)


def _affine(
    inputs: Tensor,
    mean: Tensor,
    variance: Tensor,
    *,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    **_: object,
) -> Tensor:
    """Return what `torch.nn.functional.batch_norm` returns in evaluation mode; the parameters are constants."""
    scale = (variance + eps).rsqrt()
    scale = scale if weight is None else scale * weight.detach()
    shift = -mean * scale if bias is None else bias.detach() - mean * scale
    shape = (-1, *[1] * (inputs.ndim - 2))
    return torch.addcmul(shift.view(shape), inputs, scale.view(shape))
