"""Hundreds of small networks trained at once: a step of all of them is a few batched products.

Each network has its own data, order, weight decay, dropout rate and end. What comes out is what `loop.train` would have
made of each alone, with the same config, but for rounding. The gradients are written out by hand: the layers are few,
and a tape for tensors as small as these costs three times as much as the arithmetic. All intermediate results lie in
buffers that are made once, and all parameters in one vector, over which one fused Adam runs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn, optim

from batchbayes._common.progress import Progress
from batchbayes._common.rng import generator, stream_seed
from batchbayes.errors import BatchbayesError
from batchbayes.training.batches import require_data
from batchbayes.training.layers import Layer, Stack, join
from batchbayes.training.loop import TrainingConfig
from batchbayes.training.stack import stack_networks, unstack

Examples = tuple[Tensor, Tensor]
"""Inputs (N, Q) and targets (N, K) that a network is trained on."""

Observer = Callable[[int, Stack, Tensor], Tensor]
"""From (epochs done, the networks still in training, their numbers) to a mask of those that go on."""


def train_grid(networks: Sequence[nn.Module], data: Sequence[Examples], configs: Sequence[TrainingConfig]) -> None:
    """Train networks of one shape in place, each on its own data, by `half_squared_error`; leave them in eval mode.

    The result for each is that of `train(network, *data, half_squared_error, config)`.

    >>> from batchbayes.models.mlp import MLP
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> networks = [MLP(1, [8], 1) for _ in range(3)]
    >>> configs = [TrainingConfig(20, 16, 1e-2, weight_decay=decay) for decay in (0.0, 1e-3, 1e-1)]
    >>> train_grid(networks, [(x, x)] * 3, configs)
    """
    unstack(train_stack(stack_networks(networks), data, configs), networks)
    for network in networks:
        network.eval()


def train_stack(
    stack: Stack,
    data: Sequence[Examples],
    configs: Sequence[TrainingConfig],
    *,
    observe: Observer | None = None,
    every: int = 20,
) -> Stack:
    """Train a stack and return it, each network as it was when it ended.

    `observe` is called every so many epochs, and says which networks go on; the others leave the stack.
    """
    common = _require_common(stack, data, configs)
    groups = [_Group(stack.select(numbers), numbers, data, configs) for numbers in _in_step(data, common.batch_size)]
    finished: list[tuple[Stack, Tensor]] = []
    with Progress(f"training {len(stack)} networks", common.epochs) as shown:
        for epoch in range(common.epochs):
            for group in groups:
                group.run_epoch(epoch)
            shown.advance()
            looks = (epoch + 1) % every == 0
            if looks or epoch + 1 == common.epochs:
                for group in groups:
                    group.require_converging(epoch)
            if observe and looks:
                numbers = torch.cat([group.numbers for group in groups])
                order = numbers.argsort()
                going = observe(epoch + 1, join([group.stack() for group in groups], order), numbers[order])
                if not going.all():
                    stays = torch.zeros(len(stack), dtype=torch.bool)
                    stays[numbers[order]] = going
                    finished += [group.leaving(stays) for group in groups]
                    groups = [group.staying(stays) for group in groups if stays[group.numbers].any()]
                if not groups:
                    break
    finished += [(group.stack(), group.numbers) for group in groups]
    return join([part for part, _ in finished], torch.cat([numbers for _, numbers in finished]).argsort())


def _in_step(data: Sequence[Examples], batch_size: int) -> list[Tensor]:
    """Numbers of the networks whose epochs have the same number of batches of the same size."""
    kinds: dict[tuple[int, int], list[int]] = {}
    for number, (inputs, _) in enumerate(data):
        size = min(batch_size, len(inputs))
        kinds.setdefault((size, len(inputs) // size), []).append(number)
    return [torch.tensor(numbers) for numbers in kinds.values()]


class _Group:
    """Networks in lock-step, with everything that a step changes."""

    def __init__(
        self, stack: Stack, numbers: Tensor, data: Sequence[Examples], configs: Sequence[TrainingConfig]
    ) -> None:
        self.numbers, self._data, self._configs = numbers, data, configs
        self._layers, self._rates = stack.layers, stack.dropout_rates
        names = stack.parameter_names()
        self._vector, self._parameters = _flattened({name: stack.tensors[name] for name in names})
        self._slope, self._gradients = _flattened({name: torch.zeros_like(stack.tensors[name]) for name in names})
        self._running = {name: tensor.clone() for name, tensor in stack.tensors.items() if name not in names}
        self._adam = optim.Adam([nn.Parameter(self._vector)], lr=configs[0].learning_rate, fused=True)
        self._adam.param_groups[0]["params"][0].grad = self._slope
        own = [configs[number] for number in numbers.tolist()]
        decays = [[[config.weight_decay]] for config in own]
        self._decay = torch.tensor(decays, dtype=self._vector.dtype, device=self._vector.device)
        self._orders = _Orders([data[number] for number in numbers.tolist()], own)
        self._work: list[_Buffers] = []

    def stack(self) -> Stack:
        """The networks as they are now (copies)."""
        tensors = {name: tensor.clone() for name, tensor in {**self._parameters, **self._running}.items()}
        return Stack(self._layers, tensors, self._rates)

    def leaving(self, stays: Tensor) -> tuple[Stack, Tensor]:
        """Those that end here, and their numbers."""
        ends = ~stays[self.numbers]
        return self.stack().select(ends), self.numbers[ends]

    def staying(self, stays: Tensor) -> "_Group":
        """A smaller group that goes on where this one is."""
        keep = stays[self.numbers]
        smaller = _Group(self.stack().select(keep), self.numbers[keep], self._data, self._configs)
        smaller._adopt(self, keep)
        return smaller

    def _adopt(self, other: "_Group", keep: Tensor) -> None:
        """Take over the moments of Adam and the place in the random streams."""
        (state,) = other._adam.state.values()
        moments = {
            key: _flattened({n: part[keep] for n, part in _parts(state[key], other._parameters).items()})[0]
            for key in ("exp_avg", "exp_avg_sq")
        }
        parameter = self._adam.param_groups[0]["params"][0]
        self._adam.state[parameter] = {"step": state["step"].clone(), **moments}
        self._orders.adopt(other._orders)

    def run_epoch(self, epoch: int) -> None:
        """One shuffled pass over each network's own data."""
        steps = 0
        for inputs, targets in self._orders.batches(epoch):
            self._step(inputs, targets)
            steps += 1
        for layer in self._layers:
            if layer.norm:
                self._running[f"{layer.norm}.num_batches_tracked"] += steps

    def require_converging(self, epoch: int) -> None:
        """Refuse networks whose parameters, or loss in the last batch of the epoch, are not finite."""
        errors = self._work[-1].outputs  # the step has left there (f - y) / their number
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
        """Forward, backward and Adam; inputs (G, M, Q), targets (G, M, K)."""
        if not self._work or self._work[0].size != inputs.shape[:2]:
            shapes = [self._parameters[f"{layer.linear}.weight"].shape for layer in self._layers]
            self._work = [_Buffers.of(inputs, out_width, in_width) for _, out_width, in_width in shapes]
        outputs = inputs
        for layer, work in zip(self._layers, self._work, strict=True):
            outputs = self._forward(layer, work, outputs)
        errors = outputs.sub_(targets).div_(targets[0].numel())
        for layer, work in zip(reversed(self._layers), reversed(self._work), strict=True):
            errors = self._backward(layer, work, errors)
        self._adam.step()

    def _forward(self, layer: Layer, work: "_Buffers", inputs: Tensor) -> Tensor:
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
        """Fill in the gradients of one layer; returns the errors of its inputs."""
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


