"""Progress on standard error: a bar on a terminal when the work is long, and a line for work in units anywhere."""

import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
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


class UnitProgress:
    """Work in units: a line on a terminal that is drawn again and again; elsewhere a plain line a finished unit.

    The time left goes by the effort of units, and by how long those that are done have taken, in earlier runs too.
    """

    def __init__(self, efforts: Mapping[str, float], workers: int) -> None:
        self._efforts, self._workers, self._shown = efforts, workers, False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clear()

    def show(self, taken: Mapping[str, float], running: Mapping[str, float]) -> None:
        """Seconds that each finished unit took, and those that each running one has been at it."""
        if _HIDDEN.get() or not sys.stderr.isatty():
            return
        left = seconds_left(self._efforts, taken, running, self._workers)
        line = unit_line(len(taken), len(self._efforts), list(running), left)
        sys.stderr.write("\r\x1b[K" + line[: shutil.get_terminal_size().columns - 1])
        sys.stderr.flush()
        self._shown = True

    def finished(self, name: str, taken: Mapping[str, float], running: Mapping[str, float]) -> None:
        """One more is done."""
        if _HIDDEN.get() or sys.stderr.isatty():
            return
        left = seconds_left(self._efforts, taken, running, self._workers)
        rest = "" if left is None or len(taken) == len(self._efforts) else f"; {duration(left)} left"
        print(f"{len(taken)}/{len(self._efforts)}  {name} ({taken[name]:.1f} s){rest}", file=sys.stderr)

    def say(self, text: str) -> None:
        """A line that stays."""
        self._clear()
        if not _HIDDEN.get():
            print(text, file=sys.stderr)

    def _clear(self) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = False


def seconds_left(
    efforts: Mapping[str, float], taken: Mapping[str, float], running: Mapping[str, float], workers: int
) -> float | None:
    """What is left of the work, shared by the workers; None before anything is done.

    >>> seconds_left({"a": 1, "b": 2, "c": 1}, taken={"a": 10.0}, running={"b": 5.0}, workers=1)
    25.0
    """
    done = sum(efforts[name] for name in taken if name in efforts)
    if not done:
        return None
    price = sum(seconds for name, seconds in taken.items() if name in efforts) / done
    rest = [max(0.0, price * efforts[name] - running.get(name, 0.0)) for name in efforts if name not in taken]
    # No sooner than the longest of them: workers do not help each other with a unit.
    return max(sum(rest) / workers, max(rest, default=0.0))


def unit_line(done: int, total: int, running: Sequence[str], left: float | None) -> str:
    """
    >>> unit_line(5, 20, ["boston, split 1", "yacht, split 2"], 200.0)
    '[#####...............]  5/20  3 min left  boston, split 1 + 1 more'
    """
    share = done / total if total else 1.0
    rest = "..." if left is None else f"{duration(left)} left"
    more = f" + {len(running) - 1} more" if len(running) > 1 else ""
    return f"[{'#' * round(20 * share):.<20}]  {done}/{total}  {rest}  {running[0] if running else ''}{more}".rstrip()


def duration(seconds: float) -> str:
    """
    >>> duration(45), duration(200), duration(8000)
    ('45 s', '3 min', '2 h 13 min')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
