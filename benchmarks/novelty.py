"""Novelty on two public CIFAR-10 networks: AUROC and FPR at 95 % over fourteen unseen sets, p-values, and cost.

    python benchmarks/novelty.py DATA_FOLDER

It fits to training images without augmentation. With pytorch-ood 0.4.0 and scikit-learn installed, its PNML, Gram, ViM,
Mahalanobis and KNN join the table, fitted to the same images and their labels. That package needs torchvision, so give
it an environment of its own.
"""

import argparse
import importlib.util
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from types import ModuleType

import torch
from batchbayes_papers.data.cifar10 import augmented_batches, load_cifar10, standardise
from batchbayes_papers.data.folder import data_file
from batchbayes_papers.models.pretrained import cifar_resnet
from torch import Tensor, nn
from unseen import CHOSEN_ON, NEAR, unseen_sets

import batchbayes as bb
from batchbayes.metrics import count_by_score
from batchbayes.tools import generator

TRAINING, CALIBRATION, TEST, CORRUPTED = 8000, slice(4000, 7000), slice(7000, 9000), slice(9000, 10000)
DRAWS = 8
Score = Callable[[Tensor], Tensor]


def in_chunks(score: Score) -> Score:
    return lambda images: torch.cat([score(chunk) for chunk in images.split(128)])


