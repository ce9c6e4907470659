"""A network with 1,000 classes, for the benchmarks of the linear engine.

    python benchmarks/many_classes.py DATA_FOLDER WEIGHTS_FILE

The public ResNet-20 gets a new head of 1,000 outputs. The classes are made from real images: 1,000 clusters of the
features of 20,000 training images, so they are many, of very different size, and close to each other, as the breeds of
dogs in ImageNet are. Only the head is trained, on the features of these images as they are and with crops and flips.
"""

import argparse

import torch
from batchbayes_papers.data.cifar10 import crop_and_flip, load_cifar10, standardise
from batchbayes_papers.data.folder import data_file
from batchbayes_papers.models.pretrained import cifar_resnet
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

CLASSES, IMAGES, ROUNDS = 1000, 20_000, 15
BATCH_SIZE, STEPS, RATE = 1000, 800, 0.02


def untrained(folder: str) -> nn.Module:
    """Return the public ResNet-20 with a new head."""
    network: nn.Module = cifar_resnet(20, data_file("weights/resnet20_cifar10_akamaster.safetensors", folder))
    torch.manual_seed(0)
    network.linear = nn.Linear(64, CLASSES)
    return network.eval()


def many_classes(folder: str, weights: str) -> nn.Module:
    """Return the trained network, in evaluation mode."""
    network = untrained(folder)
    kept = load_file(weights)
    network.linear.load_state_dict({name: kept[name] for name in ("weight", "bias")})
    return network


@torch.no_grad()
def features(network: nn.Module, images: Tensor) -> Tensor:
    """Return what the head gets, (N, 64)."""
    head, network.linear = network.linear, nn.Identity()
    found = torch.cat([network(part) for part in images.split(100)])
    network.linear = head
    return found


def nearest(rows: Tensor, centers: Tensor) -> Tensor:
    """Return the number of the nearest centre of each row, (N,)."""
    return torch.cat([torch.cdist(part, centers).argmin(1) for part in rows.split(2000)])


def clusters(rows: Tensor) -> Tensor:
    """Return the centres that k-means finds, (CLASSES, 64)."""
    centers = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:CLASSES]].clone()
    for _ in range(ROUNDS):
        near = nearest(rows, centers)
        counts = near.bincount(minlength=CLASSES)[:, None]
        sums = torch.zeros_like(centers).index_add_(0, near, rows)
        centers = torch.where(counts > 0, sums / counts.clamp(min=1), centers)
    return centers


def train_head(head: nn.Linear, rows: Tensor, labels: Tensor) -> None:
    optimiser = torch.optim.Adam(head.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, STEPS)
    random = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        some = torch.randint(len(rows), (BATCH_SIZE,), generator=random)
        loss = nn.functional.cross_entropy(head(rows[some]), labels[some])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("weights")
    options = parser.parse_args()
    torch.set_num_threads(1)
    network = untrained(options.folder)
    images = load_cifar10("train", options.folder, IMAGES)[0]
    plain = features(network, standardise(images))
    moved = features(network, standardise(crop_and_flip(images, torch.Generator().manual_seed(0))))
    centers = clusters(plain)
    labels = nearest(plain, centers)
    train_head(network.linear, torch.cat([plain, moved]), labels.repeat(2))
    save_file({**network.linear.state_dict(), "centers": centers}, options.weights)
    rows = features(network, standardise(load_cifar10("test", options.folder, 2000)[0]))
    with torch.no_grad():
        log_probs = network.linear(rows).log_softmax(1)
    right = (log_probs.argmax(1) == nearest(rows, centers)).double().mean()
    entropy = -(log_probs.exp() * log_probs).sum(1)
    print(f"2,000 test images: accuracy {float(right):.3f}, mean entropy {float(entropy.mean()):.2f} nats")


if __name__ == "__main__":
    main()
