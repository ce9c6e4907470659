"""How often the check of the data is wrong: false alarms on data that is right, and mistakes that it finds.

    python benchmarks/data_check.py DATA_FOLDER [--fits 30] [--keep FILE]

A fit is a network that was trained here on its own random split of a data set, with its own seed, and the test part of
that split. UCI networks have two layers of 50 units and batch norm; those of a data set are trained together. Image
networks have three convolutions with batch norm, and see 2,000 images six times. Those for CIFAR-10 are trained with
random crops and flips in every second fit; test images never have them. Two public residual networks are judged too, on
disjoint parts of the CIFAR-10 test set: these are draws of data, not fits.

With --keep, results are kept in a file after each fit, so that a run that was stopped continues where it was.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from batchbayes_papers.data.cifar10 import MEAN, STD, crop_and_flip, load_cifar10, standardise
from batchbayes_papers.data.mnist import load_mnist
from batchbayes_papers.models.pretrained import cifar_resnet
from batchbayes_tables.stack.train import train_together
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import batchbayes as bb
from batchbayes import TrainingConfig
from batchbayes.models import MLP, conv_block
from batchbayes.report.read.data_check import outside_ranges, unfamiliar
from batchbayes.report.read.examples import from_tensors
from batchbayes.report.read.schema import Column, Schema
from batchbayes.tools import GlobalStream, atomic_path, generator, progress

TABLES = ("boston", "concrete", "energy", "power", "wine")
IMAGES, TEST_IMAGES, EPOCHS, BATCH_SIZE, PARTS = 2000, 300, 6, 64, 5


@dataclass(frozen=True, eq=False)
class Fit:
    """A network, and data that is right or wrong."""

    network: nn.Module
    classes: bool
    test: dict[str, Tensor]
    """Test inputs by what was done to them."""
    training: dict[str, Tensor]
    """Training inputs, for the warning of `bb.mcbn`."""
    columns: Schema | None = None
    """The ranges of the training table."""


def tables(name: str, folder: Path, count: int, done: int) -> Iterable[Fit]:
    """Train networks on random splits of a UCI set, nine tenths and one tenth."""
    if done == count:
        return
    with np.load(folder / "uci" / f"{name}.npz") as file:
        inputs, targets = file["X"], file["y"]
    networks, data, cases = [], [], []
    for seed in range(count):
        order = np.random.default_rng(seed).permutation(len(inputs))
        test, train = np.split(order, [len(order) // 10])
        mean, std = inputs[train].mean(0), inputs[train].std(0)
        right = torch.tensor((inputs - mean) / std).float()
        scaled = torch.tensor((targets - targets[train].mean()) / targets[train].std()).float()[:, None]
        with GlobalStream(seed):
            networks.append(MLP(inputs.shape[1], [50, 50], 1))
        data.append((right[train[:3000]], scaled[train[:3000]]))
        one = torch.zeros(inputs.shape[1])
        one[seed % len(one)] = 1
        cases.append(
            {
                "right": right[test],
                "unscaled": torch.tensor(inputs[test]).float(),
                "shifted by 1 std": right[test] + 1,
                "one column shifted": right[test] + one,
            }
        )
    train_together(networks, data, [TrainingConfig(40, 32, 1e-2, seed=seed) for seed in range(count)])
    for network, case, own in list(zip(networks, cases, data, strict=True))[done:]:
        batches = {"training batches": own[0], "shifted training batches": own[0] + 1}
        yield Fit(network, False, case, batches, ranges(own[0]))


def image_network(channels: int) -> nn.Module:
    blocks = [conv_block(a, b, s) for a, b, s in ((channels, 8, 1), (8, 16, 2), (16, 32, 2))]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def trained(images: Tensor, labels: Tensor, seed: int, prepare: Callable[[Tensor], Tensor]) -> nn.Module:
    """Train a network on images (N, C, H, W) in bytes. `prepare` makes inputs of a batch."""
    with GlobalStream(seed):
        network, random = image_network(images.shape[1]), generator(seed, "order")
        adam = torch.optim.AdamW(network.parameters(), lr=5e-3, weight_decay=1e-3)
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(images), generator=random).split(BATCH_SIZE):
                adam.zero_grad()
                cross_entropy(network(prepare(images[rows])), labels[rows]).backward()
                adam.step()
    return network.eval()


def colour_mistakes(images: Tensor) -> dict[str, Tensor]:
    """Return CIFAR-10 images as the networks take them, and after mistakes in the preprocessing."""
    return {
        "right": standardise(images),
        "unscaled": images.float(),
        "shifted by 1 std": standardise(images) + 1,
        "swapped channels": standardise(images.flip(1)),
        "no normalisation": images / 255,
        "no mean": images / 255 / STD,
        "no std": images / 255 - MEAN,
    }


def cifar10(folder: Path, count: int, done: int) -> Iterable[Fit]:
    """Train networks on random parts of CIFAR-10, every second one with random crops and flips."""
    images, labels = load_cifar10("train", folder)
    unseen, _ = load_cifar10("test", folder)
    for seed in progress(range(done, count), "CIFAR-10", count - done):
        random = generator(seed, "split")
        rows = torch.randperm(len(images), generator=random)[:IMAGES]
        crops = seed % 2 == 0
        network = trained(
            images[rows], labels[rows], seed,
            (lambda x, random=random: standardise(crop_and_flip(x, random))) if crops else standardise,
        )  # fmt: skip
        test = colour_mistakes(unseen[torch.randperm(len(unseen), generator=random)[:TEST_IMAGES]])
        plain, cropped = standardise(images[rows]), standardise(crop_and_flip(images[rows], random))
        training = {"training batches": cropped if crops else plain}
        yield Fit(network, True, test, training | ({"training batches without crops": plain} if crops else {}))


def fashion(folder: Path, count: int, done: int) -> Iterable[Fit]:
    """Train networks on random parts of Fashion-MNIST."""
    images, labels = load_mnist("fashion_mnist", "train", folder)
    unseen, _ = load_mnist("fashion_mnist", "test", folder)
    for seed in progress(range(done, count), "Fashion-MNIST", count - done):
        random = generator(seed, "split")
        rows = torch.randperm(len(images), generator=random)[:IMAGES]
        network = trained(images[rows], labels[rows], seed, grey)
        test = unseen[torch.randperm(len(unseen), generator=random)[:TEST_IMAGES]]
        cases = {
            "right": grey(test), "unscaled": test.float(), "shifted by 1 std": grey(test) + 1,
            "no normalisation": test / 255, "no mean": test / 255 / 0.353, "no std": test / 255 - 0.286,
        }  # fmt: skip
        yield Fit(network, True, cases, {"training batches": grey(images[rows])})


def grey(images: Tensor) -> Tensor:
    return (images.float() / 255 - 0.286) / 0.353


def public(depth: int, folder: Path, done: int) -> Iterable[Fit]:
    """Judge disjoint parts of the test set by a public network, and then the images of each class alone."""
    network = cifar_resnet(depth, folder / "weights" / f"resnet{depth}_cifar10_akamaster.safetensors")
    unseen, labels = load_cifar10("test", folder)
    cases = [colour_mistakes(part) for part in unseen.split(TEST_IMAGES)[:PARTS]]
    cases += [{"images of one class": standardise(unseen[labels == k][:TEST_IMAGES])} for k in range(10)]
    for case in progress(cases[done:], f"ResNet-{depth}", len(cases) - done):
        yield Fit(network, True, case, {})


def alarms(fit: Fit) -> dict[str, bool]:
    """Return for each kind of data whether there is an alarm."""
    judged = {
        kind: unfamiliar(fit.network, from_tensors(kind, inputs), classes=fit.classes) is not None
        for kind, inputs in fit.test.items()
    }
    if fit.columns:
        for kind, inputs in fit.test.items():
            judged[f"{kind}, by ranges"] = outside_ranges(from_tensors(kind, inputs), fit.columns) is not None
    return judged | {kind: warns(fit.network, inputs) for kind, inputs in fit.training.items()}


def ranges(rows: Tensor) -> Schema:
    """Return the ranges of training rows (N, columns)."""
    ends = zip(rows.amin(0).tolist(), rows.amax(0).tolist(), strict=True)
    return Schema(tuple(Column(str(i), "real", low, high) for i, (low, high) in enumerate(ends)))


def warns(network: nn.Module, inputs: Tensor) -> bool:
    """Return whether MCBN warns that batches are not those of training."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bb.mcbn(network, inputs, batch_size=32, num_samples=32)
    return any("the first batch-norm layer" in str(each.message) for each in caught)


