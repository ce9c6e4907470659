"""How near the linear engine and the Gaussian posteriors come to exact MCBN, on public CIFAR-10 networks.

    python benchmarks/linear_accuracy.py DATA_FOLDER > docs/results/linear-accuracy.md
    python benchmarks/linear_accuracy.py DATA_FOLDER --weights WEIGHTS_FILE --sizes 128 --images 512 --draws 128

Statistics from training images with the training-time transforms; 500 test images; 256 exact draws. With the file of
many_classes.py, the network has 1,000 classes. "Chosen contrasts" are what `predict` uses unless draws are kept.
"""

import argparse
from collections.abc import Iterable
from dataclasses import replace

import many_classes as many
import torch
from batchbayes_papers.data.cifar10 import augmented_batches, load_cifar10, standardise
from batchbayes_papers.data.folder import data_file
from batchbayes_papers.models.pretrained import cifar_resnet
from torch import Tensor, nn

import batchbayes as bb
from batchbayes.metrics import rank_correlation


def compare(
    name: str, network: nn.Module, batches: Iterable[Tensor], size: int, images: Tensor, labels: Tensor, draws: int
) -> None:
    """Print a row for each method and engine, at one batch size."""
    mcbn = bb.mcbn(network, batches, num_samples=draws, center="running")
    exact = bb.predict(mcbn, images, bb.categorical(), num_samples=draws, keep_draws=True)
    truth, nll = exact.draws.var(0).mean(-1), float(-exact.log_prob(labels).mean())
    mean = float(exact.mutual_information.mean())
    print(f"| {name} | {size} | MCBN, exact | 1.0000 | 1.0000 | {mean:.5f} | 1.000 | {nll:.4f} |", flush=True)
    std = mcbn.omega_var().sqrt()[None]
    cases = [  # the Gaussians are those of bb.stochastic_bn, from the same rows
        ("MCBN, linear, chosen contrasts", mcbn, False),
        ("MCBN, linear", mcbn, True),
        ("correlated, linear", replace(mcbn, noise="correlated"), True),
        ("factorised, linear", replace(mcbn, noise="factorised", deviations=std), True),
    ]
    for case, posterior, keep in cases if exact.probs.shape[-1] <= 10 else cases[:1]:
        linear = bb.predict(posterior, images, bb.categorical(), num_samples=draws, engine="linear", keep_draws=keep)
        variance = f"{rank_correlation(linear.draws.var(0).mean(-1), truth):.4f}" if keep else ""
        information, nll = linear.mutual_information, float(-linear.log_prob(labels).mean())
        ranks, ratio = rank_correlation(information, exact.mutual_information), float(information.mean()) / mean
        print(
            f"| {name} | {size} | {case} | {variance} | {ranks:.4f} | {float(information.mean()):.5f} | {ratio:.3f} | "
            f"{nll:.4f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--draws", type=int, default=256)
    parser.add_argument("--sizes", type=int, nargs="+", default=[128, 32])
    parser.add_argument("--depths", type=int, nargs="+", default=[20, 32])
    parser.add_argument("--weights", help="the file of many_classes.py, to measure that network alone")
    options = parser.parse_args()
    print("| network | M | method, engine | rank corr. variance | rank corr. MI | mean MI | MI / exact | NLL |")
    print("|---|---|---|---|---|---|---|---|")
    if options.weights:
        network, test = (
            many.many_classes(options.folder, options.weights),
            many.test_images(options.folder, options.images),
        )
        for size in options.sizes:
            batches = (images for images, _ in many.training_batches(options.folder, size))
            compare("1,000 classes", network, batches, size, *test, options.draws)
        return
    train, _ = load_cifar10("train", options.folder)
    images, labels = load_cifar10("test", options.folder, options.images)
    for depth in options.depths:
        network = cifar_resnet(depth, data_file(f"weights/resnet{depth}_cifar10_akamaster.safetensors", options.folder))
        for size in options.sizes:
            batches = augmented_batches(train, size)
            compare(f"ResNet-{depth}", network, batches, size, standardise(images), labels, options.draws)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
