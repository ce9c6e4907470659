"""Does the data look like the training data to the network? Batch norm has noted down what its inputs looked like."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from batchbayes.errors import BatchbayesError
from batchbayes.methods.batchnorm.like_training import LOOSE, difference, error, is_settled
from batchbayes.methods.batchnorm.sites import Site, find_sites
from batchbayes.network.function import Network, as_network
from batchbayes.network.source import Source
from batchbayes.network.tap import tap
from batchbayes.report.read.examples import Examples
from batchbayes.report.read.schema import Schema
from batchbayes.report.words.say import say

Channels = tuple[float, float, float]
NORMALISED: tuple[tuple[Channels, Channels], ...] = (
    ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),  # ImageNet
    ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),  # CIFAR-10
)
"""Images are nearly always normalised by equal numbers for all channels, or by one of these means and deviations. They
have to be known to undo a wrong order of channels."""
SUSPECT = 0.2
"""The order of channels is only tried if a channel is this number of standard deviations away from training."""
MARGIN = 1.1
"""Images with their channels in the other order must be closer to training by this factor, to be called so."""
SITES = 3
"""The order of channels is judged at this number of batch-norm layers. Later ones tell less about colours."""
DEAD = 1e-6
"""A channel did not vary in training if its variance is below this share of the layer's epsilon."""
OUTSIDE = 0.1
"""A column is named if more than this share of its values is outside of the range of training."""
FAR = 5.0
"""A single value is named if it is more than this number of widths of that range outside of it."""
UNFAMILIAR = "WARNING: this data does not look like the training data."
FEWEST, MOST = 10, 300
"""Fewer examples are not judged, and more are not read."""


class Sight(NamedTuple):
    """What the network makes of N examples."""

    means: Tensor
    """The mean over positions of the standardised inputs of the first sites, all their channels together, (N, C)."""
    squares: Tensor
    """The same for their squares."""
    entropy: Tensor
    """Of the predicted class, (N,). It is zero if there are no classes."""


def unfamiliar(network: nn.Module, data: Examples, *, classes: bool) -> str | None:
    """Say why data is `UNFAMILIAR`; None if it is not, or if the network cannot tell.

    `classes` says whether the outputs of the network are logits of classes.
    """
    wrapped, first = as_network(network), next(_evenly(data), None)
    if first is None:
        return None
    sites = _first_sites(wrapped, first)
    own = _look(wrapped, sites, data, classes) if sites else None
    if own is None or len(own.means) < FEWEST:
        return None
    live = int(live_channels(sites[0].layer).sum())
    if first.ndim == 4 and first.shape[1] == 3 and float(own.means[:, :live].mean(0).abs().max()) > SUSPECT:
        for mean, std in NORMALISED:
            other = _look(wrapped, sites, data, classes, partial(_reversed_channels, mean=mean, std=std))
            if other is not None and is_closer(other, own) and _difference(other, live) is None:
                return say("data.advice", reason=say("data.channels"))
    how = _difference(own, live)
    return how and say("data.advice", reason=say("data.scale", site=sites[0].name, how=how))


def outside_ranges(data: Examples, schema: Schema | None) -> str | None:
    """Say which columns of a table have many values that the training table did not have; None if there are none."""
    if schema is None:
        return None
    rows = torch.cat(list(_evenly(data.raw())))
    if rows.ndim != 2 or rows.shape[1] != len(schema.columns):
        return None
    found = schema.differences(rows, least=OUTSIDE) if len(rows) >= FEWEST else []
    found = found or schema.far_values(rows, FAR)
    return say("data.outside", name=data.name, found="; ".join(found)) if found else None


def _difference(sight: Sight, channels: int) -> str | None:
    """Say how the inputs of the first site, which has this number of live channels, differ from those of training."""
    return difference(sight.means[:, :channels], sight.squares[:, :channels], LOOSE)


def is_closer(other: Sight, own: Sight) -> bool:
    """Return whether changed examples are closer to training than the examples themselves, for certain.

    Pictures of one class, such as ships, may be closer by their colours alone. So the network must not be less sure.
    """
    (before, own_parts), (after, other_parts) = _distance(own), _distance(other)
    certain = before - after > float(error(own_parts - other_parts))
    surer = own.entropy - other.entropy
    return certain and before > MARGIN * after and float(surer.mean() + error(surer)) >= 0


