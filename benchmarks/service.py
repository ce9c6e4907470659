"""`batchbayes serve` under load: 20,000 requests from 64 clients, with restarts in between.

    python benchmarks/service.py

Two networks for tables (8-64-64-1) are exported: MCBN with 8 draws, interval and novelty, and another network alone. A
request has 1 to 8 rows. During the first 40 % of the requests the service is stopped eight times, by SIGTERM and by
kill -9 in turns, and starts again on the same port, every other time with the other file. Each answer names its file,
and is compared with `predict`. A client whose connection breaks asks again. If the service had been stopped by SIGTERM,
that client was cut off, and this counts as an error.
"""

import argparse
import hashlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch

import batchbayes as bb
from batchbayes import TrainingConfig, train
from batchbayes.calibrate import ConformalIntervals
from batchbayes.models import MLP
from batchbayes.tools import generator, shuffled
from batchbayes.training.loop import half_squared_error, supervised

CLIENTS, DRAWS, TOLERANCE, RANKS = 64, 8, 1e-5, 0.03
"""A p-value is a rank among 200 rows. The distance behind it has about six digits, so that rounding moves some ranks,
here by at most 0.03."""
STOPS = 8
Wanted = dict[str, dict[str, np.ndarray]]


def export_both(folder: Path) -> tuple[torch.Tensor, list[Path], list[dict[str, np.ndarray]]]:
    """Return rows to ask about, the files, and what they must answer."""
    x = torch.randn(1000, 8, generator=generator(0))
    y = (x[:, :1] * x[:, 1:2]).sin() + 0.1 * torch.randn(1000, 1, generator=generator(1))
    new = torch.randn(500, 8, generator=generator(2))
    network, other = MLP(8, [64, 64], 1), MLP(8, [64, 64], 1)
    for each in (network, other):
        train(each, shuffled(x, y, 32, seed=0), supervised(half_squared_error), TrainingConfig(5, 32))
    posterior, likelihood = bb.mcbn(network, x, batch_size=32, num_samples=DRAWS), bb.gaussian(50.0)
    detector, intervals = bb.novelty(network, x[:800], calibration=x[800:]), ConformalIntervals(0.9, 1.7)
    whole = bb.export(
        posterior, folder / "mcbn.onnx", x[:4], likelihood, num_samples=DRAWS, conformal=intervals, threshold=0.1,
        novelty=detector,
    )  # fmt: skip
    plain = bb.export(bb.deterministic(other), folder / "network.onnx", x[:4], likelihood)
    seen = bb.predict(posterior, new, likelihood, num_samples=DRAWS)
    lower, upper = intervals(seen)
    wanted = {"pred_mean": seen.mean, "pred_std": seen.std, "lower": lower, "upper": upper}
    wanted["novelty"] = detector.p_value(new)
    alone = {"pred_mean": bb.predict(bb.deterministic(other), new, likelihood).mean}
    return new, [whole.path, plain.path], [{k: v.numpy() for k, v in each.items()} for each in (wanted, alone)]


