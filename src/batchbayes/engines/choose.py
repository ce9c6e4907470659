"""The choice of an engine: the one that was asked for, or the cheaper one that can be trusted."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from torch import Tensor

from batchbayes._common.checks import require_option
from batchbayes.engines.check import (
    MOST_CURVED,
    Linearity,
    is_known,
    known_beyond,
    known_curvature,
    known_linearity,
    warn_unless_trusted,
)
from batchbayes.engines.linear import (
    Block,
    Drawn,
    LinearDraws,
    LinearPlan,
    linear_draws,
    plan_linear,
    require_linearisable,
)
from batchbayes.engines.sample import sampled_blocks
from batchbayes.errors import BatchbayesError
from batchbayes.network.inputs import Whole, tensors_of
from batchbayes.posterior import Linearisable, Posterior

EngineName = Literal["sample", "linear", "auto"]

EXACT_TOO = "; exact draws of chunks that are not linear enough"
BEYOND = 2.0
"""The linear engine is checked again on examples whose variance exceeds this times the largest that was checked."""


@dataclass(eq=False, repr=False)
class Engine:
    """An engine at work: its name, and how it turns chunks of inputs (n, ...) into blocks of draws.

    Each block comes with the number of its chunk. The name changes if the engine makes exact draws of some inputs.
    """

    name: str
    blocks: Callable[[Sequence[Tensor]], Iterator[tuple[int, Block]]]
    shares_draws: bool
    """Whether a draw is made once for all chunks, so that several chunks at once take less time."""
    drawn: Drawn = Drawn.EXACT


def choose_engine(
    posterior: Posterior, inputs: Tensor, name: EngineName, num_samples: int, seed: int, *, contrasts: bool = False
) -> Engine:
    """Return the engine of a name. "auto" tries the linear engine on the inputs of the first chunk."""
    exact = Engine("sample", lambda chunks: sampled_blocks(posterior, chunks, num_samples, seed), shares_draws=True)
    require_option("engine", name, get_args(EngineName))
    if name == "sample":
        return exact
    if posterior.is_point:
        return replace(exact, name="sample: all draws are one function")
    if name == "auto" and posterior.linear is None:
        return replace(exact, name=f"sample: {type(posterior).__name__} has no linear engine")
    if isinstance(inputs, Whole):
        if name == "auto":
            return replace(exact, name="sample: batches that are whole have no linear engine")
        raise BatchbayesError(
            expected="rows of examples for the linear engine", got=f"{inputs}", fix='use engine="sample" or "auto"'
        )
    try:
        fallback = exact if name == "auto" else None
        return _linear_engine(require_linearisable(posterior), inputs, num_samples, seed, contrasts, fallback)
    except (BatchbayesError, RuntimeError) as error:  # the latter by torch, as for a singular matrix
        if name == "linear":
            raise
        return replace(exact, name=f"sample: no linear engine for this network ({error})")


def _linear_engine(
    posterior: Linearisable, inputs: Tensor, num_samples: int, seed: int, contrasts: bool, fallback: Engine | None
) -> Engine:
    """Return the linear engine, if exact draws cost more and a few of them agree with it; else the fallback.

    If there is no fallback, warn where it is not to be trusted.
    """
    if fallback and not is_known(posterior, contrasts=contrasts):
        curved = known_curvature(posterior, inputs, contrasts=contrasts)
        if not curved <= MOST_CURVED:
            return replace(
                fallback, name=f"sample: not linear enough ({curved:.0%} of the change is the same for opposite draws)"
            )
    plan, num_outputs = plan_for(posterior, inputs, num_samples, seed, contrasts)
    if fallback and plan.cost(num_outputs) > num_samples:
        return replace(fallback, name=f"sample: {num_samples} draws cost less than {plan}")
    found = known_linearity(posterior, inputs, contrasts=plan.contrasts, until_sure=fallback is not None)
    if fallback and not found.is_sure:
        return replace(fallback, name=f"sample: not linear enough ({found})")
    warn_unless_trusted(found)
    checked = _Checked(posterior, plan, found, fallback)
    checked.engine = Engine(f"{plan} ({found})", checked.blocks, shares_draws=False, drawn=Drawn.LINEAR)
    return checked.engine


_PLANS: "weakref.WeakKeyDictionary[Linearisable, tuple[object, LinearPlan, int]]" = weakref.WeakKeyDictionary()
"""The latest plan for each posterior: what it was made for, the plan, and the number of outputs. Small calls are often
made again and again."""


def plan_for(
    posterior: Linearisable, inputs: Any, num_samples: int, seed: int, contrasts: bool
) -> tuple[LinearPlan, int]:
    """Return the plan for inputs of this shape, and how many outputs the network has for each example."""
    wanted = ([tensor.shape[1:] for tensor in tensors_of(inputs)], num_samples, seed, contrasts)
    made_for, plan, num_outputs = _PLANS.get(posterior, (None, None, 0))
    if plan is None or made_for != wanted:
        num_outputs = posterior.function(posterior.center)(inputs[:1])[0].numel()
        plan = plan_linear(posterior, num_outputs, num_samples, seed, contrasts=contrasts)
        _PLANS[posterior] = wanted, plan, num_outputs
    return plan, num_outputs


class _Checked:
    """The linear engine, chunk by chunk. It is checked again on examples with more noise than the checked ones had."""

    def __init__(self, posterior: Linearisable, plan: LinearPlan, found: Linearity, fallback: Engine | None) -> None:
        self._posterior, self._plan, self._fallback = posterior, plan, fallback
        self._limit = BEYOND * found.largest_spread
        self.engine: Engine | None = None

    def blocks(self, chunks: Sequence[Tensor]) -> Iterator[tuple[int, Block]]:
        for number, inputs in enumerate(chunks):
            draws = self._draws(inputs)
            if draws is not None:
                yield number, draws
            elif self._fallback:
                if self.engine and self.engine.drawn is Drawn.LINEAR:
                    self.engine.name, self.engine.drawn = self.engine.name + EXACT_TOO, Drawn.BOTH
                yield from ((number, block) for _, block in self._fallback.blocks([inputs]))

    def _draws(self, inputs: Tensor) -> LinearDraws | None:
        """Return the draws, or None if those of the fallback are to be used."""
        try:
            draws = linear_draws(self._posterior, inputs, self._plan)
            return draws if self._is_trusted(inputs, draws) or self._fallback is None else None
        except BatchbayesError:  # for example, because derivatives do not exist at these inputs
            if self._fallback is None:
                raise
            return None

    def _is_trusted(self, inputs: Tensor, draws: LinearDraws) -> bool:
        spread = draws.moments()[1].reshape(len(inputs), -1)
        if spread.max() <= self._limit:
            return True
        beyond = (spread.mean(1) > self._limit).nonzero()[:, 0]
        if not len(beyond):
            return True
        found = known_beyond(self._posterior, inputs[beyond], contrasts=self._plan.contrasts)
        if found.trusted:
            self._limit = max(self._limit, BEYOND * found.largest_spread)
        elif self._fallback is None:
            warn_unless_trusted(found)
        return found.trusted
