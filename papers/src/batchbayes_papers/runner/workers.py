"""Workers for units of work on this machine, as a `concurrent.futures.Executor`.

The code that runs units needs only this interface, so that the workers of a cluster can replace them.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from batchbayes._common.machine import Workers, ctrl_c_delayed, single_threaded

T = TypeVar("T")

_UNTIL_EXIT = ExitStack()
"""Keeps the contexts that a worker process enters at its start: without a reference they would end at once."""


def local_workers(count: int) -> Workers:
    """Return an executor with `count` processes of this machine, each with one thread.

    For a count of 1 the work is done in the current process.

    >>> with local_workers(1) as workers:
    ...     workers.submit(pow, 2, 5).result()
    32
    """
    return ThisProcess() if count == 1 else WorkerProcesses(count)


class ThisProcess(Workers):
    """An executor that does all work at once in the current process, with one thread."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Call the function and return a finished future. Ctrl-C is not caught: it ends the whole run."""
        future: Future[T] = Future()
        try:
            with single_threaded():
                future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class WorkerProcesses(ProcessPoolExecutor, Workers):
    """An executor with spawned processes that always end when their parent ends.

    The workers hold one end of a pipe, and the parent holds the other. When the parent closes its end (after Ctrl-C) or
    is killed, the workers end at once, in the middle of their work.
    """

    def __init__(self, count: int) -> None:
        context = get_context("spawn")
        listening, self._lifeline = context.Pipe(duplex=False)
        self._count = count
        super().__init__(count, mp_context=context, initializer=_start_worker, initargs=(listening,))

    @property
    def size(self) -> int:
        return self._count

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Submit work as usual. This may start a process, which must not receive Ctrl-C."""
        with ctrl_c_delayed():
            return super().submit(fn, *args, **kwargs)

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is not None:
            self._end_workers()
        self.shutdown(wait=True, cancel_futures=True)
        self._lifeline.close()

    def _end_workers(self) -> None:
        """End all workers at once.

        A worker may end while it sends a result. The thread of the pool that reads results then waits for the rest of
        the message, because this process has the writing end of the pipe open too. So this end is closed here.
        """
        self._lifeline.close()
        for process in list((self._processes or {}).values()):
            wait([process.sentinel])
        self._result_queue._writer.close()  # pyright: ignore[reportAttributeAccessIssue]


def _start_worker(lifeline: Connection) -> None:
    """Prepare a new worker process."""
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives Ctrl-C too, and ends its workers
    _UNTIL_EXIT.enter_context(single_threaded())


def _end_with(lifeline: Connection) -> None:
    """End this process when the other end of the pipe closes."""
    try:
        lifeline.recv_bytes()
    except (EOFError, OSError):
        sys.stderr.flush()
        os._exit(1)
