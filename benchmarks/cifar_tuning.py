"""The batch size tuned after training against temperature scaling, on a public CIFAR-10 network, clean and shifted.

    python benchmarks/cifar_tuning.py DATA_FOLDER --depth 20 > docs/results/cifar-tuning-20.md

Statistics from training images with the training-time transforms, centred on the running statistics. M and T are
chosen on the first 2,000 test images and measured on the other 8,000; the ELBO uses 2,000 training images. Jacobians
of the linear engine are computed once for each set of images, and serve for every row of the table.
"""

import argparse
import math

import torch
from batchbayes_papers.data.cifar10 import augmented_batches, crop_and_flip, load_cifar10, load_svhn, standardise
from batchbayes_papers.data.folder import data_file
from batchbayes_papers.models.pretrained import cifar_resnet
from torch import Tensor

import batchbayes as bb
from batchbayes._common.tune import tune
from batchbayes.methods.batchnorm.tuning_family import LinearFamily, linear_family
from batchbayes.metrics import accuracy, expected_calibration_error, ood_auroc
from batchbayes.tools import generator

TRAINING_BATCH_SIZE, WEIGHT_DECAY, TRAINING_IMAGES = 128, 1e-4, 50_000
NO_NOISE = math.inf


def corrupted(images: Tensor, kind: str, strength: int) -> Tensor:
    """Bytes -> bytes: Gaussian noise, Gaussian blur or loss of contrast, at strength 1 to 3."""
    values = images.float()
    if kind == "noise":
        values = values + (8.0, 16.0, 28.0)[strength - 1] * torch.randn(values.shape, generator=generator(0, kind))
    elif kind == "blur":
        sigma = (0.5, 0.8, 1.1)[strength - 1]
        line = torch.exp(-0.5 * (torch.arange(-3, 4) / sigma) ** 2)
        kernel = (line[:, None] * line / line.sum() ** 2).expand(3, 1, 7, 7)
        values = torch.nn.functional.conv2d(torch.nn.functional.pad(values, [3] * 4, "replicate"), kernel, groups=3)
    elif kind == "contrast":
        middle = values.mean((1, 2, 3), keepdim=True)
        values = middle + (0.6, 0.4, 0.2)[strength - 1] * (values - middle)
    return values.round().clamp(0, 255).byte()


def summary(family: LinearFamily, batch_size: float, temperature: float):
    """The predictive of a family at a batch size (infinite: without noise) and a temperature."""
    running = bb.categorical().summary()
    size = 1e12 if batch_size == NO_NOISE else batch_size
    draws = family.outputs(torch.tensor([math.log(size)])) / temperature
    running.add(draws[:1] if batch_size == NO_NOISE else draws)
    return running.finish(None)


def nll(family: LinearFamily, batch_size: float, temperature: float) -> float:
    return -float(summary(family, batch_size, temperature).log_prob(family.targets).mean())


def best_temperature(family: LinearFamily, batch_size: float) -> float:
    def cost(log_temperature: float) -> float:
        return nll(family, batch_size, math.exp(log_temperature))

    return tune(cost, math.log(0.5), math.log(5.0), grid=0, steps=12).value


def jointly(family: LinearFamily) -> tuple[float, float]:
    """The batch size and the temperature that are best together."""

    def cost(log_size: float) -> float:
        size = math.exp(log_size)
        return nll(family, size, best_temperature(family, size))

    size = tune(cost, math.log(4.0), math.log(4096.0), grid=0, steps=12).value
    return size, best_temperature(family, size)


