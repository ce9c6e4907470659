"""Pictures that need no download: a bright square, a bar or a ring on a dark ground. Masks say where it is."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

CLASSES = ("bar", "ring", "square")
MEAN, STD = 0.35, 0.25
SIZE = 32


def draw(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return images (N, 3, 32, 32) in bytes, labels (N,), and masks (N, 32, 32) with 1 where the shape is."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, len(CLASSES), count)
    masks = np.zeros((count, SIZE, SIZE), dtype=np.uint8)
    rows, columns = np.mgrid[:SIZE, :SIZE]
    for mask, label in zip(masks, labels, strict=True):
        top, left, size = random.integers(2, 14), random.integers(2, 14), random.integers(10, 16)
        inside = (abs(rows - top - size / 2) < size / 2) & (abs(columns - left - size / 2) < size / 2)
        distance = np.hypot(rows - top - size / 2, columns - left - size / 2)
        shapes = (inside & (rows < top + size / 3), (distance < size / 2) & (distance > size / 4), inside)
        mask[shapes[label]] = 1
    colours = random.uniform(0.4, 0.9, (count, 1, 1, 3))
    noise = random.normal(0, 0.15, (count, SIZE, SIZE, 3))
    images = np.clip(0.2 + masks[..., None] * colours + noise, 0, 1)
    return (
        torch.from_numpy((255 * images).astype(np.uint8)).permute(0, 3, 1, 2),
        torch.from_numpy(labels),
        torch.from_numpy(masks.astype(np.int64)),
    )


def scaled(images: Tensor) -> Tensor:
    """Return the inputs of networks."""
    return (images.float() / 255 - MEAN) / STD


def save_folder(folder: Path, count: int, seed: int) -> None:
    """Write .png files, in a sub-folder for each class."""
    from PIL import Image

    images, labels, _ = draw(count, seed)
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        place = folder / CLASSES[int(label)]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(place / f"{i:04}.png")


def save_masks(folder: Path, count: int, seed: int) -> None:
    """Write .png files to the sub-folders `images` and `masks`."""
    from PIL import Image

    images, _, masks = draw(count, seed)
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    for i, (image, mask) in enumerate(zip(images, masks, strict=True)):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / "images" / f"{i:04}.png")
        Image.fromarray(mask.byte().numpy()).save(folder / "masks" / f"{i:04}.png")


def train(network: torch.nn.Module, inputs: Tensor, targets: Tensor, steps: int = 60, learning_rate: float = 2e-3):
    """Train a classifier of images or of pixels for a moment, as users do it."""
    random = torch.Generator().manual_seed(0)
    adam = torch.optim.AdamW(network.parameters(), learning_rate)
    network.train()
    for _ in range(steps):
        rows = torch.randint(0, len(inputs), (32,), generator=random)
        adam.zero_grad()
        torch.nn.functional.cross_entropy(network(inputs[rows]), targets[rows]).backward()
        adam.step()
    return network.eval()
