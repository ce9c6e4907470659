"""Peak memory of `predict` against the number of draws, and of Laplace with 1,000 classes, in processes of their own.

    python benchmarks/memory.py

Prints the peak resident memory of MCBN for S = 16 and S = 256, and their ratio: it should be 1. Then, for a last layer
of 1,280 features and 1,000 classes, as ImageNet networks have it, and 1,000 images of 64 x 64 pixels: the peak of a fit
of last-layer Laplace and a prediction with 64 draws, above that of the network alone on the same images.
"""

import resource
import subprocess
import sys
import time

import torch
from batchbayes_papers.models.cifar_resnet import CifarResNet
from torch import nn

import batchbayes as bb

IMAGES, CLASSES, FEATURES, DRAWS = 1000, 1000, 1280, 64
WAYS = ("network", "fit", "sample", "linear", "auto", "probit")
"""What is done with the Laplace posterior: nothing but plain passes of the network, the fit alone, or a prediction."""


def peak_mebibytes(*given: object) -> tuple[float, float]:
    """Run this file for one case, and read the peak and the seconds that it prints."""
    done = subprocess.run([sys.executable, __file__, *map(str, given)], capture_output=True, text=True, check=True)
    peak, seconds = map(float, done.stdout.split())
    return peak, seconds


def batch_norm(draws: int) -> None:
    posterior = bb.mcbn(CifarResNet(20), torch.randn(128, 3, 32, 32), batch_size=32, num_samples=8)
    bb.predict(posterior, torch.randn(64, 3, 32, 32), bb.categorical(), num_samples=draws)


@torch.no_grad()
def laplace(way: str) -> None:
    network = nn.Sequential(
        nn.Conv2d(3, 16, 3, 4, 1), nn.ReLU(), nn.Conv2d(16, FEATURES, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    )
    network = nn.Sequential(*network, nn.Flatten(), nn.Linear(FEATURES, CLASSES)).eval()
    images = torch.randn(IMAGES, 3, 64, 64)
    for batch in images.split(50):
        network(batch)
    if way == "network":
        return
    posterior = bb.last_layer_laplace(network, list(images.split(50)), bb.categorical())
    if way == "probit":
        torch.cat([posterior.probit_probs(batch) for batch in images.split(50)])
    elif way != "fit":
        bb.predict(posterior, images, bb.categorical(), num_samples=DRAWS, engine=way)  # type: ignore[arg-type]


def main() -> None:
    if len(sys.argv) > 1:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        start, given = time.monotonic(), sys.argv[1]
        laplace(given) if given in WAYS else batch_norm(int(given))
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, time.monotonic() - start)
        return
    few, many = peak_mebibytes(16)[0], peak_mebibytes(256)[0]
    print(f"peak memory: S=16 {few:.0f} MiB, S=256 {many:.0f} MiB, ratio {many / few:.3f}")
    base = 0.0
    for way in WAYS:
        peak, seconds = peak_mebibytes(way)
        base = base or peak
        print(
            f"Laplace, {way}: peak {peak:.0f} MiB, {peak - base:.0f} MiB above the network, {seconds:.0f} s", flush=True
        )


if __name__ == "__main__":
    main()
