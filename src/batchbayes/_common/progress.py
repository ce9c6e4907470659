"""Progress on standard error: a bar for a person who waits, or lines for a log."""

import math
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from functools import cache
from typing import Any, Self, TypeVar

T = TypeVar("T")

PATIENCE_SECONDS = 2.0
"""Work that ends sooner shows no bar."""
LINE_SECONDS = 20.0
"""How often a line is printed where there is no bar, if lines were asked for."""
_HIDDEN = ContextVar("hidden", default=False)
is_hidden = _HIDDEN.get
"""Says whether the current thread shows no progress."""


@contextmanager
def hidden_progress(hidden: bool = True) -> Iterator[None]:
    """Show no progress inside the block. This holds for the current thread."""
    token = _HIDDEN.set(hidden)
    try:
        yield
    finally:
        _HIDDEN.reset(token)


def is_watched() -> bool:
    """Say whether standard error goes to a terminal or to a notebook, which is no terminal."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel") or (sys.stderr is not None and sys.stderr.isatty())


@cache
def _bar_class() -> Any:
    """Import tqdm when the first bar is shown, because most programs never show one."""
    from tqdm.std import TqdmDefaultWriteLock, tqdm  # type: ignore[attr-defined]

    class Bar(tqdm):
        monitor_interval = 0  # no thread in the background
        # The part of tqdm's lock that is for threads. The whole lock would fix how the program starts processes.
        _lock = TqdmDefaultWriteLock.th_lock

        def refresh(self, nolock: bool = False, lock_args: Any = None) -> Any:
            with self._lock:  # tqdm would keep the lock after an interruption, and other threads would wait forever
                return super().refresh(nolock=True)

    return Bar


class Shown:
    """A bar that is opened when it is first needed, and removed from the screen at the end of a `with` block."""

    bar: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def say(self, text: str, *, always: bool = False) -> None:
        """Print a line that stays, or, where progress is hidden, only if it must `always` be seen."""
        if self.bar is not None:
            self.bar.clear()
        if always or not is_hidden():
            print(text, file=sys.stderr, flush=True)

    def open(self, label: str, total: int | None, look: str) -> Any:
        columns, rows = shutil.get_terminal_size()  # where the size is unknown, tqdm would show nothing
        size = {"ncols": columns - 1, "nrows": rows}
        self.bar = _bar_class()(desc=label, total=total, bar_format=look, leave=False, miniters=1, smoothing=0, **size)
        return self.bar


class Progress(Shown):
    """A bar that counts up to `total`, or only counts where the total is not known. With `lines` it is for logs too.

    The first line is printed at once, or `after` some seconds.
    """

    about = ""
    """What else is shown, as the number of workers."""

    def __init__(self, label: str, total: int | None = None, *, lines: bool = False, after: float = 0.0) -> None:
        self._label, self._total, self._count, self._begun = label, total, 0, time.time()
        self._next_line = self._begun + after if lines else math.inf

    def advance(self, count: int = 1) -> None:
        """Add `count` to what is done."""
        self._count += count
        now, label = time.time(), ", ".join(filter(None, (self._label, self.about)))
        if self.bar is not None:
            self.bar.set_description_str(label, refresh=False)
            self.bar.update(count)
        elif is_hidden():
            return
        elif is_watched():
            if now - self._begun > PATIENCE_SECONDS:
                look = "{desc}: {percentage:3.0f} %|{bar:20}| {remaining} left"
                bar = self.open(label, self._total, look if self._total else "{desc}: {n} done in {elapsed}")
                bar.n, bar.start_t = self._count, self._begun
                bar.refresh()
        elif now >= self._next_line:
            self._next_line = now + LINE_SECONDS
            left = (now - self._begun) / max(1, self._count) * ((self._total or 0) - self._count)
            rest = f", {timedelta(seconds=round(left))} left" if self._count and self._total else ""
            self.say(f"{label}: {self._count} of {self._total} done{rest}")


def progress(items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
    """Yield the items, and count them in a bar."""
    with Progress(label, total) as shown:
        for item in items:
            yield item
            shown.advance()
