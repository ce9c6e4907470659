"""A temperature that grows with novelty, under shift: what a cheap second look at the input is worth.

    python benchmarks/view_novelty.py DATA_FOLDER --cache CACHE_FOLDER --depth 20

It uses the outputs that `views.py` has kept in the cache folder. The temperature of an input with novelty score s is
T max(1, s / q), where T is the one of all inputs and q the 95 % quantile of the score on calibration images. So it is T
for ordinary inputs, and no number is tuned.
"""

import argparse
from pathlib import Path

import torch
from batchbayes_papers.data.cifar10 import load_cifar10, standardise
from batchbayes_papers.data.folder import data_file
from batchbayes_papers.models.pretrained import cifar_resnet
from safetensors.torch import load_file
from torch import Tensor
from views import AVERAGED, FURTHER, NETWORK, PLAIN_VIEWS, compared, image_sets, predictive

import batchbayes as bb

TRAINING, LEVEL = 3000, 0.95


def losses(draws: Tensor, labels: Tensor, temperatures: Tensor) -> Tensor:
    """NLL of each image (N,) by draws (S, N, K), with a temperature for each image."""
    return -predictive(draws.double() / temperatures.double()[:, None]).log_prob(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--depth", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    images, labels = image_sets(options.folder)
    names = [name for name in images if name not in ("calibration", FURTHER)]
    kept = {
        m: load_file(options.cache / f"resnet{options.depth}-{m.replace(' ', '_')}.safetensors")
        for m in (NETWORK, PLAIN_VIEWS)
    }
    averaged = {name: kept[PLAIN_VIEWS][name].unflatten(0, (-1, AVERAGED)).mean(1) for name in kept[PLAIN_VIEWS]}
    scaled = bb.calibrate.tune_temperature(predictive(kept[NETWORK]["calibration"]), labels["calibration"])
    agreed = bb.calibrate.agreement_temperature(predictive(kept[PLAIN_VIEWS]["calibration"]), average=AVERAGED)

    network = cifar_resnet(
        options.depth, data_file(f"weights/resnet{options.depth}_cifar10_akamaster.safetensors", options.folder)
    )
    train = standardise(load_cifar10("train", options.folder, TRAINING)[0])
    detector = bb.novelty(network, train, calibration=standardise(images["calibration"]))
    usual = detector.calibration_scores.quantile(LEVEL)

    found: dict[str, dict[str, Tensor]] = {"temperature scaling": {}, "views": {}, "views, novelty": {}}
    for name in names:
        same = torch.ones(len(images[name]))
        growth = (detector.score(standardise(images[name])) / usual).clamp(min=1)
        found["temperature scaling"][name] = losses(kept[NETWORK][name], labels[name], scaled * same)
        found["views"][name] = losses(averaged[name], labels[name], agreed * same)
        found["views, novelty"][name] = losses(averaged[name], labels[name], agreed * growth)
    print(f"| ResNet-{options.depth} | {' | '.join(names)} | mean of shifts | change to temperature scaling |")
    print("|---" * (len(names) + 3) + "|")
    base = torch.stack([found["temperature scaling"][name] for name in names[1:]]).mean(0)
    for method, by_set in found.items():
        mean = torch.stack([by_set[name] for name in names[1:]]).mean(0)
        cells = [f"{float(by_set[name].mean()):.3f}" for name in names]
        print(f"| {method} | {' | '.join(cells)} | {float(mean.mean()):.3f} | {compared(mean - base, base)} |")


if __name__ == "__main__":
    main()
