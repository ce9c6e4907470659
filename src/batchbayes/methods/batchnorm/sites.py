"""The batch-norm sites of a network: the layers where noise enters, in the order in which a forward pass meets them."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchbayes.errors import BatchbayesError
from batchbayes.network import Network, modules_by_name, require_layout

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
        """Whether the layer has running statistics, so that it can predict without batch statistics of ours."""
        return self.layer.running_mean is not None and self.layer.running_var is not None


def all_sites(module: nn.Module) -> tuple[Site, ...]:
    """Return every batch-norm layer, subclasses included, in the order in which the modules were registered."""
    return tuple(Site(name, layer) for name, layer in modules_by_name(module, _BatchNorm).items())


def site_header(network: Network, sites: Sequence[Site]) -> dict[str, object]:
    """Return what a file notes about the sites, and about the layout of the network that they belong to."""
    layout = _layout(network.module)
    return {
        "output": network.output,
        "sites": [site.name for site in sites],
        "layout": layout,
        "layout_hash": hashlib.sha256(json.dumps(layout).encode()).hexdigest()[:16],
    }


def sites_of_header(header: Mapping[str, Any], module: nn.Module) -> tuple[Site, ...]:
    """Return the sites that a file names, or raise an error if the network has another layout."""
    row = "layer {} with {} channels and epsilon {:g}"
    require_layout(module, header["layout"], _layout(module), "batch-norm", row)
    by_name = {site.name: site for site in all_sites(module)}
    return tuple(by_name[name] for name in header["sites"])


def _layout(module: nn.Module) -> list[list[object]]:
    """Return name, channels and epsilon of each batch-norm layer."""
    return [[site.name, site.channels, site.epsilon] for site in all_sites(module)]


def find_sites(network: Network, example: Tensor, select: Select = None) -> tuple[Site, ...]:
    """Return the selected sites that a forward pass of `example` meets, in that order."""
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


def _calls(network: Network, example: Tensor, every: Mapping[str, Site]) -> Counter[str]:
    """Count how often each site runs in a forward pass. The keys stand in the order of the first call."""
    calls: Counter[str] = Counter()

    def count(name: str, _: Tensor) -> None:
        calls[name] += 1

    with torch.no_grad():
        network(example, before={name: partial(count, name) for name in every})
    return calls


def _selected(names: list[str], every: Mapping[str, Site], select: Select) -> list[str]:
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
