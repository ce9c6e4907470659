"""Drift beyond small images: a segmentation network on changed street scenes, and tables with changed columns.

    python benchmarks/drift_other.py DATA_FOLDER [--frames 12]

ESPNet: the left halves of 41 training frames (360 x 480) are the reference, and the right halves the calibration data,
without labels. Perceptrons with batch norm learn UCI tables (split 0). Then one column after the other is shifted by
two standard deviations, doubled, or missing (set to zero in raw units, as a broken sensor would).
"""

import argparse
import statistics
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from batchbayes_papers.data.camvid import load_camvid_frames
from batchbayes_papers.data.camvid import standardise as camvid_standardise
from batchbayes_papers.data.folder import data_file
from batchbayes_papers.data.uci import load_regression, published_split
from batchbayes_papers.models.pretrained import espnet_camvid
from torch import Tensor

import batchbayes as bb
from batchbayes.models import MLP
from batchbayes.tools import generator, shuffled
from batchbayes.training.loop import supervised

CLASSES, UNLABELLED, WINDOW = 11, 11, 100


def mean_iou(predicted: Tensor, labels: Tensor) -> float:
    """Return the mean over classes of intersection over union, in %, without unlabelled pixels."""
    known = labels != UNLABELLED
    pairs = F.one_hot(labels[known] * 12 + predicted[known], 144).sum(0).view(12, 12)[:CLASSES]
    union = pairs.sum(1) + pairs[:, :CLASSES].sum(0) - pairs.diagonal()
    return 100 * float((pairs.diagonal() / union.clamp_min(1))[pairs.sum(1) > 0].mean())


def scenes(images: Tensor) -> dict[str, Tensor]:
    """Return changed frames: a grey veil that is thicker above, a quarter of the light, and noise."""
    x, random = images.float(), generator(0, "scenes")
    veil = torch.linspace(0.8, 0.4, x.shape[2])[:, None]
    changed = {
        "as they are": x,
        "fog": (1 - veil) * x + veil * 200,
        "dark": 0.25 * x,
        "noise": x + 25 * torch.randn(x.shape, generator=random),
        "dark and noise": 0.35 * x + 8 * torch.randn(x.shape, generator=random),
    }
    return {name: camvid_standardise(each.round().clamp(0, 255)) for name, each in changed.items()}


@torch.no_grad()
def segmentation(folder: str, frames: int) -> None:
    network = espnet_camvid(data_file("weights/espnet_camvid_sacmehta.safetensors", folder))
    train = camvid_standardise(load_camvid_frames("train", folder)[0])
    drift = bb.drift(network, train[..., :240], calibration=train[..., 240:])
    images, labels = (part[:: max(1, len(part) // frames)][:frames] for part in load_camvid_frames("test", folder))
    print(f"| {len(images)} frames as one window | p-value | network | adapted |\n|---|---|---|---|", flush=True)
    for name, x in scenes(images).items():
        _, sample, _ = drift.seen(x, None)
        p_value = drift.ordinary.evidence(sample, drift.widths).p_value
        posterior = drift.adapt(x)
        adapted = posterior.function(posterior.center)
        found = [torch.cat([each(part).argmax(1) for part in x.split(1)]) for each in (network, adapted)]
        print(
            f"| {name} | {p_value:.3f} | " + " | ".join(f"{mean_iou(f, labels):.1f}" for f in found) + " |", flush=True
        )


def table_row(name: str, folder: str) -> str:
    data = load_regression(name, folder)
    inputs, targets = (torch.as_tensor(part).float() for part in (data.inputs, data.targets))
    train_rows, test_rows = (torch.as_tensor(rows) for rows in published_split(len(inputs), 0))
    mean, scale = inputs[train_rows].mean(0), inputs[train_rows].std(0).clamp_min(1e-6)
    x = (inputs - mean) / scale
    y = ((targets - targets[train_rows].mean()) / targets[train_rows].std()).view(-1, 1)
    torch.manual_seed(0)
    network = MLP(x.shape[1], [50, 50], 1)
    batches = shuffled(x[train_rows], y[train_rows], 32, seed=0)
    epochs = max(4, 40_000 // len(x))
    bb.train(network, batches, supervised(F.mse_loss), bb.TrainingConfig(epochs, 32))
    network.eval()
    drift = bb.drift(network, x[train_rows], calibration=x[test_rows][::2])
    test, truth = x[test_rows][1::2][:1000], y[test_rows][1::2][:1000]
    changes: dict[str, Callable[[Tensor, int], Tensor]] = {
        "shifted": lambda column, _: column + 2,
        "doubled": lambda column, i: column * 2 + mean[i] / scale[i],
        "missing": lambda column, i: torch.full_like(column, float(-mean[i] / scale[i])),
    }
    cells = [_errors(network, drift, test, truth)]
    for change in changes.values():
        each = []
        for i in range(x.shape[1]):
            changed = test.clone()
            changed[:, i] = change(test[:, i], i)
            each.append(_errors(network, drift, changed, truth))
        own, adapted = map(statistics.fmean, zip(*each, strict=True))
        cells.append((own, adapted))
    return f"| {name} ({len(test)}) | " + " | ".join(f"{own:.2f} / {adapted:.2f}" for own, adapted in cells) + " |"


def _errors(network: torch.nn.Module, drift: bb.Drift, x: Tensor, truth: Tensor) -> tuple[float, float]:
    """Return the RMSE of the network, and adapted to each window in turn."""
    adapted = []
    with torch.no_grad():
        for window in x.split(WINDOW):
            posterior = drift.adapt(window)
            adapted.append(posterior.function(posterior.center)(window))
        return float(F.mse_loss(network(x), truth).sqrt()), float(F.mse_loss(torch.cat(adapted), truth).sqrt())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--frames", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(f"| RMSE in standard deviations, windows of {WINDOW} (test rows) | as it is | shifted | doubled | missing |")
    print("|---|---|---|---|---|")
    for name in ("concrete", "energy", "kin8nm", "power", "wine", "protein"):
        print(table_row(name, options.folder), flush=True)
    print()
    segmentation(options.folder, options.frames)


if __name__ == "__main__":
    main()