class Split(nn.Module):
    """A CIFAR residual network as layers that run one after another, and its last features, computed once for a set."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        stem = nn.Sequential(network.conv1, network.bn1, nn.ReLU())
        self.layers = nn.ModuleList([stem, network.layer1, network.layer2, network.layer3])
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), network.linear)
        self.linear = network.linear
        self._known: dict[tuple[int, int], Tensor] = {}

    def features(self, images: Tensor) -> Tensor:
        key = images.data_ptr(), len(images)
        if key not in self._known:
            body = nn.Sequential(*self.layers, *self.head[:2])
            self._known[key] = in_chunks(body)(images)
        return self._known[key]

    def logits(self, images: Tensor) -> Tensor:
        return self.linear(self.features(images))


def baselines(network: nn.Module, parts: Split, train: Tensor, augmented: Tensor) -> dict[str, Score]:
    """Return scores of our own making: entropy, mutual information, energy, nearest neighbours."""
    unit = nn.functional.normalize
    bank = unit(parts.features(train))
    posterior = bb.mcbn(network, augmented_batches(augmented, 128), num_samples=DRAWS)
    information = lambda x: bb.predict(posterior, x, bb.categorical(), num_samples=DRAWS).mutual_information  # noqa: E731
    return {
        "entropy": lambda x: torch.distributions.Categorical(logits=parts.logits(x)).entropy(),
        f"mutual information, MCBN, {DRAWS} draws": information,
        "energy": lambda x: -parts.logits(x).logsumexp(1),
        "nearest neighbours": lambda x: torch.cdist(unit(parts.features(x)), bank).topk(50, largest=False)[0][:, -1],
    }


def peers(parts: Split, train: Tensor, labels: Tensor) -> dict[str, Score]:
    """Return the detectors of pytorch-ood, if it is there."""
    if importlib.util.find_spec("pytorch_ood") is None:
        return {}
    # Skips a part of torchvision that fails beside another build of torch. The detectors do not use it.
    sys.modules["torchvision._meta_registrations"] = ModuleType("skipped")
    from pytorch_ood.detector import KNN, PNML, Gram, Mahalanobis, ViM

    on_features = {
        "PNML": PNML(None, parts.linear),
        "ViM": ViM(None, 32, parts.linear.weight, parts.linear.bias),
        "Mahalanobis": Mahalanobis(None),
        "KNN": KNN(None),
    }
    gram = Gram(parts.head, list(parts.layers), 10).to("cpu")
    gram.fit(list(zip(train.split(128), labels.split(128), strict=True)))
    scores: dict[str, Score] = {"pytorch-ood Gram": in_chunks(gram.predict)}
    for name, detector in on_features.items():
        detector.to("cpu")
        detector.fit_features(parts.features(train), labels)
        scores[f"pytorch-ood {name}"] = lambda x, detector=detector: detector.predict_features(parts.features(x))
    return scores


def rows(
    scores: dict[str, Score], known: Tensor, unseen: dict[str, Tensor]
) -> dict[str, dict[str, tuple[float, float]]]:
    """Return AUROC and FPR at 95 % by score and set."""
    table: dict[str, dict[str, tuple[float, float]]] = {}
    for name, score in scores.items():
        ordinary = score(known)
        table[name] = {}
        for other, images in unseen.items():
            both = torch.cat([ordinary, score(images)]).double()
            counts = count_by_score(both, torch.arange(len(both)) >= len(ordinary))
            table[name][other] = counts.area_under_roc(), counts.false_positive_rate_at_recall()
    return table


def show(table: dict[str, dict[str, tuple[float, float]]], which: int, title: str) -> None:
    """Print one measure for all scores and sets, with means."""
    sets = list(next(iter(table.values())))
    groups = {
        "all": sets,
        "far": [s for s in sets if s not in NEAR],
        "near": list(NEAR),
        "chosen on": list(CHOSEN_ON),
        "confirmed on": [s for s in sets if s not in CHOSEN_ON],
    }
    print(f"\n{title}\n\n| score | " + " | ".join([*groups, *sets]) + " |\n|" + "---|" * (1 + len(groups) + len(sets)))
    for name, row in table.items():
        values = [statistics.mean(row[s][which] for s in group) for group in groups.values()]
        print(f"| {name} | " + " | ".join(f"{v:.3f}" for v in [*values, *(row[s][which] for s in sets)]) + " |")


def show_levels(detectors: dict[str, bb.Novelty], known: Tensor) -> None:
    """Print the share of ordinary test images that are flagged, in standard errors from the level."""
    print("\n| p-values calibrated on | level | flagged | standard errors from the level |\n|---|---|---|---|")
    for name, detector in detectors.items():
        p_values, count = detector.p_value(known), len(detector.calibration_scores)
        for level in (0.01, 0.05, 0.1):
            flagged = float((p_values <= level).double().mean())
            error = (level * (1 - level) * (1 / len(known) + 1 / count)) ** 0.5
            print(f"| {count} {name} images | {level:.0%} | {flagged:.2%} | {(flagged - level) / error:+.1f} |")


def seconds(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def show_cost(network: nn.Module, detector: bb.Novelty, images: Tensor, repeats: int = 11) -> None:
    """Print what a report costs, in plain forward passes of the same chunks. CPU time, medians of interleaved runs."""
    chunks = images.split(85)
    plain = lambda: [network(chunk) for chunk in chunks]  # noqa: E731
    ratios = []
    for _ in range(repeats):
        before = seconds(plain)
        own = seconds(lambda: detector.report(images))
        ratios.append(2 * own / (before + seconds(plain)))
    print(f"\nA report on {len(images)} images costs {statistics.median(ratios):.2f} forward passes.")


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    folder = parser.parse_args().folder
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    images, labels = load_cifar10("train", folder)
    chosen = torch.randperm(len(images), generator=generator(0, "training images"))[:TRAINING]
    train, others = standardise(images[chosen]), load_cifar10("test", folder)[0]
    known, calibration = standardise(others[TEST]), standardise(others[CALIBRATION])
    unseen = {name: standardise(made) for name, made in unseen_sets(folder, others[CORRUPTED]).items()}
    for depth in (20, 32):
        network = cifar_resnet(depth, data_file(f"weights/resnet{depth}_cifar10_akamaster.safetensors", folder))
        detectors = {
            "held-out": bb.novelty(network, train, calibration=calibration),
            "training": bb.novelty(network, train),
        }
        scores: dict[str, Score] = {"novelty": detectors["held-out"].score}
        parts = Split(network)
        scores |= baselines(network, parts, train, images) | peers(parts, train, labels[chosen])
        print(f"\n## ResNet-{depth}")
        table = rows(scores, known, unseen)
        show(table, 0, "AUROC")
        show(table, 1, "False positive rate at 95 % recall")
        show_levels(detectors, known)
        show_cost(network, detectors["held-out"], known[:510])


if __name__ == "__main__":
    main()
