"""One thread for torch and numpy."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

THREADS_VARIABLE = "OMP_NUM_THREADS"
"""The libraries below torch and numpy read this variable when they are loaded."""


@contextmanager
def single_threaded() -> Iterator[None]:
    """Use one thread for torch, and for numpy if it is loaded inside the block.

    Sums then do not depend on the number of cores.
    """
    before = os.environ.get(THREADS_VARIABLE)
    os.environ[THREADS_VARIABLE] = "1"
    torch = sys.modules.get("torch")
    threads = torch.get_num_threads() if torch else 1
    try:
        if torch:
            torch.set_num_threads(1)
        yield
    finally:
        if torch:
            torch.set_num_threads(threads)
        if before is None:
            del os.environ[THREADS_VARIABLE]
        else:
            os.environ[THREADS_VARIABLE] = before
