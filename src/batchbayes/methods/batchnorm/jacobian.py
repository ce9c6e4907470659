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
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointError

from batchbayes.errors import BatchbayesError
from batchbayes.methods.batchnorm.omega import as_buffers, by_site
from batchbayes.methods.batchnorm.sites import Site
from batchbayes.network.function import Network

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
    along: Sequence[tuple[Tensor, Tensor]],
    contrasts: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return outputs at `statistics` (n, ...), and their derivatives along Q directions of omega, (Q, n, ...).

    `along` is what `along_directions` returns for these directions and statistics. With `contrasts`, outputs (n, K) are
    logits, and only differences between the logits of an example have a meaning.
    """
    size, num_directions = graph_size(inputs), along[0][0].shape[1]
    outputs, slopes, start = [], torch.empty(0), 0
    with watched(network, sites, statistics) as build:
        for part in inputs.split(size):
            graph = build(part)
            contrasts = contrasts and graph.outputs.ndim == 2 and graph.flat.shape[1] > 1
            passes = _first_contrasts(graph.flat) if contrasts else _units(graph.flat)
            if not outputs:
                along = [(mean.to(graph.flat), log_std.to(graph.flat)) for mean, log_std in along]
                count = 1 if contrasts else graph.flat.shape[1]
                slopes = graph.flat.new_empty(count, len(inputs), num_directions)  # (1 or K, n, Q)
            for found, weights in zip(slopes[:, start : start + len(part)], passes, strict=True):
                graph.slopes(weights, along, out=found)
            outputs.append(graph.outputs)
            start += len(part)
        middle = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        if contrasts:
            slopes = _all_contrasts(build, inputs, middle.to(slopes.dtype), slopes[0], along, size)
    return middle, slopes.permute(2, 1, 0).reshape(num_directions, *middle.shape)


def graph_size(inputs: Tensor) -> int:
    """Return how many examples one graph is built for."""
    return max(1, min(MOST_ROWS, CHUNK // max(1, inputs[0].numel())))


def _units(flat: Tensor) -> Iterator[Tensor]:
    """Yield weights (n, K) that pick one output after the other."""
    for output in range(flat.shape[1]):
        unit = flat.new_zeros(flat.shape[1])
        unit[output] = 1.0
        yield unit.expand_as(flat)


def _first_contrasts(logits: Tensor) -> list[Tensor]:
    """Return weights (n, K) for the contrast of the second best class with the best class."""
    order = logits.topk(min(2, logits.shape[1]), dim=1).indices
    return [_contrast(logits, order[:, -1], order[:, 0])]


def _contrast(like: Tensor, plus: Tensor, minus: Tensor) -> Tensor:
    """Return weights (n, K) that are 1 at one class of each example and -1 at another."""
    return torch.zeros_like(like).scatter_(1, plus[:, None], 1.0).scatter_(1, minus[:, None], -1.0)


def _all_contrasts(
    build: "Callable[[Tensor], Graph]",
    inputs: Tensor,
    logits: Tensor,
    first: Tensor,
    along: Sequence[tuple[Tensor, Tensor]],
    size: int,
) -> Tensor:
    """Return the slopes of all classes, (K, n, Q), from those of the first contrast, (n, Q)."""
    order = logits.argsort(1, descending=True)
    rows = torch.arange(len(logits), device=logits.device)
    slopes = first.new_zeros(logits.shape[1], *first.shape)
    slopes[order[:, 1], rows] = first
    needed = contrasts_needed(logits.gather(1, order), first.square().mean(1).sqrt())
    by_need = needed.argsort(descending=True, stable=True)[: int((needed > 1).sum())]
    for some in by_need.split(size) if len(by_need) else ():
        k = 2
        while len(some := some[needed[some] >= k]):  # those that need most come first
            graph = build(inputs[some])
            while 2 * (count := int((needed[some] >= k).sum())) > len(some):
                moved = graph.flat.new_empty(len(some), first.shape[1])
                graph.slopes(_contrast(graph.flat, order[some, k], order[some, 0]), along, out=moved)
                slopes[order[some[:count], k], some[:count]] = moved[:count]
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


@contextmanager
def watched(
    network: Network, sites: Sequence[Site], statistics: Sequence[tuple[Tensor, Tensor]]
) -> Iterator["Callable[[Tensor], Graph]"]:
    """Make the network ready for graphs at given statistics. Inside the block, call what it gives with some inputs.

    The backward passes belong inside the block, because activation checkpoints run parts of the network again.
    """
    seen: list[Seen] = []
    sees = {site.name: partial(_see, site.name, number, seen) for number, site in enumerate(sites)}
    plain = [pair for pair in zip(sites, statistics, strict=True) if is_plain(pair[0].layer)]
    instead = {site.name: _Normalise(site, *pair, sees[site.name]) for site, pair in plain}
    before = {name: see for name, see in sees.items() if name not in instead}
    tensors = as_buffers(sites, statistics)
    with network.prepared(tensors=tensors, before=before, instead=instead) as run:

        def build(inputs: Tensor) -> Graph:
            seen.clear()
            with torch.enable_grad(), affine_batch_norm() if before else nullcontext():
                outputs = run(inputs)
            return Graph(outputs, tuple(seen))

        yield build


def is_plain(layer: _BatchNorm) -> bool:
    """Whether a layer does nothing but normalise its input: it has torch's own `forward`, and no hook before it."""
    is_own = type(layer) not in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) or "forward" in vars(layer)
    return not (is_own or layer._forward_pre_hooks)


