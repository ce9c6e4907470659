"""What draws cost, as ratios to a plain forward pass of the same images on the same threads (CPU time, medians).

    python benchmarks/linear_cost.py DATA_FOLDER

ResNet-20 with 10 outputs, a regression MLP with one, and ESPNet with 12 classes for every pixel; the measurements of a
network are interleaved with plain forward passes.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import batchbayes as bb
from batchbayes.data import camvid, cifar10
from batchbayes.data.folder import data_file
from batchbayes.linear import forward_plan, linear_outputs
from batchbayes.metrics import rank_correlation
from batchbayes.models.mlp import MLP
from batchbayes.models.pretrained import cifar_resnet, espnet_camvid


def seconds(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def ratio(work: Callable[[], object], plain: Callable[[], object], repeats: int = 5) -> float:
    """Median over interleaved pairs of the time of `work` over that of a plain forward pass."""
    work(), plain()
    return statistics.median(seconds(work) / seconds(plain) for _ in range(repeats))


@torch.no_grad()
def forward(network: torch.nn.Module, inputs: torch.Tensor, chunk: int = 64) -> None:
    for part in inputs.split(chunk):
        network(part)


def classification(folder: str) -> None:
    train, _ = cifar10.load_cifar10("train", folder, 5000)
    images = cifar10.standardise(cifar10.load_cifar10("test", folder, 512)[0])
    network = cifar_resnet(20, data_file("weights/resnet20_cifar10_akamaster.safetensors", folder))
    posterior = bb.mcbn(network, cifar10.augmented_batches(train, 128), center="running")

    def plain() -> None:
        forward(network, images)

    def linear() -> None:
        bb.predict(posterior, images, bb.categorical(), num_samples=1000, engine="linear")

    print(f"ResNet-20, 10 outputs, S=1000, linear engine, reverse mode: {ratio(linear, plain, 3):.1f} forward passes")
    for rank in (8, 12, 16):
        plan = forward_plan(posterior, rank, 1000, seed=0)

        def along(plan=plan) -> None:
            with torch.no_grad():
                for chunk in images.split(64):
                    summary = bb.categorical().summary()
                    for block in linear_outputs(posterior, chunk, plan):
                        summary.add(block)

        print(f"ResNet-20, forward mode, {rank} directions ({plan.share:.0%}): {ratio(along, plain, 3):.1f}")

    def exact() -> None:
        bb.predict(posterior, images, bb.categorical(), num_samples=8, engine="sample")

    print(f"ResNet-20, exact engine: {ratio(exact, plain) / 8:.3f} forward passes a draw")


def regression() -> None:
    network, inputs = MLP(13, [50, 50], 1).eval(), torch.randn(4096, 13)
    posterior = bb.mcbn(network, inputs, batch_size=128, num_samples=64)

    def plain() -> None:
        forward(network, inputs, 2048)

    def linear() -> None:
        bb.predict(
            posterior, inputs, bb.gaussian(1.0), num_samples=64, engine="linear", keep_draws=False, chunk_size=2048
        )

    print(f"MLP 13-50-50-1, 1 output, S=64, linear engine: {ratio(linear, plain, 15):.1f} forward passes")


def segmentation(folder: str) -> None:
    network = espnet_camvid(data_file("weights/espnet_camvid_sacmehta.safetensors", folder))
    train = camvid.standardise(camvid.load_camvid_frames("train", folder)[0])
    frames = camvid.standardise(camvid.load_camvid_frames("test", folder, limit=2)[0])
    posterior = bb.mcbn(network, train, batch_size=10, num_samples=48, center="running")
    with torch.no_grad():
        exact = torch.stack([posterior.draw(0, s)(frames) for s in range(48)])
    truth = exact.var(0).mean(1).flatten()  # of each pixel

    def plain() -> None:
        forward(network, frames)

    for rank in (4, 8, 12, 16):
        plan = forward_plan(posterior, rank, 48, seed=0)
        drawn = torch.cat(list(linear_outputs(posterior, frames, plan)))
        correlation = rank_correlation(drawn.var(0).mean(1).flatten(), truth)

        def along(plan=plan) -> None:
            for _ in linear_outputs(posterior, frames, plan):
                pass

        cost = ratio(along, plain, 3)
        print(
            f"ESPNet 360x480, R={rank} ({plan.share:.0%}): {cost:.1f} forward passes (allowed {2.2 * rank + 2:.1f}), "
            f"rank correlation of the variance of pixels {correlation:.4f}, "
            f"scale {float(drawn.var(0).mean() / exact.var(0).mean()):.3f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    torch.set_num_threads(1)
    folder = parser.parse_args().folder
    classification(folder)
    regression()
    segmentation(folder)


if __name__ == "__main__":
    main()
