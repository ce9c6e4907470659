"""Progress of units of work: a bar for a person who waits, and a line for each finished unit elsewhere."""

from collections.abc import Mapping

from batchbayes._common.progress import Shown, is_hidden, is_watched


class UnitProgress(Shown):
    """Progress of work in units: one bar where a person watches, and elsewhere a plain line for each finished unit."""

    about = ""
    """What to say of the workers."""

    def __init__(self, efforts: Mapping[str, float], workers: int = 1) -> None:
        """`efforts` says how much work each unit is, in any measure. `workers` units run at the same time."""
        self._efforts, self.workers = efforts, workers

    def show(self, taken: Mapping[str, float], running: Mapping[str, float]) -> None:
        """Draw the bar, given the seconds that each finished unit took and that each running unit has run."""
        if is_hidden() or not is_watched():
            return
        left = seconds_left(self._efforts, taken, running, self.workers)
        time_left = "" if left is None else f"{duration(left)} left  "
        more = f" + {len(running) - 1} more" if len(running) > 1 else ""
        look = "{bar:20}| {n}/{total}  {desc}"
        bar = self.open("", len(self._efforts), look) if self.bar is None else self.bar
        bar.n = len(taken)
        about = f"{self.about}  " if self.about else ""
        bar.set_description_str(time_left + about + next(iter(running), "") + more)

    def finished(self, name: str, taken: Mapping[str, float], running: Mapping[str, float]) -> None:
        """Print a line about a finished unit where nobody sees a bar."""
        if is_hidden() or is_watched():
            return
        left = seconds_left(self._efforts, taken, running, self.workers)
        rest = "" if left is None or len(taken) == len(self._efforts) else f"; {duration(left)} left"
        about = f"; {self.about}" if self.about else ""
        self.say(f"{len(taken)}/{len(self._efforts)}  {name} ({taken[name]:.1f} s){rest}{about}")


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
