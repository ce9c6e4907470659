"""Run the units of a plan on workers: each unit once, expensive units first, and each after the units it needs."""

import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from platform import python_version
from typing import Any

from batchbayes import BatchbayesError, BatchbayesWarning, __version__
from batchbayes._common.cluster import RESTARTS
from batchbayes._common.machine import Workers
from batchbayes.tools import hidden_progress
from batchbayes_papers.runner.experiment import Results, Unit, load_experiment
from batchbayes_papers.runner.leases import LONGEST_LEASE_SECONDS
from batchbayes_papers.runner.plan import Plan
from batchbayes_papers.runner.records import UnitOutcome, to_json
from batchbayes_papers.runner.store import ResultStore
from batchbayes_papers.runner.unit_progress import UnitProgress, duration

TICK_SECONDS = 0.5
"""How often to look for units that other processes have finished, and to redraw the progress line."""


@dataclass(frozen=True)
class UnitFailure:
    """Why a unit has no result."""

    error: BatchbayesError | None
    """The message about bad input; None for any other error."""
    trace: str

    @property
    def reason(self) -> str:
        """The reason in one line."""
        return " ".join(str(self.error).split()) if self.error else self.trace.strip().rpartition("\n")[2]


class UnitError(RuntimeError):
    """A unit failed because of an error in the program."""


def run_units(
    plan: Plan,
    store: ResultStore,
    make_workers: Callable[[], Workers],
    data_folder: str | None,
    shown: UnitProgress,
) -> None:
    """Do all units that are not finished, together with any other process that uses the same file.

    If a unit fails, the other units are still done, and its error is raised at the end. If a worker is killed,
    `make_workers` is called again.
    """
    failures: dict[str, UnitFailure] = {}
    for attempt in range(1 + RESTARTS):
        scheduler = _Scheduler(plan, store, data_folder, shown, failures)
        try:
            with make_workers() as workers:
                scheduler.run(workers)
            break
        except BrokenExecutor as error:
            lost = [unit.name for unit, _ in scheduler.running.values()]
            store.release(lost)
            if attempt == RESTARTS:
                raise BatchbayesError(
                    expected="workers that live until their work is done",
                    got=f"a worker that was killed or crashed, {1 + RESTARTS} times, during: {'; '.join(lost)}",
                    fix="check whether memory is short and use fewer --workers; finished units are kept",
                ) from error
            shown.say(f"A worker was killed. These units start again: {'; '.join(lost)}")
    _raise_failure(failures, _blocked(plan.units, failures))


@dataclass
class _Scheduler:
    """Gives units to one set of workers."""

    plan: Plan
    store: ResultStore
    data_folder: str | None
    shown: UnitProgress
    failures: dict[str, UnitFailure]
    running: dict[Future[UnitOutcome | UnitFailure], tuple[Unit, float]] = field(default_factory=dict)
    """The units in work, each with its start time."""
    waiting_said: bool = False

    def run(self, workers: Workers) -> None:
        """Continue until no unit is left that could be done."""
        order = sorted(self.plan.units, key=lambda unit: -unit.effort)
        while True:
            taken = self.seconds_taken()
            out = taken.keys() | self.failures.keys() | {unit.name for unit, _ in self.running.values()}
            blocked = _blocked(self.plan.units, self.failures)
            waiting = [unit for unit in order if unit.name not in out and unit.name not in blocked]
            if not waiting and not self.running:
                return
            ready = [unit for unit in waiting if all(name in taken for name in unit.needs)]
            self.start(workers, ready, taken)
            if self.running:
                self.collect()
            else:
                self.wait_for_others(ready)

    def start(self, workers: Workers, ready: Sequence[Unit], taken: Mapping[str, float]) -> None:
        """Claim one unit for each idle worker and start it. No other process can do a claimed unit."""
        self.shown.workers, self.shown.about = workers.size, workers.about
        claimed = set(self.store.claim([unit.name for unit in ready], self.shown.workers - len(self.running)))
        for unit in (unit for unit in ready if unit.name in claimed):
            self.shown.show(taken, self.seconds_running() | {unit.name: 0.0})
            needed, begun = {name: self.store.result(name) for name in unit.needs}, time.monotonic()
            future = workers.submit(
                perform, self.plan.settings.experiment, self.plan.config, unit, needed, self.data_folder
            )
            self.running[future] = unit, begun
        self.shown.show(taken, self.seconds_running())

    def collect(self) -> None:
        """Wait a short time for the first running unit to end, and save everything that has ended."""
        done = wait(self.running, TICK_SECONDS, FIRST_COMPLETED).done
        # Save finished units before a future that failed raises its error.
        for future in sorted(done, key=lambda future: future.exception() is not None):
            outcome = future.result()
            unit, _ = self.running.pop(future)
            if isinstance(outcome, UnitFailure):
                self.failures[unit.name] = outcome
                self.store.release([unit.name])
                self.shown.say(f"{unit.name}: failed: {outcome.reason}")
            else:
                self.store.finish(unit.name, unit.arguments, outcome)
                self.shown.finished(unit.name, self.seconds_taken(), self.seconds_running())

    def wait_for_others(self, claimed: Sequence[Unit]) -> None:
        """Wait a short time. Other processes have claimed all units that could start; say so once."""
        if not self.waiting_said:
            self.shown.say(
                f"Waiting for another process that works on: {some_names([unit.name for unit in claimed])}. If it has "
                f"ended, this run continues after at most {duration(LONGEST_LEASE_SECONDS)}."
            )
            self.waiting_said = True
        time.sleep(TICK_SECONDS)

    def seconds_taken(self) -> dict[str, float]:
        """Return how long each finished unit of the plan took. The file may hold other units."""
        found = self.store.seconds()
        return {unit.name: found[unit.name] for unit in self.plan.units if unit.name in found}

    def seconds_running(self) -> dict[str, float]:
        """Return how long each running unit has been running."""
        now = time.monotonic()
        return {unit.name: now - begun for unit, begun in self.running.values()}


