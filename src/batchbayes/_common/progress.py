"""Progress on standard error: a bar for a person who waits, and a line for each finished unit elsewhere."""

import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, Self, TypeVar

T = TypeVar("T")

PATIENCE_SECONDS = 2.0
"""Work that ends sooner shows no bar."""
_HIDDEN = ContextVar("hidden", default=False)


@contextmanager
def hidden_progress(hidden: bool = True) -> Iterator[None]:
    """Show no progress inside the block. This holds for the current thread."""
    token = _HIDDEN.set(hidden)
    try:
        yield
    finally:
        _HIDDEN.reset(token)


def _is_watched() -> bool:
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


class _Shown:
    """A bar that is opened when it is first needed, and removed from the screen at the end of a `with` block."""

    _bar: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def _open(self, label: str, total: int | None, look: str) -> Any:
        columns, rows = shutil.get_terminal_size()  # where the size is unknown, tqdm would show nothing
        size = {"ncols": columns - 1, "nrows": rows}
        self._bar = _bar_class()(desc=label, total=total, bar_format=look, leave=False, miniters=1, smoothing=0, **size)
        return self._bar


class Progress(_Shown):
    """A bar that counts up to `total`, or only counts where the total is not known."""

    def __init__(self, label: str, total: int | None = None) -> None:
        self._label, self._total, self._count, self._begun = label, total, 0, time.time()

    def advance(self, count: int = 1) -> None:
        """Add `count` to what is done."""
        self._count += count
        if self._bar is not None:
            self._bar.update(count)
        elif time.time() - self._begun > PATIENCE_SECONDS and _is_watched() and not _HIDDEN.get():
            look = "{desc}: {percentage:3.0f} %|{bar:20}| {remaining} left"
            bar = self._open(self._label, self._total, look if self._total else "{desc}: {n} done in {elapsed}")
            bar.n, bar.start_t = self._count, self._begun
            bar.refresh()


def progress(items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
    """Yield the items, and count them in a bar."""
    with Progress(label, total) as shown:
        for item in items:
            yield item
            shown.advance()


class UnitProgress(_Shown):
    """Progress of work in units: one bar where a person watches, and elsewhere a plain line for each finished unit."""

    def __init__(self, efforts: Mapping[str, float], workers: int = 1) -> None:
        """`efforts` says how much work each unit is, in any measure. `workers` units run at the same time."""
        self._efforts, self.workers = efforts, workers

    def show(self, taken: Mapping[str, float], running: Mapping[str, float]) -> None:
        """Draw the bar, given the seconds that each finished unit took and that each running unit has run."""
        if _HIDDEN.get() or not _is_watched():
            return
        left = seconds_left(self._efforts, taken, running, self.workers)
        time_left = "" if left is None else f"{duration(left)} left  "
        more = f" + {len(running) - 1} more" if len(running) > 1 else ""
        look = "{bar:20}| {n}/{total}  {desc}"
        bar = self._open("", len(self._efforts), look) if self._bar is None else self._bar
        bar.n = len(taken)
        bar.set_description_str(time_left + next(iter(running), "") + more)

    def finished(self, name: str, taken: Mapping[str, float], running: Mapping[str, float]) -> None:
        """Print a line about a finished unit where nobody sees a bar."""
        if _HIDDEN.get() or _is_watched():
            return
        left = seconds_left(self._efforts, taken, running, self.workers)
        rest = "" if left is None or len(taken) == len(self._efforts) else f"; {duration(left)} left"
        print(f"{len(taken)}/{len(self._efforts)}  {name} ({taken[name]:.1f} s){rest}", file=sys.stderr)

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if self._bar is not None:
            self._bar.clear()
        if not _HIDDEN.get():
            print(text, file=sys.stderr)


def seconds_left(
    efforts: Mapping[str, float], taken: Mapping[str, float], running: Mapping[str, float], workers: int
) -> float | None:
    """Estimate the seconds until all units are done, by their efforts; None before the first unit is done.

    >>> seconds_left({"a": 1, "b": 2, "c": 1}, taken={"a": 10.0}, running={"b": 5.0}, workers=1)
    25.0
    """
    done = sum(efforts[name] for name in taken if name in efforts)
    if not done:
        return None
    price = sum(seconds for name, seconds in taken.items() if name in efforts) / done
    rest = [max(0.0, price * efforts[name] - running.get(name, 0.0)) for name in efforts if name not in taken]
    # At least the longest of them, because workers do not share a unit.
    return max(sum(rest) / workers, max(rest, default=0.0))


def duration(seconds: float) -> str:
    """Format a time in seconds, minutes, or hours and minutes.

    >>> duration(45), duration(200), duration(8000)
    ('45 s', '3 min', '2 h 13 min')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
