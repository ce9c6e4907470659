"""Does the data look like the training data to the network? Batch norm has noted down what its inputs looked like."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from batchbayes.data.examples import Examples
from batchbayes.errors import BatchbayesError
from batchbayes.methods.batchnorm.condition import is_settled
from batchbayes.methods.batchnorm.familiar import LOOSE, difference, error
from batchbayes.methods.batchnorm.sites import Site, find_sites
from batchbayes.network import Network, as_network

MARGIN = 1.1
"""Images with their channels in the other order must be closer to training by this factor, to be called so."""
SITES = 3
"""The order of channels is judged at so many batch-norm layers. Later ones tell less about colours."""
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
    """Say how data differs from that of training; None if it does not, or if the network cannot tell.

    `classes` says whether the outputs of the network are logits of classes.
    """
    wrapped, batches = as_network(network), _evenly(data)
    first = next(batches, None)
    sites = () if first is None else _first_sites(wrapped, first)
    if first is None or not sites:
        return None
    changes = [_same, _reversed_channels] if first.ndim == 4 and first.shape[1] == 3 else [_same]
    parts: list[list[Sight]] = [[] for _ in changes]
    for inputs in chain([first], batches):
        for change, seen in zip(changes, parts, strict=True):
            sight = _sight(wrapped, sites, change(inputs), classes)
            if sight is None:
                return None
            seen.append(sight)
    own, *others = (Sight(*map(torch.cat, zip(*seen, strict=True))) for seen in parts)
    if len(own.means) < FEWEST:
        return None
    how, *others_how = (_difference(sight, sites[0].channels) for sight in (own, *others))
    if any(is_closer(other, own) and other_how is None for other, other_how in zip(others, others_how, strict=True)):
        return (
            "WARNING: this data does not look like the training data. Probably the colour channels are in the wrong "
            "order (RGB or BGR): with the other order the images look more like those of training. Check the "
            "preprocessing first: all other numbers depend on it."
        )
    return how and (
        "WARNING: this data does not look like the training data. Probably it is not scaled or prepared as in "
        f"training. At {sites[0].name}, the first batch-norm layer, its values {how} in training. Check the "
        "preprocessing first: all other numbers depend on it."
    )


def _difference(sight: Sight, channels: int) -> str | None:
    """Say how the inputs of the first site, which has so many channels, differ from those of training."""
    return difference(sight.means[:, :channels], sight.squares[:, :channels], LOOSE)


def is_closer(other: Sight, own: Sight) -> bool:
    """Return whether changed examples are closer to training than the examples themselves, for certain.

    Pictures of one class, such as ships, may be closer by their colours alone. So the network must be surer too.
    """
    (before, own_parts), (after, other_parts) = _distance(own), _distance(other)
    certain = before - after > error(own_parts - other_parts)
    return certain and before > MARGIN * after and float((own.entropy - other.entropy).mean()) >= 0


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
    """Yield inputs of at most MOST examples. If their number is known, they are spread evenly over the data."""
    step, start, count = 1 if data.size is None else -(-data.size // MOST), 0, 0
    for inputs, _ in data:
        some = inputs[-start % step :: step][: MOST - count]
        start, count = start + len(inputs), count + len(some)
        if len(some):
            yield some
        if count >= MOST:
            return


def _first_sites(network: Network, inputs: Tensor) -> tuple[Site, ...]:
    """Return the first sites, up to one whose statistics do not describe its training data."""
    try:
        found = find_sites(network, inputs[:2])[0]
    except BatchbayesError:
        return ()  # a network without batch norm
    settled = [is_settled(site) for site in found[:SITES]]
    return found[: settled.index(False)] if False in settled else found[:SITES]


def _same(inputs: Tensor) -> Tensor:
    return inputs


def _reversed_channels(images: Tensor) -> Tensor:
    return images.flip(1)


@torch.no_grad()
def _sight(network: Network, sites: Sequence[Site], inputs: Tensor, classes: bool) -> Sight | None:
    """Run the network once. Note what its first sites see, and how sure it is. None if they do not see each example."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def see(site: Site, values: Tensor) -> None:
        seen[site.name] = _moments(values, site.layer)

    outputs = network(inputs.to(network.device), before={site.name: partial(see, site) for site in sites})
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
    """Return means over positions of standardised inputs (N, C, ...), and of their squares."""
    mean, variance = (statistic.double()[:, None] for statistic in (layer.running_mean, layer.running_var))
    standard = (values.double().reshape(*values.shape[:2], -1) - mean) / (variance + layer.eps).sqrt()
    return standard.mean(2).cpu(), standard.square().mean(2).cpu()
