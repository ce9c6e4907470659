"""What layers of a network see in a pass: one way to find layers that run, and to gather statistics of their inputs."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from batchbayes.network.function import Network


class Tapped(NamedTuple):
    """What one pass has shown."""

    seen: dict[str, Any]
    """What was seen of the input of each layer; of one that runs several times, at its last run."""
    order: list[str]
    """The names of the layers in the order in which they ran, once for each run."""
    outputs: Tensor


def tap(
    network: Network,
    inputs: Any,
    layers: Iterable[str],
    see: Callable[[str, Tensor], Any] = lambda _, h: h,
    **changes: Any,
) -> Tapped:
    """Run the network once, and look at the inputs of named layers by `see(name, input)`. The changes are those of it.

    >>> from torch import nn, zeros
    >>> network = Network(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    >>> seen, order, outputs = tap(network, zeros(5, 3), ["0", "2"], lambda name, h: tuple(h.shape))
    >>> seen, order, outputs.shape
    ({'0': (5, 3), '2': (5, 4)}, ['0', '2'], torch.Size([5, 2]))
    """
    with tapping(network, layers, see, **changes) as run:
        return run(inputs)


@contextmanager
def tapping(
    network: Network,
    layers: Iterable[str],
    see: Callable[[str, Tensor], Any],
    *,
    before: Mapping[str, Callable[[Tensor], Tensor | None]] | None = None,
    **changes: Any,
) -> Iterator[Callable[[Any], Tapped]]:
    """Prepare `tap` once, for any number of passes inside the block."""
    seen: dict[str, Any] = {}
    order: list[str] = []
    device = network.device

    def look(name: str, h: Tensor) -> None:
        seen[name] = see(name, h)
        order.append(name)

    def run(inputs: Any) -> Tapped:
        seen.clear()
        order.clear()
        outputs = passed(inputs.to(device))
        return Tapped(dict(seen), list(order), outputs)

    looking = {**(before or {}), **{name: partial(look, name) for name in layers}}
    with network.prepared(before=looking, **changes) as passed:
        yield run
