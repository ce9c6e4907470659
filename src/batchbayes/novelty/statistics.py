"""What one forward pass tells about each input on its own: statistics of activations, and the logits.

The activations are the inputs of layers: of batch norms if the network has any, else of norms of other kinds, else of
linear layers and convolutions. They are in units of running statistics, or of what the first inputs of the fit show.
The input of a classifier's last linear layer, its *last features*, is watched in any case.

A layer norm scales all channels of a position together, so a single channel of its input means little. There the
statistics are those along the principal directions of the channels. What is unusual is often small: pixel noise hides
in directions that ordinary inputs hardly use, and shows in no single channel.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from batchbayes.errors import BatchbayesError, warn
from batchbayes.methods.batchnorm.sites import (
    Site,
    all_sites,
    find_sites,
    require_running,
    site_header,
    sites_of_header,
    some,
)
from batchbayes.network.function import Network, modules_by_name, require_layout
from batchbayes.network.inputs import require_finite
from batchbayes.network.source import cut
from batchbayes.network.tap import tap
from batchbayes.state import Codec, File, State, coded

CHUNK = 2**18
"""Input numbers in one forward pass, so that activations stay in the caches of a CPU."""
FLOOR = 1e-4
"""Added to a variance before its logarithm is taken, in units of the usual variance."""

MOVED = 0.05
"""Running statistics have changed if they are this share of a standard deviation away. Half precision rounds them by
less, unless a mean is far from zero."""

PIECE = 2**19
"""Activations are squared in pieces of this number of numbers, which stay in the caches of a CPU."""

FAR = 10.0
"""If a usual mean is more standard deviations than this from zero, activations are centred before they are squared:
their variance would be lost to rounding. Elsewhere this would only take time."""

BATCH_NORM, NORM, PLAIN = "batch-norm", "norm", "linear or convolution"
"""The kinds of layers that are watched."""

WIDEST = 512
"""Layers with more channels keep them as they are: a square matrix for each layer would make files large."""
LEAST_STD = 1e-3
"""The smallest unit along a direction, as a share of the largest one of its layer."""

NORM_NAMES = ("batchnorm", "layernorm", "groupnorm", "instancenorm", "rmsnorm")
"""A layer of another library is a norm if the name of its class has one of these in it."""


@dataclass(frozen=True)
class Place:
    """What is seen of one layer."""

    name: str
    channels: int
    positions: bool
    """Whether there are positions, as in images. A table has none: it has one value for each channel."""
    axis: int = 1
    """The axis of the channels."""

    @property
    def size(self) -> int:
        """The number of statistics."""
        return self.channels * (3 if self.positions else 1)


def _places_to_file(places: tuple[Place, ...], sight: "Sight") -> State:
    module, positions = sight.network.module, {"positions": [place.positions for place in places]}
    if sight.kind == BATCH_NORM:
        by_name = {site.name: site for site in all_sites(module)}
        return site_header(sight.network, [by_name[place.name] for place in sight.norms], ()) | positions, {}
    rows = [[place.name, place.channels, place.axis] for place in places]
    return {"layers": sight.kind, "places": rows, "layout": _layout(module, sight.kind)} | positions, {}


def _places_from_file(file: File) -> tuple[Place, ...]:
    """Return the places of a file. Refuse a network of another layout."""
    header, module, kind = file.header, file.network.module, file.header.get("layers", BATCH_NORM)
    if kind == BATCH_NORM:
        last = [header["last"]] if header.get("last", [None])[0] else []
        rows = [(site.name, site.channels, 1) for site in sites_of_header(header, module)]
        rows += [(name, features, 1) for name, features in last]
    else:
        require_layout(module, header["layout"], _layout(module, kind), kind, "layer {} of class {}")
        rows = header["places"]
    places = tuple(Place(n, c, p, a) for (n, c, a), p in zip(rows, header["positions"], strict=True))
    if file.tensors["units"].shape != (2, sum(place.channels for place in places)):
        raise ValueError(f"units of shape {tuple(file.tensors['units'].shape)}")
    return places


_PLACES = Codec(_places_to_file, _places_from_file)
_KIND = Codec(lambda kind, _: ({}, {}), lambda file: file.header.get("layers", BATCH_NORM))
_LAST = Codec(
    lambda last, sight: ({"last": [last, sight.num_features]}, {}), lambda file: file.header.get("last", [None])[0]
)
_DIRECTIONS = Codec(
    lambda kept, _: ({"directions": list(kept)}, {f"directions.{name}": each for name, each in kept.items()}),
    lambda file: {name: file.tensors[f"directions.{name}"] for name in file.header.get("directions", ())},
)


@dataclass(frozen=True, eq=False)
class Sight:
    """A network whose layers are watched while it runs."""

    network: Network
    places: tuple[Place, ...] = field(metadata=coded(_PLACES))
    units: Tensor
    """Usual mean and standard deviation of each channel, (2, C): for batch norm the running ones at the fit."""
    logits: bool
    """Whether the outputs are logits of classes."""
    kind: str = field(metadata=coded(_KIND), default=BATCH_NORM)
    """Which layers are watched."""
    last: str | None = field(metadata=coded(_LAST), default=None)
    """The last linear layer of a classifier. It is the last place."""
    directions: Mapping[str, Tensor] = field(metadata=coded(_DIRECTIONS), default_factory=dict)
    """Principal directions of the channels, (C, C), by the name of a place. Elsewhere channels are as they are."""

    @property
    def size(self) -> int:
        """The number of statistics, D."""
        return sum(place.size for place in self.places)

    @cached_property
    def _units(self) -> list[tuple[Tensor, bool]]:
        """The units of each place, (2, C), and whether a mean is so far from zero that activations must be centred."""
        each = self.units.split([place.channels for place in self.places], dim=1)
        return [(unit.contiguous(), bool((unit[0].abs() > FAR * unit[1]).any())) for unit in each]

    @property
    def num_features(self) -> int:
        """The number of last features. They are the last statistics."""
        return self.places[-1].channels if self.last else 0

    def along_channels(self, place: Place, h: Tensor) -> Tensor:
        """Return the input of a layer with its channels, or their principal directions, along the second axis."""
        if place.name not in self.directions:
            return h.movedim(place.axis, 1)
        return (h.float().movedim(place.axis, -1) @ self.directions[place.name].to(h.device)).movedim(-1, 1)

    @torch.no_grad()
    def __call__(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        r"""Run the network once. Return the statistics (N, D) and the logits (N, K) of each input, on the CPU.

        At a layer with positions a channel has three statistics. Let $z$ be the mean of the channel over the positions
        of this one input, and $v$ its variance over them, both in units of the usual ones. The statistics are $z$,
        $\log(v + z^2)$ (the second moment about the usual mean) and $\log v$. Without positions $z$ is the only one.
        If the outputs are no logits, K is 0. For a map of logits K is 1: its mean energy, negated. Of a layer that
        runs several times the last run counts.
        """
        watched = {place.name: (place, *units) for place, units in zip(self.places, self._units, strict=True)}

        def see(name: str, h: Tensor) -> Tensor:
            place, unit, is_far = watched[name]
            if h.shape[0] != inputs.shape[0]:  # not len(), which a file would take as a constant
                raise BatchbayesError(
                    expected=f"one row for each of {len(inputs)} inputs at the {self.kind} layer {place.name}",
                    got=f"an activation of shape {tuple(h.shape)}",
                    fix="let the layer take (N, channels, positions), and not all positions of all inputs as rows",
                )
            h = self.along_channels(place, h)
            return _statistics(h, unit.to(h.device), place.positions, is_far).cpu()

        seen, _, outputs = tap(self.network, inputs, watched, see)
        missing = [place.name for place in self.places if place.name not in seen]
        if missing:
            raise BatchbayesError(
                expected=f"a forward pass through the {self.kind} layers that the training data went through",
                got=f"inputs of shape {tuple(inputs.shape)} for which {some(missing)} did not run",
                fix="pass inputs of the kind that the network was trained with",
            )
        return torch.cat([seen[place.name] for place in self.places], 1), kept_outputs(outputs, self.logits).cpu()

    def of_all(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the statistics (N, D) and the logits (N, K) of any number of inputs, a chunk at a time."""
        found = [self(chunk) for chunk in cut(inputs, None, CHUNK)]
        statistics, logits = (torch.cat(column) for column in zip(*found, strict=True))
        return require_finite(statistics, "the statistics of the inputs"), require_finite(logits, "the outputs")

    def warn_if_changed(self) -> None:
        """Warn if weights or running statistics are not those of the fit: the network uses the present ones."""
        present = _layers(self.network.module, self.kind).keys() | _layers(self.network.module, PLAIN).keys()
        if lost := [place.name for place in self.places if place.name not in present]:
            got, fix = f"none at {some(lost)}", "fit again after you change the network"
            raise BatchbayesError(f"the {self.kind} layers that the detector was fitted to", got, fix)
        self.network.warn_if_changed()
        if self.kind != BATCH_NORM:
            return
        by_name = {site.name: site for site in all_sites(self.network.module)}
        present = _running_units([by_name[place.name] for place in self.norms])
        fitted = self.units[:, : self.units.shape[1] - self.num_features]
        if present.shape != fitted.shape or bool(((present - fitted) / fitted[1]).abs().max() > MOVED):
            warn(
                f"the running statistics of {type(self.network.module).__name__} have changed since the fit, as by a "
                "pass in training mode: the scores may be wrong. Fit again, or load the old weights."
            )

    @property
    def norms(self) -> tuple[Place, ...]:
        """The places without the last features."""
        return self.places[:-1] if self.last else self.places


