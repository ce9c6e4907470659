"""Views of the input against temperature scaling, on public CIFAR-10 networks, clean and shifted.

    python benchmarks/views.py DATA_FOLDER --cache CACHE_FOLDER > table.md

The crop and flip of training make the views. 1,000 test images serve for calibration, 2,000 others for the test. Each
of nine shifts has 300 of these. Outputs of each method are computed once, by exact draws, and kept in the cache folder.
A run that was interrupted goes on from there. All rows are combined from these outputs.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from batchbayes_papers.data.cifar10 import augmented_batches, load_cifar10, standardise
from batchbayes_papers.data.folder import data_file
from batchbayes_papers.models.pretrained import cifar_resnet
from cifar_tuning import corrupted
from safetensors.torch import load_file, save_file
from torch import Tensor

import batchbayes as bb
from batchbayes.metrics import accuracy, expected_calibration_error

DRAWS, CALIBRATION, TEST, SHIFTED, SMALL_BATCH, AVERAGED = 16, 1000, 2000, 300, 24, 4
SHIFTS = [(kind, strength) for kind in ("noise", "blur", "contrast") for strength in (1, 2, 3)]
BLACK = tuple(standardise(torch.zeros(1, 3, 1, 1, dtype=torch.uint8)).flatten().tolist())
VIEWS = bb.Compose(bb.RandomCrop(padding=4, fill=BLACK), bb.RandomFlip())
FURTHER = "further"
NETWORK, FLIP, PLAIN_VIEWS = "network", "flip, 2 passes", f"{DRAWS} views"
TRAINED, SMALL = f"MCBN M=128, {DRAWS} views", f"MCBN M={SMALL_BATCH}, {DRAWS} views"

Outputs = dict[str, dict[str, Tensor]]
"""Outputs (S, N, K) by method and set of images."""


def posteriors(depth: int, folder: str) -> dict[str, tuple[bb.Posterior, int]]:
    """Each method and its number of draws."""
    network = cifar_resnet(depth, data_file(f"weights/resnet{depth}_cifar10_akamaster.safetensors", folder))
    train, _ = load_cifar10("train", folder)
    mcbn = bb.mcbn(network, augmented_batches(train, 128), num_samples=64, center="running")
    point = bb.deterministic(network)
    return {
        NETWORK: (point, 1),
        FLIP: (bb.with_views(point, bb.RandomFlip()), 2),
        PLAIN_VIEWS: (bb.with_views(point, VIEWS), DRAWS),
        TRAINED: (bb.with_views(mcbn, VIEWS), DRAWS),
        SMALL: (bb.with_views(mcbn.at_batch_size(SMALL_BATCH), VIEWS), DRAWS),
    }


def image_sets(folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Images and labels by set: calibration, test, further test images, and each shift of the first test images."""
    images, labels = (
        each.split([CALIBRATION, TEST, TEST]) for each in load_cifar10("test", folder, CALIBRATION + 2 * TEST)
    )
    shifted = {f"{kind} {strength}": corrupted(images[1][:SHIFTED], kind, strength) for kind, strength in SHIFTS}
    names = ("calibration", "test", FURTHER)
    return dict(zip(names, images, strict=True)) | shifted, dict(zip(names, labels, strict=True)) | dict.fromkeys(
        shifted, labels[1][:SHIFTED]
    )


def all_outputs(depth: int, folder: str, cache: Path) -> Outputs:
    """Outputs of every method on every set, from the cache where they are there."""
    fitted = posteriors(depth, folder)
    paths = {method: cache / f"resnet{depth}-{method.replace(' ', '_')}.safetensors" for method in fitted}
    found = {method: load_file(path) if path.exists() else {} for method, path in paths.items()}
    for name, images in image_sets(folder)[0].items():
        for method, (posterior, draws) in fitted.items():
            known = found[method]
            done = known[name].shape[1] if name in known else 0
            is_wanted = name != FURTHER or method in (NETWORK, PLAIN_VIEWS)
            if is_wanted and done < len(images):
                rest = standardise(images[done:])
                kept = bb.predict(posterior, rest, bb.categorical(), num_samples=draws, keep_draws=True).draws
                known[name] = torch.cat([known[name], kept], 1) if done else kept.contiguous()
                save_file(known, paths[method])
    return found


@dataclass(frozen=True)
class Row:
    """A method, how many views each draw averages, and a temperature: 1, set without labels, or tuned with labels."""

    method: str
    average: int
    temperature: float
    source: str

    def of(self, draws: Tensor) -> bb.CategoricalPredictive:
        return predictive(draws.unflatten(0, (-1, self.average)).mean(1), self.temperature)

    def losses(self, draws: Tensor, labels: Tensor) -> Tensor:
        return -self.of(draws).log_prob(labels)

    def __str__(self) -> str:
        name = f"{self.method}, {self.average} averaged" if self.average > 1 else self.method
        is_base = self.method == NETWORK and self.source == "labels"
        return f"{'**temperature scaling**' if is_base else name} | {self.source} | {self.temperature:.2f}"


