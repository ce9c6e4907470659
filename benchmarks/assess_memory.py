"""Peak memory of assessing a segmentation, against the number of images and of draws, each in a process of its own.

    python benchmarks/assess_memory.py

Prints the peak resident memory for few and many of each, and the ratios: they should be 1.
"""

import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

HEIGHT, WIDTH, CLASSES = 120, 160, 12
FEW, MANY = 12, 96


class Scenes(Dataset[tuple[Tensor, Tensor]]):
    """Images that are made when they are read."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        random = torch.Generator().manual_seed(index)
        labels = torch.randint(0, CLASSES, (HEIGHT // 8, WIDTH // 8), generator=random)
        labels = labels.repeat_interleave(8, 0).repeat_interleave(8, 1)
        return labels / CLASSES + 0.3 * torch.randn(3, HEIGHT, WIDTH, generator=random), labels


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, CLASSES, 1)
    )


def train() -> "DataLoader[tuple[Tensor, Tensor]]":
    return DataLoader(Scenes(16), batch_size=4, shuffle=True)


def test() -> "DataLoader[tuple[Tensor, Tensor]]":
    return DataLoader(Scenes(int(sys.argv[1])), batch_size=2)


def measure(draws: int) -> None:
    from batchbayes.report.assess import run_assessment
    from batchbayes.report.options import AssessOptions

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        names = {"model": "__main__:network", "train": "__main__:train", "test": "__main__:test"}
        run_assessment(AssessOptions(**names, out=Path(folder) / "out", draws=draws, engine="sample"))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def peak_mebibytes(images: int, draws: int) -> float:
    """Run this file for one number of images and draws, and read what it prints."""
    command = [sys.executable, __file__, str(images), str(draws)]
    return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def main() -> None:
    if len(sys.argv) > 1:
        return measure(int(sys.argv[2]))
    base, images, draws = peak_mebibytes(FEW, 4), peak_mebibytes(MANY, 4), peak_mebibytes(FEW, 32)
    print(f"peak memory: {FEW} images, 4 draws {base:.0f} MiB")
    print(f"{MANY} images, 4 draws {images:.0f} MiB, ratio {images / base:.3f}")
    print(f"{FEW} images, 32 draws {draws:.0f} MiB, ratio {draws / base:.3f}")
    return None


if __name__ == "__main__":
    main()
