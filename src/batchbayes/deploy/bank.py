"""The bank: everything that differs between draws, as tensors with one row for each draw.

A draw is the user's network with some of its tensors replaced, or with masks on the inputs of its dropout layers. A
posterior is asked for its draws, and what each of them puts into the network is noted down.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from batchbayes.errors import BatchbayesError
from batchbayes.methods.dropout import DropoutPosterior, DropoutSite
from batchbayes.methods.laplace.posterior import LaplacePosterior
from batchbayes.network import Network
from batchbayes.posterior import Posterior

Masks = tuple[tuple[Tensor, Tensor], ...]
"""Factor and offset of each call of a dropout layer in a forward pass."""


@dataclass(frozen=True, eq=False)
class Bank:
    """What V draws put into the network."""

    tensors: Mapping[str, Tensor]
    """Parameters and buffers by name, (V, ...)."""
    masks: Mapping[str, Masks] = field(default_factory=dict)
    """Dropout layers by name, (V, ...): the layer returns factor * input + offset."""

    def rows(self) -> list[Tensor]:
        """Return all tensors, in a fixed order."""
        return [*self.tensors.values(), *(part for calls in self.masks.values() for pair in calls for part in pair)]

    def named(self, rows: list[Tensor]) -> tuple[dict[str, Tensor], dict[str, Masks]]:
        """Return one row of each tensor, in the order of `rows`, by name again."""
        left = iter(rows)
        tensors = {name: next(left) for name in self.tensors}
        return tensors, {name: tuple((next(left), next(left)) for _ in calls) for name, calls in self.masks.items()}


def fill_bank(posterior: Posterior, example: Tensor, count: int, seed: int) -> Bank:
    """Return the bank of the first `count` draws under a seed. Dropout masks have the shape that `example` needs."""
    if isinstance(posterior, DropoutPosterior):
        return Bank({}, _masks(posterior, example, count, seed))
    if isinstance(posterior, LaplacePosterior):
        return Bank(_last_layers(posterior, count, seed))
    if not is_dataclass(posterior) or "network" not in {each.name for each in fields(posterior)}:
        raise _not_exportable(posterior, "a posterior without a network of its own")
    drawn = [_replaced(posterior, example, seed, index) for index in range(count)]
    if any(each.keys() != drawn[0].keys() for each in drawn):
        raise _not_exportable(posterior, "draws that replace different tensors")
    return Bank({name: torch.stack([each[name].detach().cpu() for each in drawn]) for name in drawn[0]})


def _last_layers(posterior: LaplacePosterior, count: int, seed: int) -> dict[str, Tensor]:
    """Return weight and bias of the last layer in each draw. Weights that another layer shares would change there."""
    layer, module = posterior.layer, posterior.network.module
    own = {f"{layer.name}.{kind}".lstrip("."): tensor for kind, tensor in layer.module.named_parameters()}
    if {kind for kind, _ in layer.module.named_parameters()} - {"weight", "bias"}:
        raise _not_exportable(posterior, "a last layer whose weights are computed from other parameters")
    users = Counter(id(tensor) for _, tensor in module.named_parameters(remove_duplicate=False))
    if any(users[id(tensor)] > 1 for tensor in own.values()):
        raise _not_exportable(posterior, "a last layer whose weights are also those of another layer")
    drawn = (layer.mean + posterior.deviations(seed, range(count))).to(layer.module.weight.dtype)  # (V, K, P)
    columns = layer.module.in_features
    return {name: drawn[..., :columns] if tensor.ndim == 2 else drawn[..., columns] for name, tensor in own.items()}


@dataclass(frozen=True, eq=False)
class _Notebook(Network):
    """A network that does not run, but notes down what it is called with."""

    calls: list[tuple[Any, Mapping[str, Any], Tensor]] = field(default_factory=list)

    def __call__(self, inputs: Any, **options: Any) -> Tensor:  # type: ignore[override]
        outputs = torch.zeros(len(inputs), 1)
        self.calls.append((inputs, options, outputs))
        return outputs


def _replaced(posterior: Any, example: Tensor, seed: int, index: int) -> dict[str, Tensor]:
    """Return the tensors that a draw puts into the network. Refuse a draw that does anything else."""
    notebook = _Notebook(posterior.network.module, posterior.network.output)
    returned = replace(posterior, network=notebook).draw(seed, index)(example)
    if len(notebook.calls) != 1:
        raise _not_exportable(posterior, f"a draw that runs the network {len(notebook.calls)} times")
    inputs, options, outputs = notebook.calls[0]
    tensors = options.get("tensors") or {}
    if inputs is not example or returned is not outputs:
        raise _not_exportable(posterior, "a draw that changes inputs or outputs of the network")
    if options.get("instead") or options.get("dropout") or any(tensor is None for tensor in tensors.values()):
        raise _not_exportable(posterior, "a draw that replaces layers, or uses the statistics of the test batch")
    return dict(tensors)


def _masks(posterior: DropoutPosterior, example: Tensor, count: int, seed: int) -> dict[str, Masks]:
    """Return the masks of all dropout layers that run. A layer with several calls has several masks."""
    shapes: dict[str, list[Tensor]] = defaultdict(list)

    def see(name: str, inputs: Tensor) -> None:
        shapes[name].append(torch.empty_like(inputs[:1]))

    with torch.no_grad():
        posterior.network(example, before={site.name: partial(see, site.name) for site in posterior.sites})
    return {
        site.name: tuple(_affine(site, like, call, count, seed) for call, like in enumerate(shapes[site.name], 1))
        for site in posterior.sites
        if site.name in shapes
    }


def _affine(site: DropoutSite, like: Tensor, call: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return factor and offset of one call in each draw, (V, ...)."""
    masks = [site.mask(like, seed, index, call) for index in range(count)]
    offsets = torch.stack([site.drop(torch.zeros_like(mask), mask) for mask in masks])
    return torch.stack([site.drop(torch.ones_like(mask), mask) for mask in masks]) - offsets, offsets


def _not_exportable(posterior: Posterior, why: str) -> BatchbayesError:
    return BatchbayesError(
        expected="a posterior whose draws are one network with other tensors or dropout masks",
        got=f"{type(posterior).__name__}: {why}",
        fix="export another method, or bb.deterministic(model)",
    )
