"""A device that is not there: tensors that say they are on another device, and count how often they are copied.

The numbers are on the CPU, inside of tensors that claim the device "meta". As on a GPU, operations between them and
tensors of the CPU are an error, and each copy, and each number that Python asks for, is counted.
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map

FAR = torch.device("meta")
COUNTED: Counter[str] = Counter()
aten = torch.ops.aten
MAY_MIX = {aten.copy_.default, aten.index.Tensor, aten.index_put_.default}
"""Operations of a GPU that take tensors of the CPU too."""


class FarTensor(Tensor):
    """A tensor that claims to be far away."""

    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor) -> "FarTensor":
        made = Tensor._make_wrapper_subclass(
            cls, near.shape, near.stride(), near.storage_offset(), dtype=near.dtype, device=FAR
        )
        made.near = near
        return made

    def __repr__(self, **_: Any) -> str:
        return f"FarTensor({self.near})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is aten._to_copy.default and torch.device(kwargs.get("device") or FAR) != FAR:
            COUNTED["to the CPU"] += 1
            return func(args[0].near, **kwargs)
        if func in (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default):
            COUNTED["numbers asked for"] += 1
            return func(*tree_map(_near, args), **kwargs)
        if func not in MAY_MIX:
            _require_one_device(args)
        if func is aten.copy_.default:
            COUNTED["to the device"] += not isinstance(args[1], FarTensor)
        found = func(*tree_map(_near, args), **tree_map(_near, kwargs | _here(kwargs)))
        return return_and_correct_aliasing(func, args, kwargs, tree_map(_far, found))


class FarDevice(TorchDispatchMode):
    """Inside this block, `.to("meta")` and `device="meta"` make tensors that keep their numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is None or torch.device(kwargs["device"]) != FAR or FarTensor in types:
            return func(*args, **kwargs)
        COUNTED["to the device"] += func is aten._to_copy.default
        return tree_map(_far, func(*args, **kwargs | _here(kwargs)))


def _here(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"device": torch.device("cpu")} if kwargs.get("device") is not None else {}


def _near(value: Any) -> Any:
    return value.near if isinstance(value, FarTensor) else value


def _far(value: Any) -> Any:
    return FarTensor(value) if isinstance(value, Tensor) and not isinstance(value, FarTensor) else value


def _require_one_device(args: Any) -> None:
    flat = [each for arg in args for each in (arg if isinstance(arg, list | tuple) else [arg])]
    if any(isinstance(each, Tensor) and not isinstance(each, FarTensor) and each.ndim for each in flat):
        raise RuntimeError("Expected all tensors to be on the same device")


def moved(network: nn.Module) -> nn.Module:
    """Move the parameters and buffers of a network to the device."""
    for module in network.modules():
        for name, own in list(module._parameters.items()):
            if own is not None:
                module._parameters[name] = nn.Parameter(FarTensor(own.detach()), own.requires_grad)
        for name, own in list(module._buffers.items()):
            if own is not None:
                module._buffers[name] = FarTensor(own)
    return network
