"""Prediction: S drawn functions on N examples, in chunks of both, summed up as they come."""

from collections.abc import Iterator
from typing import Literal, TypeVar

import torch
from torch import Tensor

from batchbayes.batches import Batches, Picker, chunks, require_finite
from batchbayes.errors import BatchbayesError
from batchbayes.likelihoods import Likelihood
from batchbayes.posterior import Posterior
from batchbayes.progress import Progress

P = TypeVar("P")
Engine = Literal["sample"]

KEPT_DRAWS_LIMIT = 2**24
"""Draws that a summary needs later are kept unasked up to this many numbers (64 MiB in float32)."""


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
        engine: "sample" runs the network once a draw: exact.
        inputs: where the inputs are in a batch, if not first: a key, a position or a function.
        chunk_size: examples in one forward pass; by default up to 256, fewer if they are large.
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
    if engine != "sample":
        raise BatchbayesError(expected='engine="sample"', got=repr(engine), fix="use that one")
    device, pieces, room = posterior.network.device(), [], KEPT_DRAWS_LIMIT
    with Progress("predicting", _work(data, num_samples)) as shown:
        for chunk in chunks(data, chunk_size, inputs):
            summary, kept = likelihood.summary(), []
            for outputs in _sampled(posterior, chunk.to(device), num_samples, seed):
                summary.add(outputs)
                room -= outputs.numel()
                if keep_draws or (keep_draws is None and summary.needs_draws and room >= 0):
                    kept.append(outputs)
                shown.advance(len(chunk))
            pieces.append(summary.finish(torch.cat(kept) if len(kept) == num_samples else None))
    if not pieces:
        raise BatchbayesError(expected="at least one example to predict", got="none", fix="check the data")
    return type(pieces[0]).concatenate(pieces)


def _work(data: Batches, num_samples: int) -> int | None:
    """Examples times draws, where the number of examples can be told."""
    examples = data if isinstance(data, Tensor) else getattr(data, "dataset", None)
    return len(examples) * num_samples if hasattr(examples, "__len__") else None  # type: ignore[arg-type]


def _sampled(posterior: Posterior, chunk: Tensor, num_samples: int, seed: int) -> Iterator[Tensor]:
    """The exact engine: one forward pass a draw, outputs (1, N, ...) one after another, on the CPU."""
    shape = None
    for index in range(num_samples):
        outputs = posterior.draw(seed, index)(chunk).cpu()
        if len(outputs) != len(chunk) or outputs.shape != (shape or outputs.shape):
            raise BatchbayesError(
                expected=f"outputs of one shape ({len(chunk)}, ...) from every draw",
                got=f"{tuple(outputs.shape)} from draw {index}",
                fix="make the network return one row an example, whatever its batch statistics are",
            )
        shape = outputs.shape
        yield require_finite(outputs, f"the network's output in draw {index}").unsqueeze(0)  # (1, N, ...)
