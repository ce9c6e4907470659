"""The process: its memory, its threads, and Ctrl-C while it starts others. What all workers have in common.

Torch is imported where it is needed, so that worker processes start quickly.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import cache


@cache
def keep_freed_memory() -> None:
    """Let the C library keep memory that a pass frees for the next pass, instead of returning it to the system.

    glibc returns memory beyond a threshold, which is twice the largest block that was freed before (at most 32 MB). The
    block here is never written to, so it costs nothing, and one is enough for the process. Without it page faults took
    a sixth of a training step, and a third of what a draw of the weights costs.
    """
    import torch

    torch.empty(2**25 - 2**13, dtype=torch.uint8)


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


class Workers(Executor):
    """An executor that knows how many units it can do at the same time."""

    about = ""
    """What to say of the workers in a line of progress."""

    @property
    def size(self) -> int:
        """The number of units. In a cluster it may change."""
        return 1


@contextmanager
def ctrl_c_delayed() -> Iterator[None]:
    """Hide Ctrl-C from processes that start in the block. The current process handles it after the block.

    A new process inherits the signal mask of this thread, so it never receives Ctrl-C. The mask alone is not enough for
    the current process: another thread may receive the signal, and Python would then leave the block while the new
    process is only half started. Therefore the handler is replaced too.
    """
    if not hasattr(signal, "pthread_sigmask") or threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    handler = signal.signal(signal.SIGINT, lambda number, _: caught.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if caught:
            signal.raise_signal(signal.SIGINT)
