"""Images and networks that the experiments on random weights share."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from batchbayes._common.rng import GlobalStream, generator
from batchbayes.data.folder import DataFolder
from batchbayes.data.mnist import load_mnist
from batchbayes.models.lenet import LeNet5, LeNet300, init_for_sparsity

NETWORKS = {"LeNet-300-100": LeNet300, "LeNet-5": LeNet5}


@dataclass(frozen=True, eq=False)
class ImageData:
    """Images (N, 1, 28, 28) and labels (N,) for training and test."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def load_images(
    data: Literal["mnist", "synthetic"], num_train: int, num_test: int, data_folder: DataFolder = None
) -> ImageData:
    """Load images, scaled to [0, 1] and with the mean image of the training set subtracted."""
    if data == "synthetic":
        images, labels = patterns(num_train, "train")
        test, test_labels = patterns(num_test, "test")
    else:
        images, labels = load_mnist("mnist", "train", data_folder, num_train)
        test, test_labels = load_mnist("mnist", "test", data_folder, num_test)
        images, test = images.float() / 256, test.float() / 256
    mean = images.mean(0)
    return ImageData((images - mean, labels), (test - mean, test_labels))


def patterns(count: int, part: str) -> tuple[Tensor, Tensor]:
    """Return noisy images of ten coarse patterns, and their labels, to test the program without data."""
    coarse = torch.rand(10, 1, 7, 7, generator=generator(0, "patterns")).repeat_interleave(4, 2)
    source = generator(0, "noise", part)
    labels = torch.randint(0, 10, (count,), generator=source)
    images = coarse.repeat_interleave(4, 3)[labels]
    return images + 0.5 * torch.randn(images.shape, generator=source), labels


def new_network(name: str, seed: int) -> nn.Module:
    """Return a LeNet with the initial weights of the sparse variational dropout paper's code."""
    with GlobalStream(seed):
        network = NETWORKS[name]()
        init_for_sparsity(network)
    return fast(network)


def fast(network: nn.Module) -> nn.Module:
    """Put the kernels of convolutions into the memory format in which they run fastest on a CPU."""
    return network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]  # torch's stubs lack it


@torch.no_grad()
def error_percent(network: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    """Return the share of wrong classes of a network, in per cent."""
    images, labels = data
    wrong = [(network(x).argmax(1) != y).sum() for x, y in zip(images.split(1000), labels.split(1000), strict=True)]
    return 100 * float(torch.stack(wrong).sum()) / len(labels)
