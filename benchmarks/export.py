"""Exported files in onnxruntime: differences from `predict`, sizes, and the time of a prediction.

    python benchmarks/export.py DATA_FOLDER

It needs the extra `export`, and timm for the last two lines (see `make third-party`), whose weights are random.
A file is made with 3 inputs and compared on others. The limit is the size of weights and bank; files may have 1.1 times
that. A time is the median of one prediction of 8 inputs (2 for ESPNet) on one thread, in turns. Passes are the time of
a file over that of the network alone in onnxruntime, which folds batch norm into convolutions there, and not in draws.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import onnxruntime  # pyright: ignore[reportMissingImports]
import torch
from batchbayes_papers.data.camvid import load_camvid_frames
from batchbayes_papers.data.camvid import standardise as standardise_frames
from batchbayes_papers.data.cifar10 import augmented_batches, load_cifar10, standardise
from batchbayes_papers.models.pretrained import cifar_resnet, espnet_camvid
from torch import Tensor, nn

import batchbayes as bb
from batchbayes import TrainingConfig, train
from batchbayes.models import MLP
from batchbayes.tools import GlobalStream, generator, shuffled
from batchbayes.training.loop import half_squared_error, supervised

CROP_AND_FLIP = bb.Compose(bb.RandomCrop(4), bb.RandomFlip())
PARTS = {"probs": "probs", "entropy": "entropy", "mutual_information": "mutual_information"}
VALUES = {"pred_mean": "mean", "pred_std": "std"}


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    name: str
    posterior: bb.Posterior
    inputs: Tensor
    likelihood: object
    num_samples: int
    engine: Literal["sample", "linear"] = "sample"


def mlp(folder: Path) -> Iterator[Line]:
    x = torch.randn(1000, 13, generator=generator(0))
    with GlobalStream(0):
        network = MLP(13, [50, 50], 1)
    train(network, shuffled(x, x[:, :1].sin(), 32, seed=0), supervised(half_squared_error), TrainingConfig(10, 32))
    posterior = bb.mcbn(network, x, batch_size=32)
    yield Line("MLP 13-50-50-1, MCBN", posterior, x[:11], bb.gaussian(4.0), 64)
    yield Line("MLP 13-50-50-1, MCBN, linear", posterior, x[:11], bb.gaussian(4.0), 64, "linear")


def resnet(folder: Path) -> Iterator[Line]:
    network = cifar_resnet(20, folder / "weights/resnet20_cifar10_akamaster.safetensors")
    test = standardise(load_cifar10("test", folder, 11)[0])
    batches = augmented_batches(load_cifar10("train", folder, 4000)[0], 128)
    posterior = bb.mcbn(network, batches, num_samples=32, center="running")
    likelihood = bb.categorical(temperature=1.5)
    yield Line("ResNet-20, MCBN", posterior, test, likelihood, 32)
    yield Line("ResNet-20, MCBN, linear", posterior, test, likelihood, 32, "linear")
    views = bb.with_views(bb.deterministic(network), CROP_AND_FLIP)
    yield Line("ResNet-20, views", views, test, likelihood, 16)
    yield Line("ResNet-20, MCBN with views", bb.with_views(posterior, CROP_AND_FLIP, average=2), test, likelihood, 8)
    yield Line("ResNet-20, the network", bb.deterministic(network), test, likelihood, 1)


def espnet(folder: Path) -> Iterator[Line]:
    network = espnet_camvid(folder / "weights/espnet_camvid_sacmehta.safetensors")
    frames = standardise_frames(load_camvid_frames("train", folder, 16)[0])
    posterior = bb.mcbn(network, frames, batch_size=4, num_samples=4, center="running")
    test = standardise_frames(load_camvid_frames("test", folder, 5)[0])
    flipped = bb.with_views(posterior, bb.RandomFlip())
    yield Line("ESPNet 360 x 480, MCBN with flips", flipped, test, bb.categorical(), 4)


def timm_networks(folder: Path) -> Iterator[Line]:
    library = torch.library.Library("torchvision", "DEF")  # PyPI's torchvision looks for these, and has them for CUDA
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import timm  # pyright: ignore[reportMissingImports]

    for name in ("resnet18", "efficientnet_b0"):
        with GlobalStream(0):
            network: nn.Module = timm.create_model(name, pretrained=False, num_classes=10).train()
        images = torch.randn(64, 3, 64, 64, generator=generator(0)) + torch.randn(64, 3, 1, 1, generator=generator(1))
        with torch.no_grad():
            for batch in images.split(16) * 5:
                network(batch)
        posterior = bb.mcbn(network.eval(), images, batch_size=16, num_samples=16, center="running")
        yield Line(f"timm {name}, MCBN", posterior, images[:11], bb.categorical(), 16)


NETWORKS = {"mlp": mlp, "resnet": resnet, "espnet": espnet, "timm": timm_networks}


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def print_line(line: Line, folder: Path) -> None:
    """Export, compare on inputs that the file was not made with, and print one line of the table."""
    options = {"num_samples": line.num_samples, "engine": line.engine}
    made = bb.export(line.posterior, folder / "file.onnx", line.inputs[:3], line.likelihood, **options)  # type: ignore[arg-type]
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(made.path), settings, providers=["CPUExecutionProvider"])
    rest = line.inputs[3:]
    found = dict(zip(made.outputs, session.run(None, {"input": rest.numpy()}), strict=True))
    predictive = bb.predict(line.posterior, rest, line.likelihood, **options)  # type: ignore[arg-type]
    names = PARTS if "probs" in found else VALUES
    difference = max(float(np.abs(found[n] - getattr(predictive, a).numpy()).max()) for n, a in names.items())
    runs: dict[str, Callable[[], object]] = {
        "file": lambda: session.run(None, {"input": rest.numpy()}),
        "python": lambda: bb.predict(line.posterior, rest, line.likelihood, **options),  # type: ignore[arg-type]
    }
    times = {name: statistics.median(column) for name, column in zip(
        runs, zip(*([seconds(run) for run in runs.values()] for _ in range(5)), strict=True), strict=True
    )}  # fmt: skip
    print(
        f"| {line.name} | {line.num_samples} | {difference:.1e} | {made.opset} | {made.weight_bytes / 1000:,.1f} kB | "
        f"{made.bank_bytes / 1000:,.1f} kB | {made.num_bytes / 1000:,.1f} kB | {made.ratio:.3f} | "
        f"{1000 * times['file']:.1f} ms | {1000 * times['python']:.1f} ms | {made.passes:.1f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = ["draws", "difference", "opset", "weights", "bank", "file", "ratio", "onnxruntime", "predict", "passes"]
    print(f"| network and method | {' | '.join(names)} |\n|---|{'---:|' * len(names)}")
    with tempfile.TemporaryDirectory() as folder:
        for name in options.networks:
            for line in NETWORKS[name](options.folder):
                print_line(line, Path(folder))


if __name__ == "__main__":
    main()
