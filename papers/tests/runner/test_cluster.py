"""Runs on a dask cluster: real schedulers, workers and drivers on the loopback, killed at random moments."""

import csv
import random
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from batchbayes_papers.runner.store import read_results
from helpers.dask_processes import DaskProcesses, Process, until
from own import tiny

from batchbayes import cli
from batchbayes._common.cluster import Cluster, ClusterWorkers, find_cluster
from batchbayes.errors import BatchbayesError

pytest.importorskip("distributed", reason="needs the extra cluster")


def started(folder: Path) -> list[str]:
    """Return the names of all units that were ever started."""
    log = folder / "log"
    return [line.partition("\t")[0] for line in log.read_text().splitlines()] if log.exists() else []


def finished(out: Path) -> dict[str, str]:
    path = out / "results.sqlite"
    return {k: row.result for k, row in read_results(path)[1].items()} if path.exists() and path.stat().st_size else {}


def wait_for_units(folder: Path, count: int, driver: Process[str]) -> None:
    until(lambda: len(started(folder)) >= count or driver.poll() is not None)


def assert_whole(out: Path, preset: str) -> None:
    """Require that every unit has its result, once, and that the table is that of a run without a cluster."""
    config, expected = replace(tiny.PRESETS[preset], seconds=0.0), {}
    for unit in sorted(tiny.units(config), key=lambda unit: len(unit.needs)):
        expected[unit.name] = tiny.work(config, unit, {name: expected[name] for name in unit.needs}, None)
    assert finished(out).keys() == expected.keys()
    with (out / "tables" / "parts-sums.csv").open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    assert rows == [[unit.name, str(expected[unit.name][0])] for unit in tiny.units(tiny.PRESETS[preset])]


def kill_and_resume(
    folder: Path, preset: str, worker_kills: int, driver_kills: int, scheduler_kills: int, chance: random.Random
) -> None:
    """Kill workers, drivers and schedulers while units are being done, until the run is whole."""
    out = folder / "out"
    with DaskProcesses(folder) as cluster:
        workers = [cluster.worker(), cluster.worker()]
        arguments = ("reproduce", "own.tiny", "--preset", preset, "--out", str(out), "--data-dir", str(folder))
        driver = cluster.driver(*arguments)
        kills = ["worker"] * worker_kills + ["driver"] * driver_kills + ["scheduler"] * scheduler_kills
        chance.shuffle(kills)
        for kill in kills:
            begun, before = len(started(folder)), finished(out)
            wait_for_units(folder, begun + 1, driver)
            time.sleep(chance.uniform(0, 0.1))
            assert driver.poll() is None, cluster.logs()
            if kill == "worker":
                workers.pop(chance.randrange(2)).kill()
                workers.append(cluster.worker())
            elif kill == "scheduler":  # its workers end with it, and the driver waits for the next one
                cluster.scheduler.kill()
                for worker in workers:
                    worker.kill()
                cluster.start_scheduler()
                workers = [cluster.worker(), cluster.worker()]
            else:
                driver.kill()
                driver.wait()
                kept = finished(out)
                assert before.items() <= kept.items()
                begun = len(started(folder))
                driver = cluster.driver(*arguments)
                wait_for_units(folder, begun + 3, driver)
                assert not kept.keys() & set(started(folder)[begun:])
        assert driver.wait(300) == 0, cluster.logs()
    assert_whole(out, preset)
    repeated = len(started(folder)) - len(finished(out))
    # At most what was in work when something was killed.
    assert repeated <= worker_kills + 2 * driver_kills + 2 * scheduler_kills
    said = cluster.driver_log.read_text()
    assert "Traceback" not in said
    assert "A worker was killed" not in said
    assert re.search(r"^\d+/\d+  .*; [12] workers?$", said, re.MULTILINE), said


def test_a_killed_worker_a_driver_and_a_scheduler_lose_nothing(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, "some", worker_kills=1, driver_kills=1, scheduler_kills=1, chance=random.Random(0))


@pytest.mark.slow
def test_twenty_workers_and_five_drivers_are_killed(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, "quick", worker_kills=20, driver_kills=5, scheduler_kills=3, chance=random.Random(1))


def test_a_driver_whose_scheduler_is_gone_ends_in_words(tmp_path: Path) -> None:
    with DaskProcesses(tmp_path) as cluster:
        cluster.worker()
        arguments = ("reproduce", "own.tiny", "--preset", "some", "--out", str(tmp_path / "out"), "--quiet")
        driver = cluster.driver(*arguments, "--data-dir", str(tmp_path), RECONNECT_SECONDS=1.0)
        wait_for_units(tmp_path, 3, driver)
        cluster.scheduler.kill()
        until(lambda: len(cluster.driver_log.read_text().splitlines()) == 2, seconds=30)
        assert driver.wait(120) == 2
    said = cluster.driver_log.read_text().splitlines()
    assert len(said) == 2
    assert said[0].startswith("The scheduler was lost. Waiting for it for at most 1 s: start `dask scheduler`")
    assert "expected a dask scheduler that answers" in said[1]
    assert "give the same command again: what is finished is kept" in said[1]
    assert finished(tmp_path / "out")


def test_a_cluster_of_this_machine_and_what_each_worker_is_given() -> None:
    """`given` reaches a worker once; a function that is not there is an error, and no hang."""
    with ClusterWorkers(Cluster(local_workers=1), given=(2, 5)) as workers:
        assert workers.size == 1
        assert workers.submit(max).result(60) == 5
        assert workers.submit(max, key=lambda number: -number).result(60) == 2
        with pytest.raises(TypeError):
            workers.submit(abs).result(60)


def test_bad_addresses_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    assert find_cluster(None, None) is None
    for cluster, file in (("local:0", None), ("somewhere", None), (None, tmp_path / "no"), ("local:2", tmp_path)):
        with pytest.raises(BatchbayesError, match="dask scheduler"):
            find_cluster(cluster, file)
    monkeypatch.setattr("batchbayes._common.cluster.CONNECT_SECONDS", 0.3)
    with pytest.raises(BatchbayesError, match="a dask scheduler that answers"):
        ClusterWorkers(Cluster("tcp://127.0.0.1:9"))
    assert cli.main(["reproduce", "own.tiny", "--out", str(tmp_path / "a"), "--workers", "2", "--cluster", "tcp://x"])
    assert "--workers or a cluster" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.parametrize(("name", "preset"), [("mcbn-uci", "smoke"), ("own.part_of_quick", "quick")])
def test_the_tables_of_a_published_experiment_are_bit_for_bit_the_same(
    name: str, preset: str, data_folder: Path, tmp_path: Path
) -> None:
    run = ("reproduce", name, "--preset", preset, "--data-dir", str(data_folder), "--quiet")
    with DaskProcesses(tmp_path) as cluster:
        for _ in range(2):
            cluster.worker()
        assert cluster.driver(*run, "--out", str(tmp_path / "far")).wait(1800) == 0, cluster.logs()
    assert cli.main([*run, "--out", str(tmp_path / "near"), "--workers", "1"]) == 0
    assert finished(tmp_path / "far") == finished(tmp_path / "near")
    tables = [sorted((tmp_path / name / "tables").iterdir()) for name in ("far", "near")]
    assert [path.read_bytes() for path in tables[0]] == [path.read_bytes() for path in tables[1]]
    assert tables[0]
