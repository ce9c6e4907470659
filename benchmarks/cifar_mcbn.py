"""MCBN on two public CIFAR-10 networks: accuracy, NLL, ECE and detection of SVHN, at two batch sizes and two centres.

    python benchmarks/cifar_mcbn.py DATA_FOLDER > docs/results/cifar-mcbn.md

The statistics come from training images with the random crop and flip that these networks were trained with.
"""

import argparse

from batchbayes_papers.data.cifar10 import augmented_batches, load_cifar10, load_svhn, standardise
from batchbayes_papers.data.folder import data_file
from batchbayes_papers.models.pretrained import cifar_resnet

import batchbayes as bb
from batchbayes.metrics import accuracy, expected_calibration_error, ood_auroc


def row(name: str, posterior: bb.Posterior, test, labels, unseen, draws: int) -> str:
    """One line of the table."""
    known = bb.predict(posterior, test, bb.categorical(), num_samples=draws)
    other = bb.predict(posterior, unseen, bb.categorical(), num_samples=draws)

    def auroc(score: str) -> float:
        return ood_auroc(getattr(known, score), getattr(other, score))

    ece = expected_calibration_error(known.probs, labels)
    nll = -known.log_prob(labels).mean()
    information = "" if draws == 1 else f"{auroc('mutual_information'):.4f}"
    return (
        f"| {name} | {accuracy(known.probs, labels):.4f} | {nll:.4f} | {ece:.4f} | {auroc('entropy'):.4f} "
        f"| {information} | {known.mutual_information.mean():.4f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--draws", type=int, default=32)
    arguments = parser.parse_args()
    train, _ = load_cifar10("train", arguments.folder)
    test, labels = load_cifar10("test", arguments.folder, arguments.images)
    test, unseen = standardise(test), standardise(load_svhn(arguments.folder, arguments.images))
    print(f"{arguments.images} CIFAR-10 test images, {len(unseen)} SVHN images, {arguments.draws} draws\n")
    print("| network, method | accuracy | NLL | ECE | AUROC entropy | AUROC MI | mean MI |")
    print("|---|---|---|---|---|---|---|")
    for depth in (20, 32):
        weights = data_file(f"weights/resnet{depth}_cifar10_akamaster.safetensors", arguments.folder)
        network = cifar_resnet(depth, weights)
        print(row(f"ResNet-{depth} deterministic", bb.deterministic(network), test, labels, unseen, 1), flush=True)
        for batch_size in (128, 32):
            for center in ("batches", "running"):
                batches = augmented_batches(train, batch_size, seed=0)
                posterior = bb.mcbn(network, batches, num_samples=arguments.draws, center=center)
                name = f"ResNet-{depth} MCBN M={batch_size} centre {center}"
                print(row(name, posterior, test, labels, unseen, arguments.draws), flush=True)


if __name__ == "__main__":
    main()
