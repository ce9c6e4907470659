"""How many calls and passes small fits and predictions take, and what a small prediction costs.

    python benchmarks/calls.py [--against SOURCES] [--repeats 40]

`--against` is the `src` folder of another version: each version runs in a process of its own, and their times are taken
in turn. Calls are those of Python functions, counted by `sys.setprofile`, of batchbayes itself and of all packages.
The networks are those of the examples in the documentation: one or two batch-norm layers, a few columns. Times are CPU
time of one thread, so that other work on the machine counts little.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import batchbayes as bb

SOURCES = Path(bb.__file__).parents[1]
ROWS, DRAWS, EXAMPLES = 64, 8, 16
TIMED = 25
"""Predictions that are timed at once."""


def one_layer() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def two_layers() -> nn.Sequential:
    hidden = [nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(8, 3))


def trained(build: Callable[[], nn.Sequential], inputs: Tensor) -> nn.Sequential:
    """Return a network whose running statistics are those of the data."""
    torch.manual_seed(0)
    network = build()
    for _ in range(20):
        network(inputs)
    return network.eval()


def counted(function: Callable[[], object]) -> tuple[int, int, int]:
    """Return the calls of functions of batchbayes and of all Python functions in one call, and our modules in them."""
    calls, modules = [0, 0], set()

    def see(frame: Any, event: str, _: object) -> None:
        if event == "call":
            if f"{os.sep}batchbayes{os.sep}" in frame.f_code.co_filename:
                calls[0] += 1
                modules.add(frame.f_code.co_filename)
            calls[1] += 1

    sys.setprofile(see)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls[0], calls[1] - 1, len(modules)  # the last call is `setprofile`


def passes(network: nn.Module, function: Callable[[], object]) -> int:
    """Return the number of passes through a network in one call. Copies of the network share its hooks."""
    seen: list[None] = []
    handle = network.register_forward_pre_hook(lambda *_: seen.append(None))
    function()
    handle.remove()
    return len(seen)


def counts() -> dict[str, dict[str, int]]:
    """Return calls of batchbayes, all calls, and passes or modules, for each example."""
    torch.manual_seed(0)
    inputs, found = torch.randn(256, 2), {}
    for size, build in {"one": one_layer, "two": two_layers}.items():
        network = trained(build, inputs)
        fit = lambda network=network: bb.mcbn(network, inputs, batch_size=32, num_samples=ROWS)  # noqa: E731
        posterior = fit()
        ask = lambda p=posterior: bb.predict(p, inputs[:EXAMPLES], bb.categorical(), num_samples=DRAWS)  # noqa: E731
        ask()  # the first prediction of a posterior also tries whether draws are functions
        for name, job in {f"`bb.mcbn`, R = {ROWS}": fit, f"`bb.predict`, sample, S = {DRAWS}": ask}.items():
            own, every, _ = counted(job)
            told = {"calls of batchbayes": own, "all calls": every, "passes": passes(network, job)}
            found[f"{name}, {size} batch-norm layer{'s' * (size == 'two')}"] = told
    x, y = torch.randn(300, 2), torch.randint(0, 3, (300,))
    network = trained(one_layer, x)
    report = lambda: bb.assess(network, x[:150], (x[150:], y[150:]), batch_size=32, draws=8)  # noqa: E731
    report()  # the first one also imports
    own, every, modules = counted(report)
    return found | {"`bb.assess`": {"calls of batchbayes": own, "all calls": every, "modules of batchbayes": modules}}


class Timed:
    """A prediction of a few rows by a small network, and the same number of plain passes."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        inputs = torch.randn(1024, 8)
        hidden = [nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()]
        self.network = trained(lambda: nn.Sequential(*hidden, nn.Linear(32, 3)), inputs)
        self.posterior, self.inputs = bb.mcbn(self.network, inputs, batch_size=32), inputs[:EXAMPLES]

    def predict(self) -> None:
        bb.predict(self.posterior, self.inputs, bb.categorical(), num_samples=DRAWS)

    @torch.no_grad()
    def plain(self) -> None:
        for _ in range(DRAWS):
            self.network(self.inputs)

    def seconds(self) -> tuple[float, float]:
        """Return the CPU time of a prediction and of the plain passes, medians of several."""
        return _median_seconds(self.predict), _median_seconds(self.plain)


def _median_seconds(function: Callable[[], object]) -> float:
    taken = []
    for _ in range(TIMED):
        start = time.thread_time()
        function()
        taken.append(time.thread_time() - start)
    return statistics.median(taken)


def answer() -> None:
    """Print the counts, and then the times each time that a line comes in."""
    warnings.simplefilter("ignore")
    print(json.dumps(counts()), flush=True)
    timed = Timed()
    for _ in sys.stdin:
        print(json.dumps(timed.seconds()), flush=True)


class Version:
    """A version of batchbayes in a process of its own."""

    def __init__(self, sources: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(sources), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--answer"]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.counts: dict[str, dict[str, int]] = self._read()
        self.times: list[list[float]] = []

    def _read(self) -> Any:
        assert self.process.stdout
        return json.loads(self.process.stdout.readline())

    def take_time(self) -> None:
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.times.append(self._read())

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="the src folder of another version")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        answer()
        return
    versions = [Version(folder.resolve()) for folder in (options.against, SOURCES) if folder]
    print("| example | " + " | ".join(["before", "after"][-len(versions) :]) + " |\n|---|" + "---:|" * len(versions))
    for name in versions[-1].counts:
        for what in versions[-1].counts[name]:
            print(f"| {name}: {what} | " + " | ".join(f"{v.counts[name][what]:,}" for v in versions) + " |")
    for _ in range(options.repeats):
        for version in versions:
            version.take_time()
    each = [[statistics.median(column) for column in zip(*v.times, strict=True)] for v in versions]
    what = f"`bb.predict`, {EXAMPLES} rows, S = {DRAWS}"
    print(f"| {what}: ms of CPU time | " + " | ".join(f"{1000 * taken:.2f}" for taken, _ in each) + " |")
    print("| the same in plain passes for each draw | " + " | ".join(f"{a / b:.1f}" for a, b in each) + " |")
    if options.against:
        old, new = (v.times for v in versions)
        ratios = [before[0] / after[0] for before, after in zip(old, new, strict=True)]
        print(f"\nTime before over after: {statistics.median(ratios):.2f} (median of {len(ratios)} turns).")
    for version in versions:
        version.close()


if __name__ == "__main__":
    main()
