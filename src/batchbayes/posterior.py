"""What a posterior is: anything that functions can be drawn from."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar

import torch
from torch import Tensor

from batchbayes.errors import BatchbayesError
from batchbayes.network.function import Function, Network, Output
from batchbayes.state import Saved

if TYPE_CHECKING:
    from batchbayes.engines.check import Linearity

T = TypeVar("T")

Header = dict[str, Any]
"""What a file says about a posterior, as JSON values."""


class Posterior(Saved, ABC):
    """A fitted distribution over functions. All work that does not depend on test inputs is done.

    Draw `index` under `seed` is a deterministic function. It depends on these two numbers and on the present weights of
    the network alone: not on the number of draws, not on how inputs are batched, and not on the other inputs of a
    batch. Any number of threads may use a posterior at once.
    """

    kind: ClassVar[str]
    """The name of this class in files; `methods` finds the class by it."""
    is_point: bool = False
    """Whether all draws are the same function, so that one draw is enough."""
    num_functions: int | None = None
    """How many different functions there are, if they are few. Draws use each function once before they use any of
    them again, so `predict` makes at most this many draws."""
    linear: "Linearisable | None" = None
    """What the linear engine needs; None if draws must be made one by one."""
    needs_weights: ClassVar[bool] = True
    """Whether the posterior holds only for the present weights of its `network`. A file then has a fingerprint of them.
    False if the posterior keeps all weights itself."""

    network: Network
    """The user's network, if there is one behind all draws."""

    @property
    def device(self) -> torch.device:
        """The device that inputs are moved to."""
        return self.network.device

    @abstractmethod
    def draw(self, seed: int, index: int) -> Function:
        """Return one function from the posterior."""

    def with_output(self, output: Output) -> Self:
        """Return the same draws, seen through another output of the network, or through several side by side."""
        if not is_dataclass(self) or "network" not in {field.name for field in fields(self)}:
            raise BatchbayesError(
                expected="a posterior whose draws give all outputs of a network",
                got=f"{type(self).__name__}, which belongs to one of them",
                fix="predict the output that it was fitted for, or fit another method, such as mcbn",
            )
        return replace(self, network=replace(self.network, output=output))

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy takes along. What is only remembered from call to call is made again."""
        return {name: value for name, value in vars(self).items() if name != _REMEMBERED}


_REMEMBERED = "_remembered"


def are_same(first: tuple[object, ...], second: tuple[object, ...]) -> bool:
    """Return whether objects are the same ones, or equal ones of simple types."""
    if len(first) != len(second):
        return False
    pairs = zip(first, second, strict=True)
    return all(a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b) for a, b in pairs)


def remembered(owner: object, name: str, wanted: tuple[object, ...], make: Callable[[], T]) -> T:
    """Return what was made last under a name, or make it if something else is wanted now. No copy takes it along."""
    latest = vars(owner).setdefault(_REMEMBERED, {})
    made_for, found = latest.get(name, ((), None))
    if found is None or not are_same(made_for, wanted):
        found = make()
        latest[name] = wanted, found
    return found


DRAWS = 64
"""The number of draws of a prediction, if nothing else is said."""


def num_draws(posterior: Posterior, wanted: int | None) -> int:
    """Return how many draws are made if this many are wanted: no function twice, if there are few of them.

    If no number is wanted, each of the functions is drawn, or 64 if there is no end of them.
    """
    few = posterior.num_functions
    return 1 if posterior.is_point else few or DRAWS if wanted is None else min(wanted, few or wanted)


class Linearisable(Protocol):
    """What the linear engine needs: the randomness is a vector, omega = centre + deviation."""

    @property
    def device(self) -> torch.device: ...

    @property
    def center(self) -> Tensor:
        """The vector omega that the draws scatter around, (D,)."""
        ...

    @property
    def num_axes(self) -> int:
        """The largest rank that `leading_axes` accepts; 0 if it cannot be called."""
        ...

    def draw(self, seed: int, index: int) -> Function: ...

    is_linear: ClassVar[bool]
    """Whether outputs are linear in omega by construction."""

    def linearity(self, *, contrasts: bool) -> "Linearity | None":
        """Return how linear outputs are in omega on training examples, if the fit has measured it."""
        ...

    def function(self, omega: Tensor) -> Function:
        """Return the network at omega (D,)."""
        ...

    def deviation(self, seed: int, index: int) -> Tensor:
        """Return omega of a draw less the centre, (D,)."""
        ...

    def combinations(self, num_samples: int, seed: int) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return directions (Q, D), weights (U, Q) and index (S,).

        Draw s deviates from the centre by `weights[index[s]] @ directions`, or by `directions[index[s]]` if there are
        no weights. Then directions may be rows of another kind, which `tangents` knows.
        """
        ...

    def leading_axes(self, rank: int) -> tuple[Tensor, float]:
        """Return the combinations of directions that move outputs most, (Q, rank), and the share of variance kept."""
        ...

    @property
    def knows_classes(self) -> bool:
        """Whether `leading_tangents` can be called: it is known how many classes move together."""
        ...

    def tangents(self, inputs: Tensor, directions: Tensor, *, contrasts: bool = False) -> tuple[Tensor, Tensor]:
        """Return outputs at the centre (n, ...), and their derivatives along directions (Q, D), (Q, n, ...).

        With `contrasts`, outputs are logits (n, K): only the differences between the logits of one example matter.
        """
        ...

    def leading_tangents(self, inputs: Tensor, directions: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
        """Return how the k combinations of logits move that matter most for each example.

        Returns:
            logits at the centre, (n, K); derivatives of the combinations along directions (Q, D), (Q, n, k); what each
            combination does to the logits, (n, k, K); and the share of the variance that they keep on average.
        """
        ...
