"""The sample engine: one forward pass for each draw. It is exact, and the truth that the linear engine is tested by."""

from collections.abc import Iterator

import torch
from torch import Tensor

from batchbayes.batches import cut, require_finite
from batchbayes.engines.linear_draws import BLOCK
from batchbayes.errors import BatchbayesError
from batchbayes.posterior import Posterior

CHUNK, DEVICE_CHUNK = 2**18, 2**21
"""Input numbers in one forward pass: on a CPU they should fit into its caches, an accelerator takes more."""
MOST_TOGETHER = 8
"""Small outputs of this many draws are summed up together."""


def sampled_outputs(posterior: Posterior, inputs: Tensor, num_samples: int, seed: int) -> Iterator[Tensor]:
    """Yield the outputs of all draws on inputs (n, ...), on the CPU, in small blocks (s, n, ...)."""
    shape, held = None, []
    numbers = CHUNK if posterior.device.type == "cpu" else DEVICE_CHUNK
    for index in range(num_samples):
        function = posterior.draw(seed, index)
        outputs = torch.cat([function(part).cpu() for part in cut(inputs, None, numbers)])
        del function  # before the next one is made: a function may hold all weights of a network
        if outputs.shape != (shape or outputs.shape):
            raise BatchbayesError(
                expected=f"outputs of one shape {tuple(shape or ())} from every draw",
                got=f"{tuple(outputs.shape)} from draw {index}",
                fix="let all draws return the same outputs: members of an ensemble need the same classes or targets",
            )
        shape = outputs.shape
        held.append(require_finite(outputs, f"the network's output in draw {index}"))
        if len(held) == MOST_TOGETHER or len(held) * outputs.numel() >= BLOCK or index + 1 == num_samples:
            yield torch.stack(held)  # (s, n, ...)
            held = []
