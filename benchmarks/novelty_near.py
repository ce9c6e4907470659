"""Novelty where it is hard: classes left out of training, tables, and a segmentation network.

    python benchmarks/novelty_near.py DATA_FOLDER WEIGHTS

A ResNet-8 learns the first five classes of CIFAR-10 (about eight minutes on one core) and meets the other five. Its
weights are kept in the file WEIGHTS, and read from it if it exists. Perceptrons with batch norm learn UCI tables and
meet rows that are shifted in one column, rows whose columns were permuted independently, and rows of another table. A
public ESPNet, fitted to the 367 training scenes of CamVid at 120 x 160, meets changed scenes, one score for each image.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from batchbayes_papers.data.camvid import standardise as camvid_standardise
from batchbayes_papers.data.cifar10 import crop_and_flip, load_cifar10, load_svhn, standardise
from batchbayes_papers.data.folder import data_file
from batchbayes_papers.data.uci import load_regression, published_split
from batchbayes_papers.models.cifar_resnet import CifarResNet
from batchbayes_papers.models.pretrained import espnet_camvid, load_weights
from safetensors.torch import save_file
from torch import Tensor, nn
from unseen import street_scenes

import batchbayes as bb
from batchbayes import TrainingConfig, train
from batchbayes.metrics import ood_auroc
from batchbayes.models import MLP
from batchbayes.tools import generator, shuffled
from batchbayes.training.loop import Step, supervised

KNOWN, EPOCHS, BATCH_SIZE, LEARNING_RATE = 5, 14, 128, 0.1
TABLES = {
    "concrete": "energy",
    "energy": "concrete",
    "kin8nm": "concrete",
    "power": None,
    "protein": None,
    "wine": None,
}
"""Tables, and another one with as many columns, if there is one."""


def five_class_network(images: Tensor, labels: Tensor, path: Path) -> nn.Module:
    """Return the network that knows five classes: from the file, or trained and written there."""
    if not path.exists():
        torch.manual_seed(0)
        network = CifarResNet(8, KNOWN).to(memory_format=torch.channels_last)
        steps = EPOCHS * (len(images) // BATCH_SIZE)

        def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
            random = generator(0, "near", epoch)
            for rows in torch.randperm(len(images), generator=random).split(BATCH_SIZE)[: steps // EPOCHS]:
                yield standardise(crop_and_flip(images[rows], random)), labels[rows]

        def anneal(step: Step) -> None:
            for group in step.optimiser.param_groups:
                group["lr"] = LEARNING_RATE * (1 - step.number / steps) + 1e-4

        config = TrainingConfig(EPOCHS, BATCH_SIZE, LEARNING_RATE, weight_decay=5e-4, optimiser="sgd")
        train(network, batches, supervised(nn.functional.cross_entropy), config, after_step=anneal)
        save_file({name: value.contiguous() for name, value in network.state_dict().items()}, path)
    return load_weights(CifarResNet(8, KNOWN), path)


@torch.no_grad()
def classes_left_out(network: nn.Module, images: Tensor, folder: str) -> None:
    others, labels = load_cifar10("test", folder)
    known, unknown = (standardise(others[rows]) for rows in (labels < KNOWN, labels >= KNOWN))
    calibration, known = known[:2000], known[2000:]
    chosen = torch.randperm(len(images), generator=generator(0, "training images"))[:8000]
    detector = bb.novelty(network, standardise(images[chosen]), calibration=calibration)
    outputs = {name: torch.cat([network(x) for x in part.split(128)]) for name, part in (("k", known), ("u", unknown))}
    right = float((outputs["k"].argmax(1) == labels[labels < KNOWN][2000:]).double().mean())
    ordinary = detector.report(known)
    print(f"Accuracy on the five known classes: {right:.3f}\n\n| score | AUROC, five other classes |\n|---|---|")
    print(f"| novelty | {ood_auroc(ordinary.score, detector.score(unknown)):.3f} |")
    for name, score in (
        ("energy", lambda f: -f.logsumexp(1)),
        ("entropy", lambda f: torch.distributions.Categorical(logits=f).entropy()),
    ):
        print(f"| {name} | {ood_auroc(score(outputs['k']), score(outputs['u'])):.3f} |")
    print(f"\nFlagged at 5 %: {(ordinary.p_value <= 0.05).double().mean():.3f} of the known classes, ", end="")
    print(f"{detector.flag(unknown, 0.05).double().mean():.3f} of the others. ", end="")
    print(
        f"AUROC against SVHN: {ood_auroc(ordinary.score, detector.score(standardise(load_svhn(folder, 2000)))):.3f}\n"
    )


def table_row(name: str, other: str | None, folder: str) -> str:
    data = load_regression(name, folder)
    inputs, targets = (torch.as_tensor(part).float() for part in (data.inputs, data.targets))
    train_rows, test_rows = (torch.as_tensor(rows) for rows in published_split(len(inputs), 0))
    scale = inputs[train_rows].std(0).clamp_min(1e-6)
    x = (inputs - inputs[train_rows].mean(0)) / scale
    y = ((targets - targets[train_rows].mean()) / targets[train_rows].std()).view(-1, 1)
    torch.manual_seed(0)
    network = MLP(x.shape[1], [50, 50], 1)
    batches = shuffled(x[train_rows], y[train_rows], 32, seed=0)
    train(network, batches, supervised(nn.functional.mse_loss), TrainingConfig(max(4, 60_000 // len(x)), 32))
    detector, test = bb.novelty(network, x[train_rows]), x[test_rows][:2000]
    posterior = bb.mcbn(network, x[train_rows], batch_size=32)
    precision = torch.linalg.inv(torch.cov(x[train_rows].T) + 1e-3 * torch.eye(x.shape[1]))
    scores = {
        "novelty": detector.score,
        "MCBN": lambda v: bb.predict(posterior, v, bb.gaussian(precision=1.0)).variance[:, 0],
        "Mahalanobis": lambda v: ((v @ precision) * v).sum(1),
    }
    random = generator(0, name)
    shifted = test.clone()
    column = torch.randint(0, x.shape[1], (len(test), 1), generator=random)
    shifted.scatter_add_(1, column, torch.full((len(test), 1), 3.0))
    permuted = torch.stack([c[torch.randperm(len(test), generator=random)] for c in test.T], 1)
    strange = {"shifted": shifted, "permuted": permuted}
    if other:
        raw = torch.as_tensor(load_regression(other, folder).inputs).float()
        strange["other"] = (raw - inputs[train_rows].mean(0)) / scale
    cells = [
        " / ".join(f"{ood_auroc(score(test), score(strange[kind])):.3f}" for score in scores.values())
        if kind in strange
        else ""
        for kind in ("shifted", "permuted", "other")
    ]
    p_values = detector.p_value(test)
    cells += [f"{(p_values <= level).double().mean():.3f}" for level in (0.05, 0.1)]
    return f"| {name} ({len(test)}) | " + " | ".join(cells) + " |"


def segmentation(folder: str) -> None:
    network = espnet_camvid(data_file("weights/espnet_camvid_sacmehta.safetensors", folder))
    scenes = {split: street_scenes(split, folder) for split in ("train", "val", "test")}
    detector = bb.novelty(network, camvid_standardise(scenes["train"]))
    test = scenes["test"]
    noise = 15 * torch.randn(test.shape, generator=generator(0, "scenes"))
    animals = nn.functional.interpolate(load_cifar10("test", folder, 300)[0].float(), size=(120, 160), mode="bilinear")
    strange = {
        "noise": test + noise,
        "blur": nn.functional.avg_pool2d(test.float(), 5, 1, 2, count_include_pad=False),
        "upside-down": test.flip(2),
        "low contrast": 0.3 * (test - 128.0) + 128,
        "CIFAR-10 images": animals,
    }
    ordinary = detector.report(camvid_standardise(test))
    print("| scenes | AUROC | flagged at 5 % |\n|---|---|---|")
    print(f"| test scenes, unchanged | | {(ordinary.p_value <= 0.05).double().mean():.3f} |")
    for name, images in strange.items():
        report = detector.report(camvid_standardise(images.clamp(0, 255)))
        flagged = (report.p_value <= 0.05).double().mean()
        print(f"| {name} | {ood_auroc(ordinary.score, report.score):.3f} | {flagged:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("weights", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| table (test rows) | one column shifted by 3 | columns permuted | another table | flagged at 5 % | at 10 % |"
    )
    print("|---|---|---|---|---|---|")
    for name, other in TABLES.items():
        print(table_row(name, other, options.folder), flush=True)
    print()
    segmentation(options.folder)
    images, labels = load_cifar10("train", options.folder)
    images, labels = images[labels < KNOWN], labels[labels < KNOWN]
    print()
    classes_left_out(five_class_network(images, labels, options.weights), images, options.folder)


if __name__ == "__main__":
    main()
