"""Workers of a dask cluster, as an executor.

The driver submits work, receives results and writes them; workers write nothing. If a worker ends, dask gives its work
to another one. Workers with other versions get no work, and a scheduler that was lost may come back. Messages between
the driver and the workers are pickled, so that whoever reaches the scheduler can run code there: use a trusted network,
or TLS. A cluster that is started here (`local:N`) listens on 127.0.0.1 alone.
"""

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from batchbayes._common.checks import require_packages
from batchbayes._common.machine import Workers, ctrl_c_delayed
from batchbayes._common.text import count
from batchbayes.errors import BatchbayesError

T = TypeVar("T")

CONNECT_SECONDS = 20.0
"""How long to wait for the scheduler at the start."""
RECONNECT_SECONDS = 300.0
"""How long to wait for a scheduler that was lost."""
TRY_SECONDS = 5.0
"""How long one attempt to reach the scheduler may take."""
NO_WORKER_SECONDS = 10.0
"""After what time without a worker to say so. It is said again after twice the time, and so on."""
TICK_SECONDS = 0.5
"""How often a driver looks at its workers."""
RESTARTS = 2
"""How often killed workers are replaced."""
ALLOWED_FAILURES = 10
"""How many workers of a local cluster may die while they do the same piece of work; or, anywhere, all workers."""
LOOPBACK = "127.0.0.1"
PACKAGES = ("batchbayes", "torch")
"""What workers must have in the version of the driver, besides Python."""

_ONE_AT_A_TIME = threading.Lock()
"""A worker process does one piece of work at a time, however many threads dask gives it: random numbers, warnings and
the number of torch's threads belong to the whole process."""
_GIVEN: dict[str, Any] = {}
"""What drivers have sent to this worker process, by the name of the driver's connection."""


@dataclass(frozen=True)
class Cluster:
    """Where a dask cluster is: the address of its scheduler, its scheduler file, or a number of local workers."""

    address: str | None = None
    scheduler_file: Path | None = None
    local_workers: int = 0


def find_cluster(cluster: str | None, scheduler_file: Path | None) -> Cluster | None:
    """Read the options --cluster and --scheduler-file. None if neither is given.

    >>> find_cluster("local:2", None)
    Cluster(address=None, scheduler_file=None, local_workers=2)
    """
    if cluster is None and scheduler_file is None:
        return None
    local = re.fullmatch("local:([1-9][0-9]{0,3})", cluster or "")
    problem = None
    if cluster is not None and scheduler_file is not None:
        problem = "both"
    elif cluster is not None and not local and "://" not in cluster:
        problem = repr(cluster)
    elif scheduler_file is not None and not scheduler_file.is_file():
        problem = f"no scheduler file at {scheduler_file}"
    if problem:
        raise BatchbayesError(
            expected="--cluster tcp://HOST:PORT or --cluster local:N, or --scheduler-file FILE",
            got=problem,
            fix="start `dask scheduler --scheduler-file FILE` and `dask worker --nthreads 1`, and name one of them",
        )
    require_packages("a cluster", "cluster", distributed="distributed")
    return Cluster(None if local else cluster, scheduler_file, int(local[1]) if local else 0)


class _NotGivenError(Exception):
    """A worker has not yet got what it needs for its work."""


@dataclass
class _Task:
    """Work that is not done: the pickled call, the future of dask, and the workers that may do it."""

    call: bytes
    remote: Any = None
    workers: frozenset[str] = frozenset()
    losses: int = 0
    """How often all of these workers have ended. Dask counts anew whenever work is submitted."""


