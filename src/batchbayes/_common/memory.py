"""Memory of the process."""

from functools import cache

import torch


@cache
def keep_freed_memory() -> None:
    """Let the C library keep memory that a pass frees for the next pass, instead of returning it to the system.

    glibc returns memory beyond a threshold, which is twice the largest block that was freed before (at most 32 MB). The
    block here is never written to, so it costs nothing, and one is enough for the process. Without it page faults took
    a sixth of a training step, and a third of what a draw of the weights costs.
    """
    torch.empty(2**25 - 2**13, dtype=torch.uint8)
