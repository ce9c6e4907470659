"""Several inputs of a network as one tensor, for an assessment, which holds one tensor for each example."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from batchbayes.errors import BatchbayesError
from batchbayes.network.function import with_forward
from batchbayes.network.inputs import Inputs


class Packing:
    """Several inputs of each example side by side in one tensor (N, 1, D) of float64, for what takes one tensor alone.

    The first inputs tell the shapes and types.

    >>> packing, both = Packing(), Inputs([torch.ones(5, 2)], {"mask": torch.ones(5, 3, dtype=torch.bool)})
    >>> packing.packed(both).shape, packing.unpacked(packing.packed(both))
    (torch.Size([5, 1, 5]), Inputs((5, 2), mask (5, 3)))
    """

    def __init__(self) -> None:
        self._forms: list[tuple[torch.Size, torch.dtype]] = []
        self._names: tuple[str | None, ...] = ()

    def packed(self, inputs: Inputs) -> Tensor:
        tensors, names = inputs.tensors(), (*[None] * len(inputs.args), *inputs.named)
        forms = [(tensor.shape[1:], tensor.dtype) for tensor in tensors]
        self._forms, self._names = self._forms or forms, self._names or names
        if (forms, names) != (self._forms, self._names):
            raise BatchbayesError(
                expected=f"inputs of the same shapes and types in all batches, as {[tuple(s) for s, _ in self._forms]}",
                got=f"{inputs}",
                fix="pad sequences to one length; bb.predict takes batches of different lengths",
            )
        return torch.cat([tensor.flatten(1).double() for tensor in tensors], 1).unsqueeze(1)

    def unpacked(self, rows: Tensor) -> Inputs | None:
        """Return the inputs; None if this is something else than inputs that were packed."""
        sizes = [math.prod(shape) for shape, _ in self._forms]
        if not sizes or not isinstance(rows, Tensor) or rows.shape[1:] != (1, sum(sizes)):
            return None
        parts = [
            part.reshape(len(rows), *shape).to(dtype)
            for part, (shape, dtype) in zip(rows[:, 0].split(sizes, 1), self._forms, strict=True)
        ]
        named = {name: part for name, part in zip(self._names, parts, strict=True) if name is not None}
        return Inputs(parts[: len(parts) - len(named)], named)


def one_input(model: nn.Module, packing: Packing) -> nn.Module:
    """Return the same network, which also takes several inputs that were packed into one tensor."""
    kind: Any = type(model)

    def forward(self: nn.Module, *args: Any, **named: Any) -> Any:
        several = None if named or len(args) != 1 else packing.unpacked(args[0])
        return (
            kind.forward(self, *args, **named)
            if several is None
            else kind.forward(self, *several.args, **several.named)
        )

    return with_forward(model, forward)
