"""What an ensemble of ten networks costs: memory against one network, and CPU time against plain passes.

    python benchmarks/ensemble_cost.py

The weights are random: cost does not depend on them. Each measurement of memory runs in a process of its own, and is
the growth of the largest resident memory by loading the weights and predicting, after a plain pass and after a
prediction with tiny members; medians of nine. The weights of ResNet-20 are small beside the memory of its activations,
so a perceptron with large weights is measured too. Times are medians of interleaved runs on one thread. The members are
read from their file at every draw.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from batchbayes_papers.models.cifar_resnet import CifarResNet
from torch import nn

import batchbayes as bb

MEMBERS, MEASUREMENTS = 10, 9
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "ResNet-20": (lambda: CifarResNet(20).eval(), (64, 3, 32, 32)),
    "perceptron": (lambda: nn.Sequential(nn.Linear(2000, 2500), nn.ReLU(), nn.Linear(2500, 10)).eval(), (64, 2000)),
}
KINDS = {"one": "one network", "file": "ten members in a file", "all": "ten networks in memory"}


def members(name: str) -> list[nn.Module]:
    torch.manual_seed(0)
    return [NETWORKS[name][0]() for _ in range(MEMBERS)]


def peak_megabytes() -> float:
    """Return the largest resident memory so far. That of `resource` may be the one of the parent process."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return float(lines["VmHWM"].split()[0]) / 1024


def growth(name: str, kind: str, path: Path) -> float:
    """Return how much resident memory grows, in MB, in this process."""
    make, shape = NETWORKS[name]
    network, images = make(), torch.randn(shape)
    with torch.no_grad():
        network(images)  # what torch itself needs for a pass
    small = [nn.Linear(3, 2) for _ in range(2)]  # what our own code needs, which is imported when it is used
    bb.save(bb.weight_samples(small[0], [each.state_dict() for each in small]), path.with_name("small.safetensors"))
    for posterior in (bb.ensemble(small), bb.load(path.with_name("small.safetensors"), small[0])):
        bb.predict(posterior, torch.randn(4, 3), bb.categorical(), num_samples=2)
    before = peak_megabytes()
    if kind == "one":
        posterior = bb.deterministic(make())
    elif kind == "file":
        posterior = bb.load(path, network)
    else:
        posterior = bb.ensemble(members(name))
    for _ in range(MEMBERS if kind == "one" else 1):  # ten passes, whatever is measured
        bb.predict(posterior, images, bb.categorical(), num_samples=MEMBERS)
    return peak_megabytes() - before


@torch.no_grad()
def passes_a_member(path: Path, repeats: int) -> float:
    """Return the CPU time of a member of the ensemble, in plain forward passes."""
    network, images = CifarResNet(20).eval(), torch.randn(256, 3, 32, 32)
    posterior, ratios = bb.load(path, network), []
    bb.predict(posterior, images, bb.categorical())  # from now on the C library keeps freed memory, for both
    for _ in range(repeats):
        start = time.process_time()
        for _ in range(MEMBERS):
            for part in images.split(85):  # as the sample engine cuts them
                network(part)
        middle = time.process_time()
        bb.predict(posterior, images, bb.categorical())
        ratios.append((time.process_time() - middle) / (middle - start))
    return statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.measure:
        print(growth(*options.measure[:2], Path(options.measure[2])))
        return
    folder = Path(tempfile.mkdtemp())
    for name in NETWORKS:
        path, networks = folder / f"{name}.safetensors", members(name)
        bb.save(bb.weight_samples(networks[0], [network.state_dict() for network in networks]), path)
        print(f"{name}: the weights of one network have {path.stat().st_size / MEMBERS / 2**20:.1f} MB")
        for kind, label in KINDS.items():
            command = [sys.executable, __file__, "--measure", name, kind, str(path)]
            options_of_run = {"capture_output": True, "text": True, "check": True}
            found = [float(subprocess.run(command, **options_of_run).stdout) for _ in range(MEASUREMENTS)]
            print(
                f"memory grows by {statistics.median(found):.1f} MB for {label} ({min(found):.1f} to {max(found):.1f})"
            )
    print(f"a member costs {passes_a_member(folder / 'ResNet-20.safetensors', options.repeats):.3f} plain passes")


if __name__ == "__main__":
    main()
