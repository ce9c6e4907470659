"""Drift on two public CIFAR-10 networks: what the networks say about corrupted images, as they are and adapted.

    python benchmarks/drift.py DATA_FOLDER RESULTS_FOLDER --depth 32
    python benchmarks/drift_tables.py DATA_FOLDER RESULTS_FOLDER > tables.md

Each finished piece of work is a file of outputs in the results folder, so the run can be stopped and started again. The
second command needs no network for most of what it prints. Settings were chosen with ResNet-20 and test images 0 to
5,000; calibration is on images 5,000 to 7,000; reported are images 7,000 to 10,000 as they are (the test, the monitor),
and 8,000 to 10,000 corrupted.
"""

import argparse
import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from batchbayes_papers.data.cifar10 import load_cifar10, standardise
from batchbayes_papers.data.folder import data_file
from batchbayes_papers.models.pretrained import cifar_resnet
from corruptions import CORRUPTIONS, corrupt
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import batchbayes as bb
from batchbayes.tools import generator

REFERENCE, CALIBRATION, UNSEEN, TEST = 2000, slice(5000, 7000), slice(7000, 10000), slice(8000, 10000)
STREAMS = ("mixed", "dirichlet", "sorted")
IMAGES = {1: 32, 8: 64, 32: 128, 128: 128}
"""Images of a cell in each round, for each size of windows. Each cell draws them from all 2,000."""
SEEN = 500
"""Corrupted images for the test and the monitor."""
DRAWS = 16
"""Draws of the adapted network, as in the tutorial."""
Predict = Callable[[Tensor], Tensor]


