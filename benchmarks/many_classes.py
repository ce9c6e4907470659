"""A network with 1,000 classes, for the benchmarks of the linear engine.

    python benchmarks/many_classes.py DATA_FOLDER WEIGHTS_FILE

The public ResNet-20 gets a head of 1,000 outputs, and is trained on for some minutes on classes that are composed: the
ten classes of CIFAR-10, four rotations and 25 tints (five shifts of the red and five of the blue channel).
"""

import argparse
from collections.abc import Iterator

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from batchbayes.data.cifar10 import crop_and_flip, load_cifar10, standardise
from batchbayes.data.folder import data_file
from batchbayes.models.pretrained import cifar_resnet

BATCH_SIZE, STEPS, RATE = 128, 1500, 0.1
SHIFTS = 5
"""Shifts of a colour channel, one standard deviation of the pixels apart."""


def composed(images: Tensor, labels: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Turn and tint each image at random. Return the images, and the composed labels."""
    count = len(images)
    turns, red, blue = (torch.randint(0, high, (count,), generator=random) for high in (4, SHIFTS, SHIFTS))
    images = images.clone()
    for turn in range(1, 4):
        images[turns == turn] = images[turns == turn].rot90(turn, (2, 3))
    images[:, 0] += (red - SHIFTS // 2)[:, None, None]
    images[:, 2] += (blue - SHIFTS // 2)[:, None, None]
    return images, ((labels * 4 + turns) * SHIFTS + red) * SHIFTS + blue


def training_batches(folder: str, batch_size: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield training mini-batches without end."""
    images, labels = load_cifar10("train", folder)
    random = torch.Generator().manual_seed(seed)
    while True:
        rows = torch.randint(0, len(images), (batch_size,), generator=random)
        yield composed(standardise(crop_and_flip(images[rows], random)), labels[rows], random)


def test_images(folder: str, count: int) -> tuple[Tensor, Tensor]:
    images, labels = load_cifar10("test", folder, count)
    return composed(standardise(images), labels, torch.Generator().manual_seed(1))


def untrained(folder: str) -> nn.Module:
    """Return the public ResNet-20 with a new head."""
    network: nn.Module = cifar_resnet(20, data_file("weights/resnet20_cifar10_akamaster.safetensors", folder))
    torch.manual_seed(0)
    network.linear = nn.Linear(64, 1000)
    return network


def many_classes(folder: str, weights: str) -> nn.Module:
    """Return the trained network, in evaluation mode."""
    network = untrained(folder)
    network.load_state_dict(load_file(weights))
    return network.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("weights")
    options = parser.parse_args()
    torch.set_num_threads(1)
    network = untrained(options.folder).train()
    optimiser = torch.optim.SGD(network.parameters(), RATE, momentum=0.9, weight_decay=1e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, STEPS, pct_start=0.1)
    for step, (images, labels) in zip(range(STEPS), training_batches(options.folder, BATCH_SIZE), strict=False):
        loss = nn.functional.cross_entropy(network(images), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step}, loss {float(loss):.3f}", flush=True)
    save_file(network.state_dict(), options.weights)
    images, labels = test_images(options.folder, 2000)
    with torch.no_grad():
        logits = torch.cat([network.eval()(part) for part in images.split(250)])
    loss = nn.functional.cross_entropy(logits, labels)
    print(
        f"2,000 test images: accuracy {float((logits.argmax(1) == labels).double().mean()):.3f}, NLL {float(loss):.3f}"
    )


if __name__ == "__main__":
    main()
