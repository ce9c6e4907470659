"""Many small networks of one shape as one: their parameters stacked, their products batched.

A chain of (dropout ->) linear -> (batch norm ->) (ReLU) layers is all that a stack can hold: perceptrons, of which
hundreds are trained for one table. Axes: G networks, S draws, then examples and features.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from batchbayes.errors import BatchbayesError


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
    """Parameters and running statistics (G, ...) by their names in the networks."""
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


def stack_networks(networks: Sequence[nn.Module]) -> Stack:
    """Copy the parameters of networks of one shape into a stack.

    >>> chain = lambda: nn.Sequential(nn.Linear(3, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    >>> stack = stack_networks([chain() for _ in range(5)])
    >>> len(stack), stack.tensors["0.weight"].shape
    (5, torch.Size([5, 8, 3]))
    """
    if not networks:
        raise BatchbayesError(expected="at least one network", got="none", fix="pass some")
    chains = [tuple(_layers(network)) for network in networks]
    states = [network.state_dict() for network in networks]
    shapes = [{name: tensor.shape for name, tensor in state.items()} for state in states]
    odd = next((i for i in range(len(networks)) if (chains[i], shapes[i]) != (chains[0], shapes[0])), None)
    if odd is not None:
        raise BatchbayesError(
            expected="networks of one shape", got=f"another one at position {odd}", fix="stack each shape by itself"
        )
    kept = [name for name in states[0] if not name.endswith("num_batches_tracked")]
    rates = {
        layer.dropout: torch.tensor(
            [network.get_submodule(layer.dropout).p for network in networks], dtype=torch.float64
        )
        for layer in chains[0]
        if layer.dropout
    }
    return Stack(chains[0], {name: torch.stack([state[name] for state in states]) for name in kept}, rates)


@torch.no_grad()
def unstack(stack: Stack, networks: Sequence[nn.Module]) -> None:
    """Copy the stack back into as many networks, in place."""
    for index, network in enumerate(networks):
        own = network.state_dict()
        for name, tensor in stack.tensors.items():
            own[name].copy_(tensor[index])


def join(stacks: Sequence[Stack], order: Tensor) -> Stack:
    """One stack of all networks of several; network i of the result is number `order[i]` of those laid end to end."""
    tensors, rates = (
        {name: torch.cat([getattr(stack, kind)[name] for stack in stacks])[order] for name in getattr(stacks[0], kind)}
        for kind in ("tensors", "dropout_rates")
    )
    return Stack(stacks[0].layers, tensors, rates)


def _layers(network: nn.Module) -> Iterator[Layer]:
    """Read a chain of layers off its modules, which stand in the order in which they are called."""
    found: Layer | None = None
    dropout: str | None = None
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear):
            if found:
                yield found
            found, dropout = Layer(name, dropout), None
        elif isinstance(module, nn.Dropout):
            dropout = name
        elif type(module) is nn.BatchNorm1d and found and module.affine and module.momentum is not None:
            found = replace(found, norm=name, epsilon=module.eps, momentum=module.momentum)
        elif isinstance(module, nn.ReLU) and found:
            found = replace(found, rectified=True)
        elif not isinstance(module, nn.Identity) and not any(True for _ in module.children()):
            raise BatchbayesError(
                expected="a chain of nn.Linear, nn.BatchNorm1d (affine), nn.ReLU and nn.Dropout",
                got=f"{type(module).__name__} at {name or 'the top'}",
                fix="train this network by training.loop.train",
            )
    if found is None or dropout:
        raise BatchbayesError(
            expected="a network that ends in a linear layer", got="none, or dropout after it", fix="check the network"
        )
    yield found
