"""Does the data look like the training data to the network? Batch norm has noted down what its inputs looked like."""

from collections.abc import Iterable
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor, nn

from batchbayes.errors import BatchbayesError
from batchbayes.methods.batchnorm.fit import is_settled
from batchbayes.methods.batchnorm.sites import Site, find_sites
from batchbayes.network import Network, as_network

FALSE_ALARMS = 0.01
"""How often data is called unfamiliar, at most, though its true statistics are within the tolerances."""
SHIFT, SPREAD = 0.5, 2.0
"""The running statistics lag behind the network. So the mean of a channel may be this many standard deviations away,
and its mean square may be this many times as large or as small."""
ENOUGH, MOST = 30, 1000
"""Fewer examples are not judged, and more are not read."""


def unfamiliar(network: nn.Module, data: Iterable[tuple[Tensor, Any]]) -> str | None:
    """Say how the inputs of the first batch-norm layer differ from those in training; None if they do not.

    The test is one of all channels at once (Bonferroni). It is for means over examples, so pixels of one image need
    not be independent.
    """
    found = _first_inputs(network, data)
    if found is None:
        return None
    layer, means, squares = found
    worst, ratio = excess(means, squares)
    if worst <= SHIFT and 1 / SPREAD <= ratio <= SPREAD:
        return None
    how = (
        f"lie {worst:.1f} standard deviations away from their mean"
        if worst > SHIFT
        else (f"spread {ratio**0.5:.2g} times as far as")
    )
    return (
        "WARNING: this data does not look like the training data. Probably it is not scaled or prepared as in "
        f"training. At {layer}, the first batch-norm layer, its values {how} in training. Check the preprocessing "
        "first: all other numbers depend on it."
    )


def excess(means: Tensor, squares: Tensor) -> tuple[float, float]:
    r"""Return how far the worst channel is away for certain, in standard deviations, and its ratio of mean squares.

    Args:
        means: $(h - \mu) / \sigma$ of each example and channel, mean over positions, (N, C).
        squares: the same of $(h - \mu)^2 / \sigma^2$.
    """
    level = NormalDist().inv_cdf(1 - FALSE_ALARMS / (4 * means.shape[1]))
    error, error_of_squares = (level * values.std(0) / len(values) ** 0.5 for values in (means, squares))
    shift = float((means.mean(0).abs() - error).amax())
    ratio = squares.mean(0)
    high, low = float((ratio - error_of_squares).amax()), float((ratio + error_of_squares).amin())
    return shift, high if high > SPREAD else low if low < 1 / SPREAD else 1.0


@torch.no_grad()
def _first_inputs(network: nn.Module, data: Iterable[tuple[Tensor, Any]]) -> tuple[str, Tensor, Tensor] | None:
    """Return the name of the first site, and first and second moments of its standardised inputs, (N, C) each."""
    wrapped, site, count = as_network(network), None, 0
    seen: list[tuple[Tensor, Tensor]] = []
    for inputs, _ in data:
        some = inputs[: MOST - count].to(wrapped.device)
        site = site or _first_site(wrapped, some)
        if site is None:
            return None
        layer = site.layer
        wrapped(some, before={site.name: lambda values, layer=layer: seen.append(_moments(values, layer))})
        count += len(some)
        if count >= MOST:
            break
    means, squares = (torch.cat(parts) for parts in zip(*seen, strict=True)) if seen else (torch.empty(0),) * 2
    return None if site is None or not ENOUGH <= count == len(means) else (site.name, means, squares)


def _moments(values: Tensor, layer: Any) -> tuple[Tensor, Tensor]:
    """Return means over positions of standardised inputs (N, C, ...), and of their squares."""
    mean, variance = (statistic.double()[:, None] for statistic in (layer.running_mean, layer.running_var))
    standard = (values.double().reshape(*values.shape[:2], -1) - mean) / (variance + layer.eps).sqrt()
    return standard.mean(2).cpu(), standard.square().mean(2).cpu()


def _first_site(network: Network, inputs: Tensor) -> Site | None:
    try:
        site = find_sites(network, inputs[:2])[0][0]
    except BatchbayesError:
        return None  # a network without batch norm
    return site if is_settled(site) else None
