"""Prediction: S drawn functions on N examples, in chunks of both, summed up as they come."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch
from torch import Tensor

from batchbayes._common.progress import Progress
from batchbayes.batches import Batches, Picker, chunks, require_finite
from batchbayes.engines.linear import (
    Linearisable,
    compare_with_exact,
    exact_draws,
    is_linearisable,
    linear_draws,
    plan_linear,
    require_linearisable,
    spread_evenly,
    warn_unless_trusted,
)
from batchbayes.engines.linear_draws import BLOCK, Block, LinearDraws
from batchbayes.errors import BatchbayesError
from batchbayes.likelihoods import Likelihood
from batchbayes.posterior import Posterior

P = TypeVar("P")
Engine = Literal["sample", "linear", "auto"]

KEPT_DRAWS_LIMIT = 2**24
"""Draws that a summary needs later are kept unasked up to this many numbers (64 MiB in float32)."""


CHUNK, DEVICE_CHUNK = 2**18, 2**21
"""Input numbers in one forward pass: on a CPU as many as its caches like, which is also what keeps the activations of
all layers, for the linear engine, small; exact draws on an accelerator take more."""
SAMPLE_BLOCK = 8
"""Exact draws that are summed up together, where they are small."""
CHECK_DRAWS, CHECK_EXAMPLES, CHECK_NUMBERS = 8, (16, 64), 2**16
"""How many exact draws the linear engine is checked against, of how many examples at least and at most: between them,
as many as hold so many numbers. On 16 rows of a table the check may pass by luck, on 64 hardly ever."""


@torch.no_grad()
def predict(
    posterior: Posterior,
    data: Batches,
    likelihood: Likelihood[P],
    *,
    num_samples: int = 64,
    seed: int = 0,
    engine: Engine = "sample",
    inputs: Picker = None,
    chunk_size: int | None = None,
    keep_draws: bool | None = None,
) -> P:
    """Average the predictions of `num_samples` functions drawn from the posterior.

    Args:
        posterior: what functions are drawn from, as `mcbn(...)` returns it.
        data: a tensor (N, ...), or an iterable of batches: a DataLoader with or without targets.
        likelihood: `categorical()`, `gaussian(precision=...)` or `heteroscedastic_gaussian()`.
        num_samples: the number of draws S. Memory does not grow with it, unless the draws are kept.
        seed: draw s depends on the seed and s only.
        engine: "sample" runs the network once a draw: exact. "linear" takes the network as linear in its batch
            statistics: any number of draws for the price of a few passes; a few exact draws of the first examples
            check it, and it warns where they differ. "auto" is linear where that check passes and it costs less, and
            exact elsewhere; `predictive.engine` says which, and why.
        inputs: where the inputs are in a batch, if not first: a key, a position or a function.
        chunk_size: examples in one forward pass; by default as many as hold about 260,000 numbers (on a CPU).
        keep_draws: keep the outputs of every draw as `predictive.draws` (S, N, ...). By default they are kept only
            where the density of a regression needs them, and only while they are small.

    Returns:
        The predictive that the likelihood builds, on the CPU.

    >>> import batchbayes as bb
    >>> network = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
    >>> posterior = bb.mcbn(network, torch.randn(256, 2), batch_size=32, num_samples=16)
    >>> predictive = bb.predict(posterior, torch.randn(5, 2), bb.categorical(), num_samples=16)
    >>> predictive.probs.shape, predictive.mutual_information.shape
    (torch.Size([5, 3]), torch.Size([5]))
    """
    if num_samples < 1:
        raise BatchbayesError(expected="at least one draw", got=f"num_samples={num_samples}", fix="pass 1 or more")
    device, pieces, room, draws = posterior.network.device(), [], KEPT_DRAWS_LIMIT, None
    numbers = DEVICE_CHUNK if engine == "sample" and device.type != "cpu" else CHUNK
    contrasts = not keep_draws and getattr(likelihood, "shift_invariant", False)
    with Progress("predicting", _work(data, num_samples)) as shown:
        for chunk in chunks(data, chunk_size, inputs, numbers=numbers):
            if not len(chunk):
                continue
            chunk = chunk.to(device)
            draws = draws or choose_engine(posterior, chunk, engine, num_samples, seed, contrasts)
            summary, kept = likelihood.summary(), []
            for block in draws.blocks(chunk):
                summary.add(block)
                room -= block.numel()
                if keep_draws or (keep_draws is None and summary.needs_draws and room >= 0):
                    kept.append(block)
                shown.advance(len(block) * len(chunk))
            pieces.append(summary.finish(_complete(kept, num_samples)))
    if draws is None:
        raise BatchbayesError(expected="at least one example to predict", got="none", fix="check the data")
    return replace(type(pieces[0]).concatenate(pieces), engine=draws.name)


@dataclass(frozen=True)
class Draws:
    """An engine at work: what it is called, and how it turns a chunk (n, ...) into blocks of draws."""

    name: str
    blocks: Callable[[Tensor], Iterator[Block]]


def choose_engine(
    posterior: Posterior, chunk: Tensor, engine: Engine, num_samples: int, seed: int, contrasts: bool = False
) -> Draws:
    """The engine that was asked for; "auto" tries the linear one on the first chunk."""
    exact = Draws("sample", lambda inputs: sampled_outputs(posterior, inputs, num_samples, seed))
    if engine == "sample":
        return exact
    if engine not in ("linear", "auto"):
        raise BatchbayesError(
            expected='engine="sample", "linear" or "auto"', got=repr(engine), fix="choose one of them"
        )
    if engine == "auto" and not is_linearisable(posterior):
        return Draws(f"sample: {type(posterior).__name__} has no linear engine", exact.blocks)
    try:
        otherwise = exact if engine == "auto" else None
        return linear_engine(require_linearisable(posterior), chunk, num_samples, seed, contrasts, otherwise)
    except (BatchbayesError, RuntimeError) as error:  # torch raises the latter where gradients cannot pass
        if engine == "linear":
            raise
        return Draws(f"sample: no linear engine for this network ({error})", exact.blocks)


def linear_engine(
    posterior: Linearisable, chunk: Tensor, num_samples: int, seed: int, contrasts: bool, otherwise: Draws | None
) -> Draws:
    """The linear engine, checked by a few exact draws of some examples of the first chunk.

    Where it costs more than exact draws or fails the check, what is to be used `otherwise`; if that is None it warns.
    """
    fewest, most = CHECK_EXAMPLES
    sample = spread_evenly(len(chunk), max(fewest, min(most, CHECK_NUMBERS // max(1, chunk[0].numel()))))
    few = exact_draws(posterior, chunk[sample], CHECK_DRAWS, seed)
    num_outputs = few[0, 0].numel()
    plan = plan_linear(posterior, num_outputs, max(num_samples, CHECK_DRAWS), seed, contrasts=contrasts)
    if otherwise and plan.cost(num_outputs) > num_samples:
        return replace(otherwise, name=f"sample: {num_samples} draws cost less than {plan}")
    first = linear_draws(posterior, chunk, plan)
    drawn = first.at(sample).first(CHECK_DRAWS)
    found = compare_with_exact(drawn, few, contrasts=plan.contrasts, left_out=plan.left_out)
    if otherwise and not found.trusted:
        return replace(otherwise, name=f"sample: not linear enough ({found})")
    warn_unless_trusted(found)
    ready = [first]  # the chunk that was checked comes first

    def blocks(inputs: Tensor) -> Iterator[LinearDraws]:
        yield (ready.pop() if ready else linear_draws(posterior, inputs, plan)).first(num_samples)

    return Draws(f"{plan} ({found})", blocks)


def _complete(kept: list[Block], num_samples: int) -> Block | None:
    """The blocks of a chunk as one, unless some draws were not kept."""
    if sum(map(len, kept)) < num_samples:
        return None
    tensors = [block for block in kept if isinstance(block, Tensor)]
    return torch.cat(tensors) if tensors else kept[0]


def _work(data: Batches, num_samples: int) -> int | None:
    """Examples times draws, where the number of examples can be told."""
    examples = data if isinstance(data, Tensor) else getattr(data, "dataset", None)
    return len(examples) * num_samples if hasattr(examples, "__len__") else None  # type: ignore[arg-type]


def sampled_outputs(posterior: Posterior, chunk: Tensor, num_samples: int, seed: int) -> Iterator[Tensor]:
    """The exact engine: one forward pass a draw, outputs (s, N, ...) in small blocks, on the CPU."""
    shape, held = None, []
    for index in range(num_samples):
        outputs = posterior.draw(seed, index)(chunk).cpu()
        if outputs.shape != (shape or outputs.shape):
            raise BatchbayesError(
                expected=f"outputs of one shape {tuple(shape or ())} from every draw",
                got=f"{tuple(outputs.shape)} from draw {index}",
                fix="make the shape of the network's output independent of its batch statistics",
            )
        shape = outputs.shape
        held.append(require_finite(outputs, f"the network's output in draw {index}"))
        if len(held) == SAMPLE_BLOCK or len(held) * outputs.numel() >= BLOCK or index + 1 == num_samples:
            yield torch.stack(held)  # (s, N, ...)
            held = []
