"""Many small networks of one shape as one: their parameters stacked, their products batched.

A chain of (dropout ->) linear -> (batch norm ->) (ReLU) layers is all that a stack can hold: perceptrons, of which
hundreds are trained for one table. Any other network is refused, by its modules or by what it answers to a probe.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from batchbayes._common.rng import GlobalStream, generator
from batchbayes.errors import BatchbayesError
from batchbayes.training.layers import Layer, Stack
from batchbayes.training.noise import mask_noise, stack_outputs

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
PROBES, PROBE_RATE = 8, 0.5
"""How many random weights, and examples, a network is probed with, and the dropout rate; one could miss a ReLU."""
BY_LOOP = "train this network by training.loop.train"


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
    shapes = [{name: (tensor.shape, tensor.dtype) for name, tensor in state.items()} for state in states]
    odd = next((i for i in range(len(networks)) if (chains[i], shapes[i]) != (chains[0], shapes[0])), None)
    if odd is not None:
        raise BatchbayesError(
            expected="networks of one shape and precision",
            got=f"another one at position {odd}",
            fix="stack each shape by itself",
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
    """Copy the stack back into as many networks, in place."""
    for index, network in enumerate(networks):
        own = network.state_dict()
        for name, tensor in stack.tensors.items():
            own[name].copy_(tensor[index])


def _layers(network: nn.Module) -> Iterator[Layer]:
    """Read a chain of layers off its modules, which stand in the order in which they are called."""
    found: Layer | None = None
    dropout: str | None = None
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear):
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
                "nn.ReLU, in this order and each at most once a linear layer",
                got=f"{type(module).__name__} at {name or 'the top'}, which is none of them or out of place",
                fix=BY_LOOP,
            )
    if found is None or dropout or found.rectified:
        raise BatchbayesError(
            expected="a network that ends in a linear layer", got="none, or dropout or ReLU after it", fix=BY_LOOP
        )
    yield found


def _fits(norm: nn.BatchNorm1d, layer: Layer) -> bool:
    """Whether a stack can train this norm, and it may stand behind what the layer has already."""
    trainable = norm.affine and norm.track_running_stats and norm.momentum is not None
    return trainable and not (layer.norm or layer.rectified)


def _require_all_trained(network: nn.Module, layers: Sequence[Layer], number: int) -> None:
    """Refuse parameters that are frozen, shared between layers or in none: a stack trains each of its own by itself."""
    statistics = {f"{layer.norm}.{kind}" for layer in layers if layer.norm for kind in STATISTICS}
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    odd = (network.state_dict().keys() - statistics) ^ (trained & {name for layer in layers for name in layer.trained})
    if odd:
        raise BatchbayesError(
            expected="networks of which every parameter is trained, and belongs to one layer",
            got=f"{', '.join(sorted(odd))} in network {number}: frozen, shared, or in no layer",
            fix=BY_LOOP,
        )


def _require_nothing_else(networks: Sequence[nn.Module], layers: tuple[Layer, ...]) -> None:
    """Refuse networks that do more than their layers say: functions in forward, modules called twice, or never.

    Copies of them get the weights, the examples and the uniform numbers of a random stack, and must answer as it does.
    Of networks that are the same but for their tensors one is asked.
    """
    source = generator(0, "probe")
    tensors = {name: _probe_values(name, tensor, source) for name, tensor in networks[0].state_dict().items()}
    rates = {layer.dropout: torch.full((PROBES,), PROBE_RATE) for layer in layers if layer.dropout}
    stack = Stack(layers, tensors, rates)
    widths = [tensors[f"{layer.linear}.weight"].shape[1:] for layer in layers]
    inputs = torch.randn(PROBES, widths[0][1], generator=source, dtype=torch.float64)
    chained = all(before[0] == after[1] for before, after in pairwise(widths))
    for number in sorted({_code(network): i for i, network in reversed(list(enumerate(networks)))}.values()):
        if not chained or not _answers(networks[number], stack, inputs):
            raise BatchbayesError(
                expected="networks that call each of their modules once, in the order of their definition, and do "
                "nothing else",
                got=f"network {number}, {type(networks[number]).__name__}, which does something else",
                fix=f"make each ReLU and SeededDropout a module of its own, or {BY_LOOP}",
            )


def _probe_values(name: str, like: Tensor, source: torch.Generator) -> Tensor:
    """Values at which no layer is without effect, as batch norm is when new; variances are positive."""
    if not like.is_floating_point():
        return torch.zeros(PROBES, *like.shape, dtype=like.dtype)
    values = torch.randn(PROBES, *like.shape, generator=source, dtype=torch.float64)
    return values.abs() + 0.5 if name.endswith("running_var") else values


def _answers(network: nn.Module, stack: Stack, inputs: Tensor) -> bool:
    """Whether the network, put in the place of each of the stack's, gives its outputs; batch norm does not train."""
    drawn = stack_outputs(stack, inputs, mask_noise(stack, len(inputs), generator(0, "torch")))
    expected = drawn.expand(-1, len(inputs), -1, -1).diagonal(dim1=1, dim2=2).mT  # example i in draw i: (G, N, K)
    copied = copy.deepcopy(network).to("cpu", torch.float64)
    for module in copied.modules():
        module.training = not isinstance(module, nn.BatchNorm1d)
        if isinstance(module, nn.Dropout):
            module.p = PROBE_RATE
    for index, wanted in enumerate(expected):
        unstack(stack.select([index]), [copied])
        with torch.no_grad(), GlobalStream(0):  # torch's own generator is now as generator(0, "torch")
            outputs = copied(inputs)
        if not (isinstance(outputs, Tensor) and outputs.shape == wanted.shape and torch.allclose(outputs, wanted)):
            return False
    return True


def _code(network: nn.Module) -> str:
    """What a network does, but for its tensors: its classes and the attributes that its authors gave it."""
    torchs_own = vars(nn.Module()).keys()
    return repr(
        [
            (name, type(module), {key: value for key, value in vars(module).items() if key not in torchs_own})
            for name, module in network.named_modules()
        ]
    )
