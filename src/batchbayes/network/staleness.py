"""A posterior shares the weights of the user's network. This tells if they have changed since it was fitted."""

from typing import Any

import torch
from torch import Tensor, nn

FEW = 8
"""Numbers of each parameter that are remembered, at least."""


class WeightsThen:
    """What the weights of a network were at one time: which tensors, and a few of their numbers.

    Torch's counters of changes also count what leaves the numbers as they are, such as loading the same weights again,
    and do not count what a fused optimiser or a numpy view changes. So numbers decide.

    >>> network = nn.Linear(3, 2)
    >>> then = WeightsThen(network)
    >>> then.have_changed()
    False
    >>> _ = network.weight.data.copy_(torch.ones(2, 3)), network.load_state_dict(network.state_dict())
    >>> then.have_changed()
    True
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._registries = self._present_registries()
        self._places, self._numbers = self._present_places(), self._sample()
        self._views, self._latest = self._watched()

    def have_changed(self) -> bool:
        """Return whether the weights are others than they were. Each change is told once."""
        now = map(torch.cat, self._views)
        if self._present_places() == self._places and all(map(_equal, now, self._latest)):
            return False
        self._registries = self._present_registries()
        self._places, now = self._present_places(), self._sample()
        self._views, self._latest = self._watched()
        return len(now) != len(self._numbers) or not all(map(_close, self._numbers, now))

    def _present_registries(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return where the modules keep parameters, and other modules. Those of scripted modules are no dicts."""
        every = list(self._module.modules())
        kinds = [[m._parameters for m in every], [m._modules for m in every]]
        parameters, modules = ([own for own in kind if isinstance(own, dict) and own] for kind in kinds)
        return parameters, modules

    def _present_places(self) -> list[int]:
        """Return which modules there are, which tensors, and where their numbers are."""
        tensors = self._tensors()
        found = [id(module) for own in self._registries[1] for module in own.values()]
        found += map(id, tensors)
        found += [tensor.data_ptr() for tensor in tensors if type(tensor) is nn.Parameter]  # others may have none
        return found

    def _sample(self) -> list[Tensor]:
        return [_spread(tensor.detach()).clone() for tensor in self._tensors()]

    def _watched(self) -> tuple[list[list[Tensor]], list[Tensor]]:
        """Return views of a few numbers of each tensor, by device and type, and these numbers as they are now."""
        groups: dict[object, list[Tensor]] = {}
        for tensor in self._tensors():
            axes = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)  # so that the numbers are not copied
            groups.setdefault((tensor.device, tensor.dtype), []).append(_spread(tensor.detach().permute(axes)))
        return list(groups.values()), [torch.cat(views) for views in groups.values()]

    def _tensors(self) -> list[Tensor]:
        return [tensor for own in self._registries[0] for tensor in own.values() if tensor is not None]


def _spread(tensor: Tensor) -> Tensor:
    """Return a few numbers of a tensor, evenly spread."""
    return tensor.reshape(-1)[:: max(1, tensor.numel() // FEW)]


def _equal(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first, second) or torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)


def _close(then: Tensor, now: Tensor) -> bool:
    """Whether numbers are the same, but for the precision of the coarser of two types."""
    if then.shape != now.shape or not (then.is_floating_point() and now.is_floating_point()):
        return then.shape == now.shape and torch.equal(then, now.to(then))
    rounding = 2 * max(torch.finfo(then.dtype).eps, torch.finfo(now.dtype).eps)
    return torch.allclose(
        now.to("cpu", torch.float64), then.to("cpu", torch.float64), rtol=rounding, atol=0, equal_nan=True
    )
