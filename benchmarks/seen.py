"""What the benchmarks of novelty share: what one pass shows of images, scores from it, and the ImageNet sample.

A pass over many images takes minutes, and every detector can be computed from what it shows. So it is kept in files,
and a run that was stopped goes on where it was.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from batchbayes_papers.data.folder import data_file, read_mosaic
from torch import Tensor, nn

from batchbayes.metrics import ood_auroc
from batchbayes.network.function import as_network
from batchbayes.novelty.detector import _fitted, _split
from batchbayes.novelty.scores import generalised_entropy, surprise
from batchbayes.novelty.statistics import Sight, watch_any

Score = Callable[["Seen"], Tensor]


class Seen(NamedTuple):
    """What one pass shows of N images."""

    statistics: Tensor
    """As `Sight` returns them, (N, D)."""
    logits: Tensor
    """(N, K)"""
    features: Tensor
    """What the last layer gets, (N, F)."""

    def rows(self, which: Tensor | slice) -> "Seen":
        return Seen(*(part[which] for part in self))


def watched(network: nn.Module, examples: Tensor) -> Sight:
    return watch_any(as_network(network), examples, None)


@torch.no_grad()
def see(sight: Sight, batches: Iterable[Tensor]) -> Seen:
    """Run the network once on inputs. Its last features are among the statistics, in units of their usual spread."""
    found = [sight(inputs) for inputs in batches]
    statistics, logits = (torch.cat(column) for column in zip(*found, strict=True))
    mean, std = sight.units[:, -sight.num_features :]
    return Seen(statistics, logits.float(), statistics[:, -sight.num_features :] * std + mean)


def kept(folder: Path, sets: Iterable[str], make: Callable[[str], Seen]) -> dict[str, Seen]:
    """Return what the files of a folder hold, one for each set. A file that is missing is made and written."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for name in sets:
        path = folder / f"{name}.pt"
        if not path.exists():
            torch.save(tuple(make(name)), folder / "unfinished")
            (folder / "unfinished").rename(path)
        found[name] = Seen(*torch.load(path, mmap=True))
    return found


def novelty_score(sight: Sight, train: Seen) -> Score:
    """Return the score of `bb.novelty` with calibration data, fitted to training examples that were seen already."""
    fit, ordinary, _ = _split(len(train.logits), True, 0)
    detector, _ = _fitted(sight, train.statistics[fit], train.logits[fit].double(), True)

    def parts(seen: Seen) -> Tensor:
        return detector.parts(seen.statistics, seen.logits.double())[0]

    usual = parts(train.rows(ordinary))
    return lambda seen: detector.sum_of(surprise(usual, parts(seen)))