def watch(network: Network, example: Tensor, logits: bool | None) -> Sight:
    """Find the batch-norm sites that a forward pass of `example` meets, and whether the outputs are logits."""
    sites, _, outputs, axes = find_sites(network, example)
    places = tuple(Place(site.name, site.channels, axes[site.name] > 2) for site in sites)
    return Sight(network, places, _running_units(sites), _are_logits(outputs, logits))


def watch_any(network: Network, examples: Tensor, logits: bool | None) -> Sight:
    """Watch batch norms if there are any, else norms of other kinds, else linear layers and convolutions.

    The first have units of their own. Those of the others are measured on `examples`. Last features join them.
    """
    if all_sites(network.module):
        return _with_last_features(watch(network, examples[:2], logits), examples)
    for kind in (NORM, PLAIN):
        if sight := _watch_kind(network, examples, logits, kind):
            return _with_last_features(sight, examples)
    raise BatchbayesError(
        expected="a network with norm, linear or convolution layers that get one row for each input",
        got=f"{type(network.module).__name__} without any",
        fix="call such layers as modules in forward(), with the inputs along their first axis; pass a scripted network "
        "as it was before scripting",
    )


def _watch_kind(network: Network, examples: Tensor, logits: bool | None, kind: str) -> Sight | None:
    """Watch the layers of one kind that get one row for each example, or return None if there are none."""
    layers, directions = _layers(network.module, kind), {}

    def note(name: str, h: Tensor) -> tuple[Place, Tensor] | None:
        if not (isinstance(h, Tensor) and h.is_floating_point() and h.ndim >= 2 and len(h) == len(examples)):
            return None
        axis = _channel_axis(layers[name], h)
        values = h.movedim(axis, 0).flatten(1).double()
        unit = _unit(values)
        if _mixes_channels(layers[name]) and h.ndim > 2 and len(values) <= min(WIDEST, values.shape[1]):
            directions[name] = _principal(values).float().contiguous()  # as files hold them
            unit = _unit(directions[name].double().T @ values)
            unit[1].clamp_(min=LEAST_STD * float(unit[1].max()))
        return Place(name, h.shape[axis], h.ndim > 2, axis), unit

    with torch.no_grad():
        seen, _, outputs = tap(network, examples, layers, note)
    found = {name: each for name, each in seen.items() if each is not None}
    if not found:
        return None
    places, units = zip(*found.values(), strict=True)
    kept = {name: each.cpu() for name, each in directions.items() if name in found}
    return Sight(network, places, torch.cat(units, 1), _are_logits(outputs, logits), kind, directions=kept)