@dataclass(eq=False)
class _Buffers:
    """What one layer keeps between the forward and the backward pass: (G, M, width), written over at each step."""

    size: torch.Size
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
        return _Buffers(inputs.shape[:2], *wide, *narrow)


class _Orders:
    """The batches of each network. Networks with the same data and seed have the same, which are then made once."""

    def __init__(self, data: Sequence[Examples], configs: Sequence[TrainingConfig]) -> None:
        kinds: dict[tuple[int, int, int], int] = {}
        streams = [(id(own[0]), id(own[1]), config.seed) for own, config in zip(data, configs, strict=True)]
        self._of_network = torch.tensor([kinds.setdefault(stream, len(kinds)) for stream in streams])
        first = {stream: i for i, stream in reversed(list(enumerate(streams)))}
        self._data = [data[first[stream]] for stream in kinds]
        self._seeds = [configs[first[stream]].seed for stream in kinds]
        self._size = min(configs[0].batch_size, len(data[0][0]))
        seeds = [config.seed for config in configs]
        self._sources = {seed: _as_global_stream(seed) for seed in seeds}
        self._source_of_network = torch.tensor([list(self._sources).index(seed) for seed in seeds])

    def batches(self, epoch: int):
        """Yield inputs (G, M, Q) and targets (G, M, K) for each step of an epoch."""
        inputs, targets = [], []
        count = len(self._data[0][0]) // self._size * self._size
        orders: dict[tuple[int, int], Tensor] = {}
        for (own_inputs, own_targets), seed in zip(self._data, self._seeds, strict=True):
            key = (len(own_inputs), seed)
            if key not in orders:
                orders[key] = torch.randperm(key[0], generator=generator(seed, "epoch", epoch))[:count]
            inputs.append(own_inputs[orders[key]])
            targets.append(own_targets[orders[key]])
        for parts in zip(
            torch.stack(inputs).split(self._size, 1), torch.stack(targets).split(self._size, 1), strict=True
        ):
            yield tuple(part.index_select(0, self._of_network) for part in parts)

    def uniform(self, out: Tensor) -> None:
        """Fill (G, M, width) with the uniform numbers that each network's dropout would draw from its own seed."""
        drawn = [torch.rand(out.shape[1:], dtype=out.dtype, generator=source) for source in self._sources.values()]
        torch.index_select(torch.stack(drawn), 0, self._source_of_network, out=out)

    def adopt(self, other: "_Orders") -> None:
        """Go on in the random streams where the other is."""
        self._sources = {seed: other._sources[seed] for seed in self._sources}


