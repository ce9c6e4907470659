"""The choice of an engine: the one that was asked for, or the cheaper one that can be trusted."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from batchbayes.engines.linear import linear_draws, plan_linear, require_linearisable
from batchbayes.engines.linear_draws import Block
from batchbayes.engines.linearity import compare_with_exact, exact_draws, spread_evenly, warn_unless_trusted
from batchbayes.engines.sample import sampled_outputs
from batchbayes.errors import BatchbayesError
from batchbayes.posterior import Linearisable, Posterior

EngineName = Literal["sample", "linear", "auto"]

CHECK_DRAWS, CHECK_EXAMPLES, CHECK_NUMBERS = 8, (16, 64), 2**16
"""The linear engine is checked by this many exact draws, on 16 to 64 examples that hold about 65,000 numbers. On 16
rows of a table the check may pass by luck, on 64 it hardly ever does."""


@dataclass(frozen=True)
class Engine:
    """An engine at work: its name, and how it turns inputs (n, ...) into blocks of draws."""

    name: str
    blocks: Callable[[Tensor], Iterator[Block]]


def choose_engine(
    posterior: Posterior, inputs: Tensor, name: EngineName, num_samples: int, seed: int, *, contrasts: bool = False
) -> Engine:
    """Return the engine of a name. "auto" tries the linear engine on the inputs of the first chunk."""
    exact = Engine("sample", lambda inputs: sampled_outputs(posterior, inputs, num_samples, seed))
    if name not in ("sample", "linear", "auto"):
        raise BatchbayesError(expected='engine="sample", "linear" or "auto"', got=repr(name), fix="choose one of them")
    if name == "sample":
        return exact
    if posterior.is_point:
        return replace(exact, name="sample: all draws are one function")
    if name == "auto" and posterior.linear is None:
        return replace(exact, name=f"sample: {type(posterior).__name__} has no linear engine")
    try:
        fallback = exact if name == "auto" else None
        return _linear_engine(require_linearisable(posterior), inputs, num_samples, seed, contrasts, fallback)
    except (BatchbayesError, RuntimeError) as error:  # torch raises the latter where gradients cannot pass
        if name == "linear":
            raise
        return replace(exact, name=f"sample: no linear engine for this network ({error})")


def _linear_engine(
    posterior: Linearisable, inputs: Tensor, num_samples: int, seed: int, contrasts: bool, fallback: Engine | None
) -> Engine:
    """Return the linear engine, checked by a few exact draws on some of the inputs.

    If the linear engine costs more than exact draws or fails the check, return the fallback. If there is no fallback,
    warn.
    """
    fewest, most = CHECK_EXAMPLES
    sample = spread_evenly(len(inputs), max(fewest, min(most, CHECK_NUMBERS // max(1, inputs[0].numel()))))
    few = exact_draws(posterior, inputs[sample], CHECK_DRAWS, seed)
    num_outputs = few[0, 0].numel()
    plan = plan_linear(posterior, num_outputs, max(num_samples, CHECK_DRAWS), seed, contrasts=contrasts)
    if fallback and plan.cost(num_outputs) > num_samples:
        return replace(fallback, name=f"sample: {num_samples} draws cost less than {plan}")
    first = linear_draws(posterior, inputs, plan)
    drawn = first.at(sample).first(CHECK_DRAWS)
    found = compare_with_exact(drawn, few, contrasts=plan.contrasts, left_out=plan.left_out)
    if fallback and not found.trusted:
        return replace(fallback, name=f"sample: not linear enough ({found})")
    warn_unless_trusted(found)
    ready = [first]  # the inputs that were checked come first

    def blocks(inputs: Tensor) -> Iterator[Block]:
        yield (ready.pop() if ready else linear_draws(posterior, inputs, plan)).first(num_samples)

    return Engine(f"{plan} ({found})", blocks)
