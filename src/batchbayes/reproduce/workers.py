"""The one seam for parallel work: `concurrent.futures.Executor`.

What runs units asks for nothing more, so that another engine with this interface can stand in for the processes of this
machine: dask.distributed, for instance, offers `Client.get_executor()`.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")

_FOR_EVER = ExitStack()
"""Holds what a worker process enters at its start: a context that nobody holds is left at once."""
THREADS_VARIABLE = "OMP_NUM_THREADS"
"""Read by the libraries under torch and numpy when they are loaded."""


def local_workers(count: int) -> Executor:
    """`count` processes of this machine with a thread each; one is this process itself.

    >>> with local_workers(1) as workers:
    ...     workers.submit(pow, 2, 5).result()
    32
    """
    return ThisProcess() if count == 1 else Processes(count)


class ThisProcess(Executor):
    """Does what it is given at once, with one thread, as a worker process would."""

    def __enter__(self) -> Self:
        self._threads = single_threaded()
        self._threads.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.__exit__(kind, error, trace)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """A future that is done already. Ctrl-C is not caught: it is meant for all."""
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class Processes(ProcessPoolExecutor):
    """Spawned processes that end with their parent, however it ends.

    They hold one end of a pipe and this process the other. When that closes, by Ctrl-C or because this process is no
    more, they end at once, in the middle of their work.
    """

    def __init__(self, count: int) -> None:
        context = get_context("spawn")
        listening, self._lifeline = context.Pipe(duplex=False)
        super().__init__(count, mp_context=context, initializer=_begin, initargs=(listening,))

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """As ever; it may start a process."""
        with _interrupts_held_back():
            return super().submit(fn, *args, **kwargs)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._lifeline.close()
        self.shutdown(wait=True, cancel_futures=True)
        self._lifeline.close()


@contextmanager
def single_threaded() -> Iterator[None]:
    """One thread for torch and numpy, if they are loaded inside, and for torch anyway.

    Then sums do not depend on how many cores there are to share them.
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


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """A process that is started inside never sees Ctrl-C, not even before its first line; this one sees it after.

    It inherits the mask of this thread. That alone would not do for this process, where any other thread may be given
    the signal, upon which Python would leave the block with the new process half made.
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


def _begin(lifeline: Connection) -> None:
    """The start of a worker process."""
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and decides
    _FOR_EVER.enter_context(single_threaded())


def _end_with(lifeline: Connection) -> None:
    try:
        lifeline.recv_bytes()
    except (EOFError, OSError):
        sys.stderr.flush()
        os._exit(1)
