"""A stack: the layers that some networks have in common, and the tensors of all of these networks.

Axes: G networks, S draws, then examples and features.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layer:
    """One linear layer and the modules around it, by their names in the network. None stands for an absent module."""

    linear: str
    dropout: str | None = None
    norm: str | None = None
    rectified: bool = False
    """Whether a ReLU comes last."""
    epsilon: float = 0.0
    momentum: float = 0.0

    @property
    def trained(self) -> tuple[str, ...]:
        """The names that its parameters have. There is no parameter for some of them if the layer has no bias."""
        norm = (f"{self.norm}.weight", f"{self.norm}.bias") if self.norm else ()
        return f"{self.linear}.weight", f"{self.linear}.bias", *norm


@dataclass(frozen=True, eq=False)
class Stack:
    """G networks of one shape."""

    layers: tuple[Layer, ...]
    tensors: Mapping[str, Tensor]
    """All parameters and buffers, by their names in the networks, each (G, ...)."""
    dropout_rates: Mapping[str, Tensor]
    """For each dropout module (G,)."""

    def __len__(self) -> int:
        return len(self.tensors[f"{self.layers[0].linear}.weight"])

    def parameter_names(self) -> list[str]:
        """Return the names of all parameters, in the order of the layers."""
        return [name for layer in self.layers for name in layer.trained if name in self.tensors]

    def select(self, networks: Tensor | Sequence[int]) -> "Stack":
        """Return copies of some of the networks, which are chosen by their numbers or by a mask."""
        chosen = torch.as_tensor(networks)
        return replace(
            self,
            tensors={name: tensor[chosen] for name, tensor in self.tensors.items()},
            dropout_rates={name: rates[chosen] for name, rates in self.dropout_rates.items()},
        )

    def joined(self, more: "Stack") -> "Stack":
        """Return these networks, followed by those of another stack of the same shape."""
        return replace(
            self,
            tensors={name: torch.cat([tensor, more.tensors[name]]) for name, tensor in self.tensors.items()},
            dropout_rates={
                name: torch.cat([own, more.dropout_rates[name]]) for name, own in self.dropout_rates.items()
            },
        )