class Service:
    """The service as a process that is stopped and started again."""

    def __init__(self, files: list[Path]) -> None:
        self._files, self.number, self.ends = files, 0, {}
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.start(0)

    def start(self, which: int) -> None:
        self.number += 1  # before it listens: who connects from now on belongs to the new process
        command = [sys.executable, "-m", "batchbayes", "serve", str(self._files[which]), "--port", str(self.port)]
        self.process = subprocess.Popen([*command, "--quiet", "--threads", "1"], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def stop(self, how: signal.Signals) -> None:
        self.ends[self.number] = how
        self.process.send_signal(how)
        self.process.wait()

    def memory(self) -> float:
        """Return the resident memory in MB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024


class Load:
    """Requests from several threads, their latencies, and what was wrong."""

    def __init__(self, service: Service, rows: torch.Tensor, wanted: Wanted, requests: int) -> None:
        self.service, self.rows, self.wanted, self.requests = service, rows.numpy(), wanted, requests
        self.seconds: list[float] = []
        self.answers = dict.fromkeys(wanted, 0)
        self.cut = {signal.SIGTERM: 0, signal.SIGKILL: 0}
        self.largest_difference, self.wrong, self.moved, self.refused = 0.0, 0, 0, 0
        self._lock = threading.Lock()

    def run(self) -> None:
        """Send requests from all clients until enough are answered."""
        threads = [threading.Thread(target=self._client, args=(number,)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _client(self, number: int) -> None:
        random, connection, generation = np.random.default_rng(number), None, 0
        while len(self.seconds) < self.requests:
            some = random.choice(len(self.rows), random.integers(1, 9), replace=False)
            body, start = json.dumps({"inputs": self.rows[some].tolist()}), time.perf_counter()
            while True:
                try:
                    if connection is None or connection.sock is None:
                        connection = http.client.HTTPConnection("127.0.0.1", self.service.port, timeout=120)
                        connection.connect()  # may wait until the next process listens
                        generation = self.service.number
                    connection.request("POST", "/predict", body, {"Content-Type": "application/json"})
                    response = connection.getresponse()
                    answer = json.loads(response.read())
                    break
                except ConnectionRefusedError:
                    connection, self.refused = None, self.refused + 1
                    time.sleep(0.1)
                except (OSError, http.client.HTTPException) as error:
                    connection = None
                    with self._lock:
                        self.cut[self.service.ends.get(generation, signal.SIGTERM)] += 1
                    if self.service.ends.get(generation) is not signal.SIGKILL:
                        print(f"a client was cut off: {error!r}", file=sys.stderr)
            with self._lock:
                self.seconds.append(time.perf_counter() - start)
                self._compare(response, answer, some)

    def _compare(self, response: http.client.HTTPResponse, answer: dict, some: np.ndarray) -> None:
        file = response.headers["Batchbayes-File"]
        self.answers[file] += 1
        if response.status != 200:
            print(answer, file=sys.stderr)
            self.wrong += 1
            return
        for name, values in self.wanted[file].items():
            difference = float(np.abs(np.asarray(answer[name]) - values[some]).max())
            if name == "novelty":
                self.moved += difference > TOLERANCE
                self.wrong += difference > RANKS
                continue
            self.largest_difference = max(self.largest_difference, difference)
            self.wrong += difference > TOLERANCE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    requests = parser.parse_args().requests
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        new, files, answers = export_both(Path(folder))
        names = [hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in files]
        service = Service(files)
        load = Load(service, new, dict(zip(names, answers, strict=True)), requests)
        running, began = threading.Thread(target=load.run), time.perf_counter()
        running.start()
        for stop in range(STOPS):
            while len(load.seconds) < 0.4 * requests * (stop + 1) / STOPS:
                time.sleep(0.01)
            service.stop((signal.SIGTERM, signal.SIGKILL)[stop % 2])
            service.start((stop + 1) // 2 % 2)
        memory: dict[int, float] = {}
        for share in (0.5, 0.6, 0.7, 0.8, 0.9):
            while len(load.seconds) < share * requests:
                time.sleep(0.01)
            memory[len(load.seconds)] = service.memory()
        running.join()
        memory[len(load.seconds)], seconds = service.memory(), time.perf_counter() - began
        service.stop(signal.SIGTERM)
    median, most, highest = np.percentile(load.seconds, [50, 95, 99]) * 1000
    print("| | |\n|---|---:|")
    print(f"| requests answered | {len(load.seconds):,} |")
    print(f"| of them by the file with MCBN, by the other | {', '.join(f'{load.answers[name]:,}' for name in names)} |")
    print(f"| wrong answers | {load.wrong} |")
    print(f"| largest difference from `predict` | {load.largest_difference:.1e} |")
    print(f"| answers in which rounding moved the rank of a p-value | {load.moved} |")
    print(f"| clients cut off by {STOPS // 2} stops with SIGTERM | {load.cut[signal.SIGTERM]} |")
    print(f"| requests broken off by {STOPS // 2} kill -9, and sent again | {load.cut[signal.SIGKILL]} |")
    print(f"| requests/s, restarts included | {len(load.seconds) / seconds:.0f} |")
    print(f"| median, 95 %, 99 % of the times to an answer | {median:.0f}, {most:.0f}, {highest:.0f} ms |")
    print("\nMemory of the last process, MB after requests: ", end="")
    print(", ".join(f"{size:.0f} ({number:,})" for number, size in memory.items()))
    if load.wrong or load.cut[signal.SIGTERM]:
        sys.exit(1)


if __name__ == "__main__":
    main()
