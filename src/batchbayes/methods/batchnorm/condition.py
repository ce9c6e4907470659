"""What state the batch-norm layers of a network are in: trained, never trained, or frozen."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchbayes.errors import warn
from batchbayes.methods.batchnorm.sites import Site, some


def is_initial(layer: _BatchNorm) -> bool:
    """Whether the running statistics still have the values of a new layer: mean 0 and variance 1."""
    mean, variance = layer.running_mean, layer.running_var
    return mean is not None and variance is not None and not (bool(mean.any()) or bool((variance != 1).any()))


def is_settled(site: Site) -> bool:
    """Return whether the running statistics of a site describe its training data.

    They do not if they still have their initial values, nor after only a few batches of a moving average. If the
    counter is zero but the statistics are not the initial ones, a file of weights has left the counter out.
    """
    seen = site.layer.num_batches_tracked
    if not site.tracks or is_initial(site.layer):
        return False
    return seen is None or int(seen) == 0 or int(seen) * (site.layer.momentum or 1.0) >= 5


def is_frozen(module: nn.Module, layer: _BatchNorm) -> bool:
    """Whether a layer is in evaluation mode, or without gradients, while the rest of the network is trained."""
    others = [m for m in module.modules() if list(m.parameters(recurse=False)) and not isinstance(m, _BatchNorm)]
    if not layer.training and any(m.training for m in others):
        return True
    own = [parameter.requires_grad for parameter in layer.parameters(recurse=False)]
    return bool(own) and not any(own) and any(parameter.requires_grad for parameter in module.parameters())


def warn_of_condition(module: nn.Module, sites: Sequence[Site]) -> None:
    """Warn if layers have never been trained, or were frozen in training: then there is no noise to learn from."""
    initial = [site for site in sites if is_initial(site.layer)]
    if initial:
        which = "the batch-norm layers have" if len(initial) == len(sites) else _named(initial, sites, "has", "have")
        pristine = all(_has_initial_scale(site.layer) for site in initial)
        warn(
            f"{which} never been trained: their running statistics have the initial values, mean 0 and variance 1. "
            + ("Were the weights loaded?" if pristine else "Did the file of weights hold the buffers too?")
        )
    frozen = [site for site in sites if is_frozen(module, site.layer)]
    if frozen:
        warn(
            f"{_named(frozen, sites, 'is', 'are')} frozen (in evaluation mode or without gradients, while the rest of "
            "the network is trained). A layer that was frozen in training has seen no batch noise. Leave it out with "
            "sites=."
        )


def _named(few: Sequence[Site], sites: Sequence[Site], one: str, many: str) -> str:
    verb = one if len(few) == 1 else many
    return f"{len(few)} of {len(sites)} batch-norm layers ({some([site.name for site in few])}) {verb}"


def _has_initial_scale(layer: _BatchNorm) -> bool:
    scale, shift = layer.weight, layer.bias
    new = [scale is None or bool((scale == 1).all()), shift is None or not bool(torch.any(shift))]
    return all(new)
