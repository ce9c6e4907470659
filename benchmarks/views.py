"""Views of the input against temperature scaling, on public CIFAR-10 networks, clean and shifted.

    python benchmarks/views.py DATA_FOLDER --cache CACHE_FOLDER > table.md

The crop and flip of training make the views. 1,000 test images serve for calibration, 4,000 others for the test. Each
of nine shifts has 300 of these. Outputs of each method are computed once, by exact draws, and kept in the cache folder.
A run that was interrupted goes on from there. All rows are combined from these outputs.
"""

import argparse
from pathlib import Path

import torch
from cifar_tuning import corrupted
from safetensors.torch import load_file, save_file
from torch import Tensor

import batchbayes as bb
from batchbayes.data.cifar10 import augmented_batches, load_cifar10, standardise
from batchbayes.data.folder import data_file
from batchbayes.metrics import accuracy, equal_width_reliability, expected_calibration_error
from batchbayes.models.pretrained import cifar_resnet

DRAWS, CALIBRATION, TEST, SHIFTED, SMALL_BATCH = 16, 1000, 4000, 300, 24
SHIFTS = [(kind, strength) for kind in ("noise", "blur", "contrast") for strength in (1, 2, 3)]
BLACK = tuple(standardise(torch.zeros(1, 3, 1, 1, dtype=torch.uint8)).flatten().tolist())
VIEWS = bb.Compose(bb.RandomCrop(padding=4, fill=BLACK), bb.RandomFlip())
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
    """Images and labels by set: calibration, test, and each shift of the first test images."""
    images, labels = load_cifar10("test", folder, CALIBRATION + TEST)
    test, rest = images[CALIBRATION:], labels[CALIBRATION:]
    shifted = {f"{kind} {strength}": corrupted(test[:SHIFTED], kind, strength) for kind, strength in SHIFTS}
    sets = {"calibration": images[:CALIBRATION], "test": test, **shifted}
    return sets, {"calibration": labels[:CALIBRATION], "test": rest, **dict.fromkeys(shifted, rest[:SHIFTED])}


def all_outputs(depth: int, folder: str, cache: Path) -> Outputs:
    """Outputs of every method on every set, from the cache where they are there."""
    sets, found = image_sets(folder)[0], {}
    for method, (posterior, draws) in posteriors(depth, folder).items():
        path = cache / f"resnet{depth}-{method.replace(' ', '_')}.safetensors"
        known = load_file(path) if path.exists() else {}
        for name, images in sets.items():
            done = known[name].shape[1] if name in known else 0
            if done < len(images):
                rest = standardise(images[done:])
                kept = bb.predict(posterior, rest, bb.categorical(), num_samples=draws, keep_draws=True).draws
                known[name] = torch.cat([known[name], kept], 1) if done else kept.contiguous()
                save_file(known, path)
        found[method] = known
    return found


def predictive(draws: Tensor, temperature: float = 1.0) -> bb.CategoricalPredictive:
    running = bb.categorical(temperature=temperature).summary()
    running.add(draws)
    return running.finish(draws)


def agreement_temperature(draws: Tensor) -> float:
    """The temperature at which the mean confidence is the share of pairs of draws that agree. It needs no labels."""
    answers = draws.argmax(-1)  # (S, N)
    pairs = answers[:, None] == answers[None]  # (S, S, N)
    agreement = float((pairs.float().mean((0, 1)).mean() * len(draws) - 1) / (len(draws) - 1))

    def gap(temperature: float) -> float:
        return float(predictive(draws, temperature).probs.amax(-1).mean()) - agreement

    low, high = 0.5, 5.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if gap(middle) > 0 else (low, middle)
    return (low + high) / 2


def nll(draws: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Negative log-likelihood of each example."""
    return -predictive(draws, temperature).log_prob(labels)


def row(name: str, temperature: float, draws: Tensor, labels: Tensor, base: Tensor) -> str:
    """NLL, its paired difference to temperature scaling with a standard error, accuracy and ECE."""
    found, losses = predictive(draws, temperature), nll(draws, labels, temperature)
    change, error = losses - base, float((losses - base).std()) / len(losses) ** 0.5
    cells = [
        f"{temperature:.2f}",
        f"{float(losses.mean()):.4f}",
        f"{float(change.mean()):+.4f} ± {error:.4f} ({100 * float(change.mean() / base.mean()):+.0f} %)",
        f"{accuracy(found.probs, labels):.4f}",
        f"{_ece(found, labels):.4f}",
    ]
    return f"| {name} | {' | '.join(cells)} |"


def tables(depth: int, outputs: Outputs, labels: dict[str, Tensor]) -> None:
    """Print the table of clean images and that of the shifts."""
    held_out = labels["calibration"]
    temperatures = {
        method: bb.calibrate.tune_temperature(predictive(sets["calibration"]), held_out)
        for method, sets in outputs.items()
    }
    base = nll(outputs[NETWORK]["test"], labels["test"], temperatures[NETWORK])
    print(f"\n## ResNet-{depth}\n\n{TEST} clean test images. T acts inside each draw. {CALIBRATION} others set it.\n")
    print("| method | T | NLL | change of NLL to temperature scaling | accuracy | ECE |\n|---|---|---|---|---|---|")
    rows = [(method, method, 1.0) for method in outputs]
    rows += [
        (f"{m}, T by agreement", m, agreement_temperature(outputs[m]["calibration"])) for m in (PLAIN_VIEWS, TRAINED)
    ]
    rows += [(_with_temperature(method), method, temperatures[method]) for method in outputs]
    for name, method, temperature in rows:
        print(row(name, temperature, outputs[method]["test"], labels["test"], base), flush=True)
    shifts = [name for name in labels if name not in ("calibration", "test")]
    print(
        f"\nNLL under shift, {SHIFTED} images each, T as tuned on clean images; ± is the standard error of the paired"
    )
    print("difference of the means over shifts. Wins: shifts with a lower NLL than temperature scaling.\n")
    print(f"| method | {' | '.join(shifts)} | mean | wins | mean ECE |\n|---{'|---' * len(shifts)}|---|---|---|")
    scaled = {name: nll(outputs[NETWORK][name], labels[name], temperatures[NETWORK]) for name in shifts}
    for name, method, temperature in rows:
        print(shift_row(name, outputs[method], labels, temperature, scaled), flush=True)


def shift_row(name: str, sets: dict[str, Tensor], labels: dict[str, Tensor], temperature: float, base: dict) -> str:
    losses = {shift: nll(sets[shift], labels[shift], temperature) for shift in base}
    means = {shift: float(each.mean()) for shift, each in losses.items()}
    wins = sum(means[shift] < float(base[shift].mean()) for shift in base)
    change = torch.stack([losses[shift] - base[shift] for shift in base]).mean(0)  # (N,): shifts share their images
    error = float(change.std()) / len(change) ** 0.5
    eces = [_ece(predictive(sets[shift], temperature), labels[shift]) for shift in base]
    cells = " | ".join(f"{mean:.3f}" for mean in means.values())
    return (
        f"| {name} | {cells} | {sum(means.values()) / len(means):.3f} ({float(change.mean()):+.3f} ± {error:.3f}) "
        f"| {wins} | {sum(eces) / len(eces):.3f} |"
    )


def _ece(found: bb.CategoricalPredictive, labels: Tensor) -> float:
    confidence, answer = found.probs.max(-1)
    return float(expected_calibration_error(equal_width_reliability(confidence.clamp_max(1), answer == labels)))


def _with_temperature(method: str) -> str:
    return "**temperature scaling**" if method == NETWORK else f"{method}, with T"


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
