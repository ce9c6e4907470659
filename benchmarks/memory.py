"""Peak memory of `predict` against the number of draws, each in a process of its own.

    python benchmarks/memory.py

Prints the peak resident memory for S = 16 and S = 256, and their ratio: it should be 1.
"""

import resource
import subprocess
import sys

import torch
from batchbayes_papers.models.cifar_resnet import CifarResNet

import batchbayes as bb


def peak_mebibytes(draws: int) -> float:
    """Run this file for one number of draws, and read what it prints."""
    done = subprocess.run([sys.executable, __file__, str(draws)], capture_output=True, text=True, check=True)
    return float(done.stdout)


def measure(draws: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    posterior = bb.mcbn(CifarResNet(20), torch.randn(128, 3, 32, 32), batch_size=32, num_samples=8)
    bb.predict(posterior, torch.randn(64, 3, 32, 32), bb.categorical(), num_samples=draws)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main() -> None:
    if len(sys.argv) > 1:
        return measure(int(sys.argv[1]))
    few, many = peak_mebibytes(16), peak_mebibytes(256)
    print(f"peak memory: S=16 {few:.0f} MiB, S=256 {many:.0f} MiB, ratio {many / few:.3f}")
    return None


if __name__ == "__main__":
    main()
