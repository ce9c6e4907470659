"""A draw is data: what it changes in a network, and one place where it is changed.

`Posterior.draw` returns a `Patch`. It is a function from inputs to outputs, and `stack` lays many of them into a bank,
which `bb.export` writes to a file. What does not fit is a plain function, which predictions and views take as it is and
`bb.export` refuses in words:

- `mcbn(include_query=True)`: each input runs in a batch of its own, among training examples;
- the Laplace approximation of many classes: the weights of a draw would cost more than what they do to the inputs;
- a member of an ensemble on another device: its inputs and outputs travel;
- whatever a posterior of a third party returns.

The local reparametrisation (`methods/weights`) has noise for each example: it is training, and no draw.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from batchbayes.errors import BatchbayesError
from batchbayes.network.copies import plain_name
from batchbayes.network.function import Function, Network
from batchbayes.network.inputs import Whole
from batchbayes.network.tap import tap

Affine = tuple[Tensor, ...]
"""A factor, and perhaps an offset."""


class Mask(Protocol):
    """A recipe of what a layer does to its inputs instead of its own work."""

    def at(self, like: Tensor, call: int) -> Affine:
        """Return factor and offset for activations (N, ...) at the layer's call of this number, counted from 1."""
        ...


class Lens(Protocol):
    """What a view looks through. All of it but for `in_files` False can be traced."""

    @property
    def in_files(self) -> bool:
        """Whether a file can hold it."""
        ...

    def look(self, inputs: Tensor, row: Any) -> Tensor:
        """Return the view of inputs (N, ...) with these parameters."""
        ...

    def back(self, outputs: Tensor, inputs: Tensor, row: Any) -> Tensor:
        """Return the outputs for the view. If they have the places of the inputs, these are moved back."""
        ...


@dataclass(frozen=True, eq=False)
class View:
    """One view of the inputs: what it looks through, and its parameters, a tensor or several of them."""

    lens: Lens
    row: Any


@dataclass(frozen=True, eq=False)
class Patch:
    """One drawn function: a network, and what this draw changes in it."""

    network: Function
    """A `Network`, or any function behind views."""
    tensors: Mapping[str, Tensor | None] = field(default_factory=dict)
    """Parameters and buffers by name. A batch-norm layer whose statistics are None takes those of the batch."""
    masks: Mapping[str, Mask] = field(default_factory=dict)
    """Recipes by name of layer. They stand in the place of its `forward`."""
    heads: Mapping[str, Affine] = field(default_factory=dict)
    """Weight (K, P), and the bias (K,) if there is one, of one last layer, which computes in their precision."""
    views: tuple[View, ...] = ()
    """Through which inputs are seen, the first one first."""
    before: Mapping[str, Callable[[Tensor], None]] = field(default_factory=dict)
    """Functions by name of layer that may refuse its inputs."""
    afterwards: Callable[[Any], None] | None = None
    """What looks at the inputs of a pass with masks when it is over, to warn."""

    def __call__(self, inputs: Any) -> Tensor:
        """Return the outputs for inputs (N, ...)."""
        if self.views and not isinstance(inputs, Tensor):
            raise BatchbayesError(
                expected="a network with one input tensor, for views",
                got=f"{inputs}",
                fix="wrap the network so that it takes one, or use the posterior without views",
            )
        seen = inputs
        for view in self.views:
            seen = view.lens.look(seen, view.row)
        outputs = self._run(seen)
        for view in reversed(self.views):
            outputs = view.lens.back(outputs, inputs, view.row)
        return outputs

    def _run(self, inputs: Any) -> Tensor:
        changes: dict[str, Any] = {"tensors": self.tensors} if self.tensors else {}
        if self.before:
            changes["before"] = self.before
        if self.masks or self.heads:
            calls: Counter[str] = Counter()
            changes["instead"] = {name: partial(_through, head) for name, head in self.heads.items()}
            changes["instead"] |= {name: partial(self._masked, name, calls, _length(inputs)) for name in self.masks}
            outputs = self.network(inputs, **changes)
            self._look_back(inputs, calls)
            return outputs
        return self.network(inputs, **changes)

    def _look_back(self, inputs: Any, calls: Counter[str]) -> None:
        if self.masks and not calls:
            raise BatchbayesError(
                expected="dropout layers that run in a forward pass",
                got=f"{len(self.masks)} in {self.network} that did not, so no noise",
                fix="call the layers in forward(), not functions with their weights",
            )
        if self.afterwards is not None:
            self.afterwards(inputs)

    def _masked(self, name: str, calls: Counter[str], known: int | None, activations: Tensor) -> Tensor:
        """Put a mask on activations. Examples can share it only if they are known to be the first axis."""
        if known is not None and activations.shape[:1] != (known,):
            raise BatchbayesError(
                expected=f"one row for each example, {known} in all, at the dropout layer {name}",
                got=f"an activation of shape {tuple(activations.shape)}",
                fix="let the network keep the batch as the first axis (batch_first=True)",
            )
        calls[name] += 1
        factor, *offset = self.masks[name].at(activations, calls[name])
        return activations * factor + offset[0] if offset else activations * factor


def _length(inputs: Any) -> int | None:
    """Return the number of examples, as a symbol where the pass is traced; None for inputs that are no rows."""
    return None if isinstance(inputs, Whole) else inputs.shape[0] if isinstance(inputs, Tensor) else len(inputs)