def _with_last_features(sight: Sight, examples: Tensor) -> Sight:
    """Also watch what the last linear layer of a classifier gets, if its outputs can be the logits."""
    linear = modules_by_name(sight.network.module, nn.Linear)
    with torch.no_grad():
        found, order, outputs = tap(sight.network, examples, linear)
    rows = [name for name in order if found[name].ndim == 2 and len(found[name]) == len(examples)]
    able = [name for name in rows if outputs.ndim == 2 and linear[name].out_features == outputs.shape[1] > 1]
    if not able or not sight.logits:
        return sight
    last = able[-1]
    units = zip(sight.places, sight.units.split([place.channels for place in sight.places], 1), strict=True)
    others = [(place, unit) for place, unit in units if place.name != last]
    place, unit = Place(last, found[last].shape[1], False), _unit(found[last].T.double())
    every = torch.cat([*(unit for _, unit in others), unit], 1)
    return replace(sight, places=(*(place for place, _ in others), place), units=every, last=last)


def _unit(values: Tensor) -> Tensor:
    """Return mean and standard deviation of channels (C, n), (2, C) in float32. What never varies has the unit 1."""
    std = values.std(1, correction=0)
    return torch.stack([values.mean(1), torch.where(std > 0, std, 1.0)]).float().cpu()


