"""The bank: everything that differs between draws, as tensors with one row for each draw.

A draw is the user's network with some of its tensors replaced, or with masks on the inputs of its dropout layers. A
posterior is asked for its draws, and what each of them puts into the network is noted down.

Views in a file: the transforms of `methods/views`, with their parameters read from a bank instead of drawn.

The novelty detector as a torch module: inputs in, p-values out. It computes what `Novelty.report` computes. Drift
likewise: the statistics of each input, and the prediction that is adapted to all inputs of a call.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchbayes._common.rng import even_numbers
from batchbayes.drift.adapt import ClassMoments, adapt_to
from batchbayes.drift.detector import Drift, sample_of
from batchbayes.errors import BatchbayesError
from batchbayes.export.linear import run_network
from batchbayes.methods.laplace.last_layer_laplace import LaplacePosterior
from batchbayes.methods.mc_dropout import DropoutPosterior, DropoutSite
from batchbayes.methods.views.transforms import (
    Compose,
    RandomCrop,
    RandomFlip,
    RandomShiftScale,
    TableJitter,
    Transform,
)
from batchbayes.methods.views.with_views import ViewsPosterior
from batchbayes.network.function import Network
from batchbayes.novelty.detector import Novelty
from batchbayes.novelty.scores import TAIL, TIE, ClassGaussian, LastFeatures
from batchbayes.novelty.statistics import FLOOR, Place, Sight, kept_outputs
from batchbayes.posterior import Posterior

ADAPTED = {"probs": "adapted_probs", "pred_mean": "adapted_mean"}
"""Outputs of a file, and their names if they are adapted."""
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


Change = Callable[[Tensor, Tensor], Tensor]
"""From inputs, or outputs, and one row of the bank to the changed ones."""


@dataclass(frozen=True, eq=False)
class BankedView:
    """One transform, with the parameters of V views."""

    rows: Tensor
    """(V, ...)"""
    look: Change
    """Returns the view of inputs (N, ...)."""
    back: Change
    """Moves outputs (N, ..., H, W) that are maps back to the places of the inputs."""


def bank_views(posterior: ViewsPosterior, count: int, seed: int) -> list[BankedView]:
    """Return the transforms of a posterior, one after the other, with the parameters of its first views."""
    if not isinstance(posterior.transform, Transform):
        raise BatchbayesError(
            expected="ready transforms such as RandomCrop, which a file can hold",
            got=f"a function of your own, {posterior.transform!r}",
            fix="export the posterior without it, or use a ready transform",
        )
    numbers = torch.stack([even_numbers(seed, index, posterior.transform.size) for index in range(count)])
    parts = posterior.transform.transforms if isinstance(posterior.transform, Compose) else (posterior.transform,)
    shares = numbers.split([part.size for part in parts], dim=1)
    return [_banked(part, share) for part, share in zip(parts, shares, strict=True)]


def _banked(transform: Transform, numbers: Tensor) -> BankedView:
    """Return one transform with the parameters that the numbers (V, size) stand for."""
    if getattr(transform, "layout", None) == "NHWC":
        fix = "let the network take images (N, C, H, W)"
        raise BatchbayesError(expected="views of images (N, C, H, W) in a file", got='layout="NHWC"', fix=fix)
    match transform:
        case RandomCrop():
            offsets = torch.tensor([transform.offsets(each) for each in numbers])
            return BankedView(offsets, lambda x, row: _cropped(x, row, transform.fill), _uncropped)
        case RandomFlip():
            return BankedView((numbers[:, :1] < 0.5).long(), _flipped, _flipped)
        case RandomShiftScale():
            rows = torch.stack([_matrices(transform, each) for each in numbers])
            return BankedView(rows, lambda x, row: _moved(x, row, transform.fill), _moved_back)
        case TableJitter():
            like = torch.zeros(1, transform.size, dtype=torch.float64)
            rows = torch.cat([transform.apply(like, each) for each in numbers])
            return BankedView(rows, lambda x, row: x + row.to(x.dtype), lambda outputs, _: outputs)
    raise BatchbayesError(
        expected="views of images or tables, which a file can hold",
        got=type(transform).__name__,
        fix="export the posterior without views",
    )


def _fill(fill: float | tuple[float, ...], images: Tensor) -> Tensor:
    return torch.tensor(fill, dtype=images.dtype).reshape(-1, 1, 1)


def _places(length: int, offset: Tensor) -> tuple[Tensor, Tensor]:
    """Return where each pixel of a moved row comes from, within the image, and whether it is inside."""
    places = torch.arange(length) + offset
    return places.clamp(0, length - 1), (places >= 0) & (places < length)


def _cropped(images: Tensor, row: Tensor, fill: float | tuple[float, ...]) -> Tensor:
    (rows, in_rows), (columns, in_columns) = (
        _places(length, offset) for length, offset in zip(images.shape[-2:], row.unbind(), strict=True)
    )
    seen = images.index_select(-2, rows).index_select(-1, columns)
    return torch.where(in_rows[:, None] & in_columns, seen, _fill(fill, images))


def _uncropped(outputs: Tensor, row: Tensor) -> Tensor:
    (rows, _), (columns, _) = (
        _places(length, -offset) for length, offset in zip(outputs.shape[-2:], row.unbind(), strict=True)
    )
    return outputs.index_select(-2, rows).index_select(-1, columns)


def _flipped(images: Tensor, row: Tensor) -> Tensor:
    columns = torch.arange(images.shape[-1])
    return images.index_select(-1, torch.where(row > 0, columns.flip(0), columns))


def _matrices(transform: RandomShiftScale, numbers: Tensor) -> Tensor:
    """Return the matrices of the view and of its inverse, (2, 2, 3)."""
    zoom, (across, down) = transform.parameters(numbers)
    there = [[1 / zoom, 0.0, -across], [0.0, 1 / zoom, -down]]
    back = [[zoom, 0.0, across * zoom], [0.0, zoom, down * zoom]]
    return torch.tensor([there, back])


def _moved(images: Tensor, row: Tensor, fill: float | tuple[float, ...]) -> Tensor:
    return _resampled(images - _fill(fill, images), row[0], "zeros") + _fill(fill, images)


def _moved_back(outputs: Tensor, row: Tensor) -> Tensor:
    maps = outputs.flatten(1, -3) if outputs.ndim > 3 else outputs[:, None]
    return _resampled(maps, row[1], "border").reshape(outputs.shape)


def _resampled(images: Tensor, matrix: Tensor, outside: str) -> Tensor:
    fine = images.to(torch.promote_types(images.dtype, torch.float32))  # half precision is too coarse for places
    grid = F.affine_grid(matrix[None].to(fine.dtype), [1, *images.shape[1:]], align_corners=False)
    grid = grid.repeat(images.shape[0], 1, 1, 1)  # onnxruntime does not broadcast it
    return F.grid_sample(fine, grid, padding_mode=outside, align_corners=False).to(images.dtype)


class Watched(nn.Module):
    """One more pass of the network, with its layers watched."""

    def __init__(self, sight: Sight, network: Network) -> None:
        super().__init__()
        self.network, self._run, self._sight = network.module, partial(run_network, network), sight
        # torch.export wants tensors that are in the order of their memory, and warns of others.
        units = sight.units.split([place.channels for place in sight.places], dim=1)
        self._units = [unit.contiguous() for unit in units]

    def _see(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the statistics (N, D) of all sites, and the logits (N, K), as `Sight` does."""
        seen: dict[str, Tensor] = {}
        places = self._sight.places

        def see(place: Place, unit: Tensor, h: Tensor) -> None:
            seen[place.name] = _statistics(self._sight.along_channels(place, h), unit, place.positions)

        before = {place.name: partial(see, place, unit) for place, unit in zip(places, self._units, strict=True)}
        logits = kept_outputs(self._run(inputs, before=before), self._sight.logits)
        return torch.cat([seen[place.name] for place in places], 1), logits


