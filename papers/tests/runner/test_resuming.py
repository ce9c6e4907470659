"""Processes that are killed or interrupted, or that share one results file."""

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from batchbayes_papers.runner.store import read_results

from batchbayes import cli

COMMAND = [sys.executable, "-c", "import sys; from batchbayes.cli import main; sys.exit(main())"]
SOME, UNITS = 26, 82
"""The number of units of the presets "some" and "quick"."""
TESTS = Path(__file__).resolve().parents[3] / "tests"

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found by /proc")


class Runs:
    """Starts processes with a mark in their environment, so that they and their workers can be found."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.mark = folder, f"BATCHBAYES_TEST={uuid.uuid4()}"
        self.out = folder / "out"
        key, _, value = self.mark.partition("=")
        path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.environment = os.environ | {key: value, "PYTHONPATH": path}

    def start(self, out: Path, workers: int, preset: str = "quick") -> "subprocess.Popen[str]":
        options = ["reproduce", "own.tiny", "--out", str(out), "--workers", str(workers), "--preset", preset]
        return subprocess.Popen(
            [*COMMAND, *options, "--data-dir", str(self.folder)],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job would ignore Ctrl-C
        )

    def log(self) -> list[list[str]]:
        """Return the name and the parent process of every unit that was started."""
        path = self.folder / "log"
        return [line.split("\t") for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for_log(self, count: int, process: "subprocess.Popen[str]", seconds: float = 60) -> None:
        until = time.monotonic() + seconds
        while len(self.log()) < count and process.poll() is None and time.monotonic() < until:
            time.sleep(0.005)

    def finished(self) -> set[str]:
        path = self.out / "results.sqlite"
        return set(read_results(path)[1]) if path.exists() and path.stat().st_size else set()

    def alive(self) -> list[int]:
        """Return the processes with the mark. Zombies have no environment and are left out."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                marked = entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if marked:
                found.append(int(entry.name))
        return found

    def wait_for_end(self, seconds: float = 20) -> list[int]:
        until = time.monotonic() + seconds
        while self.alive() and time.monotonic() < until:
            time.sleep(0.02)
        return self.alive()


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    found = Runs(tmp_path)
    yield found
    for pid in found.alive():
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("kills", "preset", "units"), [(3, "some", SOME), pytest.param(10, "quick", UNITS, marks=pytest.mark.slow)]
)
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_table(
    kills: int, preset: str, units: int, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(0)
    in_the_middle = 0
    for number in range(kills):
        finished, begun = runs.finished() if runs.out.exists() else set(), len(runs.log())
        process = runs.start(runs.out, 2, preset)
        if number % 3:  # while units are being done
            runs.wait_for_log(begun + chance.randint(1, 5), process)
            time.sleep(chance.uniform(0, 0.15))
        else:  # while it starts, which takes little time on a fast machine
            runs.wait_for_log(begun + 2, process, seconds=chance.uniform(0, 1.5))
        in_the_middle += process.poll() is None
        process.kill()
        process.wait()
        assert runs.wait_for_end() == []
        process.communicate()
        assert not finished & {name for name, _ in runs.log()[begun:]}
        assert finished <= runs.finished() if runs.out.exists() else not finished
    assert in_the_middle == kills
    finished, begun = runs.finished(), len(runs.log())
    assert 0 < len(finished) < units
    before = read_results(runs.out / "results.sqlite")[1]
    process = runs.start(runs.out, 2, preset)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0
    assert errors.startswith(f"{len(finished)} of {units} units were finished before\n")
    again = [name for name, _ in runs.log()[begun:]]
    assert len(again) == len(set(again)) == units - len(finished)
    assert not finished & set(again)
    after = read_results(runs.out / "results.sqlite")[1]
    assert {name: after[name] for name in before} == before
    assert runs.wait_for_end() == []

    whole = runs.folder / "whole"
    assert (
        cli.main(["reproduce", "own.tiny", "--preset", preset, "--out", str(whole), "--workers", "1", "--quiet"]) == 0
    )
    tables = []
    for folder in (runs.out, whole):
        assert cli.main(["table", "own.tiny", str(folder), "--format", "csv"]) == 0
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1] != ""


def test_two_processes_share_the_units_of_one_file(runs: Runs) -> None:
    both = [runs.start(runs.out, workers=2) for _ in range(2)]
    errors = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    names = [name for name, _ in runs.log()]
    assert len(names) == len(set(names)) == UNITS
    assert {int(parent) for _, parent in runs.log()} == {process.pid for process in both}
    assert runs.wait_for_end() == []


def test_the_units_of_a_killed_process_are_taken_over_by_the_other(runs: Runs) -> None:
    first, second = (runs.start(runs.out, workers=2) for _ in range(2))
    runs.wait_for_log(8, first)
    first.kill()
    first.communicate()
    begun = time.monotonic()
    second.communicate(timeout=120)
    assert second.returncode == 0
    assert time.monotonic() - begun < 50  # a lease would have had to expire
    assert len(runs.finished()) == UNITS


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_ends_quickly_and_keeps_what_is_finished(workers: int, runs: Runs) -> None:
    process = runs.start(runs.out, workers, "some")
    runs.wait_for_log(5, process)
    begun = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert time.monotonic() - begun < 10
    assert errors.splitlines()[-1] == "batchbayes reproduce: interrupted"
    assert "Traceback" not in errors
    assert runs.wait_for_end() == []
    assert 1 <= len(runs.finished()) < SOME


ENDED_WHILE_SENDING = """
import contextlib, time
from batchbayes_papers.runner.workers import WorkerProcesses

if __name__ == "__main__":
    for trial in range(12):
        with contextlib.suppress(KeyError), WorkerProcesses(2) as workers:
            workers.submit(pow, 2, 2).result()
            for _ in range(12):
                workers.submit(bytes, 40_000_000)
            time.sleep(0.02 * trial)
            raise KeyError
"""


def test_workers_that_end_while_they_send_a_result_do_not_block_the_pool(runs: Runs, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENDED_WHILE_SENDING)
    subprocess.run([sys.executable, str(script)], env=runs.environment, check=True, timeout=60)
    assert runs.wait_for_end() == []


@pytest.mark.parametrize("later", [0.0, 0.1])
def test_ctrl_c_while_workers_start_leaves_no_processes(later: float, runs: Runs) -> None:
    process = runs.start(runs.out, workers=2)
    until = time.monotonic() + 60
    while (
        len(runs.alive()) < 3 and time.monotonic() < until
    ):  # the process itself, a helper process of Python, and a worker
        time.sleep(0.002)
    time.sleep(later)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "batchbayes reproduce: interrupted"
    assert "Traceback" not in errors
    assert runs.wait_for_end() == []


def test_a_full_disk_ends_with_2_and_keeps_what_is_finished(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """A limit on the file size replaces a full disk, since it needs no permissions."""
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000)); " + COMMAND[2]
    options = ["reproduce", "own.tiny", "--preset", "large", "--out", str(runs.out), "--workers", "2"]
    command = [sys.executable, "-c", limited, *options]
    done = subprocess.run(command, env=runs.environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "free space on a working disk" in done.stderr
    kept = runs.finished()
    assert 0 < len(kept) < UNITS
    assert runs.wait_for_end() == []
    assert cli.main([*options[:-1], "1"]) == 0
    assert capsys.readouterr().err.startswith(f"{len(kept)} of {UNITS} units were finished before\n")