class ClusterWorkers(Workers):
    """An executor on a dask cluster. `given` is sent once to each worker, also to those that join later.

    Only workers that import the same versions of `packages` get work. Whoever waits for results asks for `size` every
    `TICK_SECONDS`: this takes notice of workers that come and go, and waits for a scheduler that was lost. Work that
    nobody does any more is then submitted again. `say` tells a person what is wrong.
    """

    def __init__(
        self,
        cluster: Cluster,
        given: Any = None,
        packages: Sequence[str] = PACKAGES,
        say: Callable[[str], None] = print,
    ) -> None:
        from distributed.utils import silence_logging_cmgr

        self._cluster, self._given, self._say = cluster, given, say
        self._versions, self._name = _versions_reader()(packages), uuid4().hex
        self._client: Any = None
        self._here: Any = None
        self._tasks: dict[Future[Any], _Task] = {}
        self._workers: dict[str, str] = {}
        """The workers that get work, each with its folder, which is another one for each process."""
        self._refused: dict[str, str] = {}
        self._idle_since, self._patience, self._has_worked = time.monotonic(), NO_WORKER_SECONDS, False
        self._stack = ExitStack()
        try:
            # What a person must know is said in words. When a scheduler is lost, dask would log pages.
            self._stack.enter_context(silence_logging_cmgr(logging.CRITICAL + 1))
            if cluster.local_workers:
                self._here = self._stack.enter_context(_local_cluster(cluster.local_workers))
            self._connect(CONNECT_SECONDS)
            self._look()
        except BaseException:
            self.shutdown()
            raise

    @property
    def size(self) -> int:
        """The number of workers, after a look at them. If there is none, one piece of work may wait for the next."""
        self._look()
        return max(1, len(self._workers))

    @property
    def about(self) -> str:
        """How many workers there are, for a line of progress."""
        waited = time.monotonic() - self._idle_since
        return count(len(self._workers), "worker") if self._workers else f"no worker for {waited:.0f} s"

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Submit work. The function must be importable on the workers."""
        from distributed.protocol.pickle import dumps

        future: Future[T] = Future()
        self._tasks[future] = _Task(dumps((fn, args, kwargs)))
        if self._client.status == "running":
            self._hand_out()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the cluster, or end it if it was started here. Work that is not finished is dropped."""
        self._tasks.clear()
        if self._given is not None and self._workers and self._client.status == "running":
            with suppress(Exception):  # a scheduler that is just being lost
                self._client.run(_keep, self._name, None, workers=list(self._workers), on_error="ignore")
        self._disconnect()
        self._stack.close()

    def _where(self) -> str:
        """Return the address of the scheduler. That of a file may have changed."""
        if self._cluster.scheduler_file is not None:
            return str(json.loads(self._cluster.scheduler_file.read_text())["address"])
        return self._here.scheduler_address if self._here else str(self._cluster.address)

    def _connect(self, seconds: float) -> None:
        """Connect to the scheduler, or raise an error if that takes longer than this."""
        from distributed import Client

        end, name = time.monotonic() + seconds, self._cluster.scheduler_file or self._cluster.address
        while True:
            try:
                self._client = Client(self._where(), timeout=min(seconds, TRY_SECONDS), set_as_default=False)
                return
            except (OSError, ValueError, LookupError, RuntimeError) as error:
                if time.monotonic() < end:
                    time.sleep(TICK_SECONDS)
                    continue
                raise BatchbayesError(
                    expected=f"a dask scheduler that answers ({name})",
                    got=f"none for {seconds:.0f} s ({type(error).__name__}: {' '.join(str(error).split())})"[:300],
                    fix="check the address, or start `dask scheduler` and `dask worker`, and give the same command "
                    "again: what is finished is kept",
                ) from error

    def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with suppress(Exception):  # it has lost its scheduler
                client.close(timeout=TRY_SECONDS)

    def _look(self) -> None:
        """Take notice of workers that came and went. If the scheduler is lost, wait for it."""
        try:
            if self._client.status != "running":
                raise ConnectionError
            found = self._client.scheduler_info(n_workers=-1)["workers"]
            folders = {address: info["local_directory"] for address, info in found.items()}
            self._workers = {a: folder for a, folder in self._workers.items() if folders.get(a) == folder}
            self._refused = {address: why for address, why in self._refused.items() if address in folders}
            self._check({a: folder for a, folder in folders.items() if a not in self._workers.keys() | self._refused})
            self._hand_out()
        except Exception as error:
            if self._client.status == "running" and not isinstance(error, OSError):
                raise
            self._reconnect()
        self._say_if_idle()

    def _check(self, new: Mapping[str, str]) -> None:
        """Take new workers with our versions, and give them what they need. Refuse the others, and say why."""
        if not new:
            return
        systems = self._client.get_versions()["workers"]
        found = {a: {"python": ".".join(systems[a]["host"]["python"].split(".")[:2])} for a in new if systems.get(a)}
        # The code of a function cannot be sent to another Python. A worker that has just ended has no answer.
        same = [address for address, seen in found.items() if seen["python"] == self._versions["python"]]
        found |= self._answers(_versions_reader(), [*self._versions][1:], workers=same)
        for address, seen in found.items():
            wrong = [name for name in seen if seen[name] != self._versions[name]]
            if wrong:
                self._refused[address] = "; ".join(
                    f"{name} {seen[name]} (here {self._versions[name]})" for name in wrong
                )
                self._say(f"The worker {address} gets no work: it has {self._refused[address]}.")
        fit = [address for address in found if address not in self._refused]
        if self._given is not None:
            fit = list(self._answers(_keep, self._name, self._given, workers=fit))
        self._workers |= {address: new[address] for address in fit}

    def _answers(self, function: Callable[..., Any], *args: Any, workers: list[str]) -> dict[str, Any]:
        """Call a function in workers. Return what it returned, without the workers where it failed."""
        found = self._client.run(function, *args, workers=workers, on_error="return") if workers else {}
        return {address: answer for address, answer in found.items() if not isinstance(answer, Exception)}

    def _hand_out(self) -> None:
        """Submit the work that no present worker may do."""
        for future, task in list(self._tasks.items()):
            if self._workers and (task.remote is None or not task.workers & self._workers.keys()):
                task.losses += task.remote is not None
                if task.losses > ALLOWED_FAILURES and self._tasks.pop(future, None):
                    future.set_exception(BrokenExecutor(f"{task.losses} times all workers ended that could do it"))
                    continue
                task.workers, call = (
                    frozenset(self._workers),
                    (_caller(), self._name if self._given is not None else "", task.call),
                )
                task.remote = self._client.submit(*call, pure=False, workers=list(task.workers))
                task.remote.add_done_callback(partial(self._ended, future))

    def _ended(self, future: Future[Any], remote: Any) -> None:
        """Give the outcome of a future of dask to ours. If it was lost, the next look submits the work again."""
        from distributed.scheduler import KilledWorker

        task = self._tasks.get(future)
        if task is None or task.remote is not remote:
            return
        try:
            result = remote.result(CONNECT_SECONDS)
        except Exception as error:
            # No scheduler, or no worker that has the result, or a worker that was started again at the same address.
            lost = remote.status != "error" and isinstance(error, OSError | CancelledError)
            if lost or isinstance(error, _NotGivenError):
                task.remote = None
            elif self._tasks.pop(future, None):
                future.set_exception(BrokenExecutor(str(error)) if isinstance(error, KilledWorker) else error)
        else:
            if self._tasks.pop(future, None):
                future.set_result(result)

    def _reconnect(self) -> None:
        self._say(
            f"The scheduler was lost. Waiting for it for at most {RECONNECT_SECONDS:.0f} s: start `dask scheduler` and "
            "`dask worker` again. What is finished is kept."
        )
        self._disconnect()
        self._workers, self._refused = {}, {}
        self._connect(RECONNECT_SECONDS)
        for task in self._tasks.values():
            task.remote = None
        self._idle_since = time.monotonic()
        self._say("The scheduler is back. Work that was not finished starts again.")

    def _say_if_idle(self) -> None:
        """Say that there is no worker, less and less often. If none has ever fitted, but others are there, give up."""
        now = time.monotonic()
        if self._workers:
            self._idle_since, self._patience, self._has_worked = now, NO_WORKER_SECONDS, True
        elif now - self._idle_since > self._patience:
            self._patience *= 2
            if self._refused and not self._has_worked:
                raise BatchbayesError(
                    expected="workers with " + ", ".join(f"{name} {text}" for name, text in self._versions.items()),
                    got="; ".join(f"{address}: {why}" for address, why in self._refused.items())[:600],
                    fix="start `dask worker` in an environment with the same versions, and give the same command again",
                )
            self._say(
                f"{self.about.capitalize()}. Start `dask worker {self._client.scheduler.address} --nthreads 1` in an "
                "environment like this one: work goes on when it joins."
            )


