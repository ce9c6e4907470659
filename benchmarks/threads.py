"""Threads that fit, predict, save and call one network at once: do they get the bits of one after the other?

    python benchmarks/threads.py [--calls 1000]

Prints a line for each network and each number of threads: calls with wrong results (0 is right), whether the network is
bit-identical afterwards, and the time in units of the sequential run. Ends with exit code 1 if anything is wrong.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from batchbayes_papers.models.cifar_resnet import CifarResNet
from torch import Tensor, nn

import batchbayes as bb


class Memoising(nn.Module):
    """Derives a scale from its weight, and keeps it while in evaluation mode, as some attention layers do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.memory = nn.Parameter(torch.zeros(width)), {}

    def train(self, mode: bool = True) -> "Memoising":
        self.memory = {}
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return x * self.weight.exp()
        return x * self.memory.setdefault("scale", self.weight.exp())


def perceptron(*extra: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(13, 50), nn.BatchNorm1d(50), nn.ReLU(), *extra, nn.Linear(50, 3))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (perceptron, (13,)),
    "memoising": (lambda: perceptron(Memoising(50)), (13,)),
    "dropout": (lambda: perceptron(nn.Dropout(0.3)), (13,)),
    "ResNet-20": (lambda: CifarResNet(20), (3, 32, 32)),
}


def jobs(name: str, network: nn.Module, shape: tuple[int, ...], folder: Path) -> list[Callable[[int], Tensor]]:
    """Return the calls that are mixed; each gives a tensor that must not depend on the other threads."""
    images = len(shape) > 1
    x, batches = torch.randn(4 if images else 64, *shape), [torch.randn(8, *shape) for _ in range(4)]
    fit = (lambda: bb.mc_dropout(network)) if name == "dropout" else (lambda: bb.mcbn(network, batches))
    posterior = fit()

    def predicted(engine: str) -> Tensor:
        return bb.predict(posterior, x, bb.categorical(), num_samples=4, engine=engine).probs  # type: ignore[arg-type]

    def saved(number: int) -> Tensor:
        path = folder / f"{number}.safetensors"
        bb.save(posterior, path)
        return bb.predict(bb.load(path, network), x, bb.categorical(), num_samples=2).probs

    linear = "sample" if name == "dropout" else "linear"
    return [
        lambda _: predicted("sample"),
        lambda _: predicted(linear),
        lambda _: predicted("auto"),
        lambda _: bb.predict(fit(), x, bb.categorical(), num_samples=2).probs,
        saved,
        lambda _: network(x),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000)
    calls, failed = parser.parse_args().calls, False
    torch.set_num_threads(1)
    print(
        f"{'network':<12} {'threads':>7} {'calls':>6} {'wrong':>6} {'network identical':>18} {'time / sequential':>18}"
    )
    for name, (build, shape) in NETWORKS.items():
        torch.manual_seed(0)
        network = build()
        with torch.no_grad():
            for _ in range(20):
                network.train()(torch.randn(16, *shape))
        network.eval()
        with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
            work = jobs(name, network, shape, Path(folder))
            expected = [job(-1) for job in work]
            state = {key: tensor.clone() for key, tensor in network.state_dict().items()}

            def call(number: int, work=work, expected=expected) -> bool:
                with torch.no_grad():
                    kind = number % len(work)
                    return torch.equal(work[kind](number), expected[kind])

            start = time.perf_counter()
            wrong = calls - sum(map(call, range(calls)))
            alone = time.perf_counter() - start
            rows = [(1, wrong, 1.0)]
            for threads in (2, 8):
                start = time.perf_counter()
                with ThreadPoolExecutor(threads) as pool:
                    wrong = calls - sum(pool.map(call, range(calls)))
                rows.append((threads, wrong, (time.perf_counter() - start) / alone))
            same = all(torch.equal(tensor, state[key]) for key, tensor in network.state_dict().items())
            for threads, wrong, ratio in rows:
                print(f"{name:<12} {threads:>7} {calls:>6} {wrong:>6} {'yes' if same else 'NO':>18} {ratio:>18.2f}")
                failed |= bool(wrong) or not same
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