class Detector(Watched):
    """From inputs to p-values of novelty."""

    def __init__(self, detector: Novelty, network: Network) -> None:
        super().__init__(detector.sight, network)
        features = detector.features
        if features is not None:
            features = LastFeatures(_in_order(features.within), _in_order(features.common))
        ordered = replace(detector, gaussian=_in_order(detector.gaussian), features=features)
        self._parts, self._sum_of = ordered.parts, ordered.sum_of
        self._ordinary = detector.ordinary_parts.double().sort(0).values  # (n, parts)
        self._calibration = detector.calibration_scores.double()  # (m,)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the share of ordinary inputs that are at least as unusual, (N,)."""
        score = self._sum_of(self._surprise(self._parts(*self._see(inputs))[0]))
        at_least = (self._calibration >= score[:, None] - TIE).double().sum(1)
        return ((1 + at_least) / (len(self._calibration) + 1)).float()

    def _surprise(self, parts: Tensor) -> Tensor:
        """Return -log p of each part (N, parts) among the ordinary ones, as `ranks.surprise` does."""
        count = len(self._ordinary)
        tail = max(1, int(TAIL * count))
        start = self._ordinary[-tail - 1 :][:1]  # (1, parts)
        excess = (self._ordinary[-tail:] - start).mean(0).clamp_min(1e-9)
        at_least = (self._ordinary[None] >= parts[:, None] - TIE).double().sum(1)  # (N, parts)
        ranks = -((1 + at_least) / (count + 1)).log()
        beyond = (parts - start) / excess - math.log((1 + tail) / (count + 1))
        return torch.where(parts > start + TIE, beyond, ranks)


