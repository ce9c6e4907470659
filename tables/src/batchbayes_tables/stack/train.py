"""Train hundreds of small networks at once.

Each network has its own data, order, weight decay, dropout rate and last epoch. The result for each network is that of
`loop.train` for this network alone, up to rounding: batches and dropout masks have the same random numbers.

A step of all networks is a few batched products. The gradients are written out by hand, because autograd costs three
times as much as the arithmetic for tensors as small as these. All intermediate results are in buffers that are made
once, and all parameters in one vector, so that one fused Adam updates them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn, optim

from batchbayes._common.progress import Progress
from batchbayes._common.rng import generator
from batchbayes.errors import BatchbayesError
from batchbayes.training.batches import require_data, shuffled_batches
from batchbayes.training.loop import TrainingConfig
from batchbayes_tables.stack.stack import Layer, Stack, stack_networks, unstack

Observer = Callable[[int, Stack, Tensor], Tensor]
"""From (epochs done, the networks that are still trained, their numbers) to a mask of those that continue."""


Examples = tuple[Tensor, Tensor]
"""The inputs (N, Q) and targets (N, K) that one network is trained on."""
GATHERED = 16
"""Steps whose batches are gathered at a time: all steps of an epoch would be a copy of the data for each network."""


def train_together(networks: Sequence[nn.Module], data: Sequence[Examples], configs: Sequence[TrainingConfig]) -> None:
    """Train networks of one shape in place, each on its own data, and leave them in evaluation mode.

    The objective of each network is `half_squared_error`.

    >>> from batchbayes.models import MLP
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> networks = [MLP(1, [8], 1) for _ in range(3)]
    >>> configs = [TrainingConfig(20, 16, 1e-2, weight_decay=decay) for decay in (0.0, 1e-3, 1e-1)]
    >>> train_together(networks, [(x, x)] * 3, configs)
    """
    stack = stack_networks(networks)
    for number, own in enumerate(data):
        _require_fitting(stack, *own, configs[number], number)
    unstack(train_stack(stack, data, configs), networks)
    for network in networks:
        network.eval()


Gradient = Callable[[Tensor, Tensor], Tensor]
"""From outputs and targets (G, M, K) to the gradient of the loss of each example by the outputs."""
Loss = Literal["half_squared_error", "cross_entropy"] | Gradient
"""What training makes small. For the cross-entropy, targets are probabilities of classes."""


def train_stack(
    stack: Stack,
    data: Sequence[Examples],
    configs: Sequence[TrainingConfig],
    *,
    observe: Observer | None = None,
    every: int = 20,
    loss: Loss = "half_squared_error",
    schedule: Callable[[float], float] | None = None,
) -> Stack:
    """Return a trained copy of a stack.

    Args:
        stack: the networks.
        data: for each network what it is trained on.
        configs: for each network how it is trained, by Adam. They differ in weight decay and seed alone.
        observe: called after every `every` epochs. A network that does not continue stays as it is then.
        every: how many epochs are between two calls of `observe`.
        loss: what training makes small. For "cross_entropy", targets are one-hot rows, or other probabilities.
        schedule: from the share of the training that is done to a factor of the learning rate.
    """
    trained, groups = stack.select(range(len(stack))), _groups(stack, data, configs, loss)
    with Progress(f"training {len(stack)} networks", configs[0].epochs) as shown:
        for epoch in range(configs[0].epochs):
            for group in groups:
                group.run_epoch(epoch, schedule)
            shown.advance()
            looks = (epoch + 1) % every == 0
            if looks or epoch + 1 == configs[0].epochs:
                for group in groups:
                    group.require_converging(epoch)
                    group.copy_into(trained)
            if observe and looks:
                numbers = torch.cat([group.numbers for group in groups]).sort().values
                stays = torch.zeros(len(stack), dtype=torch.bool)
                stays[numbers] = observe(epoch + 1, trained.select(numbers), numbers)
                groups = [group.only(stays, trained) for group in groups if stays[group.numbers].any()]
                if not groups:
                    break
    return trained


class Group:
    """Networks whose epochs have the same number of batches of the same size, and all that a step changes.

    `data` and `configs` are those of the whole stack; `numbers` says which networks of the stack are in the group.
    """

    def __init__(
        self,
        stack: Stack,
        numbers: Tensor,
        data: Sequence[Examples],
        configs: Sequence[TrainingConfig],
        streams: Mapping[int, torch.Generator] | None = None,
        loss: Loss = "half_squared_error",
    ) -> None:
        self._loss: Loss = loss
        own = stack.select(numbers)
        self.numbers, self._data, self._configs = numbers, data, configs
        self._layers, self._rates = own.layers, own.dropout_rates
        parameters = {name: own.tensors[name] for name in own.parameter_names()}
        self._running = {name: tensor for name, tensor in own.tensors.items() if name not in parameters}
        vector = _vector(parameters)
        self._trained = nn.Parameter(vector)
        self._trained.grad = torch.zeros_like(vector)
        self._parameters, self._gradients = (_views(each, parameters) for each in (vector, self._trained.grad))
        self._adam = optim.Adam([self._trained], lr=configs[0].learning_rate, fused=True)
        chosen = [configs[number] for number in numbers.tolist()]
        self._decay = vector.new_tensor([[[config.weight_decay]] for config in chosen])
        self._orders = _Orders([data[number] for number in numbers.tolist()], chosen, streams)
        self._work: list[_Buffers] = []

    def copy_into(self, stack: Stack) -> None:
        """Copy the networks to their places in a stack, in place."""
        for name, tensor in (self._parameters | self._running).items():
            stack.tensors[name][self.numbers] = tensor

    def only(self, stays: Tensor, stack: Stack) -> "Group":
        """Return the group that continues with some of the networks.

        Args:
            stays: for each network of the stack whether it continues.
            stack: the whole stack, with this group copied into it.
        """
        kept = stays[self.numbers]
        if kept.all():
            return self
        group = Group(stack, self.numbers[kept], self._data, self._configs, self._orders.streams, self._loss)
        state = self._adam.state[self._trained]
        moments = {
            moment: _vector({name: part[kept] for name, part in _views(state[moment], self._parameters).items()})
            for moment in ("exp_avg", "exp_avg_sq")
        }
        group._adam.state[group._trained] = {"step": state["step"].clone(), **moments}
        return group

    def run_epoch(self, epoch: int, schedule: Callable[[float], float] | None = None) -> None:
        """Train each network on one shuffled pass over its own data."""
        steps = 0
        for inputs, targets in self._orders.batches(epoch):
            if schedule:
                done = (epoch + steps / self._orders.steps) / self._configs[0].epochs
                self._adam.param_groups[0]["lr"] = self._configs[0].learning_rate * schedule(done)
            self._step(inputs, targets)
            steps += 1
        for layer in self._layers:
            if layer.norm:
                self._running[f"{layer.norm}.num_batches_tracked"] += steps

    def require_converging(self, epoch: int) -> None:
        """Refuse networks with parameters, or a loss in the last batch of the epoch, that are not finite."""
        errors = self._work[-1].outputs  # the last step has put (f - y) divided by their number there
        finite = (errors * errors[0].numel()).square().mean((1, 2)).isfinite()
        for parameter in self._parameters.values():
            finite &= parameter.flatten(1).isfinite().all(1)
        if not finite.all():
            raise BatchbayesError(
                expected="a finite training loss",
                got=f"infinity or NaN in epoch {epoch + 1} or before, in networks {self.numbers[~finite].tolist()}",
                fix="lower the learning rate, or scale inputs and targets to about unit variance",
            )

    @torch.no_grad()
    def _step(self, inputs: Tensor, targets: Tensor) -> None:
        """Do one step of Adam for inputs (G, M, Q) and targets (G, M, K)."""
        if not self._work:
            shapes = [self._parameters[f"{layer.linear}.weight"].shape for layer in self._layers]
            self._work = [_Buffers.of(inputs, out_width, in_width) for _, out_width, in_width in shapes]
        outputs = inputs
        for layer, work in zip(self._layers, self._work, strict=True):
            outputs = self._forward(layer, work, outputs)
        if self._loss == "cross_entropy":
            errors = outputs.copy_(outputs.softmax(-1)).sub_(targets).div_(targets.shape[1])
        elif callable(self._loss):
            errors = outputs.copy_(self._loss(outputs, targets)).div_(targets.shape[1])
        else:
            errors = outputs.sub_(targets).div_(targets[0].numel())
        for layer, work in zip(reversed(self._layers), reversed(self._work), strict=True):
            errors = self._backward(layer, work, errors)
        self._adam.step()

    def _forward(self, layer: Layer, work: "_Buffers", inputs: Tensor) -> Tensor:
        """Return the outputs of one layer."""
        weight, bias = self._parameters[f"{layer.linear}.weight"], self._parameters.get(f"{layer.linear}.bias")
        work.inputs = inputs
        if layer.dropout:
            self._orders.uniform(work.mask)
            rates = self._rates[layer.dropout].to(inputs)[:, None, None]
            torch.ge(work.mask, rates, out=work.mask)
            work.mask.div_(1 - rates)
            work.inputs = torch.mul(inputs, work.mask, out=work.dropped)
        torch.bmm(work.inputs, weight.transpose(1, 2), out=work.outputs)
        if bias is not None:
            work.outputs.add_(bias[:, None])
        if layer.norm:
            self._normalise(layer, work)
        return work.outputs.relu_() if layer.rectified else work.outputs

    def _normalise(self, layer: Layer, work: "_Buffers") -> None:
        """Normalise the outputs in place by their batch statistics, and update the running statistics."""
        size = work.outputs.shape[1]
        mean = work.outputs.mean(1, keepdim=True)
        torch.sub(work.outputs, mean, out=work.normalised)
        torch.square(work.normalised, out=work.spare)
        variance = work.spare.mean(1, keepdim=True)
        work.inverse_std = (variance + layer.epsilon).rsqrt_()
        work.normalised.mul_(work.inverse_std)
        scale, shift = (self._parameters[f"{layer.norm}.{kind}"][:, None] for kind in ("weight", "bias"))
        torch.addcmul(shift, work.normalised, scale, out=work.outputs)
        unbiased = variance[:, 0].mul_(size / max(size - 1, 1))
        self._running[f"{layer.norm}.running_mean"].lerp_(mean[:, 0], layer.momentum)
        self._running[f"{layer.norm}.running_var"].lerp_(unbiased, layer.momentum)

    def _backward(self, layer: Layer, work: "_Buffers", errors: Tensor) -> Tensor:
        """Fill in the gradients of one layer. Return the gradient of the loss by its inputs."""
        if layer.rectified:
            torch.gt(work.outputs, 0, out=work.outputs)
            errors.mul_(work.outputs)
        if layer.norm:
            shift, scale = self._gradients[f"{layer.norm}.bias"], self._gradients[f"{layer.norm}.weight"]
            torch.sum(errors, 1, out=shift)
            torch.sum(torch.mul(errors, work.normalised, out=work.spare), 1, out=scale)
            size = errors.shape[1]
            errors.addcmul_(work.normalised, scale[:, None], value=-1 / size).sub_(shift[:, None] / size)
            errors.mul_(work.inverse_std * self._parameters[f"{layer.norm}.weight"][:, None])
        weight, slope = (kind[f"{layer.linear}.weight"] for kind in (self._parameters, self._gradients))
        torch.bmm(errors.transpose(1, 2), work.inputs, out=slope)
        slope.addcmul_(weight, self._decay)
        if f"{layer.linear}.bias" in self._gradients:
            torch.sum(errors, 1, out=self._gradients[f"{layer.linear}.bias"])
        if layer is self._layers[0]:
            return errors
        torch.bmm(errors, weight, out=work.errors)
        return work.errors.mul_(work.mask) if layer.dropout else work.errors


def _groups(stack: Stack, data: Sequence[Examples], configs: Sequence[TrainingConfig], loss: Loss) -> list[Group]:
    """Return groups of the networks whose epochs have the same number of batches of the same size."""
    kinds: dict[tuple[int, int], list[int]] = {}
    for number, (inputs, _) in enumerate(data):
        size = min(configs[0].batch_size, len(inputs))
        kinds.setdefault((size, len(inputs) // size), []).append(number)
    return [Group(stack, torch.tensor(numbers), data, configs, loss=loss) for numbers in kinds.values()]


def _require_fitting(stack: Stack, inputs: Tensor, targets: Tensor, config: TrainingConfig, number: int) -> None:
    """Refuse data that does not fit the networks, and another optimiser."""
    require_data(inputs, targets)
    if config.optimiser != "adam":
        raise BatchbayesError("Adam, to train networks together", repr(config.optimiser), "leave optimiser= out")
    weights = [stack.tensors[f"{layer.linear}.weight"] for layer in stack.layers]
    wanted = (len(inputs), weights[0].shape[2]), (len(inputs), weights[-1].shape[1])
    if (inputs.shape, targets.shape) != wanted:
        raise BatchbayesError(
            expected="inputs {} and targets {}".format(*wanted),
            got=f"{tuple(inputs.shape)} and {tuple(targets.shape)} for network {number}",
            fix="check the network's first and last layer; a single target is a column, targets[:, None]",
        )
    require_dtype(stack, inputs)
    if config.epochs and min(config.batch_size, len(inputs)) < 2 and any(layer.norm for layer in stack.layers):
        raise BatchbayesError(
            expected="batches of two examples or more, to train batch norm",
            got=f"a batch of one for network {number}",
            fix="raise batch_size, or pass more examples",
        )


def require_dtype(stack: Stack, inputs: Tensor) -> None:
    """Refuse inputs of another precision than that of the networks."""
    own = next(iter(stack.tensors.values())).dtype
    if inputs.dtype != own:
        fix = f"convert the data, for example with x.to({own})"
        raise BatchbayesError(expected=f"inputs of {own}, as the networks are", got=f"{inputs.dtype}", fix=fix)


@dataclass(eq=False)
class _Buffers:
    """What one layer keeps between the forward and the backward pass: (G, M, width), overwritten at each step."""

    outputs: Tensor
    normalised: Tensor
    spare: Tensor
    errors: Tensor
    dropped: Tensor
    mask: Tensor
    inputs: Tensor = field(init=False)
    inverse_std: Tensor = field(init=False)

    @staticmethod
    def of(inputs: Tensor, out_width: int, in_width: int) -> "_Buffers":
        wide, narrow = (
            [inputs.new_empty(*inputs.shape[:2], width) for _ in range(3)] for width in (out_width, in_width)
        )
        return _Buffers(*wide, *narrow)


class _Orders:
    """The batches and dropout masks of G networks. Networks with the same data and seed share their batches.

    `streams` has for each seed the generator of its dropout masks. By default all of them start anew.
    """

    def __init__(
        self,
        data: Sequence[Examples],
        configs: Sequence[TrainingConfig],
        streams: Mapping[int, torch.Generator] | None = None,
    ) -> None:
        seeds = [config.seed for config in configs]
        kinds = [(id(inputs), id(targets), seed) for (inputs, targets), seed in zip(data, seeds, strict=True)]
        unique = list(dict.fromkeys(kinds))
        self._kinds = [(data[kinds.index(kind)], kind[2]) for kind in unique]
        self._kind_of_network = torch.tensor([unique.index(kind) for kind in kinds])
        self._size = min(configs[0].batch_size, len(data[0][0]))
        self.steps = len(data[0][0]) // self._size
        # "torch" is the stream that GlobalStream gives to torch's global generator, from which dropout draws.
        self.streams = {seed: streams[seed] if streams else generator(seed, "torch") for seed in dict.fromkeys(seeds)}
        self._stream_of_network = torch.tensor([list(self.streams).index(seed) for seed in seeds])

    def batches(self, epoch: int) -> Iterator[Examples]:
        """Yield the inputs (G, M, Q) and the targets (G, M, K) of each step of an epoch."""
        orders = [
            torch.stack(list(shuffled_batches(len(examples[0]), self._size, seed, epoch))).split(GATHERED)
            for examples, seed in self._kinds
        ]
        for rows in zip(*orders, strict=True):  # of each kind (steps, M)
            pairs = [(x[own], y[own]) for ((x, y), _), own in zip(self._kinds, rows, strict=True)]
            for step in zip(*(torch.stack(each, 1) for each in zip(*pairs, strict=True)), strict=True):
                inputs, targets = (part.index_select(0, self._kind_of_network) for part in step)
                yield inputs, targets

    def uniform(self, out: Tensor) -> None:
        """Fill (G, M, width) with the uniform numbers that the dropout of each network draws from its seed."""
        drawn = [torch.rand(out.shape[1:], dtype=out.dtype, generator=stream) for stream in self.streams.values()]
        torch.index_select(torch.stack(drawn), 0, self._stream_of_network, out=out)


def _vector(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


def _views(vector: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parts of a vector in the shapes of some tensors, without a copy."""
    pieces = vector.split([tensor.numel() for tensor in like.values()])
    return {name: piece.view(tensor.shape) for (name, tensor), piece in zip(like.items(), pieces, strict=True)}
