"""The choice of an engine: the one that was asked for, or the cheaper one that can be trusted."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from torch import Tensor

from batchbayes._common.checks import require_option
from batchbayes.engines.check import Linearity, measure_beyond, measure_linearity, warn_unless_trusted
from batchbayes.engines.linear import (
    BACKWARD_COST,
    LEADING_PASSES,
    MOST_OUTPUTS,
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
from batchbayes.posterior import Linearisable, Posterior, remembered

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
    posterior: Any, inputs: Tensor, num_samples: int, seed: int, contrasts: bool, fallback: Engine | None
) -> Engine:
    """Return the linear engine, if exact draws cost more and a few of them agree with it; else the fallback.

    If there is no fallback, warn where it is not to be trusted.
    """
    num_outputs = _num_outputs(posterior, inputs)
    if fallback and num_outputs > MOST_OUTPUTS:
        return replace(fallback, name="sample: of maps, as many exact draws as the linear engine costs are as near")
    if fallback and BACKWARD_COST * min(num_outputs, LEADING_PASSES) > num_samples:
        return replace(fallback, name=f"sample: {num_samples} draws cost less than the linear engine")
    kind = contrasts and 1 < num_outputs <= MOST_OUTPUTS
    found = posterior.linearity(contrasts=kind) or measure_linearity(posterior, inputs, contrasts=kind)
    if fallback and not found.is_sure:
        return replace(fallback, name=f"sample: not linear enough ({found})")
    plan, _ = plan_for(posterior, inputs, num_samples, seed, contrasts)
    if fallback and plan.cost(num_outputs) > min(num_samples, found.worth):
        draws = min(num_samples, found.worth)
        return replace(fallback, name=f"sample: {draws:.0f} draws cost less than {plan} and are as near")
    warn_unless_trusted(found)
    checked = _Checked(posterior, plan, found, fallback)
    checked.engine = Engine(f"{plan} ({found})", checked.blocks, shares_draws=False, drawn=Drawn.LINEAR)
    return checked.engine


def plan_for(
    posterior: Linearisable, inputs: Any, num_samples: int, seed: int, contrasts: bool
) -> tuple[LinearPlan, int]:
    """Return the plan for inputs of this shape, and how many outputs the network has for each example."""
    num_outputs = _num_outputs(posterior, inputs)
    wanted = (num_outputs, num_samples, seed, contrasts)
    plan = remembered(
        posterior,
        "plan",
        wanted,
        lambda: plan_linear(posterior, num_outputs, num_samples, seed, contrasts=contrasts),
    )
    return plan, num_outputs


def _num_outputs(posterior: Linearisable, inputs: Any) -> int:
    """Return how many outputs the network has for each example, by a pass of one of them."""
    wanted = tuple(tensor.shape[1:] for tensor in tensors_of(inputs))
    one = lambda: posterior.function(posterior.center)(inputs[:1])[0].numel()  # noqa: E731
    return remembered(posterior, "outputs", wanted, one)


class _Checked:
    """The linear engine, chunk by chunk. It is checked again on examples with more noise than the checked ones had."""

    def __init__(self, posterior: Any, plan: LinearPlan, found: Linearity, fallback: Engine | None) -> None:
        self._posterior, self._plan, self._fallback = posterior, plan, fallback
        self._limit = BEYOND * found.largest_spread
        self._refused: Linearity | None = None
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
        if self._refused is None:
            found = measure_beyond(self._posterior, inputs[beyond], contrasts=self._plan.contrasts)
            if found.trusted:
                self._limit = max(self._limit, BEYOND * found.largest_spread)
                return True
            self._refused = found
            if self._fallback is None:
                warn_unless_trusted(found)
        return False