def some_names(names: Sequence[str], most: int = 3) -> str:
    """Join names into a text, at most `most` of them.

    >>> some_names(["a", "b", "c", "d"])
    'a; b; c; and 1 more'
    """
    return "; ".join([*names[:most], *([f"and {len(names) - most} more"] if len(names) > most else [])])


def _blocked(units: Iterable[Unit], failures: Mapping[str, UnitFailure]) -> set[str]:
    """Return the units that need a failed unit, directly or through other units."""
    lost, units = set(failures), list(units)
    while more := {unit.name for unit in units if lost & set(unit.needs)} - lost:
        lost |= more
    return lost - failures.keys()


def _raise_failure(failures: Mapping[str, UnitFailure], blocked: set[str]) -> None:
    """Raise an error if units failed. An error of the program goes first, with its traceback."""
    for name, failure in failures.items():
        if failure.error is None:
            raise UnitError(f"the unit {name!r} failed:\n{failure.trace}")
    if failures:
        name, first = next(iter(failures.items()))
        assert first.error is not None
        others = f"; {len(failures) - 1} more failed" if len(failures) > 1 else ""
        others += f"; {len(blocked)} could not start without them" if blocked else ""
        raise BatchbayesError(
            expected=first.error.expected,
            got=f"{first.error.got}, in the unit {name!r}{others}",
            fix=f"{first.error.fix}; then run the same command again: finished units are kept",
        )


def perform(name: str, config: Any, unit: Unit, needed: Results, data_folder: str | None) -> UnitOutcome | UnitFailure:
    """Do a unit of the experiment `name`, inside a worker. Only plain values go in and come out.

    Errors are returned, since some exceptions cannot be sent between processes.
    """
    start = time.perf_counter()
    try:
        with hidden_progress(), _collected_warnings() as texts:
            result = to_json(load_experiment(name).work(config, unit, needed, data_folder))
    except Exception as error:
        return UnitFailure(error if isinstance(error, BatchbayesError) else None, traceback.format_exc())
    versions = {package: version(package) for package in ("torch", "numpy")}
    versions |= {"batchbayes": __version__, "python": python_version()}
    return UnitOutcome(result, tuple(texts), time.perf_counter() - start, versions, os.cpu_count() or 1)


@contextmanager
def _collected_warnings() -> Iterator[list[str]]:
    """Collect the warnings of batchbayes, which are part of the result. Show other warnings as usual."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", BatchbayesWarning)
        yield texts
    for warning in caught:
        if not issubclass(warning.category, BatchbayesWarning):
            place = warning.filename, warning.lineno
            sys.stderr.write(warnings.formatwarning(warning.message, warning.category, *place))
        elif str(warning.message) not in texts:
            texts.append(str(warning.message))