def _distance(sight: Sight) -> tuple[float, Tensor]:
    r"""Return how far the statistics of examples are from those of training, and what each example (N,) adds to it.

    The distance is the divergence of normal distributions, $(v + m^2 - 1 - \log v) / 2$ for the mean $m$ and the
    variance $v$ of a channel, mean over channels. The second result is its linear approximation.
    """
    mean, square = sight.means.mean(0), sight.squares.mean(0)
    variance = (square - mean.square()).clamp_min(1e-6)
    parts = sight.means * mean / variance + sight.squares * (1 - 1 / variance) / 2
    return float((square - 1 - variance.log()).mean()) / 2, parts.mean(1)


def _evenly(data: Examples) -> Iterator[Tensor]:
    """Yield inputs of at most MOST examples, which are spread evenly over the data."""
    return (inputs for inputs, _ in Source(data).evenly(MOST))


def _first_sites(network: Network, inputs: Tensor) -> tuple[Site, ...]:
    """Return the first sites, up to one whose statistics do not describe its training data."""
    try:
        found = find_sites(network, inputs[:2])[0]
    except BatchbayesError:
        return ()  # a network without batch norm
    settled = [is_settled(site) and bool(live_channels(site.layer).any()) for site in found[:SITES]]
    return found[: settled.index(False)] if False in settled else found[:SITES]


def _reversed_channels(images: Tensor, mean: Channels, std: Channels) -> Tensor:
    """Reverse the colour channels of images that were normalised by these constants, in the wrong order."""
    shift, scale = (images.new_tensor(numbers)[:, None, None] for numbers in (mean, std))
    return ((images * scale + shift).flip(1) - shift) / scale


def _look(
    network: Network,
    sites: Sequence[Site],
    data: Examples,
    classes: bool,
    change: Callable[[Tensor], Tensor] = lambda inputs: inputs,
) -> Sight | None:
    """Return what the network makes of the data after a change. None if its first sites do not see each example."""
    seen = [_sight(network, sites, change(inputs), classes) for inputs in _evenly(data)]
    known = [sight for sight in seen if sight is not None]
    return Sight(*map(torch.cat, zip(*known, strict=True))) if len(known) == len(seen) else None


@torch.no_grad()
def _sight(network: Network, sites: Sequence[Site], inputs: Tensor, classes: bool) -> Sight | None:
    """Run the network once. Note what its first sites see, and how sure it is. None if they do not see each example."""
    layers = {site.name: site.layer for site in sites}
    seen, _, outputs = tap(network, inputs, layers, lambda name, values: _moments(values, layers[name]))
    if len(seen) < len(sites) or any(len(means) != len(inputs) for means, _ in seen.values()):
        return None
    means, squares = (torch.cat(parts, 1) for parts in zip(*(seen[site.name] for site in sites), strict=True))
    return Sight(
        means,
        squares,
        _entropy(outputs) if classes and outputs.ndim > 1 else torch.zeros(len(outputs), dtype=torch.float64),
    )


def _entropy(logits: Tensor) -> Tensor:
    """Return the entropy for each example of logits (N, K, ...), (N,). Of maps it is the mean over positions."""
    log_probs = logits.double().log_softmax(1)
    return -(log_probs.exp() * log_probs).sum(1).reshape(len(logits), -1).mean(1).cpu()


def _moments(values: Tensor, layer: Any) -> tuple[Tensor, Tensor]:
    """Return means over positions of standardised inputs (N, C, ...), and of their squares, of the live channels.

    The epsilon of the layer is not part of the standard deviation. It may be far above the variance, and then inputs
    that are right would seem to spread too little.
    """
    live = live_channels(layer)
    mean, variance = (statistic.double()[live, None] for statistic in (layer.running_mean, layer.running_var))
    standard = (values.double().reshape(*values.shape[:2], -1)[:, live] - mean) / variance.sqrt()
    return standard.mean(2).cpu(), standard.square().mean(2).cpu()


def live_channels(layer: Any) -> Tensor:
    """Return which channels (C,) varied in training. The layer hardly passes on one below its own epsilon."""
    return layer.running_var > DEAD * layer.eps
