"""What a transform is, and several of them one after the other.

A transform turns some uniform numbers into one view of the inputs. The same numbers serve for all inputs, so an input's
view does not depend on its neighbours. Geometric transforms can be undone on outputs that are maps of the inputs.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from batchbayes.errors import BatchbayesError


class Transform(ABC):
    """A random transform of inputs (N, ...), whose shape it keeps."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many uniform numbers one view takes."""

    @abstractmethod
    def apply(self, inputs: Tensor, numbers: Tensor) -> Tensor:
        """Return the view of inputs (N, ...) that uniform numbers (size,) stand for."""

    def undo(self, outputs: Tensor, numbers: Tensor) -> Tensor:
        """Move outputs (N, ..., H, W) for this view back to the places of the original inputs."""
        return outputs

    def __call__(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return one random view of the inputs."""
        return self.apply(inputs, torch.rand(self.size, generator=generator, dtype=torch.float64))


@dataclass(frozen=True)
class Compose(Transform):
    """Apply several transforms, one after the other: `Compose(RandomCrop(4), RandomFlip())`."""

    transforms: tuple[Transform, ...]

    def __init__(self, *transforms: Transform) -> None:
        if not transforms or not all(isinstance(each, Transform) for each in transforms):
            raise BatchbayesError(
                expected="one ready transform or more",
                got=", ".join(type(each).__name__ for each in transforms) or "none",
                fix="call your own functions inside one function, and pass that to with_views",
            )
        object.__setattr__(self, "transforms", transforms)

    @property
    def size(self) -> int:
        return sum(each.size for each in self.transforms)

    def apply(self, inputs: Tensor, numbers: Tensor) -> Tensor:
        for each, own in self._shares(numbers):
            inputs = each.apply(inputs, own)
        return inputs

    def undo(self, outputs: Tensor, numbers: Tensor) -> Tensor:
        for each, own in reversed(self._shares(numbers)):
            outputs = each.undo(outputs, own)
        return outputs

    def _shares(self, numbers: Tensor) -> list[tuple[Transform, Tensor]]:
        shares = numbers.split([each.size for each in self.transforms])
        return list(zip(self.transforms, shares, strict=True))

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self.transforms))})"


def require_floating(transform: Transform, inputs: Tensor) -> None:
    if not inputs.is_floating_point():
        raise BatchbayesError(
            expected=f"floating-point inputs for {type(transform).__name__}",
            got=str(inputs.dtype),
            fix="convert the inputs first",
        )
