"""Views: each draw sees its own random view of the inputs (test-time augmentation), around any posterior.

What is random: a transform of the inputs, such as the crop and flip of training, and what the wrapped posterior draws.
All inputs of a draw share the parameters of the transform. Draws spread these parameters evenly: of 16 draws, 8 are
mirrored, and their offsets cover the range.
Cost: none for the fit; a draw costs one transform beside the draw of the wrapped posterior.
Reference: Ashukha, Lyzhov, Molchanov, Vetrov, "Pitfalls of In-Domain Uncertainty Estimation and Ensembling in Deep
Learning", ICLR 2020. Where we differ: the parameters are spread evenly over draws instead of independent.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from batchbayes._common.checks import require_choice, whole_number
from batchbayes._common.files import under
from batchbayes._common.rng import even_numbers
from batchbayes.errors import BatchbayesError
from batchbayes.methods.table import from_named_state, named_state
from batchbayes.methods.views.signals import SignalCrop, SignalNoise, SignalShift
from batchbayes.methods.views.torchvision import OwnFunction, OwnLens, name_of
from batchbayes.methods.views.transforms import (
    Compose,
    RandomCrop,
    RandomFlip,
    RandomShiftScale,
    TableJitter,
    Transform,
)
from batchbayes.network.function import Function, Network
from batchbayes.patch import Mean, Patch, View
from batchbayes.posterior import Header, Posterior

_PREFIX = "wrapped."
_READY = (RandomCrop, RandomFlip, RandomShiftScale, TableJitter, SignalShift, SignalCrop, SignalNoise)
READY: dict[str, type[Any]] = {each.__name__: each for each in _READY}
"""The transforms that a file can name, beside `Compose`."""


@dataclass(frozen=True, eq=False)
class ViewsPosterior(Posterior):
    """Functions that first take a random view of their inputs, and then are draws of another posterior."""

    kind: ClassVar[str] = "views"

    posterior: Posterior
    transform: Transform | OwnFunction
    undo: OwnFunction | None = None
    """What moves maps for a view back to the inputs, for a transform that is a user's own function."""
    average: int = 1
    """How many views each draw averages the outputs of."""

    @property
    def device(self) -> torch.device:
        return self.posterior.device

    @property
    def network(self) -> Network:  # type: ignore[override]
        """The network of the wrapped posterior."""
        return self.posterior.network

    @property
    def needs_weights(self) -> bool:  # type: ignore[override]
        return self.posterior.needs_weights

    def __repr__(self) -> str:
        parts = self.transform.transforms if isinstance(self.transform, Compose) else [self.transform]
        names = ", ".join(name_of(part) for part in parts) + f", {self.average} averaged" * (self.average > 1)
        return f"{type(self).__name__}({names} before {type(self.posterior).__name__})"

    def draw(self, seed: int, index: int) -> Function:
        """Return draw `index` of the wrapped posterior, on view `index` of its inputs, or the mean of several such."""
        every = tuple(self._seen(seed, index * self.average + step) for step in range(self.average))
        return every[0] if self.average == 1 else Mean(every)

    def _seen(self, seed: int, index: int) -> Patch:
        """Return draw `index` of the wrapped posterior, which sees view `index`."""
        if isinstance(self.transform, Transform):
            view = View(self.transform, self.transform.row(even_numbers(seed, index, self.transform.size)))
        else:
            view = View(OwnLens(self.transform, self.undo), (seed, index))
        drawn = self.posterior.draw(seed, index)
        if isinstance(drawn, Patch):
            return replace(drawn, views=(view, *drawn.views))
        return Patch(drawn, views=(view,))

    def state(self) -> tuple[Header, dict[str, Tensor]]:
        header, tensors = named_state(self.posterior)
        if isinstance(self.transform, Transform):
            view = {"transform": to_header(self.transform), "own": None}
        else:
            view = {"own": {"transform": name_of(self.transform), "undo": self.undo and name_of(self.undo)}}
        view |= {"average": self.average, "wrapped": header}
        return view, {_PREFIX + key: tensor for key, tensor in tensors.items()}

    @classmethod
    def restore(
        cls,
        header: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        model: nn.Module,
        transform: OwnFunction | None = None,
        undo: OwnFunction | None = None,
    ) -> Self:
        """Build the posterior again. A user's own functions are passed again, because a file holds no code."""
        saved = header["own"]
        for role, given in (("transform", transform), ("undo", undo)):
            _require_named(role, given, saved[role] if saved else None)
        inner = from_named_state(header["wrapped"], under(tensors, _PREFIX), model)
        return cls(
            inner, transform or from_header(header["transform"]), undo, whole_number("average", int(header["average"]))
        )


