"""A stack: the layers that some networks have in common, the tensors of all of these networks, and their predictions.

A stack holds perceptrons, `batchbayes.models.MLP` or `nn.Sequential`: layers (dropout ->) linear -> (batch norm ->)
(ReLU).

Batch statistics or dropout masks are drawn for all networks at once, and all networks get the same inputs. The draws of
one network are laid out along its examples, so that a layer of all networks and all draws is one batched product.
Axes: G networks, S draws, then examples and features.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from batchbayes.errors import BatchbayesError
from batchbayes.models import MLP, SeededDropout

CHUNK = 2**20
"""How many numbers the widest layer holds at a time, so that they fit into the cache."""


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

    @property
    def hidden_widths(self) -> tuple[int, ...]:
        """The widths of all layers but the last one."""
        return tuple(self.tensors[f"{layer.linear}.weight"].shape[1] for layer in self.layers[:-1])

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


@dataclass(frozen=True, eq=False)
class Noise:
    """The random part of S draws of each of G networks. A module that is not named here is in evaluation mode."""

    statistics: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """For each batch norm the mean and the standard deviation, each (G, S, width)."""
    masks: Mapping[str, Tensor] = field(default_factory=dict)
    """For each dropout module the factors of its inputs, (G, S, width)."""


@torch.no_grad()
def batch_noise(stack: Stack, batches: Tensor) -> Noise:
    """Return the batch statistics of S mini-batches (S, M, Q), with all layers in training mode."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    parts = [_batch_noise(stack, part) for part in batches.split(_affordable(stack, batches.shape[1]))]
    for name in parts[0]:
        means, stds = zip(*(part[name] for part in parts), strict=True)
        found[name] = (torch.cat(means, 1), torch.cat(stds, 1))
    return Noise(found)