def _through(head: Affine, features: Tensor) -> Tensor:
    """Return what a last layer makes of features (N, P), (N, K)."""
    return F.linear(features.to(head[0].dtype), *head).to(features.dtype)


@dataclass(frozen=True, eq=False)
class Mean:
    """One drawn function whose outputs are the mean of those of several."""

    parts: tuple[Function, ...]

    def __call__(self, inputs: Any) -> Tensor:
        return sum(part(inputs) for part in self.parts) / len(self.parts)  # type: ignore[return-value]


@dataclass(frozen=True, eq=False)
class _Kept:
    """A mask whose numbers are known for each call."""

    calls: Sequence[Affine]

    def at(self, like: Tensor, call: int) -> Affine:
        return self.calls[call - 1]


@dataclass(frozen=True, eq=False)
class Bank:
    """Several patches of one network: what they change, with one row for each of them."""

    network: Network
    rows: list[Tensor]
    """(V, ...) each."""
    average: int
    """How many consecutive patches make one draw, their mean."""
    lenses: tuple[Lens, ...]
    form: TreeSpec
    """How one row of each tensor becomes tensors, masks, heads and views."""

    def patch(self, rows: Sequence[Tensor]) -> Patch:
        """Return the patch that one row of each tensor stands for."""
        tensors, masks, heads, views = tree_unflatten(list(rows), self.form)
        kept = {name: _Kept(calls) for name, calls in masks.items()}
        return Patch(self.network, tensors, kept, heads, tuple(map(View, self.lenses, views)))


def stack(draws: Sequence[Function], example: Tensor) -> Bank:
    """Lay draws side by side. They must be patches of one network; `example` tells the shapes of masks."""
    average = len(draws[0].parts) if isinstance(draws[0], Mean) else 1
    every = [part for draw in draws for part in (draw.parts if isinstance(draw, Mean) else (draw,))]
    patches = [each for each in every if isinstance(each, Patch)]
    networks = [each.network for each in patches if isinstance(each.network, Network)]
    if len(networks) < len(every):
        raise _unlike("a function of its own")
    first, network = patches[0], networks[0]
    is_one = all(each.module is network.module and each.output == network.output for each in networks)
    if not is_one or len(every) != average * len(draws):
        raise _unlike("draws of several networks or outputs: weight_samples takes weights of one network")
    if any(None in each.tensors.values() for each in patches):
        raise _unlike("draws that normalise by the statistics of the test batch")
    if any(each.heads.keys() != first.heads.keys() or _lenses(each) != _lenses(first) for each in patches):
        raise _unlike("draws that differ in their views or in the layer that is random")
    if own := next((lens for lens in _lenses(first) if not lens.in_files), None):
        raise BatchbayesError(
            expected="ready transforms such as RandomCrop, which a file can hold",
            got=f"{own!r}, whose views are no plain computation",
            fix="export the posterior without it, or use a ready transform",
        )
    filled = _filled(network, patches, example)
    flat = [tree_flatten(each)[0] for each in filled]
    rows = [torch.stack([row.detach().cpu() for row in column]) for column in zip(*flat, strict=True)]
    return Bank(network, rows, average, _lenses(first), tree_flatten(filled[0])[1])


def _lenses(patch: Patch) -> tuple[Lens, ...]:
    return tuple(view.lens for view in patch.views)


def _filled(network: Network, patches: Sequence[Patch], example: Tensor) -> list[Any]:
    """Return what each patch changes, as tensors. What others change stays as it is in the network."""
    module = network.module
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    names = dict.fromkeys(name for each in patches for name in each.tensors)
    own = {plain_name(name): tensor for name, tensor in named}
    if any(name not in own and name not in each.tensors for each in patches for name in names):
        raise _unlike("draws that replace different tensors")
    present = {name: own[name] for name in names if name in own}
    likes = _likes(network, patches, example)
    masks = [
        {name: [mask.at(like, call) for call, like in enumerate(likes[name], 1)] for name, mask in each.masks.items()}
        for each in patches
    ]
    neutral = {name: list(map(_neutral, calls)) for each in masks for name, calls in each.items()}
    return [
        (
            {name: each.tensors.get(name, present.get(name)) for name in names},
            {**neutral, **found},
            dict(each.heads),
            [view.row for view in each.views],
        )
        for each, found in zip(patches, masks, strict=True)
    ]


def _neutral(affine: Affine) -> Affine:
    """Return the factor and the offset that change nothing."""
    return tuple(torch.full_like(part, float(place == 0)) for place, part in enumerate(affine))


@torch.no_grad()
def _likes(network: Network, patches: Sequence[Patch], example: Tensor) -> Mapping[str, list[Tensor]]:
    """Return a tensor of the shape of each activation that a mask is put on, by name of layer, call after call."""
    found: dict[str, list[Tensor]] = defaultdict(list)
    if names := dict.fromkeys(name for each in patches for name in each.masks):
        tap(network, example, names, lambda name, h: found[name].append(torch.empty_like(h[:1])))
    return found


def _unlike(why: str) -> BatchbayesError:
    return BatchbayesError(
        expected="a posterior whose draws are patches of one network: other tensors, dropout masks or ready views",
        got=why,
        fix="export another method, or bb.deterministic(model); a posterior of your own returns batchbayes.tools.Patch",
    )
