"""Train hundreds of small networks at once.

Each network has its own data, order, weight decay, dropout rate and last epoch. The result for each network is that of
`loop.train` for this network alone, up to rounding.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from batchbayes._common.progress import Progress
from batchbayes.errors import BatchbayesError
from batchbayes.training.batches import require_data
from batchbayes.training.loop import TrainingConfig
from batchbayes.training.stack.convert import stack_networks, unstack
from batchbayes.training.stack.group import Examples, Group, Loss
from batchbayes.training.stack.stack import Stack

Observer = Callable[[int, Stack, Tensor], Tensor]
"""From (epochs done, the networks that are still trained, their numbers) to a mask of those that continue."""


def train_together(networks: Sequence[nn.Module], data: Sequence[Examples], configs: Sequence[TrainingConfig]) -> None:
    """Train networks of one shape in place, each on its own data, and leave them in evaluation mode.

    The objective of each network is `half_squared_error`.

    >>> from batchbayes.models.mlp import MLP
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> networks = [MLP(1, [8], 1) for _ in range(3)]
    >>> configs = [TrainingConfig(20, 16, 1e-2, weight_decay=decay) for decay in (0.0, 1e-3, 1e-1)]
    >>> train_together(networks, [(x, x)] * 3, configs)
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
    loss: Loss = "half_squared_error",
) -> Stack:
    """Return a trained copy of a stack.

    Args:
        stack: the networks.
        data: for each network what it is trained on.
        configs: for each network how it is trained. They may differ in weight decay and seed alone.
        observe: called after every `every` epochs. A network that does not continue stays as it is then.
        every: how many epochs are between two calls of `observe`.
        loss: what training makes small. For "cross_entropy", targets are one-hot rows, or other probabilities.
    """
    common = _require_common(stack, data, configs)
    trained, groups = stack.select(range(len(stack))), _groups(stack, data, configs, loss)
    with Progress(f"training {len(stack)} networks", common.epochs) as shown:
        for epoch in range(common.epochs):
            for group in groups:
                group.run_epoch(epoch)
            shown.advance()
            looks = (epoch + 1) % every == 0
            if looks or epoch + 1 == common.epochs:
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


def _groups(stack: Stack, data: Sequence[Examples], configs: Sequence[TrainingConfig], loss: Loss) -> list[Group]:
    """Return groups of the networks whose epochs have the same number of batches of the same size."""
    kinds: dict[tuple[int, int], list[int]] = {}
    for number, (inputs, _) in enumerate(data):
        size = min(configs[0].batch_size, len(inputs))
        kinds.setdefault((size, len(inputs) // size), []).append(number)
    return [Group(stack, torch.tensor(numbers), data, configs, loss=loss) for numbers in kinds.values()]


def _require_common(stack: Stack, data: Sequence[Examples], configs: Sequence[TrainingConfig]) -> TrainingConfig:
    """Refuse arguments that do not fit together. Return the config that all networks share except decay and seed."""
    if not len(stack) == len(data) == len(configs):
        raise BatchbayesError(
            expected="as many data sets and configs as networks",
            got=f"{len(stack)} networks, {len(data)} data sets, {len(configs)} configs",
            fix="pass one of each for each network",
        )
    common = replace(configs[0], weight_decay=0.0, seed=0)
    if any(replace(config, weight_decay=0.0, seed=0) != common for config in configs) or common.optimiser != "adam":
        raise BatchbayesError(
            expected="one number of epochs, batch size and learning rate for all networks, and Adam",
            got="different ones" if common.optimiser == "adam" else repr(common.optimiser),
            fix="train networks with another config as another stack",
        )
    for number in sorted({(id(own[0]), id(own[1])): i for i, own in reversed(list(enumerate(data)))}.values()):
        _require_fitting(stack, *data[number], common, number)
    return common


def _require_fitting(stack: Stack, inputs: Tensor, targets: Tensor, config: TrainingConfig, number: int) -> None:
    """Refuse data that does not fit the networks."""
    require_data(inputs, targets)
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
