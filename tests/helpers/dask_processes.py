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


def until(holds: Callable[[], object], seconds: float = 120) -> None:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


class DaskProcesses:
    """Starts processes, and ends all that are left when a `with` block ends."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "scheduler.json"
        path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self._started: list[Process[str]] = []

    def __enter__(self) -> "DaskProcesses":
        self._start("dask_scheduler", "--port", "0", "--no-show", "--scheduler-file", str(self.file))
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            process.kill()
            process.wait()

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

    def worker(self) -> "Process[str]":
        """Start a worker without a nanny, so that nobody restarts it."""
        until(self.file.exists)
        options = ("--scheduler-file", str(self.file), "--nthreads", "1", "--no-nanny")
        return self._start("dask_worker", *options)

    def driver(self, *arguments: str) -> "Process[str]":
        """Start batchbayes with these arguments, on the cluster."""
        until(self.file.exists)
        log = self.folder / f"driver-{len(self._started)}.log"
        return self._run([*COMMAND, *arguments, "--scheduler-file", str(self.file)], log)

    def logs(self) -> str:
        """Return what all processes have said."""
        return "\n".join(f"{path.name}: {path.read_text()}" for path in sorted(self.folder.glob("*-*.log")))
