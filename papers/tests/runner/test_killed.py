"""An experiment as a process that is killed: it goes on, and ends with the table of a whole run."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from batchbayes_papers.runner.store import read_results

from batchbayes.errors import BatchbayesError

COMMAND = [sys.executable, "-c", "import sys; from batchbayes.cli import main; sys.exit(main())"]
SAMPLES = ["sg-mcmc", "online", "attack", "active-learning", "ensembles", "rl"]
WEIGHTS = ["gradient-variance", "mean-propagation", "random-labels", "sparse-vd", "variance-networks"]

IMAGES = ["mcbn-camvid", "mcbn-cifar", "sbn"]


def finished(out: Path) -> int:
    try:
        return len(read_results(out / "results.sqlite")[1])
    except BatchbayesError:  # the run has just begun
        return 0


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES + WEIGHTS + IMAGES)
def test_a_killed_run_goes_on(name: str, tmp_path: Path) -> None:
    if name == "rl":
        pytest.importorskip("gymnasium", reason="needs the extra rl")
    options = ["reproduce", name, "--preset", "smoke", "--workers", "1", "--quiet", "--out"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = subprocess.Popen([*COMMAND, *options, str(killed)])
    try:
        while process.poll() is None and not finished(killed):
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    kept = finished(killed)
    assert kept
    subprocess.run([*COMMAND, *options, str(killed)], check=True)
    subprocess.run([*COMMAND, *options, str(whole)], check=True)
    assert kept < finished(whole) == finished(killed)
    assert (killed / "table.md").read_text() == (whole / "table.md").read_text()
