"""What draws cost, as ratios to a plain forward pass of the same inputs on the same thread (CPU time, medians).

    python benchmarks/linear_cost.py DATA_FOLDER > docs/results/linear-cost.md
    python benchmarks/linear_cost.py DATA_FOLDER --part many_classes --weights WEIGHTS_FILE

ResNet-20 with ten outputs, with one and with 1,000 (see many_classes.py), a regression MLP, and ESPNet with 12 classes
for every pixel. What is measured is interleaved with plain forward passes, in chunks of 64 images or 2,048 rows.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import many_classes as many
import torch
from batchbayes_papers.data import camvid, cifar10
from batchbayes_papers.data.folder import data_file
from batchbayes_papers.models.pretrained import cifar_resnet, espnet_camvid
from torch import Tensor, nn

import batchbayes as bb
from batchbayes.engines.linear import forward_plan, linear_draws, plan_linear
from batchbayes.metrics import rank_correlation
from batchbayes.models import MLP


def seconds(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


@torch.no_grad()
def ratio(work: Callable[[], object], network: nn.Module, inputs: Tensor, chunk: int, repeats: int) -> float:
    """Median over repeats of the time of `work` over that of the plain forward passes before and after it."""

    def plain() -> None:
        for part in inputs.split(chunk):
            network(part)

    work(), plain()
    return statistics.median(
        2 * seconds(work) / (before + seconds(plain)) for before in (seconds(plain) for _ in range(repeats))
    )


def row(case: str, cost: float, limit: str = "", note: str = "") -> None:
    print(f"| {case} | {cost:.2f} | {limit} | {note} |", flush=True)


def classification(folder: str) -> None:
    train, _ = cifar10.load_cifar10("train", folder, 5000)
    images = cifar10.standardise(cifar10.load_cifar10("test", folder, 512)[0])
    network = cifar_resnet(20, data_file("weights/resnet20_cifar10_akamaster.safetensors", folder))
    posterior = bb.mcbn(network, cifar10.augmented_batches(train, 128), center="running")

    def cost(posterior, likelihood, repeats=3, images=images, **options) -> float:
        work = lambda: bb.predict(posterior, images, likelihood, **options)  # noqa: E731
        return ratio(work, posterior.network.module, images, 64, repeats)

    name, linear = "ResNet-20, 512 images", {"num_samples": 1000, "engine": "linear"}
    note = f"chosen contrasts; {ranked(posterior, images[:256])}"
    row(f"{name}, 10 outputs, linear, S=1000", cost(posterior, bb.categorical(), **linear), "5", note)
    few = cost(posterior, bb.categorical(), 9, images=images[:64], **linear)
    row("ResNet-20, 64 images, 10 outputs, linear, S=1000", few, "7", "chosen contrasts")
    kept = cost(posterior, bb.categorical(), keep_draws=True, **linear)
    row(f"{name}, 10 outputs, linear, S=1000, draws kept", kept, "16", "ten logits")
    gaussian = replace(posterior, noise="correlated")
    row(f"{name}, 10 outputs, linear, S=1000, Gaussian rows", cost(gaussian, bb.categorical(), **linear), "")
    exact = cost(posterior, bb.categorical(), 5, num_samples=8) / 8
    row(f"{name}, exact, a draw", exact, "1.05")
    one = bb.mcbn(
        nn.Sequential(network, nn.Linear(10, 1)).eval(), cifar10.augmented_batches(train, 128), num_samples=32
    )
    row(f"{name}, 1 output, linear, S=1000", cost(one, bb.gaussian(1.0), 5, **linear), "5", "regression on images")


@torch.no_grad()
def many_classes(folder: str, weights: str) -> None:
    network = many.many_classes(folder, weights)
    train, _ = cifar10.load_cifar10("train", folder, 5000)
    images = cifar10.standardise(cifar10.load_cifar10("test", folder, 512)[0])
    posterior = bb.mcbn(network, cifar10.augmented_batches(train, 128), num_samples=48, center="running")
    options: Any = {"num_samples": 1000, "engine": "linear"}
    cost = ratio(lambda: bb.predict(posterior, images, bb.categorical(), **options), network, images, 64, 3)
    row("ResNet-20, 512 images, 1,000 outputs, linear, S=1000", cost, "10", ranked(posterior, images))


def ranked(posterior: Any, images: Tensor) -> str:
    """How mutual information ranks images, as each row makes one draw: linear draws against exact ones."""
    options: Any = {"num_samples": len(posterior.deviations)}
    linear, exact, half = (
        bb.predict(posterior, images, bb.categorical(), **(options | more)).mutual_information
        for more in ({"engine": "linear"}, {}, {"num_samples": options["num_samples"] // 2})
    )
    return (
        f"MI against {options['num_samples']} exact draws: rank correlation {rank_correlation(linear, exact):.4f}, "
        f"ratio {float(linear.mean() / exact.mean()):.3f}; half of the exact draws {rank_correlation(half, exact):.4f}"
    )


def regression() -> None:
    torch.manual_seed(0)
    network, inputs = MLP(13, [50, 50], 1).eval(), torch.randn(65_536, 13)
    posterior = bb.mcbn(network, inputs, batch_size=128, num_samples=64)
    for count in (4096, 65_536):
        for samples, noise in ((64, "rows"), (1000, "rows"), (1000, "correlated")):
            used, some = replace(posterior, noise=noise), inputs[:count]

            def linear(used=used, some=some, samples=samples) -> None:
                bb.predict(used, some, bb.gaussian(1.0), num_samples=samples, engine="linear")

            name = f"MLP 13-50-50-1, {count:,} rows, linear, S={samples}, {noise}"
            rounds = 15 if count > 4096 else 100
            row(name, ratio(linear, network, some, 2048, rounds), "5" if noise == "rows" else "")


@torch.no_grad()
def segmentation(folder: str) -> None:
    network = espnet_camvid(data_file("weights/espnet_camvid_sacmehta.safetensors", folder))
    train = camvid.standardise(camvid.load_camvid_frames("train", folder)[0])
    frames = camvid.standardise(camvid.load_camvid_frames("test", folder)[0])[[0, 20]]
    posterior = bb.mcbn(network, train, batch_size=10, num_samples=48, center="running")

    def of_pixels(draws: Tensor) -> Tensor:
        return draws.var(0).mean(1).flatten()

    exact = torch.stack([posterior.draw(0, s)(frames) for s in range(48)])  # (S, n, K, H, W)
    truth = of_pixels(exact)
    halves = rank_correlation(of_pixels(exact[::2]), of_pixels(exact[1::2]))
    print(f"| ESPNet, two 360x480 frames, M=10: two halves of 48 exact draws | 24 | | agree to {halves:.4f} |")
    for count in (8, 12, 16, 20):
        note = f"rank correlation {rank_correlation(of_pixels(exact[:count]), truth):.4f}"
        print(f"| ESPNet, the first {count} exact draws | {count} | | {note} |", flush=True)
    chosen = len(plan_linear(posterior, frames[0].numel(), 48, seed=0).directions)
    for rank in sorted({4, 5, 8, chosen}):
        plan = forward_plan(posterior, rank, 48, seed=0)
        drawn = of_pixels(linear_draws(posterior, frames, plan).outputs())

        def along(plan=plan) -> None:
            linear_draws(posterior, frames, plan)

        note = f"keeps {plan.share:.0%}; rank correlation {rank_correlation(drawn, truth):.4f}, "
        note += f"scale {float(drawn.mean() / truth.mean()):.2f}" + ("; the default" if rank == chosen else "")
        row(f"ESPNet, forward mode, R={rank}", ratio(along, network, frames, 2, 5), f"{2.2 * rank + 2:.1f}", note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--part", choices=["classification", "many_classes", "regression", "segmentation"])
    parser.add_argument("--weights", help="the file of many_classes.py, for that part")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("# What draws cost\n\n`python benchmarks/linear_cost.py DATA_FOLDER`; in plain forward passes of the same")
    print("inputs, one thread, CPU time, medians of interleaved runs.\n")
    print("| case | passes | limit | |\n|---|---|---|---|")
    parts = {
        "classification": lambda: classification(options.folder),
        **({"many_classes": lambda: many_classes(options.folder, options.weights)} if options.weights else {}),
        "regression": regression,
        "segmentation": lambda: segmentation(options.folder),
    }
    for name in [options.part] if options.part else parts:
        parts[name]()


if __name__ == "__main__":
    main()
