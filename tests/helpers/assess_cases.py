"""Small networks and data for `batchbayes assess`, named on its command line as assess_cases:NAME."""

import csv
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as binary_loss
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from batchbayes._common.rng import GlobalStream
from batchbayes.models import MLP
from batchbayes.training.batches import shuffled
from batchbayes.training.loop import TrainingConfig, supervised, train

EVIL = "<script>alert(1)</script>"
CLASS_NAMES = ("round", EVIL, 'quote" & $money$')


def blobs(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Three classes that overlap."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=random)
    centers = torch.tensor([[0.0, 1.2], [1.0, -0.6], [-1.0, -0.6]])
    return centers[labels] + 0.9 * torch.randn(count, 2, generator=random), labels


def wave(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """A noisy wave."""
    random = torch.Generator().manual_seed(seed)
    x = 4 * torch.rand(count, 2, generator=random) - 2
    return x, (2 * x[:, 0]).sin() + 0.2 * (1 + x[:, 1].abs()) * torch.randn(count, generator=random)


def scenes(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images of 12 x 16 pixels whose class is the strongest of three noisy colours; two pixels are unlabelled (255)."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count, 3, 4), generator=random).repeat_interleave(4, 1).repeat_interleave(4, 2)
    images = nn.functional.one_hot(labels, 3).movedim(-1, 1) + 0.7 * torch.randn(count, 3, 12, 16, generator=random)
    labels[:, 0, :2] = 255
    return images, labels


def pictures(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images of 12 x 12 pixels whose class is the strongest of three noisy colours."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=random)
    colours = 0.15 * nn.functional.one_hot(labels, 3)[:, :, None, None]
    return colours + torch.randn(count, 3, 12, 12, generator=random), labels


def halves(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two classes that overlap."""
    x, labels = blobs(count, seed)
    return x, (labels > 0).long()


def classifier() -> nn.Module:
    return MLP(2, [16, 16], 3)


def double_classifier() -> nn.Module:
    return classifier().double()


def regressor() -> nn.Module:
    return MLP(2, [16, 16], 1)


def two_outputs() -> nn.Module:
    return MLP(2, [16, 16], 2)


def two_waves(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two targets in units of their own."""
    x, y = wave(count, seed)
    return x, torch.stack([y, 100 * y.square()], 1)


def picture_classifier() -> nn.Module:
    body = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


def one_logit() -> nn.Module:
    return MLP(2, [16, 16], 1)


def plain() -> nn.Module:
    """A network without batch norm and without dropout."""
    return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3))


def segmenter() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1)
    )


def raising() -> nn.Module:
    raise RuntimeError("no such\nlayer")


def exiting() -> nn.Module:
    sys.exit(0)


def not_a_network() -> str:
    return "network"


def without_batch_norm() -> nn.Module:
    return nn.Linear(2, 3)


def with_dropout() -> nn.Module:
    with GlobalStream(0):
        return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))


def endless_training() -> Iterator[Tensor]:
    while True:
        yield blobs(32, int(torch.randint(0, 1000, ())))[0]


def named_test() -> TensorDataset:
    dataset = TensorDataset(*blobs(240, 1))
    dataset.classes = CLASS_NAMES  # type: ignore[attr-defined]
    return dataset


def blob_training() -> DataLoader:
    return DataLoader(TensorDataset(*blobs(300, 0)), batch_size=16, shuffle=True)


def other_names() -> TensorDataset:
    dataset = TensorDataset(*blobs(300, 0))
    dataset.classes = CLASS_NAMES[::-1]  # type: ignore[attr-defined]
    return dataset


def shuffling_test() -> DataLoader:
    return DataLoader(named_test(), batch_size=10, shuffle=True)


def scene_training() -> DataLoader:
    return DataLoader(TensorDataset(*scenes(32, 0)), batch_size=8, shuffle=True)


def scene_test() -> DataLoader:
    return DataLoader(TensorDataset(*scenes(18, 1)), batch_size=5)


