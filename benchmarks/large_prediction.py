"""Prediction of a million rows: memory, kills and resumption, and a dask cluster.

    python benchmarks/large_prediction.py FOLDER

The rows have 8 inputs and are in ten .npz files. The network is a perceptron 8-64-64-1, with the method that
its assessment recommends, out of the network itself and MCBN with 8 draws. Each run is
`batchbayes predict --parts` in a process of its own, with one thread. The peak is its largest resident memory. FOLDER
keeps the data, and is used again.
"""

import argparse
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from batchbayes import TrainingConfig, cli, train
from batchbayes.models import MLP
from batchbayes.tools import GlobalStream, shuffled
from batchbayes.training.loop import half_squared_error, supervised

FILES, ROWS, KILLS = 10, 100_000, 10
COMMAND = [sys.executable, "-c", "import sys; from batchbayes.cli import main; sys.exit(main())", "predict"]


def network() -> MLP:
    with GlobalStream(0):
        return MLP(8, [64, 64], 1)


def table(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.standard_normal((count, 8), dtype=np.float32)
    return x, (np.sin(x[:, 0] * x[:, 1]) + 0.1 * random.standard_normal(count)).astype(np.float32)


def prepare(folder: Path) -> list[str]:
    """Train a network, assess it, write the rows, and return the options of `predict`."""
    if not (folder / "report").exists():
        (folder / "rows").mkdir(parents=True, exist_ok=True)
        for name, seed in (("train", 0), ("test", 1)):
            x, y = table(2000, seed)
            np.savez(folder / f"{name}.npz", X=x, y=y)
        trained, (x, y) = network(), map(torch.from_numpy, table(2000, 0))
        config = TrainingConfig(20, 32)
        train(trained, shuffled(x, y[:, None], 32, seed=0), supervised(half_squared_error), config)
        save_file(trained.state_dict(), folder / "weights.safetensors")
        for number in range(FILES):
            np.savez(folder / "rows" / f"{number}.npz", X=table(ROWS, 100 + number)[0])
        options = ["--train", str(folder / "train.npz"), "--test", str(folder / "test.npz"), "--method", "mcbn"]
        options += ["--batch-size", "32", "--draws", "8", "--engine", "sample", "--quiet"]
        assert cli.main(["assess", *model(folder), *options, "--out", str(folder / "report")]) == 0
    saved = ["--posterior", str(folder / "report" / "posterior.safetensors")]
    return [*model(folder), *saved, "--threads", "1", "--quiet"]


def model(folder: Path) -> list[str]:
    return ["--model", "benchmarks.large_prediction:network", "--weights", str(folder / "weights.safetensors")]


def start(options: list[str], inputs: list[Path], *more: str) -> "subprocess.Popen[bytes]":
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.Popen([*COMMAND, *options, "--input", *map(str, inputs), *more], env=environment)


def measured(options: list[str], inputs: list[Path], *more: str) -> tuple[float, float]:
    """Run to the end. Return the CPU seconds, and the peak of the resident memory in MB."""
    _, status, used = os.wait4(start(options, inputs, *more).pid, 0)
    assert status == 0
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1000


def digest(folder: Path) -> str:
    """Return a digest of all parts in a folder: their names and their contents."""
    found = hashlib.sha256()
    for path in sorted(folder.glob("part-*.csv")):
        found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def kill_and_resume(options: list[str], inputs: list[Path], out: Path, seconds: float) -> list[int]:
    """Kill a run at random moments, and continue it. Return the number of parts after each kill."""
    chance, found = random.Random(0), []
    for _ in range(KILLS):
        process = start(options, inputs, "--parts", str(out))
        time.sleep(chance.uniform(0.5, 1.5) * seconds / KILLS)
        process.send_signal(signal.SIGKILL)
        process.wait()
        found.append(len(list(out.glob("part-*.csv"))) if out.exists() else 0)
    assert start(options, inputs, "--parts", str(out)).wait() == 0
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    torch.set_num_threads(1)
    options = prepare(folder)
    files = sorted((folder / "rows").iterdir())
    runs = folder / "runs"
    shutil.rmtree(runs, ignore_errors=True)
    runs.mkdir()
    print("| rows | peak with --parts | CPU seconds | peak with --out |\n|---:|---:|---:|---:|", flush=True)
    begun = 0.0
    for count in (1, 3, 10):
        begun = time.monotonic()
        seconds, peak = measured(options, files[:count], "--parts", str(runs / f"{count}"))
        begun = time.monotonic() - begun
        whole = f"{measured(options, files[:1], '--out', str(runs / 'one.csv'))[1]:.0f} MB" if count == 1 else ""
        print(f"| {count * ROWS:,} | {peak:.0f} MB | {seconds:.0f} | {whole} |", flush=True)
    kept = kill_and_resume(options, files, runs / "killed", begun)
    print(f"\nParts after each of {KILLS} kills: {kept}; of {len(list((runs / '10').glob('part-*.csv')))} in all.")
    print(f"Killed and resumed, the same bytes: {digest(runs / 'killed') == digest(runs / '10')}", flush=True)
    assert start(options, files[:3], "--parts", str(runs / "cluster"), "--cluster", "local:2").wait() == 0
    print(
        f"300,000 rows on a cluster with two workers, the same bytes: {digest(runs / 'cluster') == digest(runs / '3')}"
    )


if __name__ == "__main__":
    main()
