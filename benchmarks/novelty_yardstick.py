"""Novelty on far sets, on near sets, and on near images that took no part in any choice, beside its peers.

    python benchmarks/novelty_yardstick.py DATA_FOLDER KEEP_FOLDER [--depth 20] [--depth 32]

The unseen near set: images of the ImageNet sample at 32 pixels whose classes are not among those of CIFAR-10 (the rule
is in `seen.unlike_cifar10`). Settings were chosen on ResNet-20 without it; ResNet-32 reports. With pytorch-ood 0.4.0
installed, its detectors join, fitted to the same 8,000 training images. What one pass shows of the images is kept in
KEEP_FOLDER.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from batchbayes_papers.data.cifar10 import load_cifar10, standardise
from batchbayes_papers.data.folder import data_file
from batchbayes_papers.models.pretrained import cifar_resnet
from seen import (
    Seen,
    aurocs,
    baselines,
    imagenet_sample,
    kept,
    novelty_score,
    peers,
    see,
    table,
    unlike_cifar10,
    watched,
)
from torch import Tensor
from unseen import NEAR, unseen_sets

from batchbayes.novelty.scores import conformal_p_value
from batchbayes.tools import generator

IMAGENET = "ImageNet sample"


def image_sets(folder: str) -> dict[str, Tensor]:
    """Return training, test and unseen images as bytes, by name."""
    images, others = load_cifar10("train", folder)[0], load_cifar10("test", folder)[0]
    chosen = torch.randperm(len(images), generator=generator(0, "training images"))[:8000]
    sample, names = imagenet_sample(folder)
    small = F.interpolate(sample.float(), size=(32, 32), mode="bilinear", antialias=True, align_corners=False)
    small = small.round().clamp(0, 255).byte()[unlike_cifar10(names)]
    known = {"train": images[chosen], "test": others[7000:9000]}
    return known | unseen_sets(folder, others[9000:10000]) | {IMAGENET: small}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("keep", type=Path)
    parser.add_argument("--depth", type=int, action="append")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    images, labels = load_cifar10("train", options.folder)
    labels = labels[torch.randperm(len(images), generator=generator(0, "training images"))[:8000]]
    sets = image_sets(options.folder)
    for depth in options.depth or (20, 32):
        weights = data_file(f"weights/resnet{depth}_cifar10_akamaster.safetensors", options.folder)
        network = cifar_resnet(depth, weights)
        sight = watched(network, standardise(images[:64]))

        def make(name: str, sight=sight) -> Seen:
            return see(sight, map(standardise, sets[name].split(85)))

        seen = kept(options.keep / f"resnet{depth}", sets, make)
        train, known = seen.pop("train"), seen.pop("test")
        scores = {"novelty": novelty_score(sight, train)} | baselines(train) | peers(network.linear, train, labels)
        far = [name for name in seen if name not in (*NEAR, IMAGENET)]
        print(f"\n## ResNet-{depth}\n")
        groups = {"far": far, "near": [*NEAR, IMAGENET]}
        table({name: aurocs(score, known, seen) for name, score in scores.items()}, groups)
        half, others = (scores["novelty"](known.rows(part)) for part in (slice(1000), slice(1000, None)))
        flagged = (conformal_p_value(half, others) <= 0.05).double().mean()
        print(
            f"\nFlagged at 5 %: {flagged:.3f} of {len(others)} test images, calibrated on {len(half)} others.",
            flush=True,
        )


if __name__ == "__main__":
    main()
