"""The batch-norm sites of a network: where its noise enters, in the order in which a forward pass meets them."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchbayes.errors import BatchbayesError
from batchbayes.network import Network, evaluation_mode, inputs_seen

Select = int | str | Iterable[str] | Callable[[str, nn.Module], bool] | None
"""Which sites: the first k, names or patterns ("layer1.*"), a function of (name, layer), or None for all."""


@dataclass(frozen=True, eq=False)
class Site:
    """One batch-norm layer and its name inside the network."""

    name: str
    layer: _BatchNorm

    @property
    def channels(self) -> int:
        return self.layer.num_features

    @property
    def epsilon(self) -> float:
        return self.layer.eps

    @property
    def tracks(self) -> bool:
        """Whether it keeps running statistics, so that it can predict without batch statistics of ours."""
        return self.layer.running_mean is not None and self.layer.running_var is not None


def all_sites(module: nn.Module) -> tuple[Site, ...]:
    """Every batch-norm layer, subclasses included, in the order in which the modules were registered."""
    return tuple(
        Site(name.replace("_orig_mod.", ""), layer)  # a compiled part keeps the name it had
        for name, layer in module.named_modules()
        if isinstance(layer, _BatchNorm)
    )


def layout(module: nn.Module) -> list[list[object]]:
    """What a file must agree on with a network: name, channels and epsilon of each batch-norm layer."""
    return [[site.name, site.channels, site.epsilon] for site in all_sites(module)]


def layout_hash(module: nn.Module) -> str:
    """A fingerprint of the layout."""
    return hashlib.sha256(json.dumps(layout(module)).encode()).hexdigest()[:16]


def find_sites(network: Network, example: Tensor, select: Select = None) -> tuple[Site, ...]:
    """The selected sites that a forward pass of `example` meets, in that order."""
    every = {site.name: site for site in all_sites(network.module)}
    if not every:
        raise BatchbayesError(
            expected="a network with batch normalisation (any subclass of torch's BatchNorm)",
            got=f"{type(network.module).__name__} with none among its {len(list(network.module.modules()))} modules",
            fix="use a network that was trained with batch norm; layer norm and group norm carry no batch noise",
        )
    calls = _calls(network, example, every)
    chosen = _selected(list(calls), every, select)
    twice = [name for name in chosen if calls[name] > 1]
    if twice:
        raise BatchbayesError(
            expected="each batch-norm layer to run once in a forward pass",
            got=f"layers that ran more often, and so have several batch statistics under one name: {_some(twice)}",
            fix="give each use its own BatchNorm layer, or leave these out with sites=",
        )
    blind = [name for name in calls if name not in chosen and not every[name].tracks]
    if blind:
        raise BatchbayesError(
            expected="running statistics in every batch-norm layer outside sites=",
            got=f"none (track_running_stats=False) in {_some(blind)}",
            fix="select these layers as well: without statistics their output depends on the test batch",
        )
    return tuple(every[name] for name in chosen)


def _calls(network: Network, example: Tensor, every: dict[str, Site]) -> Counter[str]:
    """How often each site runs in a forward pass; the keys stand in the order of the first call."""
    calls: Counter[str] = Counter()
    layers = {name: site.layer for name, site in every.items()}
    with (
        torch.no_grad(),
        evaluation_mode(network.module),
        inputs_seen(layers, lambda name, _: calls.update([name])),
    ):
        network.module(example)
    return calls


def _selected(names: list[str], every: dict[str, Site], select: Select) -> list[str]:
    if select is None:
        return names
    if isinstance(select, int):
        chosen = names[:select] if select > 0 else []
    elif callable(select):
        chosen = [name for name in names if select(name, every[name].layer)]
    else:
        patterns = [select] if isinstance(select, str) else list(select)
        chosen = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
        idle = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]
        if idle:
            chosen = []
    if not chosen:
        raise BatchbayesError(
            expected="sites= to select batch-norm layers that run in a forward pass",
            got=f"{select!r}, which does not match all of what it names",
            fix=f"choose among {_some(names)}",
        )
    return chosen


def _some(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