def with_views(
    posterior: Posterior,
    transform: Transform | OwnFunction,
    *,
    average: int = 1,
    undo: OwnFunction | None = None,
) -> ViewsPosterior:
    """Let each draw of a posterior see its own random view of the inputs.

    View s depends on the seed and on s alone, and all inputs share its parameters. If the network returns maps
    (N, ..., H, W) of the size of its inputs, as in segmentation, each map is moved back to the inputs before draws are
    averaged.

    Args:
        posterior: any posterior; around `deterministic(model)` this is test-time augmentation.
        transform: best that of the training: `RandomCrop`, `RandomFlip` and `RandomShiftScale` for images (with
            `layout="NHWC"` if colours are last), `SignalShift`, `SignalCrop` and `SignalNoise` for signals,
            `TableJitter` for tables, several of them in `Compose`, a function `(inputs, generator) -> inputs`, or
            `torchvision_transform(...)`. A function takes all random numbers from the generator, and uses one set of
            them for all inputs.
        average: how many views each draw averages the outputs of. Draw s is the mean of the draws from `average * s` on
            that it would be without this option. A mean of logits with a temperature is better than a mean of
            probabilities with one (docs/results/views.md), but fewer draws say less about mutual information.
        undo: for a function and a network that returns maps or sequences: a function `(outputs, generator) -> outputs`
            that moves them back. Its generator starts where that of the transform starts.

    >>> import batchbayes as bb
    >>> network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 10))
    >>> posterior = with_views(bb.deterministic(network), bb.Compose(bb.RandomCrop(padding=1), bb.RandomFlip()))
    >>> posterior
    ViewsPosterior(RandomCrop, RandomFlip before PointPosterior)
    >>> bb.predict(posterior, torch.randn(5, 3, 8, 8), bb.categorical(), num_samples=16).probs.shape
    torch.Size([5, 10])
    """
    if not isinstance(posterior, Posterior) or isinstance(posterior, ViewsPosterior):
        raise BatchbayesError(
            expected="a posterior without views",
            got=f"a {type(posterior).__name__}",
            fix="pass for example deterministic(model); join several transforms by Compose",
        )
    if not callable(transform) or isinstance(transform, type):
        raise BatchbayesError(
            expected="a transform, or a function (inputs, generator) -> inputs",
            got=repr(transform),
            fix="pass for example RandomFlip()",
        )
    if isinstance(transform, Transform):
        to_header(transform)
    if undo is not None and (isinstance(transform, Transform) or not callable(undo)):
        raise BatchbayesError(
            expected="undo= as a function (outputs, generator) -> outputs, beside a transform that is a function too",
            got=f"{name_of(undo)} beside {name_of(transform)}",
            fix="leave it out if the transform is a ready one, because that has its own inverse",
        )
    return ViewsPosterior(posterior, transform, undo, whole_number("average", average))


def _require_named(role: str, given: OwnFunction | None, saved: str | None) -> None:
    """Refuse a function that is missing, or that has another name than the one in the file."""
    if (given and name_of(given)) != saved:
        raise BatchbayesError(
            expected=f"the function {saved} as {role}=" if saved else f"no {role}=, because the file needs none",
            got=name_of(given) if given else "none",
            fix=f"pass {role}={saved}: the file has the name of your function, never its code" if saved else "omit it",
        )


def to_header(transform: Transform) -> list[dict[str, Any]]:
    """Return names and parameters of a transform, or of the parts of a composition, as JSON values."""
    if isinstance(transform, Compose):
        return [part for each in transform.transforms for part in to_header(each)]
    if type(transform) not in READY.values():
        raise BatchbayesError(
            expected=f"a transform that a file can name: {', '.join([*READY, 'Compose'])}",
            got=type(transform).__name__,
            fix="pass a function (inputs, generator) to with_views instead of a class of your own",
        )
    values = {name: value for name, value in asdict(transform).items() if value is not None}  # type: ignore[call-overload]
    return [{"name": type(transform).__name__, **values}]


def from_header(parts: list[Mapping[str, Any]]) -> Transform:
    """Build a transform from what `to_header` returned."""
    found = []
    for part in parts:
        name, values = part["name"], {key: value for key, value in part.items() if key != "name"}
        require_choice("a transform", name, list(READY))
        found.append(READY[name](**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}))
    return found[0] if len(found) == 1 else Compose(*found)
