"""What an ensemble of ten ResNet-20 costs: memory against one network, and CPU time against plain passes.

    python benchmarks/ensemble_cost.py

The weights are random: cost does not depend on them. Each measurement of memory runs in a process of its own, and is
the growth of the largest resident memory between before the weights are loaded and after the prediction. Times are
medians of interleaved runs on one thread. The members are read from their file at every draw.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import batchbayes as bb
from batchbayes.models.cifar_resnet import CifarResNet

MEMBERS = 10


def members() -> list[CifarResNet]:
    torch.manual_seed(0)
    return [CifarResNet(20).eval() for _ in range(MEMBERS)]


def growth(kind: str, path: Path) -> float:
    """Return how much resident memory grows, in MB, in this process."""
    network, images = CifarResNet(20).eval(), torch.randn(64, 3, 32, 32)
    with torch.no_grad():
        network(images)  # what torch itself needs for a pass
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if kind == "one":
        twins = [CifarResNet(20).eval()]
        posterior: bb.Posterior = bb.deterministic(twins[0])
    elif kind == "file":
        posterior = bb.load(path, network)
    else:
        posterior = bb.ensemble(members())
    bb.predict(posterior, images, bb.categorical(), num_samples=MEMBERS)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


@torch.no_grad()
def passes_a_member(path: Path, repeats: int) -> float:
    """Return the CPU time of a member of the ensemble, in plain forward passes."""
    network, images = CifarResNet(20).eval(), torch.randn(256, 3, 32, 32)
    posterior, ratios = bb.load(path, network), []
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
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.measure:
        print(growth(options.measure[0], Path(options.measure[1])))
        return
    path = Path(tempfile.mkdtemp()) / "members.safetensors"
    networks = members()
    bb.save(bb.weight_samples(networks[0], [network.state_dict() for network in networks]), path)
    print(f"weights of one network: {path.stat().st_size / MEMBERS / 2**20:.1f} MB")
    for kind, label in (("one", "one network"), ("file", "ten members in a file"), ("all", "ten networks in memory")):
        command = [sys.executable, __file__, "--measure", kind, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        print(f"memory grows by {float(done.stdout):.1f} MB for {label}")
    print(f"a member costs {passes_a_member(path, options.repeats):.3f} plain passes")


if __name__ == "__main__":
    main()
