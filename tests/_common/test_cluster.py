"""What a driver says and does when its cluster has no workers, wrong ones, or loses its scheduler: real processes."""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.dask_processes import DaskProcesses, slow_power, until

from batchbayes import __version__
from batchbayes._common import cluster as module
from batchbayes._common.cluster import Cluster, ClusterWorkers
from batchbayes.errors import BatchbayesError

pytest.importorskip("distributed", reason="needs the extra cluster")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DaskProcesses]:
    """A scheduler without workers, and little patience."""
    monkeypatch.setattr(module, "NO_WORKER_SECONDS", 0.5)
    monkeypatch.setattr(module, "TICK_SECONDS", 0.1)
    with DaskProcesses(tmp_path) as found:
        until(found.file.exists)
        yield found


def looked(workers: ClusterWorkers, holds: Callable[[], Any]) -> None:
    """Look at the workers again and again, as drivers do, until something holds."""
    until(lambda: workers.size and holds())


def result(workers: ClusterWorkers, future: Future[Any]) -> Any:
    looked(workers, future.done)
    return future.result()


def test_a_driver_says_that_it_has_no_worker_and_goes_on_when_one_comes(cluster: DaskProcesses) -> None:
    said: list[str] = []
    with ClusterWorkers(Cluster(scheduler_file=cluster.file), given=2, say=said.append) as workers:
        future = workers.submit(pow, 5)
        looked(workers, lambda: said)
        assert said[0].startswith("No worker for 1 s. Start `dask worker tcp://127.0.0.1:")
        assert workers.about.startswith("no worker for")
        first = cluster.worker()
        assert result(workers, future) == 32
        assert (workers.size, workers.about) == (1, "1 worker")
        # The only worker ends with work in it, and the next one has never heard of that.
        future = workers.submit(slow_power, 5)
        looked(workers, lambda: any(workers._client.processing().values()))
        first.kill()
        cluster.worker()
        assert result(workers, future) == 32
    assert all(text.startswith("No worker for") for text in said)


def test_work_that_ends_all_its_workers_again_and_again_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dask counts the workers that end while they do the same work, but anew when it is submitted again."""
    submitted: list[list[str]] = []

    def submit(*call: Any, pure: bool, workers: list[str]) -> Any:
        submitted.append(workers)
        return SimpleNamespace(add_done_callback=lambda done: None)

    monkeypatch.setattr(module, "ALLOWED_FAILURES", 2)
    workers: Any = object.__new__(ClusterWorkers)  # without a cluster
    workers._client, workers._tasks = SimpleNamespace(submit=submit, status="running"), {}
    workers._name, workers._given = "a driver", 7
    workers._workers = {"first": "a folder"}
    future = workers.submit(pow, 2, 5)
    # A worker that was started again at its address may be quicker than our look at it.
    remote = SimpleNamespace(status="error", result=lambda seconds: module._caller()("a driver", b""))
    workers._tasks[future].remote = remote
    workers._ended(future, remote)
    assert workers._tasks[future].remote is None
    workers._hand_out()
    for name in ("second", "third", "fourth"):
        assert not future.done()
        workers._workers = {name: "a folder"}
        workers._hand_out()
        workers._hand_out()  # nothing has changed
    assert isinstance(future.exception(0), BrokenExecutor)
    assert (submitted, workers._tasks) == ([["first"], ["first"], ["second"], ["third"]], {})


def test_workers_with_other_versions_get_no_work(cluster: DaskProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    old = cluster.worker(batchbayes="__version__ = '0.1.0'", torch="__version__ = '1.0+cpu'")
    broken = cluster.worker(batchbayes="raise ImportError('no such file')")
    with ClusterWorkers(Cluster(scheduler_file=cluster.file), say=said.append) as workers:
        while len(workers._client.scheduler_info(n_workers=-1)["workers"]) < 2:  # both, before one look finds one
            time.sleep(0.1)
        with pytest.raises(BatchbayesError, match=r"batchbayes 0\.1\.0 \(here") as error:
            looked(workers, lambda: False)
        assert "start `dask worker` in an environment with the same versions" in str(error.value)
    told = [text for text in said if not text.startswith("No worker")]
    assert len(told) == 2
    assert any(f"batchbayes 0.1.0 (here {__version__}); torch 1.0 (here" in text for text in told)
    assert any("batchbayes that cannot be imported, ImportError: no such file (here" in text for text in told)
    # Among others they are left alone, whenever they come.
    monkeypatch.setattr(module, "NO_WORKER_SECONDS", 60.0)
    good, said[:] = cluster.worker(), []
    with ClusterWorkers(Cluster(scheduler_file=cluster.file), say=said.append) as workers:
        assert {result(workers, workers.submit(os.getpid)) for _ in range(4)} == {good.pid}
        assert len(workers._client.scheduler_info(n_workers=-1)["workers"]) == 3
        assert workers.size == 1
    assert old.poll() is None
    assert broken.poll() is None


def test_another_python_gets_no_work(cluster: DaskProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code cannot be sent to another Python, so that it is asked for its version by a message of dask."""
    monkeypatch.setattr(module, "_versions_reader", lambda: lambda packages: {"python": "3.99", "torch": "2"})
    cluster.worker()
    said: list[str] = []
    with (
        ClusterWorkers(Cluster(scheduler_file=cluster.file), say=said.append) as workers,
        pytest.raises(BatchbayesError, match=r"python 3\.\d+ \(here 3\.99\)"),
    ):
        looked(workers, lambda: False)


def test_a_scheduler_that_comes_back_at_another_address(cluster: DaskProcesses, capfd) -> None:
    said: list[str] = []
    worker = cluster.worker()
    with ClusterWorkers(Cluster(scheduler_file=cluster.file), given=2, say=said.append) as workers:
        assert result(workers, workers.submit(pow, 3)) == 8
        future = workers.submit(slow_power, 5)
        cluster.scheduler.kill()
        until(lambda: workers._client.status != "running")
        worker.kill()
        cluster.start_scheduler()
        cluster.worker()
        assert result(workers, future) == 32
    lost, back = (text for text in said if not text.startswith("No worker"))
    assert lost.startswith("The scheduler was lost. Waiting for it for at most 300 s: start `dask scheduler`")
    assert back == "The scheduler is back. Work that was not finished starts again."
    assert capfd.readouterr() == ("", "")


def test_a_scheduler_that_is_gone_ends_the_run_in_one_sentence(
    cluster: DaskProcesses, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    monkeypatch.setattr(module, "RECONNECT_SECONDS", 1.0)
    said: list[str] = []
    with ClusterWorkers(Cluster(scheduler_file=cluster.file), say=said.append) as workers:
        cluster.scheduler.kill()
        with pytest.raises(BatchbayesError, match=r"a dask scheduler that answers \(.*none for 1 s .*finished is kept"):
            looked(workers, lambda: False)
    assert len([text for text in said if not text.startswith("No worker")]) == 1  # there was none before, either
    assert capfd.readouterr() == ("", "")
