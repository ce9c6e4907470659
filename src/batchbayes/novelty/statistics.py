"""What one forward pass tells about each input on its own: statistics at the batch-norm sites, and the logits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from batchbayes.errors import BatchbayesError, warn
from batchbayes.methods.batchnorm.sites import (
    Site,
    all_sites,
    find_sites,
    require_running,
    site_header,
    sites_of_header,
)
from batchbayes.network.batches import cut
from batchbayes.network.function import Network, as_network

FLOOR = 1e-4
"""Added to a variance before its logarithm is taken, in units of the running variance."""

MOVED = 0.05
"""Running statistics have changed if they are this share of a standard deviation away. Half precision rounds them by
less, unless a mean is far from zero."""

PIECE = 2**19
"""Activations are squared in pieces of this number of numbers, which stay in the caches of a CPU."""

FAR = 10.0
"""If a running mean is more standard deviations than this from zero, activations are centred before they are squared:
their variance would be lost to rounding. Elsewhere this would only take time."""


@dataclass(frozen=True)
class Place:
    """What is seen of one site."""

    name: str
    channels: int
    positions: bool
    """Whether the site has positions, as in images. A table has none: it has one value for each channel."""

    @property
    def size(self) -> int:
        """The number of statistics."""
        return self.channels * (3 if self.positions else 1)


@dataclass(frozen=True, eq=False)
class Sight:
    """A network whose batch-norm sites are watched while it runs."""

    network: Network
    places: tuple[Place, ...]
    units: Tensor
    """Running mean and running standard deviation of each channel, (2, C), as they were at the fit."""
    logits: bool
    """Whether the outputs are logits of classes."""

    @property
    def size(self) -> int:
        """The number of statistics, D."""
        return sum(place.size for place in self.places)

    @cached_property
    def _units(self) -> list[tuple[Tensor, bool]]:
        """The units of each place, (2, C), and whether a mean is so far from zero that activations must be centred."""
        each = self.units.split([place.channels for place in self.places], dim=1)
        return [(unit, bool((unit[0].abs() > FAR * unit[1]).any())) for unit in each]

    @torch.no_grad()
    def __call__(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        r"""Run the network once. Return the statistics (N, D) and the logits (N, K) of each input, on the CPU.

        At a site with positions a channel has three statistics. Let $z$ be the mean of the channel over the positions
        of this one input, and $v$ its variance over them, both in units of the running statistics. The statistics
        are $z$, $\log(v + z^2)$ (the second moment about the running mean) and $\log v$. Without positions $z$ is
        the only one. If the outputs are no logits, K is 0. For a map of logits K is 1: its mean energy, negated.
        """
        seen: dict[str, Tensor] = {}

        def see(place: Place, unit: Tensor, is_far: bool, h: Tensor) -> None:
            if len(h) != len(inputs):
                raise BatchbayesError(
                    expected=f"one row for each of {len(inputs)} inputs at the batch-norm layer {place.name}",
                    got=f"an activation of shape {tuple(h.shape)}",
                    fix="let the layer take (N, channels, positions), and not all positions of all inputs as rows",
                )
            seen[place.name] = _statistics(h, unit.to(h.device), place.positions, is_far).cpu()

        before = {p.name: partial(see, p, *units) for p, units in zip(self.places, self._units, strict=True)}
        outputs = self.network(inputs.to(self.network.device), before=before)
        missing = [place.name for place in self.places if place.name not in seen]
        if missing:
            raise BatchbayesError(
                expected="a forward pass through the batch-norm layers that the training data went through",
                got=f"inputs of shape {tuple(inputs.shape)} for which {', '.join(missing[:6])} did not run",
                fix="pass inputs of the kind that the network was trained with",
            )
        return torch.cat([seen[place.name] for place in self.places], 1), kept_outputs(outputs, self.logits).cpu()

    def warn_if_changed(self) -> None:
        """Warn if weights or running statistics are not those of the fit: the network uses the present ones."""
        by_name = {site.name: site for site in all_sites(self.network.module)}
        if lost := [place.name for place in self.places if place.name not in by_name]:
            got, fix = f"none at {', '.join(lost[:6])}", "fit again after you change the network"
            raise BatchbayesError(expected="the batch-norm layers that the detector was fitted to", got=got, fix=fix)
        self.network.warn_if_changed()
        present = _running_units([by_name[place.name] for place in self.places])
        if present.shape != self.units.shape or bool(((present - self.units) / self.units[1]).abs().max() > MOVED):
            warn(
                f"the running statistics of {type(self.network.module).__name__} have changed since the fit, as by a "
                "pass in training mode: the scores may be wrong. Fit again, or load the old weights."
            )

    def header(self) -> dict[str, object]:
        """Return what a file notes about it, as JSON values."""
        by_name = {site.name: site for site in all_sites(self.network.module)}
        sites = site_header(self.network, [by_name[place.name] for place in self.places], ())
        return sites | {"positions": [place.positions for place in self.places], "logits": self.logits}

    @classmethod
    def restore(cls, header: Mapping[str, Any], units: Tensor, model: nn.Module) -> Self:
        """Build it from its header and its units. Refuse a network of another layout."""
        network = as_network(model, header["output"])
        sites = sites_of_header(header, network.module)
        places = tuple(Place(s.name, s.channels, p) for s, p in zip(sites, header["positions"], strict=True))
        if units.shape != (2, sum(place.channels for place in places)):
            raise ValueError(f"units of shape {tuple(units.shape)}")
        return cls(network, places, units, header["logits"])


def watch(network: Network, example: Tensor, logits: bool | None) -> Sight:
    """Find the batch-norm sites that a forward pass of `example` meets, and whether the outputs are logits."""
    sites = find_sites(network, example).sites
    dimensions: dict[str, int] = {}

    def note(name: str, h: Tensor) -> None:
        dimensions[name] = h.ndim

    with torch.no_grad():
        outputs = network(example, before={site.name: partial(note, site.name) for site in sites})
    if logits is None:
        logits = outputs.ndim >= 2 and outputs.shape[1] >= 3
    elif logits and outputs.ndim < 2:
        raise BatchbayesError(
            expected="logits of shape (N, K, ...)", got=f"outputs of shape {tuple(outputs.shape)}", fix="drop logits="
        )
    places = tuple(Place(site.name, site.channels, dimensions[site.name] > 2) for site in sites)
    return Sight(network, places, _running_units(sites), logits)


def _running_units(sites: Sequence[Site]) -> Tensor:
    """Return running mean and running standard deviation of each channel of the sites, (2, C) in float32."""
    fix = "use a network with running statistics: without them an output depends on the rest of the batch"
    require_running(sites, "in every batch-norm layer", fix)
    pairs = [(site.running, site.epsilon) for site in sites]
    return torch.cat([torch.stack([mean, (var + eps).sqrt()]).float().cpu() for (mean, var), eps in pairs], 1)


def _statistics(h: Tensor, unit: Tensor, positions: bool, is_far: bool) -> Tensor:
    """Return the statistics of the input (N, C, ...) of one site, (N, C) or (N, 3 C)."""
    mean, std = unit
    if not positions:
        return ((h - mean) / std).float()
    over = tuple(range(2, h.ndim))
    if is_far:
        h, mean = h - mean.view(-1, *[1] * (h.ndim - 2)), torch.zeros_like(mean)
    h = h.float()
    own_mean = h.mean(over)
    square = torch.cat([part.square().mean(over) for part in cut(h, None, PIECE)])
    z = (own_mean - mean) / std
    variance = ((square - own_mean.square()) / std.square()).clamp_min(0)
    return torch.cat([z, (variance + z.square() + FLOOR).log(), (variance + FLOOR).log()], 1)


def kept_outputs(outputs: Tensor, logits: bool) -> Tensor:
    """Return what is kept of the outputs, (N, K) in float64."""
    if not logits:
        return outputs.new_zeros(outputs.shape[0], 0, dtype=torch.float64)
    values = outputs.double()
    return values if values.ndim == 2 else values.logsumexp(1).flatten(1).mean(1, keepdim=True)