def predictive(draws: Tensor, temperature: float = 1.0) -> bb.CategoricalPredictive:
    running = bb.categorical(temperature=temperature).summary()
    running.add(draws)
    return running.finish(draws)


def all_rows(outputs: Outputs, labels: Tensor) -> list[Row]:
    """The rows of both tables: nothing tuned, temperatures without labels, temperatures with labels."""
    held_out = {method: sets["calibration"] for method, sets in outputs.items()}
    pairs = [(PLAIN_VIEWS, 1), *((method, AVERAGED) for method in (PLAIN_VIEWS, TRAINED, SMALL))]
    rows = [Row(method, 1, 1.0, "none") for method in outputs]
    for method, average in pairs:
        found = bb.calibrate.agreement_temperature(predictive(held_out[method]), average=average)
        rows.append(Row(method, average, found, "no labels"))
    for method, average in [(method, 1) for method in outputs] + pairs[1:]:
        means = held_out[method].unflatten(0, (-1, average)).mean(1)
        rows.append(Row(method, average, bb.calibrate.tune_temperature(predictive(means), labels), "labels"))
    return rows


def tables(depth: int, outputs: Outputs, labels: dict[str, Tensor]) -> None:
    """Print the table of clean images and that of the shifts."""
    rows = all_rows(outputs, labels["calibration"])
    base = next(row for row in rows if row.method == NETWORK and row.source == "labels")
    scaled = {name: base.losses(outputs[NETWORK][name], labels[name]) for name in labels}
    print(f"\n## ResNet-{depth}\n\n{TEST} clean test images:\n")
    clean_table(rows, outputs, "test", labels["test"], scaled["test"])
    print(f"\n{TEST} further test images, which took no part in any choice:\n")
    few = [row for row in rows if row.method in (NETWORK, PLAIN_VIEWS)]
    clean_table(few, outputs, FURTHER, labels[FURTHER], scaled[FURTHER])
    shifts = [name for name in labels if name not in ("calibration", "test", FURTHER)]
    print(f"\nNLL under shift, {SHIFTED} images each, T as above:\n")
    print(f"| method | T from | T | {' | '.join(shifts)} | mean | change of the mean | wins | mean ECE |")
    print("|---" * (len(shifts) + 7) + "|")
    for row in rows:
        print(
            f"| {row} | {shift_cells(row, outputs[row.method], labels, {k: scaled[k] for k in shifts})} |", flush=True
        )


def clean_table(rows: list[Row], outputs: Outputs, name: str, labels: Tensor, scaled: Tensor) -> None:
    print("| method | T from | T | NLL | change to temperature scaling | accuracy | ECE |")
    print("|---" * 7 + "|")
    for row in rows:
        found = row.of(outputs[row.method][name])
        losses = -found.log_prob(labels)
        cells = [
            f"{float(losses.mean()):.4f}",
            compared(losses - scaled, scaled),
            f"{accuracy(found.probs, labels):.4f}",
        ]
        print(f"| {row} | {' | '.join(cells)} | {expected_calibration_error(found.probs, labels):.4f} |", flush=True)


def compared(change: Tensor, base: Tensor) -> str:
    """Mean of paired differences (N,), its standard error, and its share of the mean of the base."""
    mean, error = float(change.mean()), float(change.std()) / len(change) ** 0.5
    return f"{mean:+.4f} ± {error:.4f} ({100 * mean / float(base.mean()):+.1f} %)"


def shift_cells(row: Row, outputs: dict[str, Tensor], labels: dict[str, Tensor], base: dict[str, Tensor]) -> str:
    losses = {name: row.losses(outputs[name], labels[name]) for name in base}
    wins = sum(bool(losses[name].mean() < base[name].mean()) for name in base)
    mean, scaled = (torch.stack(list(each.values())).mean(0) for each in (losses, base))  # (N,): shifts share images
    eces = [expected_calibration_error(row.of(outputs[name]).probs, labels[name]) for name in base]
    cells = [f"{float(each.mean()):.3f}" for each in (*losses.values(), mean)]
    return " | ".join([*cells, compared(mean - scaled, scaled), f"{wins}", f"{sum(eces) / len(eces):.3f}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--depth", type=int, nargs="+", default=[20, 32])
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    labels = image_sets(options.folder)[1]
    for depth in options.depth:
        tables(depth, all_outputs(depth, options.folder, options.cache), labels)


if __name__ == "__main__":
    main()
