"""Do 90 % intervals hold in every fifth of the predictions? Plain ones, and those that an assessment recommends.

    python benchmarks/interval_groups.py FOLDER [NAME ...]

FOLDER has NAME.npz with X and y: the UCI regression sets. A third of the rows trains a network with batch norm, and the
others are test data, a third of which calibrates. Shown is the share of targets inside, on average and in each fifth
of the predictions, and the mean width in standard deviations of the targets. "made" is a set whose noise grows with the
target.
"""

import argparse
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import batchbayes as bb
from batchbayes.report.compare.groups import in_groups

KINDS = ("plain", "auto")


def made(count: int = 6000) -> tuple[Tensor, Tensor]:
    """Two columns, and a target whose noise grows with it."""
    random = torch.Generator().manual_seed(0)
    x = 4 * torch.rand(count, 2, generator=random)
    height = x[:, 0] + 0.3 * x[:, 1]
    return x, height + (0.05 + 0.35 * height) * torch.randn(count, generator=random)


def read(path: Path) -> tuple[Tensor, Tensor]:
    """Return standardised columns and the targets, in a random order."""
    with np.load(path) as file:
        x, y = (torch.from_numpy(file[name]).float() for name in ("X", "y"))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return ((x - x.mean(0)) / x.std(0).clamp_min(1e-6))[order], ((y - y.mean()) / y.std())[order]


def trained(x: Tensor, y: Tensor, epochs: int = 20) -> nn.Module:
    """Return a small network with batch norm."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(x.shape[1], 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 1))
    optimiser = torch.optim.Adam(network.parameters(), 0.005)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            optimiser.zero_grad()
            nn.functional.mse_loss(network(x[rows])[:, 0], y[rows]).backward()
            optimiser.step()
    return network.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=["made", "protein", "power", "kin8nm"])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| set | intervals | all | fifths | worst | width |\n|---|---|---:|---|---:|---:|")
    for name in options.names:
        x, y = made() if name == "made" else read(options.folder / f"{name}.npz")
        cut = len(x) // 3
        network, test = trained(x[:cut], y[:cut]), (x[cut : cut + 9000], y[cut : cut + 9000])
        for kind in KINDS:
            found = bb.assess(network, x[:cut], test, batch_size=64, method="none", intervals=kind, no_figures=True)
            rows = {key: torch.tensor(found.rows[key]).double() for key in ("mean", "lower", "upper", "target")}
            held = ((rows["target"] >= rows["lower"]) & (rows["target"] <= rows["upper"])).double()
            group, _ = in_groups(rows["mean"])
            shares = [100 * float(held[group == k].mean()) for k in range(int(group.max()) + 1)]
            used, width = found.notes["intervals"][0]["kind"], float((rows["upper"] - rows["lower"]).mean() / y.std())
            fifths = ", ".join(f"{share:.0f}" for share in shares)
            print(
                f"| {name} | {used} | {100 * held.mean():.1f} | {fifths} | {min(shares):.1f} | {width:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
