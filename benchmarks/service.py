"""The example service under load: 10,000 requests from 8 threads, every answer compared with `predict`.

    python benchmarks/service.py

A network for tables (8-64-64-1, as for the concrete data) is exported twice: as MCBN with 32 draws, interval and
novelty, and as the network alone. Each file runs in a server process of its own. A request has 1 to 8 rows. Latency is
measured at the client, with the two services in turns.
"""

import argparse
import http.client
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

import batchbayes as bb
from batchbayes import TrainingConfig, train
from batchbayes.calibrate import ConformalIntervals
from batchbayes.models import MLP
from batchbayes.tools import generator, shuffled
from batchbayes.training.loop import half_squared_error, supervised

SERVICE = Path(__file__).resolve().parents[1] / "examples" / "service.py"
THREADS, DRAWS, TOLERANCE, RANKS = 8, 32, 1e-5, 0.03
"""A p-value is a rank among 200 rows. The distance behind it has about six digits, so that rounding moves some ranks,
here by at most 0.03."""


def export_both(folder: Path) -> tuple[torch.Tensor, list[bb.Exported], dict[str, np.ndarray]]:
    """Train a network and export it. Return rows to ask about, the two files, and what the first must answer."""
    x = torch.randn(1000, 8, generator=generator(0))
    y = (x[:, :1] * x[:, 1:2]).sin() + 0.1 * torch.randn(1000, 1, generator=generator(1))
    network = MLP(8, [64, 64], 1)
    train(network, shuffled(x, y, 32, seed=0), supervised(half_squared_error), TrainingConfig(20, 32))
    posterior = bb.mcbn(network, x, batch_size=32, num_samples=DRAWS)
    detector = bb.novelty(network, x[:800], calibration=x[800:])
    intervals = ConformalIntervals(0.9, 1.7)
    whole = bb.export(
        posterior, folder / "mcbn.onnx", x[:4], bb.gaussian(50.0), num_samples=DRAWS, conformal=intervals,
        threshold=0.1, novelty=detector,
    )  # fmt: skip
    plain = bb.export(bb.deterministic(network), folder / "network.onnx", x[:4], bb.gaussian(50.0))
    new = torch.randn(500, 8, generator=generator(2))
    seen = bb.predict(posterior, new, bb.gaussian(50.0), num_samples=DRAWS)
    lower, upper = intervals(seen)
    wanted = {"pred_mean": seen.mean, "pred_std": seen.std, "lower": lower, "upper": upper}
    wanted["novelty"] = detector.p_value(new)
    return new, [whole, plain], {name: values.numpy() for name, values in wanted.items()}


@contextmanager
def service(path: Path) -> Iterator[int]:
    """Run the service in another process, and give its port."""
    command = [sys.executable, str(SERVICE), str(path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline().rsplit(":", 1)[1].split("/")[0])
        finally:
            process.terminate()


class Load:
    """Requests from several threads, their latencies, and what was wrong."""

    def __init__(self, port: int, rows: torch.Tensor, wanted: dict[str, np.ndarray]) -> None:
        self.port, self.rows, self.wanted = port, rows.numpy(), wanted
        self.seconds: list[float] = []
        self.largest_difference, self.wrong, self.moved = 0.0, 0, 0

    def run(self, requests: int) -> float:
        """Send requests, and return how long they took together."""
        threads = [threading.Thread(target=self._send, args=(n, requests // THREADS)) for n in range(THREADS)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - start

    def _send(self, number: int, requests: int) -> None:
        random = np.random.default_rng([number, len(self.seconds)])
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        for _ in range(requests):
            some = random.choice(len(self.rows), random.integers(1, 9), replace=False)
            body = json.dumps({"inputs": self.rows[some].tolist()})
            start = time.perf_counter()
            connection.request("POST", "/predict", body)
            response = connection.getresponse()
            answer = json.loads(response.read())
            self.seconds.append(time.perf_counter() - start)
            if response.status != 200:
                self.wrong += 1
                continue
            for name, values in self.wanted.items():
                difference = float(np.abs(np.asarray(answer[name]) - values[some]).max())
                if name == "novelty":
                    self.moved += difference > TOLERANCE
                    self.wrong += difference > RANKS
                    continue
                self.largest_difference = max(self.largest_difference, difference)
                self.wrong += difference > TOLERANCE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    requests = parser.parse_args().requests
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        new, (whole, plain), wanted = export_both(Path(folder))
        with service(whole.path) as first, service(plain.path) as second:
            loads = Load(first, new, wanted), Load(second, new, {})
            total = [0.0, 0.0]
            for _ in range(5):
                for k, load in enumerate(loads):
                    total[k] += load.run(requests // 5)
    print("| file | bytes | requests | answered | wrong | largest difference | requests/s | median | 95 % | 99 % |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    names = f"MCBN, {DRAWS} draws, interval, novelty", "the network alone"
    for name, made, load, seconds in zip(names, (whole, plain), loads, total, strict=True):
        times = np.percentile(load.seconds, [50, 95, 99]) * 1000
        difference = f"{load.largest_difference:.1e}" if load.wanted else ""
        print(
            f"| {name} | {made.num_bytes:,} | {requests // 5 // THREADS * THREADS * 5:,} | {len(load.seconds):,} | "
            f"{load.wrong} | {difference} | {len(load.seconds) / seconds:.0f} | "
            + " | ".join(f"{value:.1f} ms" for value in times)
            + " |"
        )
    print(f"\nAnswers in which rounding moved the rank of a p-value: {loads[0].moved}")
    if loads[0].wrong or loads[1].wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()