Seen = tuple[int, Tensor, int]
"""The number of a site, its input, and the version of that, which tells whether it was changed in place later."""


def _see(name: str, number: int, seen: list[Seen], h: Tensor) -> Tensor:
    """Note the input of a site, and return it as a node of the graph that this layer alone uses.

    The input itself may go elsewhere too (a shortcut).
    """
    if not torch.is_grad_enabled():
        raise _unfit("a network without no_grad in its forward pass", f"{name} under no_grad")
    h = h.view_as(h) if h.requires_grad else h.detach().requires_grad_()
    seen.append((number, h, h._version))
    return h


class _Normalise:
    """A layer that does nothing but normalise, as one multiplication and addition (see `affine_batch_norm`)."""

    def __init__(self, site: Site, mean: Tensor, variance: Tensor, see: Callable[[Tensor], Tensor]) -> None:
        layer, self._see = site.layer, see
        self._fixed = (mean, variance, layer.weight, layer.bias, False, 0.0, layer.eps)
        self._scale, self._shift = _scale_and_shift(mean, variance, layer.weight, layer.bias, layer.eps)

    def __call__(self, h: Tensor) -> Tensor:
        h = self._see(h)
        if h.dtype != self._scale.dtype:
            return F.batch_norm(h, *self._fixed)
        return _scaled(h, self._scale, self._shift)


class Graph:
    """One forward pass at given statistics, ready for backward passes to the inputs of the sites."""

    def __init__(self, outputs: Tensor, seen: Sequence[Seen]) -> None:
        self._outputs, self._seen = outputs, seen
        self.outputs = outputs.detach()
        """(n, ...)"""
        flat = self.outputs.flatten(1) if outputs.ndim > 1 else self.outputs[:, None]
        self.flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
        """(n, K)"""
        for _, h, version in seen:
            if h._version != version:
                raise _unfit("a network that leaves the input of a batch-norm layer alone", "a change in place")
            if h.shape[0] % flat.shape[0]:
                got = f"{h.shape[0]} rows at a batch-norm layer for {flat.shape[0]}"
                raise _unfit("the same number of rows for every example", got)
        shapes = {(h.shape, h.dtype): h for _, h, _ in seen}
        self._products = {key: torch.empty_like(h, requires_grad=False) for key, h in shapes.items()}

    def slopes(self, weights: Tensor, along: Sequence[tuple[Tensor, Tensor]], *, out: Tensor) -> None:
        """Write to `out` (n, Q) the derivatives along Q directions of the sum of outputs with weights (n, K)."""
        if not (self._seen and self._outputs.requires_grad):
            out.zero_()
            return
        one, inputs = weights.to(self._outputs.dtype).view_as(self._outputs), [h for _, h, _ in self._seen]
        try:
            gradients = torch.autograd.grad(self._outputs, inputs, one, retain_graph=True, allow_unused=True)
        except RuntimeError as error:  # something is changed in place, or has no backward pass
            if isinstance(error, torch.OutOfMemoryError):
                raise
            got = "activation checkpoints" if isinstance(error, CheckpointError) else f"{error}"[:300]
            raise _unfit("a network that gradients can pass through", got) from error
        every = zip(gradients, self._seen, strict=True)
        moved = [(gradient, h, *along[site]) for gradient, (site, h, _) in every if gradient is not None]
        if not moved:
            out.zero_()
        for number, (gradient, h, mean, log_std) in enumerate(moved):
            product = torch.mul(gradient, h.detach(), out=self._products[h.shape, h.dtype])
            out.addmm_(_summed(gradient, self.flat), mean, beta=float(number > 0), alpha=-1.0)  # the first one writes
            out.addmm_(_summed(product, self.flat), log_std, alpha=-1.0)


def along_directions(
    sites: Sequence[Site], statistics: Sequence[tuple[Tensor, Tensor]], directions: Tensor
) -> list[tuple[Tensor, Tensor]]:
    r"""Return what each site multiplies $-\sum g$ and $-\sum g h$ by, (C, Q) each; the first includes the mean of h."""
    pairs = zip(statistics, by_site(sites, directions), strict=True)
    return [
        (torch.addcmul(d_mean, mean.to(directions), d_log_std, value=-1).T.contiguous(), d_log_std.T.contiguous())
        for (mean, _), (d_mean, d_log_std) in pairs
    ]


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
        given = kwargs or {}
        if func is not F.batch_norm or given.get("training") or args[0].dtype != args[2].dtype:
            return func(*args, **given)
        inputs, mean, variance = args
        return _scaled(inputs, *_scale_and_shift(mean, variance, given["weight"], given["bias"], given["eps"]))


def _scale_and_shift(
    mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return what evaluation mode multiplies a channel by, and what it adds then, (C,) each."""
    scale = (variance + eps).rsqrt()
    scale = scale if weight is None else scale * weight.detach()
    return scale, -mean * scale if bias is None else torch.addcmul(bias.detach(), mean, scale, value=-1)


def _scaled(inputs: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    if inputs.ndim > 2:
        shape = (-1, *[1] * (inputs.ndim - 2))
        scale, shift = scale.view(shape), shift.view(shape)
    return torch.addcmul(shift, inputs, scale)
