"""What a stack is: the layers that its networks have in common, and the tensors of all of them.

Axes: G networks, S draws, then examples and features.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layer:
    """One linear layer and what stands around it, by the names of the modules; None is for what is not there."""

    linear: str
    dropout: str | None = None
    norm: str | None = None
    rectified: bool = False
    epsilon: float = 0.0
    momentum: float = 0.0

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of its parameters; those without a bias or a norm are left out by the stack."""
        norm = (f"{self.norm}.weight", f"{self.norm}.bias") if self.norm else ()
        return f"{self.linear}.weight", f"{self.linear}.bias", *norm


@dataclass(frozen=True, eq=False)
class Stack:
    """G networks of one shape."""

    layers: tuple[Layer, ...]
    tensors: Mapping[str, Tensor]
    """Parameters, running statistics and their counters (G, ...) by their names in the networks."""
    dropout_rates: Mapping[str, Tensor]
    """(G,) for each dropout module."""

    def __len__(self) -> int:
        return len(self.tensors[f"{self.layers[0].linear}.weight"])

    def parameter_names(self) -> list[str]:
        """What is trained, in the order of the layers."""
        return [name for layer in self.layers for name in layer.trained if name in self.tensors]

    def select(self, networks: Tensor | Sequence[int]) -> "Stack":
        """Copies of some of the networks, chosen by number or by a mask."""
        chosen = torch.as_tensor(networks)
        return replace(
            self,
            tensors={name: tensor[chosen] for name, tensor in self.tensors.items()},
            dropout_rates={name: rates[chosen] for name, rates in self.dropout_rates.items()},
        )


def join(stacks: Sequence[Stack], order: Tensor) -> Stack:
    """One stack of all networks of several; network i of the result is number `order[i]` of those laid end to end."""
    tensors, rates = (
        {name: torch.cat([getattr(stack, kind)[name] for stack in stacks])[order] for name in getattr(stacks[0], kind)}
        for kind in ("tensors", "dropout_rates")
    )
    return Stack(stacks[0].layers, tensors, rates)
