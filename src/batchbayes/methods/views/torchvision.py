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
    """A view through a user's own function. Its parameters name a random stream: seed and index."""

    function: OwnFunction
    undo: OwnFunction | None
    """What moves maps for a view back to the inputs."""
    in_files: bool = False

    def look(self, inputs: Tensor, row: tuple[int, int]) -> Tensor:
        """Return the view. It must be that of each example alone, with the same generator."""
        name = f"transform {name_of(self.function)}"
        view, alone = (called(name, self.function, part, row) for part in (inputs, inputs[-1:]))
        require_finite(view, f"the view of the {name}")
        rounding = 1e-4 * float(view[-1:].double().abs().max())  # in the units of the inputs, whichever they are
        if not torch.allclose(alone.double(), view[-1:].double(), rtol=0, atol=rounding):
            raise BatchbayesError(
                expected=f"the same view of an example whenever the {name} gets the same generator",
                got="another view when the example came alone",
                fix="take all random numbers from the generator, and use one set of them for all examples of a call",
            )
        return view

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
        return called(f"function undo={name_of(self.undo)}", self.undo, outputs, row)

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


def called(name: str, function: OwnFunction, values: Tensor, row: tuple[int, int]) -> Tensor:
    """Return what a user's function makes of values (N, ...), or raise an error if it is of another form."""
    seed, index = row
    try:
        result = function(values.clone(), generator(seed, "view", index))  # it may change its input in place
    except (BatchbayesError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        is_of_form = not isinstance(error, TypeError)
        does = f"works on values of shape {tuple(values.shape)}" if is_of_form else "takes (inputs, generator)"
        got, fix = f"{type(error).__name__}: {error}"[:300], "call it with one batch of inputs and a torch.Generator"
        fix += "; torchvision_transform(...) wraps those of torchvision"
        raise BatchbayesError(f"a {name} that {does}", got, fix) from error
    if not isinstance(result, Tensor):
        raise BatchbayesError(f"a tensor from the {name}", type(result).__name__, "return what it makes of its input")
    for what in ("shape", "dtype", "device"):
        kept, found = (tuple(a) if what == "shape" else a for a in (getattr(values, what), getattr(result, what)))
        if kept != found:
            expected, fix = (
                f"a tensor of the same {what} from the {name}: {kept}",
                f"let it keep the {what} of its input",
            )
            raise BatchbayesError(expected, f"{found}", fix)
    return result


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
