"""The sample engine: one forward pass for each draw. It is exact, and the truth that the linear engine is tested by."""

from collections.abc import Iterator

import torch
from torch import Tensor

from batchbayes.batches import require_finite
from batchbayes.engines.linear_draws import BLOCK
from batchbayes.errors import BatchbayesError
from batchbayes.posterior import Posterior

MOST_TOGETHER = 8
"""Small outputs of this many draws are summed up together."""


def sampled_outputs(posterior: Posterior, inputs: Tensor, num_samples: int, seed: int) -> Iterator[Tensor]:
    """Yield the outputs of all draws on inputs (n, ...), on the CPU, in small blocks (s, n, ...)."""
    shape, held = None, []
    for index in range(num_samples):
        outputs = posterior.draw(seed, index)(inputs).cpu()
        if outputs.shape != (shape or outputs.shape):
            raise BatchbayesError(
                expected=f"outputs of one shape {tuple(shape or ())} from every draw",
                got=f"{tuple(outputs.shape)} from draw {index}",
                fix="make the shape of the network's output independent of its batch statistics",
            )
        shape = outputs.shape
        held.append(require_finite(outputs, f"the network's output in draw {index}"))
        if len(held) == MOST_TOGETHER or len(held) * outputs.numel() >= BLOCK or index + 1 == num_samples:
            yield torch.stack(held)  # (s, n, ...)
            held = []