@cache
def trained(task: str) -> dict[str, Tensor]:
    """Return the weights of a network that was trained for a moment."""
    build, data, loss, epochs = {
        "classification": (classifier, blobs(300, 0), cross_entropy, 15),
        "regression": (regressor, (wave(300, 0)[0], wave(300, 0)[1][:, None]), mse_loss, 60),
        "pictures": (picture_classifier, pictures(300, 0), cross_entropy, 10),
        "binary": (one_logit, halves(300, 0), lambda a, b: binary_loss(a[:, 0], b.float()), 15),
        "plain": (plain, blobs(300, 0), cross_entropy, 15),
        "segmentation": (segmenter, scenes(32, 0), lambda a, b: cross_entropy(a, b, ignore_index=255), 40),
        "two outputs": (two_outputs, two_waves(300, 0), lambda a, b: mse_loss(a, b / torch.tensor([1.0, 100.0])), 15),
    }[task]
    with GlobalStream(0):
        network = build()
    config = TrainingConfig(epochs=epochs, batch_size=16, learning_rate=0.01)
    train(network, shuffled(*data, 16, seed=0), supervised(loss), config)
    return network.state_dict()


def trained_network(task: str = "classification") -> nn.Module:
    """Return the network of a task with its trained weights."""
    build = {"classification": classifier, "regression": regressor, "segmentation": segmenter}[task]
    network = build()
    network.load_state_dict(trained(task))
    return network.eval()


def write_case(task: str, folder: Path) -> list[str]:
    """Write weights and data, and return the arguments that assess them."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(trained(task), folder / "weights.safetensors")
    shared = ["--weights", str(folder / "weights.safetensors"), "--draws", "12", "--quiet"]
    if task == "segmentation":
        return [
            "--model", "helpers.assess_cases:segmenter", "--train", "helpers.assess_cases:scene_training",
            "--test", "helpers.assess_cases:scene_test", "--ignore-label", "255", *shared,
        ]  # fmt: skip
    if task in ("pictures", "binary", "plain", "two outputs"):
        data, build = {
            "pictures": (pictures, picture_classifier), "binary": (halves, one_logit), "plain": (blobs, plain),
            "two outputs": (two_waves, two_outputs),
        }[task]  # fmt: skip
        for name, count, seed in (("train", 300, 0), ("test", 240, 1)):
            x, y = data(count, seed)
            np.savez(folder / f"{name}.npz", X=x.numpy(), y=y.numpy())
        files = ["--train", str(folder / "train.npz"), "--test", str(folder / "test.npz")]
        return ["--model", f"helpers.assess_cases:{build.__name__}", *files, "--batch-size", "16", *shared]
    if task == "classification":
        for name, count, seed in (("train", 300, 0), ("test", 240, 1), ("ood", 60, 2)):
            x, y = blobs(count, seed)
            x = x + 6 if name == "ood" else x
            np.savez(folder / f"{name}.npz", X=x.numpy(), y=y.numpy(), class_names=np.array(CLASS_NAMES))
        files = ["--train", str(folder / "train.npz"), "--test", str(folder / "test.npz")]
        files += ["--ood", str(folder / "ood.npz")]
        return ["--model", "helpers.assess_cases:classifier", *files, "--batch-size", "16", *shared]
    for name, count, seed in (("train", 300, 0), ("test", 240, 1)):
        write_csv(folder / f"{name}.csv", *wave(count, seed))
    files = ["--train", str(folder / "train.csv"), "--test", str(folder / "test.csv"), "--target", "height"]
    return ["--model", "helpers.assess_cases:regressor", *files, "--batch-size", "16", *shared]


def rows_in(path: str | Path) -> list[dict[str, str]]:
    """Read a .csv file of predictions."""
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_csv(path: Path, x: Tensor, y: Tensor) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["left", "right", "height"])
        writer.writerows(torch.cat([x, y[:, None]], 1).tolist())


class Colours(nn.Module):
    """Find the strongest colour of images of 6 x 6 pixels that are scaled by a mean of 0.3 and a std of 0.2."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[1:] != (3, 6, 6) or images.amin() > 0:
            raise ValueError(f"shape {tuple(images.shape)}, or values that are not scaled")
        return 3 * self.norm(images.mean((2, 3)))


def colours() -> nn.Module:
    return Colours()