def windows(labels: Tensor, size: int, stream: str, count: int, seed: int) -> list[Tensor]:
    """Return rows of images of some windows: in random order, with classes by Dirichlet(0.3), or sorted by class."""
    random, total = generator(seed, "stream", stream, size), len(labels)
    rows = torch.randperm(total, generator=random)
    if stream == "sorted":
        rows = rows[labels[rows].argsort(stable=True)]
    if stream != "dirichlet":
        found = rows[: total // size * size].split(size)
        return [found[i * len(found) // count] for i in range(count)]
    numbers = np.random.default_rng([seed, size])
    members, found = [torch.where(labels == k)[0].numpy() for k in range(10)], []
    for _ in range(count):  # no image is in a window twice: copies would look like a change
        counts = numbers.multinomial(size, numbers.dirichlet([0.3] * 10))
        drawn = [numbers.choice(own, number, replace=False) for own, number in zip(members, counts, strict=True)]
        found.append(torch.from_numpy(np.concatenate(drawn)))
    return found


def blended(network: nn.Module, pseudo_count: float) -> nn.Module:
    """Return a copy that normalises by the batch, blended with a number of pseudo-examples of the running ones."""
    network = copy.deepcopy(network)

    def forward(layer: Any, input: Tensor) -> Tensor:
        if not pseudo_count:
            return F.batch_norm(input, None, None, layer.weight, layer.bias, training=True, eps=layer.eps)
        share, flat = len(input) / (len(input) + pseudo_count), input.flatten(2)
        mean = flat.mean(2).mean(0)
        variance = flat.square().mean(2).mean(0) - mean.square()
        mean = layer.running_mean + share * (mean - layer.running_mean)
        variance = layer.running_var + share * (variance - layer.running_var)
        return F.batch_norm(input, mean, variance, layer.weight, layer.bias, eps=layer.eps)

    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.forward = partial(forward, layer)
    return network


def tent(network: nn.Module) -> Predict:
    """Return TENT (Wang et al., ICLR 2021): batch statistics, one step of Adam on the entropy for each batch."""
    network = blended(network, 0.0)
    layers = [layer for layer in network.modules() if isinstance(layer, nn.BatchNorm2d)]
    scales = [p.requires_grad_() for layer in layers for p in (layer.weight, layer.bias)]
    optimiser = torch.optim.Adam(scales, lr=1e-3)

    def predict(inputs: Tensor) -> Tensor:
        with torch.enable_grad():
            logits = network(inputs)
            entropy = -(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean()
            optimiser.zero_grad()
            entropy.backward()
            optimiser.step()
        return logits.detach()

    return predict


class Case:
    """A network with everything that is fitted to it."""

    def __init__(self, depth: int, folder: str, results: Path) -> None:
        self.network = cifar_resnet(depth, data_file(f"weights/resnet{depth}_cifar10_akamaster.safetensors", folder))
        self.network.requires_grad_(False)
        self.images, self.labels = load_cifar10("test", folder)
        self.labelled = standardise(self.images[CALIBRATION]), self.labels[CALIBRATION]
        fitted = results / f"drift-{depth}.safetensors"
        if not fitted.exists():
            train = load_cifar10("train", folder)[0]
            chosen = torch.randperm(len(train), generator=generator(0, "reference"))[:REFERENCE]
            bb.save(bb.drift(self.network, standardise(train[chosen]), calibration=[self.labelled]), fitted)
        self.drift = bb.load(fitted, self.network)

    def see(self, name: str, severity: int) -> dict[str, Tensor]:
        """Return what the network as it is says of images: statistics of each, and its logits."""
        images = self.images[UNSEEN] if severity == 0 else self.images[TEST][:SEEN]
        _, sample, logits = self.drift.seen(standardise(corrupt(images, name, severity)), None, torch.inf)
        return {"rows": sample.rows.half(), "classes": sample.classes, "logits": logits.float()}

    def adapt(self, name: str, severity: int, stream: str, size: int, turn: int) -> dict[str, Tensor]:
        """Return logits of each method for windows of a stream, and the rows of the images (windows, size)."""
        images, labels = self.images[TEST], self.labels[TEST]
        count = (1 if severity else 2) * IMAGES[size] // size
        chosen = windows(labels, size, stream, count, seed=15 * turn + list(CORRUPTIONS).index(name))
        inputs = standardise(corrupt(images[torch.cat(chosen)], name, severity, seed=turn)).split(size)
        methods: dict[str, Predict] = {
            "network": self.network,
            "batch": blended(self.network, 0.0),
            "N = 16": blended(self.network, 16.0),
            "N = 64": blended(self.network, 64.0),
            "TENT": tent(self.network),
        }
        if severity in (1, 3):
            del methods["TENT"], methods["N = 16"]
        found = {method: torch.stack([predict(x) for x in inputs]).float() for method, predict in methods.items()}
        parts = [self.by_call(x) for x in inputs]
        return found | {"rows": torch.stack(chosen)} | {key: torch.stack([p[key] for p in parts]) for key in parts[0]}

    def by_call(self, window: Tensor) -> dict[str, Tensor]:
        """Return what the calls of the tutorial say of a window: log probabilities, and the report's numbers."""
        report, posterior = self.drift.report(window), self.drift.adapt(window)
        likelihoods = [bb.categorical(), bb.categorical(temperature=report.temperature or 1.0)]
        (predicted,) = bb.predict_stream(posterior, [window], likelihoods, num_samples=DRAWS)
        plain, tempered = (each.log_probs.float() for each in predicted.predictives)
        numbers = report.p_value, report.expected_accuracy.value, report.network_accuracy.value
        names = ("p", "expected", "expected of the network")
        said = {name: torch.tensor(number) for name, number in zip(names, numbers, strict=True)}
        return said | {"drift": plain, "drift, temperature": tempered, "sets": self.drift.sets(window, 0.9)}


def work(depth: int, sizes: list[int]) -> Iterator[tuple[object, ...]]:
    """Yield all pieces of work, the most telling first: see, or adapt with corruption, severity, stream, size, turn."""
    every = list(CORRUPTIONS)
    for severity, name in itertools.product((0, 3, 1), every):
        if 0 in sizes and (severity or name == every[0]):
            yield "see", depth, name, severity
    for turn, size in itertools.product(range(8), [size for size in sizes if size]):
        for name, stream in itertools.product(every, STREAMS if size > 1 else STREAMS[:1]):
            yield "adapt", depth, name, 5, stream, size, turn
        for stream in STREAMS if size > 1 else STREAMS[:1]:
            yield "adapt", depth, every[0], 0, stream, size, turn
        for severity, name in itertools.product((3, 1), every if size == 128 else []):
            yield "adapt", depth, name, severity, "mixed", size, turn


def file_of(results: Path, *about: object) -> Path:
    """Return the file of a piece of work."""
    return results / ("-".join(str(each).replace(" ", "_") for each in about) + ".safetensors")


def read(results: Path, *about: object) -> dict[str, Tensor] | None:
    """Return what was found, or None."""
    path = file_of(results, *about)
    return load_file(path) if path.exists() else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("results", type=Path)
    parser.add_argument("--depth", type=int, default=32, choices=[32, 20])
    help_ = "sizes of windows; 0 is what the network as it is sees. Several processes may share the work"
    parser.add_argument("--sizes", type=int, nargs="*", default=[0, 8, 128, 32, 1], help=help_)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    options.results.mkdir(exist_ok=True)
    case = Case(options.depth, options.folder, options.results)
    for kind, depth, *about in work(options.depth, options.sizes):
        path = file_of(options.results, kind, depth, *about)
        if not path.exists():
            with torch.no_grad():
                save_file(getattr(case, str(kind))(*about), path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)
            print(path.name, flush=True)


if __name__ == "__main__":
    main()