def show(found: dict[str, list[dict[str, bool]]]) -> None:
    """Print a table: a line for each kind of data, a column for each data set, and the totals."""
    kinds = dict.fromkeys(kind for fits in found.values() for fit in fits for kind in fit)
    print("| | " + " | ".join(found) + " | all |\n|---|" + "---|" * (len(found) + 1))
    for kind in kinds:
        said = [[fit[kind] for fit in fits if kind in fit] for fits in found.values()]
        cells = [f"{sum(each)} of {len(each)}" if each else "" for each in said]
        yes, total = sum(map(sum, said)), sum(map(len, said))
        print(f"| {kind} | {' | '.join(cells)} | {yes} of {total} ({100 * yes / total:.1f} %) |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fits", type=int, default=30, help="for each data set")
    parser.add_argument("--keep", type=Path, help="a .json file for the results")
    given = parser.parse_args()
    torch.set_num_threads(1)
    folder, fits = given.folder, given.fits
    parts: dict[str, Callable[[int], Iterable[Fit]]] = {name: partial(tables, name, folder, fits) for name in TABLES}
    parts |= {"Fashion-MNIST": partial(fashion, folder, fits), "CIFAR-10": partial(cifar10, folder, fits)}
    networks = {f"ResNet-{depth}": partial(public, depth, folder) for depth in (20, 32)}
    found = json.loads(given.keep.read_text()) if given.keep and given.keep.exists() else {}
    for name, make in (parts | networks).items():
        for fit in make(len(found.setdefault(name, []))):
            found[name].append(alarms(fit))
            if given.keep:
                with atomic_path(given.keep) as new:
                    new.write_text(json.dumps(found))
    print("Fits of networks that were trained here:\n")
    show({name: found[name] for name in parts})
    print("\nDraws of test data for public networks:\n")
    show({name: found[name] for name in networks})


if __name__ == "__main__":
    sys.exit(main())
