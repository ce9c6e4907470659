"""The sample engine: one forward pass for each draw. It is exact, and the truth that the linear engine is tested by."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from batchbayes.engines.linear import BLOCK
from batchbayes.errors import BatchbayesError
from batchbayes.network.inputs import require_finite
from batchbayes.network.source import cut
from batchbayes.posterior import Posterior

CHUNK, DEVICE_CHUNK = 2**18, 2**21
"""Input numbers in one forward pass: on a CPU they should fit into its caches, an accelerator takes more."""
MOST_TOGETHER = 8
"""Small outputs of this many draws are summed up together."""


def sampled_blocks(
    posterior: Posterior, chunks: Sequence[Tensor], num_samples: int, seed: int
) -> Iterator[tuple[int, Tensor]]:
    """Yield the outputs of all draws in small blocks (s, n, ...) on the CPU, each with the number of its chunk.

    All chunks share each draw.
    """
    held: list[list[Tensor]] = [[] for _ in chunks]
    shapes: dict[int, torch.Size] = {}
    numbers = CHUNK if posterior.device.type == "cpu" else DEVICE_CHUNK
    pieces = [cut(inputs, None, numbers) for inputs in chunks]
    for index in range(num_samples):
        function = posterior.draw(seed, index)
        for number, parts in enumerate(pieces):
            outputs = function(parts[0]).cpu()
            if len(parts) > 1:
                outputs = torch.cat([outputs, *(function(part).cpu() for part in parts[1:])])
            if outputs.shape != shapes.setdefault(number, outputs.shape):
                raise _another_shape(outputs, shapes[number], index)
            own = held[number]
            own.append(outputs)
            if len(own) == MOST_TOGETHER or len(own) * outputs.numel() >= BLOCK or index + 1 == num_samples:
                yield number, _finite(torch.stack(own), index + 1 - len(own))  # (s, n, ...)
                own.clear()
        del function  # before the next one is made: a function may hold all weights of a network


def _finite(block: Tensor, first: int) -> Tensor:
    """Return a block of draws (s, n, ...), or raise an error that names the draw if a number is not finite."""
    if not math.isfinite(block.sum().item()):  # much faster than a test of each number
        for index, outputs in enumerate(block, start=first):
            require_finite(outputs, f"the network's output in draw {index}")
    return block


def _another_shape(outputs: Tensor, shape: torch.Size, index: int) -> BatchbayesError:
    return BatchbayesError(
        expected=f"outputs of one shape {tuple(shape)} from every draw",
        got=f"{tuple(outputs.shape)} from draw {index}",
        fix="let all draws return the same outputs: members of an ensemble need the same classes or targets",
    )
