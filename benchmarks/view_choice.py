"""How to choose views: independent, spread evenly, or searched on calibration data, at equal cost.

    python benchmarks/view_choice.py DATA_FOLDER --cache CACHE_FOLDER

All 162 crops (9 x 9 offsets) and flips of 3,000 CIFAR-10 test images go through a public ResNet-20 once. Sets of views
are then combined from these outputs: 1,000 images for the search and for the temperature, 2,000 for the test.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from batchbayes_papers.data.cifar10 import load_cifar10, standardise
from batchbayes_papers.data.folder import data_file
from batchbayes_papers.models.pretrained import cifar_resnet
from safetensors.torch import load_file, save_file
from torch import Tensor
from views import BLACK, VIEWS, predictive

import batchbayes as bb
from batchbayes._common.rng import even_numbers
from batchbayes.metrics import accuracy
from batchbayes.tools import generator

OFFSETS, SEEDS, CALIBRATION, TEST = 9, 20, 1000, 2000


@torch.inference_mode()
def all_outputs(folder: str, cache: Path) -> Tensor:
    """Outputs (162, N, K), by flip and then by offset."""
    path = cache / "resnet20-all-views.safetensors"
    if path.exists():
        return load_file(path)["outputs"]
    images = standardise(load_cifar10("test", folder, CALIBRATION + TEST)[0])
    network = cifar_resnet(20, data_file("weights/resnet20_cifar10_akamaster.safetensors", folder)).eval()
    crop, found = bb.RandomCrop(padding=4, fill=BLACK), []
    for number in range(2 * OFFSETS**2):
        place = torch.tensor([number // OFFSETS % OFFSETS, number % OFFSETS])
        view = crop.apply(images, (place + 0.5) / OFFSETS)
        view = view.flip(-1) if number >= OFFSETS**2 else view
        found.append(torch.cat([network(chunk) for chunk in view.split(100)]))
    save_file({"outputs": torch.stack(found)}, path)
    return torch.stack(found)


def view_number(numbers: Tensor) -> int:
    """Return which of the 162 views uniform numbers (3,) of `VIEWS` stand for."""
    top, left, flip = numbers.tolist()
    return OFFSETS**2 * (flip < 0.5) + OFFSETS * int(top * OFFSETS) + int(left * OFFSETS)


def independent(count: int, seed: int) -> list[int]:
    random = generator(seed, "independent views")
    return [view_number(torch.rand(VIEWS.size, generator=random)) for _ in range(count)]


def spread(count: int, seed: int) -> list[int]:
    """The views of `with_views`."""
    return [view_number(even_numbers(seed, index, VIEWS.size)) for index in range(count)]


def searched(outputs: Tensor, labels: Tensor, count: int) -> list[int]:
    """Add, again and again, the view with which the mean probability of the labels is best; each view once."""
    given = outputs.softmax(-1).gather(-1, labels[None, :, None].expand(len(outputs), -1, 1))[..., 0]  # (162, N)
    chosen: list[int] = []
    for _ in range(count):
        scores = (given[chosen].sum(0) + given).log().mean(1)
        scores[chosen] = -math.inf
        chosen.append(int(scores.argmax()))
    return chosen


def row(name: str, sets: Sequence[list[int]], outputs: Tensor, labels: Tensor) -> str:
    """NLL with T = 1 and with T tuned, and accuracy: mean and standard deviation over sets of views."""
    found = []
    for views in sets:
        held_out, test = outputs[views, :CALIBRATION], outputs[views, CALIBRATION:]
        temperature = bb.calibrate.tune_temperature(predictive(held_out), labels[:CALIBRATION])
        truth, plain = labels[CALIBRATION:], predictive(test)
        tuned = predictive(test, temperature)
        found.append([-plain.log_prob(truth).mean(), -tuned.log_prob(truth).mean(), accuracy(plain.probs, truth)])
    columns = torch.tensor(found).T
    cells = [f"{float(c.mean()):.4f}" + (f" ± {float(c.std()):.4f}" if len(c) > 1 else "") for c in columns]
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--cache", type=Path, required=True)
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    outputs = all_outputs(options.folder, options.cache)
    labels = load_cifar10("test", options.folder, CALIBRATION + TEST)[1]
    print("| views | NLL | NLL with T | accuracy |\n|---|---|---|---|")
    for count in (4, 8, 16, 32):
        for name, choose in (("independent", independent), ("spread evenly", spread)):
            sets = [choose(count, seed) for seed in range(SEEDS)]
            print(row(f"{count} {name}", sets, outputs, labels), flush=True)
        found = searched(outputs[:, :CALIBRATION], labels[:CALIBRATION], count)
        print(row(f"{count} searched", [found], outputs, labels), flush=True)
    print(row("all 162", [list(range(len(outputs)))], outputs, labels))


if __name__ == "__main__":
    main()