def baselines(train: Seen) -> dict[str, Score]:
    """Return scores of our own making, from logits and last features."""
    unit = partial(nn.functional.normalize, dim=1)
    bank, centre = unit(train.features), train.features.mean(0)
    classes = train.logits.argmax(1)
    means = {int(k): train.features[classes == k].mean(0) for k in classes.unique()}
    inside = train.features - torch.stack([means[int(k)] for k in classes])
    shape = torch.cov(inside.T) + 1e-3 * train.features.var(0).mean() * torch.eye(inside.shape[1])
    precision, known = torch.linalg.inv(shape.double()).float(), torch.stack(list(means.values())) - centre

    def mahalanobis(seen: Seen) -> Tensor:
        x = seen.features - centre
        return ((x @ precision) * x).sum(1) + (((known @ precision) * known).sum(1) - 2 * x @ precision @ known.T).min(
            1
        ).values

    k = min(50, len(bank) // 10)
    return {
        "maximum probability": lambda seen: -seen.logits.double().softmax(1).amax(1),
        "energy": lambda seen: -seen.logits.double().logsumexp(1),
        "generalised entropy": lambda seen: generalised_entropy(seen.logits.double()),
        "nearest neighbours": lambda seen: -(unit(seen.features) @ bank.T).topk(k, 1).values[:, -1],
        "Mahalanobis, last features": mahalanobis,
    }


def peers(last: nn.Linear, train: Seen, labels: Tensor) -> dict[str, Score]:
    """Return the detectors of pytorch-ood that work on last features or logits, if it is there."""
    if importlib.util.find_spec("pytorch_ood") is None:
        return {}
    # Skips a part of torchvision that fails beside another build of torch. The detectors do not use it.
    sys.modules["torchvision._meta_registrations"] = ModuleType("skipped")
    from pytorch_ood.detector import ASH, GEN, KNN, EnergyBased, MaxSoftmax, ReAct, ViM

    head = nn.Sequential(nn.Flatten(), last)
    kinds = {"KNN": KNN(None), "ViM": ViM(None, 32, last.weight, last.bias)}
    for detector in kinds.values():
        detector.to("cpu")
        detector.fit_features(train.features, labels)
    found: dict[str, Score] = {
        name: lambda seen, detector=detector: detector.predict_features(seen.features)
        for name, detector in kinds.items()
    }
    maps = lambda seen: seen.features[:, :, None, None]  # noqa: E731
    threshold = float(train.features.flatten()[:: max(1, train.features.numel() // 10**6)].quantile(0.9))
    react = ReAct(nn.Identity(), head, threshold=threshold)
    ash = ASH(nn.Identity(), head, percentile=0.65)
    found["ReAct"] = lambda seen: react.predict(maps(seen))
    found["ASH"] = lambda seen: ash.predict(maps(seen))
    for name, kind in (("MSP", MaxSoftmax), ("energy", EnergyBased), ("GEN", GEN)):
        found[name] = lambda seen, kind=kind: kind.score(seen.logits)
    return {f"pytorch-ood {name}": score for name, score in found.items()}


def aurocs(score: Score, known: Seen, unseen: dict[str, Seen]) -> dict[str, float]:
    ordinary = score(known).double()
    return {name: float(ood_auroc(ordinary, score(seen).double())) for name, seen in unseen.items()}


def table(rows: dict[str, dict[str, float]], groups: dict[str, list[str]]) -> None:
    """Print AUROC by score, first the means of groups of sets."""
    sets = list(next(iter(rows.values())))
    print("| AUROC | " + " | ".join([*groups, *sets]) + " |\n|" + "---|" * (1 + len(groups) + len(sets)))
    for name, row in rows.items():
        means = [sum(row[each] for each in group) / len(group) for group in groups.values()]
        print(f"| {name} | " + " | ".join(f"{value:.3f}" for value in [*means, *row.values()]) + " |", flush=True)


def imagenet_sample(folder: str) -> tuple[Tensor, list[str]]:
    """Load one image of each of the 1,000 classes, bytes (1000, 3, 224, 224), and the names of the classes."""
    images = torch.from_numpy(read_mosaic(data_file("imagenet_sample/images_224.webp", folder), 224, 224))
    lines = data_file("imagenet_sample/classes.txt", folder).read_text().split()
    return images[:1000], [line.partition("_")[2] for line in lines]


ANIMALS = (
    *range(7, 25),
    *range(80, 101),
    *range(127, 147),
    *range(30, 33),
    *range(151, 276),
    *range(281, 294),
    339,
    340,
)
ANTELOPES = (351, 352, 353)
VEHICLES = (
    "airliner", "warplane", "wing", "airship", "ambulance", "beach_wagon", "cab", "convertible", "jeep",
    "limousine", "minibus", "minivan", "Model_T", "racer", "sports_car", "go-kart", "golfcart", "grille",
    "car_wheel", "moving_van", "pickup", "police_van", "recreational_vehicle", "school_bus", "tow_truck",
    "trailer_truck", "fire_engine", "garbage_truck", "trolleybus", "snowplow", "tank", "half_track", "mobile_home",
    "tractor", "amphibian", "aircraft_carrier", "canoe", "catamaran", "container_ship", "fireboat", "gondola",
    "lifeboat", "liner", "pirate", "schooner", "speedboat", "submarine", "trimaran", "yawl", "wreck", "dock",
    "boathouse", "horse_cart", "passenger_car", "streetcar",
)  # fmt: skip


def unlike_cifar10(names: list[str]) -> Tensor:
    """Return the numbers of the classes of ImageNet that are not among those of CIFAR-10.

    The rule: all birds, frogs, dogs and wolves, cats of all sizes, horses and zebras, antelopes (for deer), and all
    aircraft, boats and road vehicles, with their parts, are left out.
    """
    left_out = {*ANIMALS, *ANTELOPES, *(number for number, name in enumerate(names) if name in VEHICLES)}
    return torch.tensor([number for number in range(len(names)) if number not in left_out])
