"""Novelty on networks without batch norm: layer norm, group norm, and no norm at all. And on digits that meet letters.

    python benchmarks/novelty_networks.py DATA_FOLDER WEIGHTS_FOLDER

Three small networks learn the first eight classes of Fashion-MNIST (a few minutes each on one core; their weights are
kept in WEIGHTS_FOLDER, and read from there). They meet ten far sets, and as near set the two classes that were left
out. A network with batch norm learns the digits of MNIST, and the letters of notMNIST are near to it. Beside novelty
stand scores of our own making and, with pytorch-ood 0.4.0 installed, its detectors.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from batchbayes_papers.data.cifar10 import load_cifar10, load_svhn
from batchbayes_papers.data.mnist import PIXEL_MEAN, PIXEL_STD, load_mnist
from batchbayes_papers.models.pretrained import load_weights
from safetensors.torch import save_file
from seen import aurocs, baselines, novelty_score, peers, see, table, watched
from torch import Tensor, nn

from batchbayes import TrainingConfig, train
from batchbayes.novelty.scores import conformal_p_value
from batchbayes.tools import generator
from batchbayes.training.loop import Step, supervised

KNOWN, BATCH_SIZE = 8, 128
REFERENCE, CALIBRATION, COUNT = 5000, 2000, 500


class Transformer(nn.Module):
    """Patches of 4 x 4 pixels as 49 tokens, three blocks with layer norm, and the mean token."""

    def __init__(self, classes: int, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, 4)
        self.positions = nn.Parameter(0.02 * torch.randn(49, width))
        self.blocks = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True, norm_first=True)
                for _ in range(depth)
            )
        )
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.linear(self.norm(self.blocks(tokens)).mean(1))


def convolutions(classes: int, norm: Callable[[int], nn.Module] | None) -> nn.Module:
    """Five convolutions, with a norm after each or without."""
    layers: list[nn.Module] = []
    for before, after, stride in ((1, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)):
        layers += [nn.Conv2d(before, after, 3, stride, 1), *([norm(after)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "group norm": (lambda: convolutions(KNOWN, lambda channels: nn.GroupNorm(4, channels)), 2),
    "no norm": (lambda: convolutions(KNOWN, None), 2),
    "layer norm": (lambda: Transformer(KNOWN), 4),
    "digits": (lambda: convolutions(10, nn.BatchNorm2d), 1),
}
"""How to build each, and the number of epochs. The last one learns MNIST, the others eight classes of Fashion-MNIST."""


def data(name: str, split: str, folder: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return images and labels that a network knows, and images of its near set."""
    if name == "digits":
        return *load_mnist("mnist", split, folder), load_mnist("notmnist", "test", folder)[0]
    images, labels = load_mnist("fashion_mnist", split, folder)
    return images[labels < KNOWN], labels[labels < KNOWN], images[labels >= KNOWN]


def standardise(images: Tensor) -> Tensor:
    """Convert grey bytes to the inputs of the networks."""
    return (images.float() / 255 - PIXEL_MEAN) / PIXEL_STD


def trained(name: str, images: Tensor, labels: Tensor, folder: Path) -> nn.Module:
    """Return a network from its file, or train it and write the file."""
    build, epochs = NETWORKS[name]
    path = folder / f"{name.replace(' ', '-')}.safetensors"
    if not path.exists():
        torch.manual_seed(0)
        network, steps = build(), epochs * (len(images) // BATCH_SIZE)

        def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
            order = torch.randperm(len(images), generator=generator(0, name, epoch))
            for rows in order.split(BATCH_SIZE)[: steps // epochs]:
                yield standardise(images[rows]), labels[rows]

        def anneal(step: Step) -> None:
            for group in step.optimiser.param_groups:
                group["lr"] = 2e-3 * min(1.0, (step.number + 1) / 50) * (1 - step.number / steps)

        config = TrainingConfig(epochs, BATCH_SIZE, 2e-3, optimiser="adam")
        train(network, batches, supervised(F.cross_entropy), config, after_step=anneal)
        folder.mkdir(parents=True, exist_ok=True)
        save_file({key: value.contiguous() for key, value in network.state_dict().items()}, path)
    return load_weights(build(), path)


def unseen(folder: str, name: str, images: Tensor, near: Tensor) -> dict[str, Tensor]:
    """Return strange images (N, 1, 28, 28) as numbers from 0 to 255. Corrupted ones are made from `images`."""
    random, values = generator(0, "grey"), images.float()
    grey = [
        part.float().mean(1, keepdim=True)
        for part in (load_cifar10("test", folder, COUNT)[0], load_svhn(folder, COUNT))
    ]
    cifar, svhn = (F.interpolate(part, size=28, mode="bilinear", antialias=True) for part in grey)
    uniform, middle = torch.rand(values.shape, generator=random), values.mean((1, 2, 3), keepdim=True)
    of_others = {"Fashion-MNIST": "fashion_mnist"} if name == "digits" else {"MNIST": "mnist", "notMNIST": "notmnist"}
    return {
        **{key: load_mnist(each, "test", folder, COUNT)[0].float() for key, each in of_others.items()},
        "CIFAR-10": cifar,
        "SVHN": svhn,
        "noise": (values + 40 * torch.randn(values.shape, generator=random)).clamp(0, 255),
        "salt and pepper": torch.where(uniform < 0.05, 0.0, torch.where(uniform > 0.95, 255.0, values)),
        "blur": F.avg_pool2d(values, 5, 1, 2, count_include_pad=False),
        "low contrast": middle + 0.3 * (values - middle),
        "inverted": 255 - values,
        "constant": 255 * torch.rand(len(values), 1, 1, 1, generator=random).expand_as(values),
        "letters" if name == "digits" else "classes left out": near.float(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("weights", type=Path)
    parser.add_argument("--network", choices=list(NETWORKS), action="append")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.network or NETWORKS:
        images, labels, _ = data(name, "train", options.folder)
        known, truth, near = data(name, "test", options.folder)
        fresh, calibration = known[:COUNT], known[-CALIBRATION:]
        strange = unseen(options.folder, name, known[COUNT : 2 * COUNT], near[:COUNT])
        network = trained(name, images, labels, options.weights).eval()
        sight = watched(network, standardise(images[:64]))

        def seen(part: Tensor, sight=sight):
            return see(sight, map(standardise, part.split(100)))

        reference, usual = seen(images[:REFERENCE]), seen(fresh)
        right = (usual.logits.argmax(1) == truth[:COUNT]).double().mean()
        last = [module for module in network.modules() if isinstance(module, nn.Linear)][-1]
        scores = {"novelty": novelty_score(sight, reference)} | baselines(reference)
        scores |= peers(last.requires_grad_(False), reference, labels[:REFERENCE])
        sets = {key: seen(part) for key, part in strange.items()}
        far = list(sets)[:-1]
        print(f"\n## {name}\n\n{sight.kind} layers, {sight.size} statistics; accuracy {right:.3f}.\n")
        table({key: aurocs(score, usual, sets) for key, score in scores.items()}, {"far": far})
        p_values = conformal_p_value(scores["novelty"](seen(calibration)), scores["novelty"](usual))
        print(f"\nFlagged at 5 %: {(p_values <= 0.05).double().mean():.3f} of {COUNT} fresh images.", flush=True)


if __name__ == "__main__":
    main()
