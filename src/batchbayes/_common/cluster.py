"""Workers of a dask cluster, as an executor.

The driver submits work, receives results and writes them; workers write nothing. If a worker ends, dask gives its work
to another one. Messages between the driver and the workers are pickled, so that whoever reaches the scheduler can run
code there: use a trusted network, or TLS. A cluster that is started here (`local:N`) listens on 127.0.0.1 alone.
"""

import logging
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, TypeVar

from batchbayes._common.checks import require_packages
from batchbayes._common.machine import Workers, ctrl_c_delayed, single_threaded
from batchbayes.errors import BatchbayesError

T = TypeVar("T")

CONNECT_SECONDS = 30.0
"""How long to wait for the scheduler, and then for the first worker."""
RESTARTS = 2
"""How often killed workers are replaced."""
ALLOWED_FAILURES = 10
"""How many workers of a local cluster may die while they do the same piece of work."""
LOOPBACK = "127.0.0.1"

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


class ClusterWorkers(Workers):
    """An executor on a dask cluster. `given` is sent once to each worker, also to those that join later."""

    def __init__(self, cluster: Cluster, given: Any = None) -> None:
        self._stack = ExitStack()
        try:
            self._client = self._connected(cluster)
            self._name = self._client.id
            if given is not None:
                self._client.register_plugin(_gift(self._name, given), name=self._name)
                self._stack.callback(self._client.unregister_worker_plugin, self._name)
            self._client.wait_for_workers(1, timeout=CONNECT_SECONDS)
        except (OSError, ValueError, RuntimeError) as error:
            self._stack.close()
            raise BatchbayesError(
                expected="a dask scheduler that answers, with at least one worker",
                got=f"{type(error).__name__}: {' '.join(str(error).split())}"[:300],
                fix="check the address, and that `dask worker` runs beside the scheduler",
            ) from error
        except BaseException:
            self._stack.close()
            raise

    def _connected(self, cluster: Cluster) -> Any:
        from distributed import Client, LocalCluster

        address: Any = cluster.address
        if cluster.local_workers:
            resource_tracker.ensure_running()  # its start would undo the next line in the thread that starts processes
            with ctrl_c_delayed():  # processes of the cluster do not receive Ctrl-C: they end with this process
                address = self._stack.enter_context(
                    LocalCluster(
                        n_workers=cluster.local_workers,
                        threads_per_worker=1,
                        host=LOOPBACK,
                        dashboard_address=f"{LOOPBACK}:0",
                        worker_dashboard_address=f"{LOOPBACK}:0",
                        memory_limit=0,
                        silence_logs=logging.ERROR,
                        scheduler_kwargs={"allowed_failures": ALLOWED_FAILURES},
                    )
                )
        file = None if cluster.scheduler_file is None else str(cluster.scheduler_file)
        client = Client(address, scheduler_file=file, timeout=CONNECT_SECONDS, set_as_default=False)
        return self._stack.enter_context(client)

    @property
    def size(self) -> int:
        """The number of workers now. If there is none, work waits at the scheduler for the next one."""
        return max(1, len(self._client.scheduler_info(n_workers=-1)["workers"]))

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Submit work. The function must be importable on the workers."""
        task = self._client.submit(_alone, self._name, fn, args, kwargs, pure=False)
        future: Future[T] = Future()
        task.add_done_callback(partial(_pass_on, future))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the cluster, or end it if it was started here. Work that is not finished is dropped."""
        self._stack.close()


def _alone(name: str, fn: Callable[..., T], args: Sequence[Any], kwargs: dict[str, Any]) -> T:
    """Call a function in a worker, with one thread."""
    with _ONE_AT_A_TIME, single_threaded():
        return fn(*args, **kwargs) if name not in _GIVEN else fn(_GIVEN[name], *args, **kwargs)


def _gift(name: str, given: Any) -> Any:
    """Return a plugin that leaves a value in each worker."""
    from distributed import WorkerPlugin

    class Gift(WorkerPlugin):
        def setup(self, worker: Any) -> None:
            _keep(name, given)

        def teardown(self, worker: Any) -> None:
            _keep(name, None)

    return Gift()


def _keep(name: str, given: Any) -> None:
    """Keep a value in this process, or drop it. The class above is sent by value, and would have its own dictionary."""
    if given is None:
        _GIVEN.pop(name, None)
    else:
        _GIVEN[name] = given


def _pass_on(future: Future[Any], task: Any) -> None:
    """Give the outcome of a task of dask to a future."""
    from distributed.scheduler import KilledWorker

    if task.status == "finished":
        future.set_result(task.result())
        return
    error = None if task.status == "cancelled" else task.exception()
    if error is None or isinstance(error, KilledWorker):
        future.set_exception(BrokenExecutor("the scheduler was lost" if error is None else str(error)))
    else:
        future.set_exception(error)
