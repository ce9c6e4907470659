"""How near the linear engine and the Gaussian posteriors come to exact MCBN, on public CIFAR-10 networks.

    python benchmarks/linear_accuracy.py DATA_FOLDER > docs/results/linear-accuracy.md

Statistics from training images with the training-time transforms; 500 test images; 256 exact draws.
"""

import argparse
from dataclasses import replace

import torch

import batchbayes as bb
from batchbayes.data.cifar10 import augmented_batches, load_cifar10, standardise
from batchbayes.data.folder import data_file
from batchbayes.metrics import rank_correlation
from batchbayes.models.pretrained import cifar_resnet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--draws", type=int, default=256)
    options = parser.parse_args()
    train, _ = load_cifar10("train", options.folder)
    images = standardise(load_cifar10("test", options.folder, options.images)[0])
    print("| network | M | method, engine | rank corr. variance | rank corr. MI | mean MI | MI / exact |")
    print("|---|---|---|---|---|---|---|")
    for depth in (20, 32):
        network = cifar_resnet(depth, data_file(f"weights/resnet{depth}_cifar10_akamaster.safetensors", options.folder))
        for size in (128, 32):
            mcbn = bb.mcbn(network, augmented_batches(train, size), num_samples=options.draws, center="running")
            std = mcbn.noise_variance().sqrt()[None]
            cases = [  # the Gaussians are those of bb.stochastic_bn, from the same rows
                ("MCBN, exact", mcbn, "sample"),
                ("MCBN, linear", mcbn, "linear"),
                ("correlated, linear", replace(mcbn, noise="correlated"), "linear"),
                ("factorised, linear", replace(mcbn, noise="factorised", deviations=std, influence=None), "linear"),
            ]
            exact = None
            for name, posterior, engine in cases:
                predictive = bb.predict(
                    posterior, images, bb.categorical(), num_samples=options.draws, engine=engine, keep_draws=True
                )
                exact = exact or predictive
                variance, truth = (p.draws.var(0).mean(-1) for p in (predictive, exact))
                information = predictive.mutual_information
                mean = float(information.mean())
                print(
                    f"| ResNet-{depth} | {size} | {name} | {rank_correlation(variance, truth):.4f} | "
                    f"{rank_correlation(information, exact.mutual_information):.4f} | {mean:.5f} | "
                    f"{mean / float(exact.mutual_information.mean()):.3f} |",
                    flush=True,
                )


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
