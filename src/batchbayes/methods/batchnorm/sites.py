"""The batch-norm sites of a network: the layers where noise enters, in the order in which a forward pass meets them."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from batchbayes.errors import BatchbayesError, warn
from batchbayes.network.function import Network, modules_by_name, require_layout
from batchbayes.network.replicas import first_time
from batchbayes.network.tap import tap
from batchbayes.state import Codec

Select = int | str | Iterable[str] | Callable[[str, nn.Module], bool] | None
"""Which sites: the first k, names or patterns ("layer1.*"), a function of (name, layer), or None for all."""


MOST_EXAMPLES = 256
"""Sites are looked for with at most this many examples."""


class Site(NamedTuple):
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

    @property
    def running(self) -> tuple[Tensor, Tensor]:
        """Running mean and running variance. `require_running` makes sure that they are there."""
        return self.layer.running_mean.detach(), self.layer.running_var.detach()  # type: ignore[union-attr]


def require_running(sites: Iterable[Site], where: str, fix: str) -> None:
    """Raise an error if one of the sites has no running statistics. `where` says where they are needed."""
    if blind := [site.name for site in sites if not site.tracks]:
        got = f"none (track_running_stats=False) in {some(blind)}"
        raise BatchbayesError(expected=f"running statistics {where}", got=got, fix=fix)


def all_sites(module: nn.Module) -> tuple[Site, ...]:
    """Return every batch-norm layer, subclasses included, in the order in which the modules were registered."""
    return tuple(Site(name, layer) for name, layer in modules_by_name(module, _BatchNorm).items())


def site_header(network: Network, sites: Sequence[Site], idle: Sequence[str]) -> dict[str, object]:
    """Return what a file notes about the sites, and about the layout of the network that they belong to."""
    names = [site.name for site in sites]
    return {"output": network.output, "sites": names, "idle": list(idle), "layout": _layout(network.module)}


def sites_of_header(header: Mapping[str, Any], module: nn.Module) -> tuple[Site, ...]:
    """Return the sites that a file names, or raise an error if the network has another layout."""
    row = "layer {} with {} channels and epsilon {:g}"
    require_layout(module, header["layout"], _layout(module), "batch-norm", row)
    by_name, names = {site.name: site for site in all_sites(module)}, header["sites"]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"sites {names}")
    return tuple(by_name[name] for name in names)


def idle_of_header(header: Mapping[str, Any], module: nn.Module) -> tuple[str, ...]:
    """Return the layers that a file names as not reached."""
    names = header.get("idle", [])
    if not isinstance(names, list) or not {str(name) for name in names} <= {site.name for site in all_sites(module)}:
        raise ValueError(f"idle layers {names!r}")
    return tuple(names)


def _layout(module: nn.Module) -> list[list[object]]:
    """Return name, channels and epsilon of each batch-norm layer."""
    return [[site.name, site.channels, site.epsilon] for site in all_sites(module)]


SITES = Codec(
    lambda sites, own: (site_header(own.network, sites, own.idle), {}),
    lambda file: sites_of_header(file.header, file.network.module),
)
"""The sites of a posterior in a file, with the layers that do not run, and the layout of the network."""
IDLE = Codec(lambda names, own: ({}, {}), lambda file: idle_of_header(file.header, file.network.module))


class Found(NamedTuple):
    """What a forward pass has shown."""

    sites: tuple[Site, ...]
    """The selected sites that it met, in that order."""
    idle: tuple[str, ...]
    """The names of layers that must not run. A layer that these examples do not reach has no statistics. If others
    reach it (as in a network that routes examples to experts), it would have no noise, or normalise by the test batch.
    `refusing` stops such a pass. Layers that the user leaves out may run, if they have statistics."""
    outputs: Tensor
    """The answers of the network itself to these examples."""
    axes: Mapping[str, int]
    """The number of axes of the inputs of each layer that ran."""


def find_sites(network: Network, examples: Any, select: Select = None) -> Found:
    """Run the network on at most 256 examples, and return the selected sites that it meets."""
    every = {site.name: site for site in all_sites(network.module)}
    if not every:
        raise _no_batch_norm(network.module)
    calls, axes, outputs = _calls(network, examples[:MOST_EXAMPLES], every)
    chosen = _selected(list(calls), every, select)
    twice = [name for name in chosen if calls[name] > 1]
    if twice:
        raise BatchbayesError(
            expected="each batch-norm layer to run once in a forward pass",
            got=f"layers that ran more often, and so have several batch statistics under one name: {some(twice)}",
            fix="give each use its own BatchNorm layer, or leave these out with sites=",
        )
    others = [every[name] for name in calls if name not in chosen]
    fix = "select these layers as well: without statistics their output depends on the test batch"
    require_running(others, "in every batch-norm layer outside sites=", fix)
    if exact := [name for name in chosen if every[name].epsilon <= 0]:
        raise BatchbayesError(
            expected="batch-norm layers with eps above zero",
            got=f"eps={every[exact[0]].epsilon:g} in {some(exact)}",
            fix="set eps to 1e-12: a channel that is constant in a batch would be divided by zero",
        )
    for name in calls:
        if every[name].tracks:
            _require_finite_running(every[name])
    idle = [name for name, site in every.items() if name not in calls and (select is None or not site.tracks)]
    return Found(tuple(every[name] for name in chosen), tuple(idle), outputs, axes)


def _require_finite_running(site: Site) -> None:
    if bad := int(sum((~part.isfinite()).sum() for part in site.running)):
        half = site.layer.running_var is not None and site.layer.running_var.dtype == torch.float16
        got = f"{bad} that are NaN or infinite" + (", in float16, which ends at 65504" if half else "")
        fix = "convert the trained network to float32 or bfloat16: network.float()" if half else "train it again"
        raise BatchbayesError(f"finite running statistics in {site.name}", got, fix)


def _no_batch_norm(module: nn.Module) -> BatchbayesError:
    kinds = Counter(type(m).__name__ for m in module.modules())
    others = {kind: n for kind, n in kinds.items() if "norm" in kind.lower()}
    if not others and kinds["Identity"]:
        others = {"Identity": kinds["Identity"]}  # what fusing a network leaves behind
    found = ", but " + ", ".join(f"{n} {kind}" for kind, n in others.items()) if others else ""
    fix = "use a network that was trained with batch norm; layer norm and group norm carry no batch noise, and frozen "
    fix += "or fused batch norm has lost it"
    if any(isinstance(m, nn.modules.conv._ConvNd) for m in module.modules()) and "norm" not in "".join(others).lower():
        fix += ": exporters and fuse() fuse it into convolutions, so load the weights as they were before that"
    return BatchbayesError(
        expected="a network with batch normalisation (any subclass of torch's BatchNorm)",
        got=f"{type(module).__name__} with none among its {sum(kinds.values())} modules{found}",
        fix=fix,
    )


def refusing(idle: Iterable[str]) -> dict[str, Callable[[Tensor], None]]:
    """Return functions for `before=` that raise an error if one of these layers runs."""

    def refuse(name: str, _: Tensor) -> None:
        raise BatchbayesError(
            expected="examples that reach the same batch-norm layers as those of the fit",
            got=f"an example that reaches {name}, for which there are no statistics",
            fix="fit with larger or more varied batches, so that each of them reaches every layer, or leave this layer "
            "out with sites=",
        )

    return {name: partial(refuse, name) for name in idle}


def require_present(network: Network, sites: Sequence[Site]) -> None:
    """Raise an error if a layer has been replaced since the posterior was fitted, and warn if weights have changed."""
    if not first_time(network, sites):
        return
    for site in sites:
        found: Any = network.module
        for part in site.name.split("."):
            found = None if found is None else found._modules.get(part)
            found = getattr(found, "_orig_mod", found)
        if found is not site.layer and site.name:
            got = f"another layer in its place: {type(found).__name__}"
            fix = "fit again after you change the network"
            raise BatchbayesError(f"the layer {site.name} that the posterior was fitted to", got, fix)
    network.warn_if_changed()


class _BatchNormCalls(TorchFunctionMode):
    """Watches batch norm in functional form. What a layer calls after its hook ran is its own."""

    def __init__(self) -> None:
        self.is_expected, self.strays = False, []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.batch_norm, torch.batch_norm):
            if not self.is_expected:
                self.strays.append(bool((kwargs or {}).get("training", args[5] if len(args) > 5 else False)))
            self.is_expected = False
        return func(*args, **(kwargs or {}))


def _calls(
    network: Network, examples: Any, every: Mapping[str, Site]
) -> tuple[Counter[str], Mapping[str, int], Tensor]:
    """Count how often each site runs in a pass, in the order of the first call. Also return axes and outputs."""
    watch = _BatchNormCalls()

    def see(_: str, h: Tensor) -> int:
        watch.is_expected = True
        return h.ndim

    with torch.no_grad(), watch:
        axes, order, outputs = tap(network, examples, every, see)
    calls = Counter(order)
    missed = [name for name in every if name not in calls]
    if any(watch.strays) or (watch.strays and missed) or not calls:
        raise BatchbayesError(
            expected="batch-norm layers that are called in forward(), as in self.norm(x)",
            got=f"{len(watch.strays)} batch norms in functional form, and {len(missed)} layers that were not called"
            + (f": {some(missed)}" if missed else ""),
            fix="call the layer itself, not layer.forward(x) or F.batch_norm: others cannot be seen, and those with "
            "training=True depend on the test batch",
        )
    if watch.strays:
        warn(f"{len(watch.strays)} calls of F.batch_norm outside of layers carry no noise: use layers instead.")
    return calls, axes, outputs


def _selected(names: list[str], every: Mapping[str, Site], select: Select) -> list[str]:
    if select is None:
        return names
    patterns = [select] if isinstance(select, str) else list(select) if isinstance(select, Iterable) else []
    if isinstance(select, int) and not isinstance(select, bool):
        chosen = names[: max(0, select)]
    elif callable(select):
        try:
            chosen = [name for name in names if select(name, every[name].layer)]
        except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
            got = f"{type(error).__name__}: {error}"[:300]
            raise BatchbayesError("a function sites= of (name, layer)", got, "take two arguments") from error
    elif patterns and all(isinstance(pattern, str) for pattern in patterns):
        found = [{name for name in names if fnmatchcase(name, pattern)} for pattern in patterns]
        chosen = [name for name in names if all(found) and name in set().union(*found)]
    else:
        fix = 'pass sites=1 for the first, or text, as in sites=["layer1.*"]'
        raise BatchbayesError("sites= as a number, names or a function", f"{select!r}"[:200], fix)
    if not chosen:
        raise BatchbayesError(
            expected="sites= to select batch-norm layers that run in a forward pass",
            got=f"{select!r}, which does not match all of what it names",
            fix=f"choose among {some(names)}",
        )
    return chosen


def some(names: Sequence[str]) -> str:
    """Return the first names of a list, as words."""
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
