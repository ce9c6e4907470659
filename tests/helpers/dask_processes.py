"""A dask scheduler, its workers and a driver as real processes on the loopback, to be killed."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

COMMAND = [sys.executable, "-c", "import sys; from batchbayes.cli import main; sys.exit(main())"]
TESTS = Path(__file__).resolve().parents[1]
Process = subprocess.Popen


def until(holds: Callable[[], object], seconds: float = 300) -> None:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def slow_power(base: int, exponent: int) -> int:
    """Work that a worker can be killed in."""
    time.sleep(1)
    return base**exponent


class DaskProcesses:
    """Starts processes, and ends all that are left when a `with` block ends."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "scheduler.json"
        path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self._started: list[Process[str]] = []

    def __enter__(self) -> "DaskProcesses":
        self.start_scheduler()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            process.kill()
            process.wait()

    def start_scheduler(self) -> None:
        """Start a scheduler, or another one in place of one that was killed. It has a new address."""
        self.file.unlink(missing_ok=True)
        options = ("--port", "0", "--no-show", "--scheduler-file", str(self.file))
        self.scheduler = self._start("dask_scheduler", *options)

    def _start(self, module: str, *options: str) -> "Process[str]":
        command = [sys.executable, "-m", f"distributed.cli.{module}", "--host", "127.0.0.1"]
        command += ["--dashboard-address", "127.0.0.1:0", *options]
        return self._run(command, self.folder / f"{module}-{len(self._started)}.log")

    def _run(self, command: list[str], log: Path) -> "Process[str]":
        with log.open("w") as output:
            process = subprocess.Popen(
                command, env=self._environment, stdout=output, stderr=output, text=True, cwd=self.folder
            )
        self._started.append(process)
        return process

    def worker(self, **packages: str) -> "Process[str]":
        """Start a worker without a nanny, so that nobody restarts it. `packages` replaces sources of packages."""
        until(self.file.exists)
        options = ("--scheduler-file", str(self.file), "--nthreads", "1", "--no-nanny")
        before = self._environment
        for name, source in packages.items():
            place = self.folder / f"packages-{len(self._started)}"
            (place / name).mkdir(parents=True)
            (place / name / "__init__.py").write_text(source)
            self._environment = before | {"PYTHONPATH": os.pathsep.join([str(place), before["PYTHONPATH"]])}
        try:
            return self._start("dask_worker", *options)
        finally:
            self._environment = before

    def driver(self, *arguments: str, **settings: float) -> "Process[str]":
        """Start batchbayes with these arguments, on the cluster. `settings` replaces constants of the module."""
        until(self.file.exists)
        log = self.folder / f"driver-{len(self._started)}.log"
        changed = [f"cluster.{name} = {value}" for name, value in settings.items()]
        code = "; ".join(["from batchbayes._common import cluster", *changed, COMMAND[2]])
        command = [*COMMAND[:2], code, *arguments, "--scheduler-file", str(self.file)]
        process = self._run(command, log)
        self.driver_log = log
        return process

    def logs(self) -> str:
        """Return what all processes have said."""
        return "\n".join(f"{path.name}: {path.read_text()}" for path in sorted(self.folder.glob("*-*.log")))