def _principal(values: Tensor) -> Tensor:
    """Return the principal directions of channels (C, n), (C, C)."""
    centred = values - values.mean(1, keepdim=True)
    return torch.linalg.eigh(centred @ centred.T)[1]


def _mixes_channels(layer: nn.Module) -> bool:
    """Whether a norm scales all channels of a position together."""
    name = type(layer).__name__.lower()
    return isinstance(layer, nn.LayerNorm | nn.RMSNorm) or "layernorm" in name or "rmsnorm" in name


def _layers(module: nn.Module, kind: str) -> dict[str, nn.Module]:
    """Return the layers of a kind by name."""
    if kind == PLAIN:
        return modules_by_name(module, (nn.Linear, _ConvNd))
    if kind == BATCH_NORM:
        return {site.name: site.layer for site in all_sites(module)}
    known = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _InstanceNorm)
    return {
        name: layer
        for name, layer in modules_by_name(module).items()
        if isinstance(layer, known) or any(part in type(layer).__name__.lower() for part in NORM_NAMES)
    }


def _channel_axis(layer: nn.Module, h: Tensor) -> int:
    """Return the axis of the channels in the input of a layer: the last one of linear layers and layer norms."""
    if isinstance(layer, nn.Linear):
        return h.ndim - 1
    shape = getattr(layer, "normalized_shape", None) or getattr(getattr(layer, "weight", None), "shape", ())
    over_last = not isinstance(layer, nn.GroupNorm | _InstanceNorm | _ConvNd) and "2d" not in type(layer).__name__
    axis = h.ndim - max(1, len(shape))
    return axis if over_last and axis > 0 and tuple(h.shape[axis:]) == tuple(shape) else 1


def _layout(module: nn.Module, kind: str) -> list[list[str]]:
    """Return name and class of each layer of a kind."""
    return [[name, type(layer).__name__] for name, layer in _layers(module, kind).items()]


def _are_logits(outputs: Tensor, logits: bool | None) -> bool:
    if logits and outputs.ndim < 2:
        raise BatchbayesError(
            expected="logits of shape (N, K, ...)", got=f"outputs of shape {tuple(outputs.shape)}", fix="drop logits="
        )
    return outputs.ndim >= 2 and outputs.shape[1] >= 3 if logits is None else logits


def _running_units(sites: Sequence[Site]) -> Tensor:
    """Return running mean and running standard deviation of each channel of the sites, (2, C) in float32."""
    fix = "use a network with running statistics: without them an output depends on the rest of the batch"
    require_running(sites, "in every batch-norm layer", fix)
    pairs = [(site.running, site.epsilon) for site in sites]
    return torch.cat([torch.stack([mean, (var + eps).sqrt()]).float().cpu() for (mean, var), eps in pairs], 1)


def _statistics(h: Tensor, unit: Tensor, positions: bool, is_far: bool) -> Tensor:
    """Return the statistics of the input (N, C, ...) of one layer, (N, C) or (N, 3 C)."""
    mean, std = unit
    if not positions:
        return ((h - mean) / std).float()
    over = tuple(range(2, h.ndim))
    if is_far:
        h, mean = h - mean.view(-1, *[1] * (h.ndim - 2)), torch.zeros_like(mean)
    h = h.float()
    own_mean = h.mean(over)
    parts = [h] if torch.compiler.is_exporting() else cut(h, None, PIECE)
    square = torch.cat([part.square().mean(over) for part in parts])
    z = (own_mean - mean) / std
    variance = ((square - own_mean.square()) / std.square()).clamp_min(0)
    return torch.cat([z, (variance + z.square() + FLOOR).log(), (variance + FLOOR).log()], 1)


def layer_means(places: Sequence[Place], z: Tensor) -> Tensor:
    """Return the mean of each of the statistics of a layer over its channels, (N, d), from standardised ones (N, D).

    A layer without positions has one statistic. The logarithm of its mean square joins it.
    """
    found = []
    for place, part in zip(places, z.split([place.size for place in places], dim=1), strict=True):
        found.append(part.unflatten(1, (-1, place.channels)).mean(2))
        if not place.positions:
            found.append((part.square().mean(1, keepdim=True) + FLOOR).log())
    return torch.cat(found, 1)


def kept_outputs(outputs: Tensor, logits: bool) -> Tensor:
    """Return what is kept of the outputs, (N, K) in float64."""
    if not logits:
        return outputs.new_zeros(outputs.shape[0], 0, dtype=torch.float64)
    values = outputs.double()
    return values if values.ndim == 2 else values.logsumexp(1).flatten(1).mean(1, keepdim=True)
