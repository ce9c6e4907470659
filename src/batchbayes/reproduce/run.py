"""Units over workers: each once, the expensive first, those that need others after them."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait

from batchbayes._common.progress import UnitProgress
from batchbayes.errors import BatchbayesError
from batchbayes.reproduce.experiment import Unit
from batchbayes.reproduce.plan import Plan
from batchbayes.reproduce.results import Outcome, Results
from batchbayes.reproduce.unit import Failure, perform

TICK_SECONDS = 0.5
"""How often to look what other processes have finished, and to draw the progress."""
NEW_WORKERS = 2
"""How often workers that were killed are replaced."""


class UnitError(RuntimeError):
    """A unit failed by an error of the program."""


def do_units(
    plan: Plan,
    results: Results,
    make_workers: Callable[[], Executor],
    num_workers: int,
    data_folder: str | None,
    shown: UnitProgress,
) -> None:
    """Do what is not finished yet, together with any other process on the same file.

    A unit that fails does not keep the others from being done; its error is raised at the end. `make_workers` is asked
    again when a worker was killed.
    """
    failures: dict[str, Failure] = {}
    for attempt in range(1 + NEW_WORKERS):
        work = _Work(plan, results, num_workers, data_folder, shown, failures)
        try:
            with make_workers() as executor:
                work.drive(executor)
            break
        except BrokenExecutor as error:
            lost = [unit.name for unit, _ in work.running.values()]
            results.release(lost)
            if attempt == NEW_WORKERS:
                raise _killed(lost) from error
            shown.say(f"A worker was killed; again: {'; '.join(lost)}")
    _raise(failures, _blocked(plan.units, failures))


class _Work:
    """The state of one set of workers."""

    def __init__(
        self,
        plan: Plan,
        results: Results,
        num_workers: int,
        data_folder: str | None,
        shown: UnitProgress,
        failures: dict[str, Failure],
    ) -> None:
        self.plan, self.results, self.num_workers, self.data_folder = plan, results, num_workers, data_folder
        self.shown, self.failures = shown, failures
        self.running: dict[Future[Outcome | Failure], tuple[Unit, float]] = {}
        self.order = sorted(plan.units, key=lambda unit: -unit.effort)

    def drive(self, executor: Executor) -> None:
        """Until nothing is left that could be done."""
        while True:
            taken = self.results.seconds()
            out = taken.keys() | self.failures.keys() | {unit.name for unit, _ in self.running.values()}
            blocked = _blocked(self.plan.units, self.failures)
            waiting = [unit for unit in self.order if unit.name not in out and unit.name not in blocked]
            if not waiting and not self.running:
                return
            ready = [unit for unit in waiting if all(name in taken for name in unit.needs)]
            self.start(executor, ready, taken)
            if self.running:
                self.collect()
            else:
                time.sleep(TICK_SECONDS)

    def start(self, executor: Executor, ready: Sequence[Unit], taken: Mapping[str, float]) -> None:
        """Claim as many as there are idle workers: what one process has claimed no other can do."""
        claimed = set(self.results.claim([unit.name for unit in ready], self.num_workers - len(self.running)))
        for unit in (unit for unit in ready if unit.name in claimed):
            self.shown.show(taken, self.seconds_running() | {unit.name: 0.0})
            needed, begun = {name: self.results.result(name) for name in unit.needs}, time.monotonic()
            future = executor.submit(
                perform, self.plan.run.experiment, self.plan.config, unit, needed, self.data_folder
            )
            self.running[future] = unit, begun
        self.shown.show(taken, self.seconds_running())

    def collect(self) -> None:
        """Keep what has come; wait a little for the first."""
        done = wait(self.running, TICK_SECONDS, FIRST_COMPLETED).done
        for future in sorted(done, key=lambda future: future.exception() is not None):  # first keep what is whole
            outcome = future.result()
            unit, _ = self.running.pop(future)
            if isinstance(outcome, Failure):
                self.failures[unit.name] = outcome
                self.results.release([unit.name])
                self.shown.say(f"{unit.name}: failed: {outcome.reason}")
            else:
                self.results.finish(unit.name, unit.arguments, outcome)
                self.shown.finished(unit.name, self.results.seconds(), self.seconds_running())

    def seconds_running(self) -> dict[str, float]:
        now = time.monotonic()
        return {unit.name: now - begun for unit, begun in self.running.values()}


def _blocked(units: Iterable[Unit], failures: Mapping[str, Failure]) -> set[str]:
    """Those that need what failed, or need what needs it."""
    lost, units = set(failures), list(units)
    while more := {unit.name for unit in units if lost & set(unit.needs)} - lost:
        lost |= more
    return lost - failures.keys()


def _raise(failures: Mapping[str, Failure], blocked: set[str]) -> None:
    """An error of the program comes first: it is shown where it happened."""
    for name, failure in failures.items():
        if failure.error is None:
            raise UnitError(f"the unit {name!r} failed:\n{failure.trace}")
    if failures:
        name, first = next(iter(failures.items()))
        assert first.error is not None
        others = f"; {len(failures) - 1} more failed" if len(failures) > 1 else ""
        others += f"; {len(blocked)} need those" if blocked else ""
        raise BatchbayesError(
            expected=first.error.expected,
            got=f"{first.error.got}, in the unit {name!r}{others}",
            fix=f"{first.error.fix}; then run the same command again: what is finished is kept",
        )


def _killed(lost: Sequence[str]) -> BatchbayesError:
    return BatchbayesError(
        expected="workers that live as long as their work",
        got=f"one that was killed or crashed, {1 + NEW_WORKERS} times, at: {'; '.join(lost)}",
        fix="see whether memory is short and use fewer --workers; what is finished is kept",
    )
