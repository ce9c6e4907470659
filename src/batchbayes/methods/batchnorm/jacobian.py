r"""How a network's outputs move with omega, for each example, by one backward pass for each output.

A layer that normalises by $(\mu + d\mu, \log s + d\log s)$ instead of $(\mu, \log s)$ does, to first order, what it
would do to the input $h - d\mu - (h - \mu)\, d\log s$. So the gradient g of an output with respect to the layer's input
gives both derivatives: $-\sum g$ and $-\sum g (h - \mu)$ over the positions of a channel. In evaluation mode examples
do not mix, so one backward pass of the sum over examples gives the derivatives for every example at once. Only inputs
are touched, so this works for subclasses with an activation inside.

A layer may see several rows of each example (time steps), one example after the other.

**Contrasts.** Under a softmax only differences between outputs matter, and they matter only for classes that some draw
makes likely. So each example has its own contrasts: of its next best classes with its best class, as many as leave less
than two thousandths of the probability outside. The logits of all other classes move with the best class. The first
contrast is computed for all examples. Examples that need more are sorted by how many they need, so that the later
passes run on ever fewer examples.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointError

from batchbayes.errors import BatchbayesError
from batchbayes.methods.batchnorm.collect import as_buffers
from batchbayes.methods.batchnorm.omega import by_site
from batchbayes.methods.batchnorm.sites import Site
from batchbayes.network import Network

LEFT_OUT = 2e-3
"""The contrasts of an example leave out classes that have less probability than this in all."""
WARMTH = 0.8
"""That probability is taken at a temperature of 1 + WARMTH * sqrt(std of the first contrast over draws), because
classes that are unlikely at the centre may be likely in some draws."""
CHUNK, MOST_ROWS = 3 * 2**15, 4096
"""Input numbers in one graph (those of 32 images of CIFAR), and examples: the activations of all layers should stay
small, because new memory costs more time than arithmetic."""


def tangents_by_reverse_mode(
    network: Network,
    sites: Sequence[Site],
    statistics: Sequence[tuple[Tensor, Tensor]],
    inputs: Tensor,
    directions: Tensor,
    contrasts: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return outputs at `statistics` (n, ...), and their derivatives along Q directions of omega, (Q, n, ...).

    With `contrasts`, outputs (n, K) are logits, and only differences between the logits of an example have a meaning.
    """
    build = partial(_Graph, network, sites, statistics)
    size = max(1, min(MOST_ROWS, CHUNK // max(1, inputs[0].numel())))
    outputs, along, slopes, start = [], [], torch.empty(0), 0
    for part in inputs.split(size):
        with build(part) as graph:
            contrasts = contrasts and graph.outputs.ndim == 2 and graph.flat.shape[1] > 1
            passes = _first_contrasts(graph.flat) if contrasts else _units(graph.flat)
            if not outputs:
                along = _along(sites, statistics, directions.to(graph.flat))
                count = 1 if contrasts else graph.flat.shape[1]
                slopes = graph.flat.new_zeros(count, len(directions), len(inputs))  # (1 or K, Q, n)
            for found, weights in zip(slopes[..., start : start + len(part)], passes, strict=True):
                graph.add_slopes(found, weights, along)
        outputs.append(graph.outputs)
        start += len(part)
    middle = torch.cat(outputs)
    if contrasts:
        slopes = _all_contrasts(build, inputs, middle.to(slopes.dtype), slopes[0], along, size)
    tangents = slopes.permute(1, 2, 0) if len(slopes) > 1 else slopes[0]
    return middle, tangents.reshape(len(directions), *middle.shape)


def _units(flat: Tensor) -> Iterator[Tensor]:
    """Yield weights (n, K) that pick one output after the other."""
    for k in range(flat.shape[1]):
        yield torch.zeros_like(flat).index_fill_(1, torch.tensor(k, device=flat.device), 1.0)


def _first_contrasts(logits: Tensor) -> list[Tensor]:
    """Return weights (n, K) for the contrast of the second best class with the best class."""
    order = logits.topk(min(2, logits.shape[1]), dim=1).indices
    return [_contrast(logits, order[:, -1], order[:, 0])]


def _contrast(like: Tensor, plus: Tensor, minus: Tensor) -> Tensor:
    """Return weights (n, K) that are 1 at one class of each example and -1 at another."""
    return torch.zeros_like(like).scatter_(1, plus[:, None], 1.0).scatter_(1, minus[:, None], -1.0)


def _all_contrasts(
    build: "Callable[[Tensor], _Graph]",
    inputs: Tensor,
    logits: Tensor,
    first: Tensor,
    along: Sequence[tuple[Tensor, Tensor]],
    size: int,
) -> Tensor:
    """Return the slopes of all classes, (K, Q, n), from those of the first contrast, (Q, n)."""
    order = logits.argsort(1, descending=True)
    rows = torch.arange(len(logits), device=logits.device)
    slopes = first.new_zeros(logits.shape[1], *first.shape)
    slopes[order[:, 1], :, rows] = first.T
    needed = contrasts_needed(logits.gather(1, order), first.square().mean(0).sqrt())
    by_need = needed.argsort(descending=True, stable=True)[: int((needed > 1).sum())]
    for some in by_need.split(size) if len(by_need) else ():
        k = 2
        while len(some := some[needed[some] >= k]):  # those that need most come first
            with build(inputs[some]) as graph:
                while 2 * (count := int((needed[some] >= k).sum())) > len(some):
                    moved = graph.flat.new_zeros(len(first), len(some))
                    graph.add_slopes(moved, _contrast(graph.flat, order[some, k], order[some, 0]), along)
                    slopes[order[some[:count], k], :, some[:count]] = moved.T[:count]
                    k += 1
    return slopes


def contrasts_needed(ordered: Tensor, std: Tensor) -> Tensor:
    """Return how many contrasts with its best class each example needs, (n,).

    Args:
        ordered: logits of each example in falling order, (n, K).
        std: standard deviation over draws of the contrast between the two best classes, (n,).

    >>> contrasts_needed(torch.tensor([[20.0, 0.0, -20.0], [1.0, 0.5, 0.0]]), torch.tensor([0.5, 0.5]))
    tensor([1, 2])
    """
    temperature = 1 + WARMTH * std.double().sqrt()
    covered = (ordered.double() / temperature[:, None]).softmax(1).cumsum(1)
    return (covered < 1 - LEFT_OUT).sum(1).clamp(min=1, max=ordered.shape[1] - 1)


class _Graph:
    """One forward pass at given statistics, ready for backward passes to the inputs of the sites.

    The backward passes belong inside the block, because activation checkpoints run parts of the network again.
    """

    def __init__(
        self,
        network: Network,
        sites: Sequence[Site],
        statistics: Sequence[tuple[Tensor, Tensor]],
        inputs: Tensor,
    ) -> None:
        self._sites, self._statistics, self._count = sites, statistics, len(inputs)
        self._seen: list[Tensor] = []
        before = {site.name: partial(self._see, site.name) for site in sites}
        self._running = network.running(inputs, tensors=as_buffers(sites, statistics), before=before)

    def __enter__(self) -> Self:
        with torch.enable_grad(), affine_batch_norm():
            self._outputs = self._running.__enter__()
        self.outputs = self._outputs.detach()
        """(n, ...)"""
        flat = self.outputs.reshape(self._count, -1)
        self.flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
        """(n, K)"""
        shapes = {(h.shape, h.dtype): h for h in self._seen}
        self._products = {key: torch.empty_like(h, requires_grad=False) for key, h in shapes.items()}
        return self

    def __exit__(self, *error: Any) -> None:
        self._running.__exit__(*error)

    def _see(self, name: str, h: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            raise _unfit("a network without no_grad in its forward pass", f"{name} under no_grad")
        if len(h) % self._count:
            raise _unfit("the same number of rows for every example", f"{len(h)} rows at {name} for {self._count}")
        # A node of the graph that this layer alone uses: the input itself may go elsewhere too (a shortcut).
        self._seen.append(h.view_as(h) if h.requires_grad else h.detach().requires_grad_())
        return self._seen[-1]

    def add_slopes(self, total: Tensor, weights: Tensor, along: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Add to `total` (Q, n) the derivatives along Q directions of the sum of outputs with weights (n, K)."""
        one = weights.to(self._outputs.dtype).view_as(self._outputs)
        try:
            gradients = torch.autograd.grad(self._outputs, self._seen, one, retain_graph=True, allow_unused=True)
        except CheckpointError as error:
            raise _unfit("a network without activation checkpoints", "checkpoints in its forward pass") from error
        for gradient, h, (mean, log_std) in zip(gradients, self._seen, along, strict=True):
            if gradient is not None:  # a layer of another head moves nothing
                product = torch.mul(gradient, h.detach(), out=self._products[h.shape, h.dtype])
                total.addmm_(mean, _summed(gradient, self.flat).T).addmm_(log_std, _summed(product, self.flat).T)


def _along(
    sites: Sequence[Site], statistics: Sequence[tuple[Tensor, Tensor]], directions: Tensor
) -> list[tuple[Tensor, Tensor]]:
    r"""Return what each site multiplies $\sum g$ and $\sum g h$ by, (Q, C) each; the first includes the mean of h."""
    found = []
    for (mean, _), (d_mean, d_log_std) in zip(statistics, by_site(sites, directions), strict=True):
        found.append((mean.to(directions) * d_log_std - d_mean, -d_log_std))
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
    return (inputs * scale.view(shape)).add_(shift.view(shape))