def measures(known: LinearFamily, unseen: LinearFamily | None, batch_size: float, temperature: float) -> list[str]:
    """Accuracy, NLL, ECE, and AUROC of entropy and of mutual information."""
    seen = summary(known, batch_size, temperature)
    ece = expected_calibration_error(seen.probs, known.targets)
    cells = [f"{accuracy(seen.probs, known.targets):.4f}", f"{-float(seen.log_prob(known.targets).mean()):.4f}"]
    cells.append(f"{ece:.4f}")
    if unseen is not None:
        other = summary(unseen, batch_size, temperature)
        for name in ("entropy", "mutual_information"):
            blank = name == "mutual_information" and batch_size == NO_NOISE
            cells.append("" if blank else f"{ood_auroc(getattr(seen, name), getattr(other, name)):.4f}")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--depth", type=int, default=20)
    parser.add_argument("--shifted", type=int, default=500, help="images of each corruption")
    options = parser.parse_args()
    train, train_labels = load_cifar10("train", options.folder)
    test, labels = load_cifar10("test", options.folder)
    weights = data_file(f"weights/resnet{options.depth}_cifar10_akamaster.safetensors", options.folder)
    network = cifar_resnet(options.depth, weights)
    posterior = bb.mcbn(network, augmented_batches(train, TRAINING_BATCH_SIZE), num_samples=64, center="running")

    def family(images: Tensor, targets: Tensor) -> LinearFamily:
        one = torch.zeros(posterior.center.numel(), dtype=torch.long)
        return linear_family(posterior, [(standardise(images), targets)], one, num_samples=64, seed=0)

    held_out = [(standardise(test[:2000]), labels[:2000])]
    tuned = bb.tune_batch_size(posterior, held_out, bb.categorical())
    trained_on = standardise(crop_and_flip(train[:2000], generator(0, "elbo"))), train_labels[:2000]
    elbo = bb.tune_batch_size(
        posterior,
        [trained_on],
        bb.categorical(),
        objective="elbo",
        num_examples=TRAINING_IMAGES,
        weight_decay=WEIGHT_DECAY,
    )
    choice = family(test[:2000], labels[:2000])
    joint_size, joint_temperature = jointly(choice)
    rows = {
        "deterministic": (NO_NOISE, 1.0),
        "temperature scaling": (NO_NOISE, best_temperature(choice, NO_NOISE)),
        f"MCBN, M={TRAINING_BATCH_SIZE} of training": (float(TRAINING_BATCH_SIZE), 1.0),
        "MCBN, M tuned on held-out images": (tuned.batch_size, 1.0),
        "MCBN, M tuned by the ELBO": (elbo.batch_size, 1.0),
        "MCBN, M and T tuned together": (joint_size, joint_temperature),
    }
    known, unseen = family(test[2000:], labels[2000:]), load_svhn(options.folder, 2000)
    other = family(unseen, torch.zeros(len(unseen), dtype=torch.long))
    print(f"ResNet-{options.depth}, 8,000 clean images, SVHN as the unseen\n")
    print("| method | M | T | accuracy | NLL | ECE | AUROC entropy | AUROC MI |\n|---|---|---|---|---|---|---|---|")
    for name, (size, temperature) in rows.items():
        cells = measures(known, other, size, temperature)
        print(f"| {name} | {size:.1f} | {temperature:.2f} | {' | '.join(cells)} |", flush=True)
    print(f"\nNLL / ECE under shift, {options.shifted} images each; M and T as chosen on clean images\n")
    print("| method | " + " | ".join(f"{k} {s}" for k in ("noise", "blur", "contrast") for s in (1, 2, 3)) + " |")
    print("|---" * 10 + "|")
    shifted = [
        family(corrupted(test[2000 : 2000 + options.shifted], kind, s), labels[2000 : 2000 + options.shifted])
        for kind in ("noise", "blur", "contrast")
        for s in (1, 2, 3)
    ]
    for name, (size, temperature) in rows.items():
        cells = [measures(each, None, size, temperature) for each in shifted]
        print(f"| {name} | " + " | ".join(f"{c[1]} / {c[2]}" for c in cells) + " |", flush=True)
    print("\n| accuracy | " + " | ".join(measures(each, None, NO_NOISE, 1.0)[0] for each in shifted) + " |")


if __name__ == "__main__":
    main()