def _batch_noise(stack: Stack, batches: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    found: dict[str, tuple[Tensor, Tensor]] = {}
    draws = len(batches)
    values = batches.flatten(0, 1).expand(len(stack), -1, -1)
    for layer in stack.layers:
        values = _linear(stack, layer, values).unflatten(1, (draws, -1))  # (G, S, M, width)
        if layer.norm:
            variance, mean = torch.var_mean(values, 2, correction=0)
            found[layer.norm] = (mean, (variance + layer.epsilon).sqrt_())
            values = _normalise(stack, layer, values, *found[layer.norm])
        values = (values.relu_() if layer.rectified else values).flatten(1, 2)
    return found


def mask_noise(stack: Stack, num_samples: int, generator: torch.Generator) -> Noise:
    """Draw a mask for each dropout module. All networks use the same uniform numbers, each with its own rate."""
    masks = {}
    for layer in stack.layers:
        if layer.dropout:
            weight = stack.tensors[f"{layer.linear}.weight"]
            uniform = torch.rand(num_samples, weight.shape[2], generator=generator, dtype=weight.dtype)
            rates = stack.dropout_rates[layer.dropout].to(weight)[:, None, None]
            masks[layer.dropout] = (uniform >= rates) / (1 - rates)
    return Noise(masks=masks)


@torch.no_grad()
def stack_outputs(stack: Stack, inputs: Tensor, noise: Noise | None = None) -> Tensor:
    """Return outputs (G, S, N, K) for inputs (N, Q). Without noise there is one draw, in evaluation mode."""
    noise = noise or Noise()
    some = next(iter([*noise.masks.values(), *(mean for mean, _ in noise.statistics.values())]), None)
    draws = 1 if some is None else some.shape[1]
    step = _affordable(stack, len(inputs))
    return torch.cat([_outputs(stack, inputs, noise, slice(s, min(s + step, draws))) for s in range(0, draws, step)], 1)


def _outputs(stack: Stack, inputs: Tensor, noise: Noise, some: slice) -> Tensor:
    draws, values = some.stop - some.start, inputs.expand(len(stack), 1, -1, -1)  # (G, 1 or S, N, width)
    for layer in stack.layers:
        if layer.dropout and layer.dropout in noise.masks:
            values = values * noise.masks[layer.dropout][:, some, None]
        values = _linear(stack, layer, values.flatten(1, 2)).unflatten(1, values.shape[1:3])
        if layer.norm and layer.norm in noise.statistics:
            values = _normalise(stack, layer, values, *(part[:, some] for part in noise.statistics[layer.norm]))
        elif layer.norm:
            mean, variance = (stack.tensors[f"{layer.norm}.running_{kind}"][:, None] for kind in ("mean", "var"))
            values = _normalise(stack, layer, values, mean, (variance + layer.epsilon).sqrt())
        values = values.relu_() if layer.rectified else values
    return values.expand(-1, draws, -1, -1)


def _linear(stack: Stack, layer: Layer, values: Tensor) -> Tensor:
    """Apply a linear layer: (G, n, in) -> (G, n, out)."""
    weight, bias = stack.tensors[f"{layer.linear}.weight"], stack.tensors.get(f"{layer.linear}.bias")
    product = torch.bmm(values, weight.transpose(1, 2))
    return product if bias is None else product.add_(bias[:, None])


def _normalise(stack: Stack, layer: Layer, values: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Normalise values (G, S, n, width) by statistics (G, S, width)."""
    scale, shift = (stack.tensors[f"{layer.norm}.{kind}"][:, None] for kind in ("weight", "bias"))
    factor = scale / std
    return torch.addcmul((shift - mean * factor)[:, :, None], values, factor[:, :, None])


def _affordable(stack: Stack, examples: int) -> int:
    """Return how many draws fit into a chunk."""
    width = max(max(stack.tensors[f"{layer.linear}.weight"].shape[1:]) for layer in stack.layers)
    return max(1, CHUNK // (len(stack) * examples * width))


def stack_networks(networks: Sequence[nn.Module]) -> Stack:
    """Copy the parameters of perceptrons of one shape into a stack. They may differ in their dropout rates.

    >>> stack = stack_networks([MLP(3, [8], 1) for _ in range(5)])
    >>> len(stack), stack.tensors["output.weight"].shape
    (5, torch.Size([5, 1, 8]))
    """
    if not networks:
        raise BatchbayesError(expected="at least one network", got="none", fix="pass networks to stack")
    layers, states = [_layers(network) for network in networks], [network.state_dict() for network in networks]
    shapes = [{name: (tensor.shape, tensor.dtype) for name, tensor in state.items()} for state in states]
    for number, network in enumerate(networks):
        parameters = list(network.parameters())
        is_whole = all(each.requires_grad for each in parameters) and len(parameters) == sum(
            name in shapes[number] for layer in layers[number] for name in layer.trained
        )
        if not is_whole or (layers[number], shapes[number]) != (layers[0], shapes[0]):
            raise BatchbayesError(
                expected="perceptrons of one shape and precision (an MLP, or nn.Sequential of linear layers with batch "
                "norm and ReLU), of which all parameters are trained",
                got=f"another one at position {number}",
                fix="make one stack for each shape, or train this network with training.loop.train",
            )
    rates = {
        layer.dropout: torch.tensor([n.get_submodule(layer.dropout).p for n in networks], dtype=torch.float64)
        for layer in layers[0]
        if layer.dropout
    }
    return Stack(layers[0], {name: torch.stack([state[name] for state in states]) for name in states[0]}, rates)


def _layers(network: nn.Module) -> tuple[Layer, ...]:
    """Return the layers of a perceptron, an MLP or nn.Sequential, whose modules run in their order; else none."""
    found: list[Layer] = []
    dropout: str | None = None
    for name, module in network.named_modules(remove_duplicate=False):
        kind, last = type(module), found[-1] if found else None
        if kind in (MLP, nn.Sequential, nn.Identity):
            continue
        if kind is nn.Linear:
            found.append(Layer(name, dropout))
            dropout = None
        elif kind is SeededDropout and not dropout:
            dropout = name
        elif last and not dropout and not last.rectified and kind is nn.ReLU:
            found[-1] = replace(last, rectified=True)
        elif last and not dropout and not (last.rectified or last.norm) and _is_trainable(module):
            found[-1] = replace(last, norm=name, epsilon=module.eps, momentum=module.momentum)
        else:
            return ()
    return () if not found or dropout or found[-1].rectified or isinstance(network, nn.Linear) else tuple(found)


def _is_trainable(module: nn.Module) -> bool:
    """Whether a stack can train a module as a batch norm."""
    is_norm = type(module) is nn.BatchNorm1d
    return is_norm and module.affine and module.track_running_stats and module.momentum is not None


@torch.no_grad()
def unstack(stack: Stack, networks: Sequence[nn.Module]) -> None:
    """Copy a stack into as many networks, in place."""
    for index, network in enumerate(networks):
        own = network.state_dict()
        for name, tensor in stack.tensors.items():
            own[name].copy_(tensor[index])
