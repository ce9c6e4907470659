"""A stack: the layers that some networks have in common, the tensors of all of these networks, and their predictions.

A stack can hold perceptrons: chains of layers (dropout ->) linear -> (batch norm ->) (ReLU). Any other network is
refused, either for its modules or because its outputs in a trial differ from those of the stack.

Batch statistics or dropout masks are drawn for all networks at once, and all networks get the same inputs. The draws of
one network are laid out along its examples, so that a layer of all networks and all draws is one batched product.
Axes: G networks, S draws, then examples and features.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from batchbayes._common.rng import GlobalStream, generator
from batchbayes.errors import BatchbayesError

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


STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
TRIALS, TRIAL_RATE = 8, 0.5
"""The number of random weights and of examples in a trial, and its dropout rate. A single one could miss a ReLU."""
BY_LOOP = "train this network with training.loop.train"


def stack_networks(networks: Sequence[nn.Module]) -> Stack:
    """Copy the parameters of networks of one shape into a stack.

    >>> chain = lambda: nn.Sequential(nn.Linear(3, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    >>> stack = stack_networks([chain() for _ in range(5)])
    >>> len(stack), stack.tensors["0.weight"].shape
    (5, torch.Size([5, 8, 3]))
    """
    if not networks:
        raise BatchbayesError(expected="at least one network", got="none", fix="pass networks to stack")
    chains = [tuple(_layers(network)) for network in networks]
    states = [network.state_dict() for network in networks]
    shapes = [{name: (tensor.shape, tensor.dtype) for name, tensor in state.items()} for state in states]
    odd = next((i for i in range(len(networks)) if (chains[i], shapes[i]) != (chains[0], shapes[0])), None)
    if odd is not None:
        raise BatchbayesError(
            expected="networks of one shape and precision",
            got=f"another one at position {odd}",
            fix="make one stack for each shape",
        )
    for number, network in enumerate(networks):
        _require_all_trained(network, chains[0], number)
    _require_nothing_else(networks, chains[0])
    rates = {
        layer.dropout: torch.tensor(
            [network.get_submodule(layer.dropout).p for network in networks], dtype=torch.float64
        )
        for layer in chains[0]
        if layer.dropout
    }
    return Stack(chains[0], {name: torch.stack([state[name] for state in states]) for name in states[0]}, rates)


@torch.no_grad()
def unstack(stack: Stack, networks: Sequence[nn.Module]) -> None:
    """Copy a stack into as many networks, in place."""
    for index, network in enumerate(networks):
        own = network.state_dict()
        for name, tensor in stack.tensors.items():
            own[name].copy_(tensor[index])


def _layers(network: nn.Module) -> Iterator[Layer]:
    """Yield the layers of a network. Its modules must be defined in the order in which they are called."""
    found: Layer | None = None
    dropout: str | None = None
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear):
            if module is network:
                raise BatchbayesError(
                    expected="a chain of modules", got="a linear layer alone", fix="pass nn.Sequential(layer)"
                )
            if found:
                yield found
            found, dropout = Layer(name, dropout), None
        elif isinstance(module, nn.Dropout) and type(module) is not nn.Dropout and not dropout:
            dropout = name
        elif type(module) is nn.BatchNorm1d and found and not dropout and _fits(module, found):
            found = replace(found, norm=name, epsilon=module.eps, momentum=module.momentum or 0.0)
        elif isinstance(module, nn.ReLU) and found:
            found = replace(found, rectified=True)
        elif not isinstance(module, nn.Identity) and not any(True for _ in module.children()):
            raise BatchbayesError(
                expected="a chain of SeededDropout, nn.Linear, nn.BatchNorm1d (affine, with running statistics) and "
                "nn.ReLU, in this order and each at most once for each linear layer",
                got=f"{type(module).__name__} at {name or 'the top'}, which is none of them or out of place",
                fix=BY_LOOP,
            )
    if found is None or dropout or found.rectified:
        raise BatchbayesError(
            expected="a network that ends in a linear layer",
            got="no linear layer, or dropout or ReLU after the last one",
            fix=BY_LOOP,
        )
    yield found


def _fits(norm: nn.BatchNorm1d, layer: Layer) -> bool:
    """Return whether a stack can train this norm, and the layer has no norm or ReLU before it."""
    trainable = norm.affine and norm.track_running_stats and norm.momentum is not None
    return trainable and not (layer.norm or layer.rectified)


def _require_all_trained(network: nn.Module, layers: Sequence[Layer], number: int) -> None:
    """Refuse parameters that are frozen, shared by layers, or in no layer. A stack would train them differently."""
    statistics = {f"{layer.norm}.{kind}" for layer in layers if layer.norm for kind in STATISTICS}
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    odd = (network.state_dict().keys() - statistics) ^ (trained & {name for layer in layers for name in layer.trained})
    if odd:
        raise BatchbayesError(
            expected="networks in which every parameter is trained and belongs to one layer",
            got=f"{', '.join(sorted(odd))} in network {number}: frozen, shared, or in no layer",
            fix=BY_LOOP,
        )


def _require_nothing_else(networks: Sequence[nn.Module], layers: tuple[Layer, ...]) -> None:
    """Refuse networks that do more than their layers say: functions in forward, or modules called twice or never.

    A copy of a network gets the weights, the inputs and the uniform numbers of a random stack, and must give the same
    outputs. Networks that differ only in their tensors need one trial.
    """
    source = generator(0, "probe")
    tensors = {name: _trial_values(name, tensor, source) for name, tensor in networks[0].state_dict().items()}
    rates = {layer.dropout: torch.full((TRIALS,), TRIAL_RATE) for layer in layers if layer.dropout}
    stack = Stack(layers, tensors, rates)
    widths = [tensors[f"{layer.linear}.weight"].shape[1:] for layer in layers]
    inputs = torch.randn(TRIALS, widths[0][1], generator=source, dtype=torch.float64)
    chained = all(before[0] == after[1] for before, after in pairwise(widths))
    for number in sorted({_description(network): i for i, network in reversed(list(enumerate(networks)))}.values()):
        if not chained or not _agrees(networks[number], stack, inputs):
            raise BatchbayesError(
                expected="networks that call each of their modules once, in the order of their definition, and do "
                "nothing else",
                got=f"network {number}, {type(networks[number]).__name__}, which does something else",
                fix=f"give each ReLU and SeededDropout its own module, or {BY_LOOP}",
            )


def _trial_values(name: str, like: Tensor, source: torch.Generator) -> Tensor:
    """Return random values, at which each layer has an effect. New batch norm has none. Variances are positive."""
    if not like.is_floating_point():
        return torch.zeros(TRIALS, *like.shape, dtype=like.dtype)
    values = torch.randn(TRIALS, *like.shape, generator=source, dtype=torch.float64)
    return values.abs() + 0.5 if name.endswith("running_var") else values


def _agrees(network: nn.Module, stack: Stack, inputs: Tensor) -> bool:
    """Return whether the network gives the outputs of each network of the stack, with batch norm in evaluation mode."""
    drawn = stack_outputs(stack, inputs, mask_noise(stack, len(inputs), generator(0, "torch")))
    expected = drawn.expand(-1, len(inputs), -1, -1).diagonal(dim1=1, dim2=2).mT  # example i in draw i: (G, N, K)
    copied = copy.deepcopy(network).to("cpu", torch.float64)
    for module in copied.modules():
        module.training = not isinstance(module, nn.BatchNorm1d)
        if isinstance(module, nn.Dropout):
            module.p = TRIAL_RATE
    for index, wanted in enumerate(expected):
        unstack(stack.select([index]), [copied])
        with torch.no_grad(), GlobalStream(0):  # the global generator is now in the state of generator(0, "torch")
            outputs = copied(inputs)
        if not (isinstance(outputs, Tensor) and outputs.shape == wanted.shape and torch.allclose(outputs, wanted)):
            return False
    return True


def _description(network: nn.Module) -> str:
    """Describe what a network does, without its tensors: the classes of its modules and their own attributes."""
    of_torch = vars(nn.Module()).keys()
    return repr(
        [
            (name, type(module), {key: value for key, value in vars(module).items() if key not in of_torch})
            for name, module in network.named_modules()
        ]
    )