def _local_cluster(workers: int) -> Any:
    """Start a cluster of this machine."""
    from distributed import LocalCluster

    resource_tracker.ensure_running()  # its start would undo the next line in the thread that starts processes
    with ctrl_c_delayed():  # processes of the cluster do not receive Ctrl-C: they end with this process
        return LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            host=LOOPBACK,
            dashboard_address=f"{LOOPBACK}:0",
            worker_dashboard_address=f"{LOOPBACK}:0",
            memory_limit=0,
            silence_logs=logging.ERROR,
            scheduler_kwargs={"allowed_failures": ALLOWED_FAILURES},
        )


def _caller() -> Callable[[str, bytes], Any]:
    """Return what makes a pickled call in a worker, with one thread.

    It is sent by value, because the scheduler reads it too, and may not have us.
    """

    def call(name: str, content: bytes) -> Any:
        from distributed.protocol.pickle import loads

        from batchbayes._common.cluster import _GIVEN, _ONE_AT_A_TIME, _NotGivenError
        from batchbayes._common.machine import single_threaded

        with _ONE_AT_A_TIME, single_threaded():
            if name and name not in _GIVEN:
                raise _NotGivenError
            fn, args, kwargs = loads(content)
            return fn(*([_GIVEN[name]] if name else []), *args, **kwargs)

    return call


def _versions_reader() -> Callable[[Sequence[str]], dict[str, str]]:
    """Return a function that says what a process imports. It is sent by value, to workers that may not have us."""

    def versions(packages: Sequence[str]) -> dict[str, str]:
        import sys
        from importlib import import_module

        found = {"python": ".".join(map(str, sys.version_info[:2]))}
        for name in packages:
            try:
                found[name] = str(import_module(name).__version__).partition("+")[0]  # "+cpu" is how torch was built
            except Exception as error:
                found[name] = f"that cannot be imported, {type(error).__name__}: {error}"
        return found

    return versions


def _keep(name: str, given: Any) -> None:
    """Keep a value in this process, or drop it."""
    if given is None:
        _GIVEN.pop(name, None)
    else:
        _GIVEN[name] = given
