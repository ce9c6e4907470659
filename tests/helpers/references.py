"""Naive versions of what the library does fast: the truth that it is tested against."""

import copy
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchbayes._common.rng import generator


def training_forward(network: nn.Module, batch: Tensor) -> Tensor:
    """A training-mode forward pass of a copy whose dropout is off."""
    twin = copy.deepcopy(network).train()
    for module in twin.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()
    with torch.no_grad():
        return twin(batch)


def training_statistics(network: nn.Module, batch: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Mean and biased variance that each layer normalises by, read off its running statistics at momentum 1."""
    twin = copy.deepcopy(network).train()
    counts = {}
    for name, layer in twin.named_modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd):
            layer.eval()
        if isinstance(layer, _BatchNorm):
            layer.momentum, layer.track_running_stats = 1.0, True
            layer.running_mean, layer.running_var = torch.zeros(layer.num_features), torch.ones(layer.num_features)
            layer.to(batch.dtype)
            layer.num_batches_tracked = torch.tensor(0)
            layer.register_forward_pre_hook(
                lambda _, args, name=name: counts.__setitem__(name, args[0].numel() // args[0].shape[1])
            )
    with torch.no_grad():
        twin(batch)
    layers = dict(twin.named_modules())
    return {n: (layers[n].running_mean, layers[n].running_var * (c - 1) / c) for n, c in counts.items()}


def dropout_mask(shape: tuple[int, ...], p: float, seed: int, index: int, site: str, call: int) -> Tensor:
    """Zeros and ones, number by number, from the stream of one call of one dropout layer in one draw."""
    numbers = torch.rand(shape, generator=generator(seed, "dropout", index, site, call)).flatten().tolist()
    return torch.tensor([0.0 if number < p else 1.0 for number in numbers], dtype=torch.float64).reshape(shape)


def snapshot(network: nn.Module) -> dict[str, object]:
    """Everything about a network that fitting and predicting must leave alone."""
    state: dict[str, object] = {}
    for name, module in network.named_modules():
        state[f"{name}:mode"] = module.training
        state[f"{name}:hooks"] = (
            len(module._forward_pre_hooks),
            len(module._forward_hooks),
            len(module._backward_hooks),
        )
        state[f"{name}:attributes"] = sorted(module.__dict__)
        for key, tensor in {**module._parameters, **module._buffers}.items():
            state[f"{name}.{key}"] = (
                None if tensor is None else (id(tensor), tensor.detach().clone(), tensor.requires_grad)
            )
    return state


def same_state(before: dict[str, object], after: dict[str, object]) -> bool:
    """Whether two snapshots are bit-identical, down to the identity of the tensors."""
    if before.keys() != after.keys():
        return False
    for key, old in before.items():
        new = after[key]
        if isinstance(old, tuple) and len(old) == 3 and isinstance(old[1], Tensor):
            if not isinstance(new, tuple) or old[0] != new[0] or old[2] != new[2] or not torch.equal(old[1], new[1]):
                return False
        elif old != new:
            return False
    return True


@contextmanager
def left_alone(network: nn.Module):
    """Assert that the block leaves the network bit-identical, even if it raises."""
    before = snapshot(network)
    try:
        yield
    finally:
        assert same_state(before, snapshot(network))