def _as_global_stream(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(stream_seed(seed, "torch"))


def _flattened(tensors: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """One vector of all of them, and views of it in their shapes."""
    vector = torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
    return vector, _parts(vector, tensors)


def _parts(vector: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
    pieces = vector.split([math.prod(tensor.shape) for tensor in like.values()])
    return {name: piece.view(tensor.shape) for (name, tensor), piece in zip(like.items(), pieces, strict=True)}


def _require_common(stack: Stack, data: Sequence[Examples], configs: Sequence[TrainingConfig]) -> TrainingConfig:
    """The config that all networks share, but for weight decay and seed."""
    if not len(stack) == len(data) == len(configs):
        raise BatchbayesError(
            expected="as many data sets and configs as networks",
            got=f"{len(stack)} networks, {len(data)} data sets, {len(configs)} configs",
            fix="pass one for each",
        )
    common = replace(configs[0], weight_decay=0.0, seed=0)
    if any(replace(config, weight_decay=0.0, seed=0) != common for config in configs) or common.optimiser != "adam":
        raise BatchbayesError(
            expected="one number of epochs, batch size and learning rate for all networks, and Adam",
            got="different ones" if common.optimiser == "adam" else repr(common.optimiser),
            fix="train each kind as a stack of its own",
        )
    for number in sorted({(id(own[0]), id(own[1])): i for i, own in reversed(list(enumerate(data)))}.values()):
        _require_fitting(stack, *data[number], common, number)
    return common


def _require_fitting(stack: Stack, inputs: Tensor, targets: Tensor, config: TrainingConfig, number: int) -> None:
    """Refuse data that a network cannot be trained on."""
    require_data(inputs, targets)
    weights = [stack.tensors[f"{layer.linear}.weight"] for layer in stack.layers]
    wanted = (len(inputs), weights[0].shape[2]), (len(inputs), weights[-1].shape[1])
    if (inputs.shape, targets.shape) != wanted:
        raise BatchbayesError(
            expected="inputs {} and targets {}".format(*wanted),
            got=f"{tuple(inputs.shape)} and {tuple(targets.shape)} for network {number}",
            fix="check the network's first and last layer; a single target is a column, targets[:, None]",
        )
    if config.epochs and min(config.batch_size, len(inputs)) < 2 and any(layer.norm for layer in stack.layers):
        raise BatchbayesError(
            expected="batches of two examples or more, to train batch norm",
            got=f"a batch of one for network {number}",
            fix="raise batch_size, or pass more examples",
        )