@dataclass(frozen=True, eq=False)
class _Traced(Network):
    """A network that the code of `drift` runs while it is traced."""

    def __call__(self, inputs: Any, **changes: Any) -> Tensor:  # type: ignore[override]
        return run_network(self, inputs, **changes)


class Drifted(Watched):
    """From inputs to their drift statistics, and to predictions that are adapted to all inputs of the call.

    It runs the code of `drift` itself. There is no gate: the test compares with windows of ordinary inputs, which would
    make the file large. The mean of `drift_statistics` over a window is all that the test needs of it.
    """

    def __init__(self, drift: Drift, network: Network, finish: Callable[[Tensor], dict[str, Tensor]]) -> None:
        """`finish` returns what is said, by name, about outputs (N, ...) of the network."""
        super().__init__(drift.sight, network)
        self._traced = replace(drift.sight, network=_Traced(network.module, network.output))
        moments = {name: tensor.contiguous() for name, tensor in vars(drift.moments).items() if name[0] != "_"}
        self._moments, self._gaussian = ClassMoments(**moments), _in_order(drift.ordinary.gaussian)
        self._moments._unmixing  # noqa: B018  # computed here, because a file cannot invert a matrix
        self._is_labelled, self._finish = drift.confidence is not None, finish

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        """Return outputs of the file by name."""
        statistics, logits = self._see(inputs)
        rows, classes = sample_of(self._gaussian, statistics, logits)
        outputs = adapt_to(self._traced, self._moments, inputs).logits
        found = self._finish(outputs.float())
        shown = {new: found[old] for old, new in ADAPTED.items() if old in found}
        if self._is_labelled:
            shown["adapted_logits"] = outputs.float()
        return {"drift_statistics": rows, "drift_class": classes, **shown}


def _in_order(gaussian: ClassGaussian) -> ClassGaussian:
    return replace(gaussian, directions=gaussian.directions.contiguous())


def _statistics(h: Tensor, unit: Tensor, positions: bool) -> Tensor:
    """Return the statistics of the input (N, C, ...) of one site, (N, C) or (N, 3 C)."""
    middle, spread = unit
    if not positions:
        return ((h - middle) / spread).float()
    over, centred = list(range(2, h.ndim)), (h - middle.view(-1, *[1] * (h.ndim - 2))).float()
    z = centred.mean(over) / spread
    variance = (centred.square().mean(over) / spread.square() - z.square()).clamp_min(0)
    return torch.cat([z, (variance + z.square() + FLOOR).log(), (variance + FLOOR).log()], 1)
