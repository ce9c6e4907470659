"""Transforms that are a user's own code: checked at each use, and named in files, never stored."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from batchbayes._common.rng import generator
from batchbayes.errors import BatchbayesError
from batchbayes.methods.views.transforms import other_places
from batchbayes.network.inputs import require_finite

OwnFunction = Callable[[Tensor, torch.Generator], Tensor]
"""A transform `(inputs, generator) -> inputs`. All its random numbers come from the generator."""

_RANDOM = {
    torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal, torch.bernoulli, torch.multinomial,
    Tensor.uniform_, Tensor.normal_, Tensor.random_, Tensor.bernoulli_, Tensor.exponential_,
}  # fmt: skip


def name_of(function: object) -> str:
    """Return the name of a function, or of the class of another object that can be called."""
    return getattr(function, "__name__", None) or type(function).__name__


@dataclass(frozen=True)
class OwnLens:
    """A view through a user's own function. Its parameters are the numbers of a random stream."""

    function: OwnFunction
    undo: OwnFunction | None
    """What moves maps for a view back to the inputs."""

    @property
    def in_files(self) -> bool:
        return False

    def look(self, inputs: Tensor, row: tuple[int, int]) -> Tensor:
        return checked_view(self.function, inputs, lambda: _stream(row))

    def back(self, outputs: Tensor, inputs: Tensor, row: tuple[int, int]) -> Tensor:
        if not self._have_places(outputs, inputs):
            return outputs
        if self.undo is None:
            raise BatchbayesError(
                expected=f"undo= for the transform {name_of(self.function)}, because the network returns maps",
                got="none",
                fix="pass undo=, a function (outputs, generator) -> outputs that moves maps back to the inputs; if the "
                "transform moves no pixels, it returns the outputs as they are",
            )
        return checked_call(f"function undo={name_of(self.undo)}", self.undo, outputs, _stream(row))

    def _have_places(self, outputs: Tensor, inputs: Tensor) -> bool:
        """Whether outputs are maps (N, ..., H, W), or have the positions of sequences (N, C, L), as the inputs have."""
        if inputs.ndim < 3 or outputs.ndim < 3:  # tables, signals (N, L), or one row of outputs for each example
            return self.undo is not None and (outputs.ndim > 2 or outputs.shape == inputs.shape)
        if outputs.shape[-2:] == inputs.shape[-2:]:
            return True
        if outputs.ndim == 3:
            shared = outputs.shape[1] == inputs.shape[1] or outputs.shape[2] == inputs.shape[2]
            return self.undo is not None or (inputs.ndim == 3 and shared)
        if outputs.shape[-2:] != (1, 1):
            raise other_places(tuple(inputs.shape[-2:]), outputs)
        return False


def _stream(row: tuple[int, int]) -> torch.Generator:
    seed, index = row
    return generator(seed, "view", index)


def checked_view(function: OwnFunction, inputs: Tensor, generator: Callable[[], torch.Generator]) -> Tensor:
    """Return the view of inputs (N, ...) that a user's function makes, or raise an error that says what is wrong."""
    name = name_of(function)
    view = checked_call(f"transform {name}", function, inputs, generator())
    require_finite(view, f"the view of the transform {name}")
    _require_repeatable(name, view[-1:], checked_call(f"transform {name}", function, inputs[-1:], generator()))
    return view


def checked_call(name: str, function: OwnFunction, values: Tensor, generator: torch.Generator) -> Tensor:
    """Return what a user's function makes of values (N, ...), or raise an error if it is of another form."""
    try:
        result = function(values.clone(), generator)  # it may change its input in place
    except TypeError as error:
        raise BatchbayesError(
            expected=f"a {name} that takes (inputs, generator)",
            got=f"TypeError: {error}"[:300],
            fix="take all random numbers from the generator; torchvision_transform(...) wraps those of torchvision",
        ) from error
    except Exception as error:
        if isinstance(error, BatchbayesError | torch.OutOfMemoryError):
            raise
        raise BatchbayesError(
            expected=f"a {name} that works on values of shape {tuple(values.shape)}",
            got=f"{type(error).__name__}: {error}"[:300],
            fix="call it with one batch of inputs, and look what it does",
        ) from error
    if not isinstance(result, Tensor):
        fix = "return what it makes of its input"
        raise BatchbayesError(expected=f"a tensor from the {name}", got=type(result).__name__, fix=fix)
    for what in ("shape", "dtype", "device"):
        kept, found = getattr(values, what), getattr(result, what)
        if kept != found:
            raise BatchbayesError(
                expected=f"a tensor of the same {what} from the {name}: {_text(kept)}",
                got=_text(found),
                fix=f"let it keep the {what} of its input",
            )
    return result


def _require_repeatable(name: str, together: Tensor, alone: Tensor) -> None:
    """Refuse a transform that treats an example differently when it comes alone, with the same generator."""
    together, alone = together.double(), alone.double()
    rounding = 1e-4 * float(together.abs().max())  # in the units of the inputs, whichever they are
    if alone.shape != together.shape or not torch.allclose(alone, together, rtol=0, atol=rounding):
        raise BatchbayesError(
            expected=f"the same view of an example whenever the transform {name} gets the same generator",
            got="another view when the example came alone",
            fix="take all random numbers from the generator, and use one set of them for all examples of a call",
        )


def _text(value: object) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value)


@dataclass(frozen=True, eq=False)
class _Torchvision:
    """A transform of torchvision as a function `(inputs, generator) -> inputs`."""

    transform: Callable[[Tensor], Any]

    @property
    def __name__(self) -> str:
        return type(self.transform).__name__

    def __call__(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        with _RandomNumbersFrom(generator):
            return self.transform(inputs)


class _RandomNumbersFrom(TorchFunctionMode):
    """Let torch's random functions use this generator, in this thread alone. The global generator is untouched."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func in _RANDOM:
            given.setdefault("generator", self._generator)
        return func(*args, **given)


def torchvision_transform(transform: Callable[[Tensor], Any]) -> OwnFunction:
    """Return a torchvision transform (v2) as a function for `with_views`.

    torchvision draws one set of random parameters for a batch (N, C, H, W), from torch's global generator. Here it
    draws them from the generator of the view. torchvision itself is not imported.

    >>> class Brightness:  # called as a transform of torchvision is
    ...     def __call__(self, images):
    ...         return images * torch.empty(1).uniform_(0.8, 1.2)
    >>> brighter = torchvision_transform(Brightness())
    >>> first, second = (brighter(torch.ones(1, 3, 2, 2), torch.Generator().manual_seed(1)) for _ in range(2))
    >>> bool((first == second).all())
    True
    """
    if not callable(transform):
        raise BatchbayesError(
            expected="a transform of torchvision, which can be called with a batch of images",
            got=type(transform).__name__,
            fix="pass for example torchvision.transforms.v2.RandomHorizontalFlip()",
        )
    return _Torchvision(transform)
