"""What a posterior is: anything that functions can be drawn from."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from batchbayes.network import Function, Network


@runtime_checkable
class Posterior(Protocol):
    """A distribution over functions, fitted: all the work that needs no test input is done.

    Draw `index` under `seed` is a deterministic function that depends on nothing else: not on how many draws are
    taken, nor on how inputs are batched, nor on their neighbours in the batch.
    """

    @property
    def network(self) -> Network:
        """The user's network, which a draw borrows for the length of a call."""
        ...

    def draw(self, seed: int, index: int) -> Function:
        """One function from the posterior."""
        ...

    def state(self) -> tuple[dict[str, object], dict[str, Tensor]]:
        """What a file must hold to bring it back: a JSON header with its `kind`, and tensors."""
        ...
