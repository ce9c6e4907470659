"""A posterior shares the weights of the user's network. This tells if they have changed since it was fitted."""

import torch
from torch import Tensor, nn

from batchbayes.restoring import version_of

FEW = 8
"""Numbers of each parameter that are remembered."""


class WeightsThen:
    """What the weights of a network were at one time: their counters of changes, and a few of their numbers.

    The counters cost nothing to look at. They also count what leaves the numbers as they are, such as loading the same
    weights again, so numbers decide.

    >>> network = nn.Linear(3, 2)
    >>> then = WeightsThen(network)
    >>> then.have_changed()
    False
    >>> _ = network.weight.data.copy_(torch.ones(2, 3)), network.load_state_dict(network.state_dict())
    >>> then.have_changed()
    True
    """

    def __init__(self, module: nn.Module) -> None:
        registries = [m._parameters for m in module.modules() if isinstance(m._parameters, dict)]  # not if scripted
        self._places = tuple((own, name) for own in registries for name, tensor in own.items() if tensor is not None)
        self._counters, self._numbers = self._count(), self._sample()

    def have_changed(self) -> bool:
        """Return whether the weights are others than they were. Each change is told once."""
        counters = self._count()
        if counters == self._counters:
            return False
        self._counters = counters
        return not all(map(_close, self._numbers, self._sample()))

    def _count(self) -> list[tuple[int, int]]:
        return [(id(tensor), version_of(tensor)) for tensor in self._tensors()]

    def _sample(self) -> list[Tensor]:
        with torch.no_grad():
            return [_spread(tensor) for tensor in self._tensors()]

    def _tensors(self) -> list[Tensor]:
        return [tensor for parameters, name in self._places if (tensor := parameters.get(name)) is not None]


def _spread(tensor: Tensor) -> Tensor:
    """Return a few numbers of a tensor, evenly spread."""
    return tensor.detach().reshape(-1)[:: max(1, tensor.numel() // FEW)].clone()


def _close(then: Tensor, now: Tensor) -> bool:
    """Whether numbers are the same, but for the precision of the coarser of two types."""
    if then.shape != now.shape or not (then.is_floating_point() and now.is_floating_point()):
        return then.shape == now.shape and torch.equal(then, now.to(then))
    rounding = 2 * max(torch.finfo(then.dtype).eps, torch.finfo(now.dtype).eps)
    return torch.allclose(now.to("cpu", torch.float64), then.to("cpu", torch.float64), rtol=rounding, atol=0)
