"""A progress bar on standard error: only on a terminal, and only when the work is long."""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Self, TypeVar

T = TypeVar("T")

PATIENCE_SECONDS = 2.0
"""Work that ends sooner shows nothing."""
_HIDDEN = ContextVar("hidden", default=False)


@contextmanager
def hidden_progress(hidden: bool = True) -> Iterator[None]:
    """Show no bars inside the block."""
    token = _HIDDEN.set(hidden)
    try:
        yield
    finally:
        _HIDDEN.reset(token)


class Progress:
    """A bar that counts up to `total`, or just counts where the total is not known."""

    def __init__(self, label: str, total: int | None = None) -> None:
        self._label, self._total, self._count = label, total, 0
        self._start, self._last, self._shown = time.monotonic(), 0.0, False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def advance(self, count: int = 1) -> None:
        """Say that `count` more are done."""
        self._count += count
        now = time.monotonic()
        due = now - self._start > PATIENCE_SECONDS and now - self._last > 0.1
        if due and sys.stderr.isatty() and not _HIDDEN.get():
            sys.stderr.write("\r\x1b[K" + bar(self._label, self._count, self._total, now - self._start))
            sys.stderr.flush()
            self._shown, self._last = True, now


def progress(items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
    """Pass the items through, and tell a waiting person how far it is."""
    with Progress(label, total) as shown:
        for item in items:
            yield item
            shown.advance()


def bar(label: str, count: int, total: int | None, seconds: float) -> str:
    """One line that says how far it is and how long is left.

    >>> bar("draws", 30, 120, 10.0)
    'draws  [#####...............]  25 %  30 s left'
    """
    if not total:
        return f"{label}  {count} done  {seconds:.0f} s"
    share = min(1.0, count / total)
    left = f"{seconds * (1 - share) / share:.0f} s left" if share else "..."
    return f"{label}  [{'#' * round(20 * share):.<20}]  {share:.0%}  {left}".replace("%", " %", 1)
