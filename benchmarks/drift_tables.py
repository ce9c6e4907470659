"""Tables and figures of what `benchmarks/drift.py` has put into its results folder.

python benchmarks/drift_tables.py DATA_FOLDER RESULTS_FOLDER [--parts adapt accuracy test monitor] [--figures DIR]
"""

import argparse
import math
import statistics
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from batchbayes_papers.data.cifar10 import standardise
from corruptions import CORRUPTIONS
from drift import STREAMS, TEST, UNSEEN, Case, read, windows
from torch import Tensor

from batchbayes.drift.detector import GATE_WINDOWS, LEVEL
from batchbayes.drift.monitor import BINS, MOST, POWERS, bet_on, entering, rank
from batchbayes.novelty.windows import Sample
from batchbayes.tools import generator

METHODS = ("network", "batch", "N = 16", "N = 64", "TENT", "drift", "drift, temperature")
SEVERITIES = (1, 3, 5)
CLEAN = next(iter(CORRUPTIONS))
"""Files of images as they are have the name of the first corruption, at severity 0."""
Row = list[float | str]


def table(columns: Iterable[str], rows: dict[str, Row], digits: int = 1) -> None:
    columns = list(columns)
    print("| | " + " | ".join(columns) + " |\n|" + "---|" * (1 + len(columns)))
    for name, values in rows.items():
        print(f"| {name} | " + " | ".join(v if isinstance(v, str) else f"{v:.{digits}f}" for v in values) + " |")
    print()


def cells(results: Path, depth: int, severity: int, stream: str, size: int) -> dict[str, dict[str, Tensor]]:
    """Return the windows of each corruption, of all turns together."""
    found = {}
    for name in CORRUPTIONS if severity else [CLEAN]:
        turns = [read(results, "adapt", depth, name, severity, stream, size, turn) for turn in range(8)]
        parts = [part for part in turns if part is not None]
        if parts:
            found[name] = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    return found


def error(logits: Tensor, labels: Tensor) -> float:
    return 100 * float((logits.argmax(-1) != labels).double().mean())


def nll(logits: Tensor, labels: Tensor) -> float:
    return float(-logits.double().log_softmax(-1).gather(-1, labels[..., None]).mean())


def show_adapted(case: Case, results: Path, depth: int) -> None:
    """Print mean error and NLL of each method, for each size of windows and stream."""
    labels = case.labels[TEST].long()
    for severity in (5, 3, 1, 0):
        columns: dict[str, dict[str, str]] = {}
        for size in (1, 8, 32, 128):
            for stream in STREAMS:
                own = cells(results, depth, severity, stream, size)
                if not own:
                    continue
                images = sum(each["rows"].numel() for each in own.values())
                column = columns.setdefault(f"n = {size}, {stream} ({len(own)}; {images:,})", {})
                for method in METHODS:
                    if all(method in each for each in own.values()):
                        pairs = [(x[method], labels[x["rows"]]) for x in own.values()]
                        off = statistics.fmean(error(*pair) for pair in pairs)
                        loss = statistics.fmean(nll(*pair) for pair in pairs)
                        column[method] = f"{off:.1f} / {loss:.2f}"
        if columns:
            print(f"ResNet-{depth}, severity {severity}: mean error in % / NLL (corruptions; images in all)\n")
            rows: dict[str, Row] = {m: [column.get(m, "") for column in columns.values()] for m in METHODS}
            table(columns, rows)


def show_clean(case: Case, results: Path, depth: int, streams: list[str]) -> None:
    """Print errors on all test images as they are. Only windows that the test calls changed need a pass."""
    seen = read(results, "see", depth, CLEAN, 0)
    assert seen is not None
    start = TEST.start - UNSEEN.start
    rows_, classes, own = seen["rows"][start:].float(), seen["classes"][start:], seen["logits"][start:]
    labels, images, found = case.labels[TEST].long(), standardise(case.images[TEST]), {}
    for size in (8, 32, 128):
        for stream in streams:
            wrong, changed = torch.zeros(2), 0
            chosen = windows(labels, size, stream, len(labels) // size, seed=0)
            for rows in chosen:
                sample = Sample(rows_[rows], classes[rows])
                is_changed = case.drift.ordinary.evidence(sample, case.drift.widths, GATE_WINDOWS).p_value <= LEVEL
                said = case.by_call(images[rows])["drift"] if is_changed else own[rows]
                wrong += torch.tensor([float((each.argmax(1) != labels[rows]).sum()) for each in (own[rows], said)])
                changed += is_changed
            count = size * len(chosen)
            cells: Row = [*(100 * wrong / count).tolist(), 100 * changed / len(chosen), f"{count:,}"]
            found[f"n = {size}, {stream}"] = cells
    print(f"ResNet-{depth}: errors in % on images as they are, and windows that are called changed\n")
    table(["network", "drift", "called changed, %", "images"], found, digits=2)


def show_accuracy(case: Case, results: Path, depth: int) -> dict[int, list[tuple[float, float]]]:
    """Print how far estimates of the accuracy are off, and coverage of 90 % sets. Return the latter by severity."""
    labels = case.labels[TEST].long()
    logits = torch.cat([case.network(part) for part in case.labelled[0].split(250)])
    probs, truth = logits.softmax(1), case.labelled[1].long()
    limit = probs.amax(1).double().quantile(1 - (probs.argmax(1) == truth).double().mean())
    scores = (1 - probs.gather(1, truth[:, None])[:, 0]).sort().values
    plain = float(scores[math.ceil(0.9 * (len(scores) + 1)) - 1])
    rows: dict[str, Row] = {}
    covered: dict[int, list[tuple[float, float]]] = {}
    for size in (32, 128):
        for severity in (0, *SEVERITIES):
            found = []
            for cell in cells(results, depth, severity, "mixed", size).values():
                each = [_labelless(limit, plain, {key: value[k] for key, value in cell.items()}, labels)
                        for k in range(len(cell["rows"]))]  # fmt: skip
                found.append({key: statistics.fmean(w[key] for w in each) for key in each[0]})
            if not found:
                continue
            off = [100 * statistics.fmean(abs(x[key] - x[true]) for x in found) for key, true in PAIRS]
            ranges = [[100 * x[key] for x in found] for key in ("coverage", "plain coverage")]
            spans = [f"{statistics.fmean(r):.0f} ({min(r):.0f} to {max(r):.0f})" for r in ranges]
            sizes = [f"{statistics.fmean(x[key] for x in found):.2f}" for key in ("size", "plain size")]
            rows[f"n = {size}, severity {severity} ({len(found)})"] = [*off, *spans, *sizes]
            covered[severity] = list(zip(*ranges, strict=True))
    print(f"ResNet-{depth}: accuracy without labels, mean absolute error in points; coverage of 90 % sets in %\n")
    table(["adapted", "network", "average confidence", "ATC", "sets", "plain sets", "size", "plain size"], rows)
    return covered


PAIRS = [("adapted", "adapted, true")] + [(key, "network, true") for key in ("network", "average confidence", "ATC")]


def _labelless(limit: Tensor, plain: float, window: dict[str, Tensor], every: Tensor) -> dict[str, float]:
    """Return what is expected of the accuracies of a window, and what they are; coverage and size of 90 % sets."""
    own, sets, labels = window["network"], window["sets"], every[window["rows"]]
    probs = own.softmax(1)
    usual = 1 - probs <= plain
    return {
        "adapted": float(window["expected"]),
        "adapted, true": float((window["drift"].argmax(1) == labels).double().mean()),
        "network": float(window["expected of the network"]),
        "network, true": float((own.argmax(1) == labels).double().mean()),
        "average confidence": float(probs.amax(1).mean()),
        "ATC": float((probs.amax(1) >= limit).double().mean()),
        "coverage": float(sets.gather(1, labels[:, None]).double().mean()),
        "size": float(sets.double().sum(1).mean()),
        "plain coverage": float(usual.gather(1, labels[:, None]).double().mean()),
        "plain size": float(usual.double().sum(1).mean()),
    }


def show_tests(case: Case, results: Path, depth: int, sizes: list[int], kinds: list[str]) -> None:
    """Print the shares of windows that are called changed: by the test, BBSD and MMD (Rabanser et al., 2019)."""
    rows: dict[str, Row] = {}
    names = ["drift at 1%", "drift at 5%", "told as classes", "BBSD at 5%", "MMD at 5%"]
    usual = torch.cat([case.network(part) for part in case.labelled[0].split(250)])
    for size in sizes:
        for stream, severity in ((kind.split(":")[0], int(kind.split(":")[1])) for kind in kinds):
            found = []
            for name in CORRUPTIONS if severity else [CLEAN]:
                seen = read(results, "see", depth, name, severity)
                if seen is not None:
                    labels = case.labels[UNSEEN] if severity == 0 else case.labels[TEST][: len(seen["rows"])]
                    number = 10 if severity else 1000
                    found += list(_called(case, seen, labels, usual, size, stream, number, mmd=severity > 0))
            if found:
                shares = [100 * statistics.fmean(x[n] for x in found) if n in found[0] else "" for n in names]
                what = "as they are" if severity == 0 else f"severity {severity}"
                rows[f"n = {size}, {stream}, {what} ({len(found):,})"] = shares
    print(f"ResNet-{depth}: windows that are called changed, in % (windows in all)\n")
    table(names, rows)


def _called(
    case: Case, seen: dict[str, Tensor], labels: Tensor, usual: Tensor, size: int, stream: str, count: int, *, mmd: bool
) -> Iterable[dict[str, bool]]:
    from scipy.stats import ks_2samp

    random, ordinary = np.random.default_rng(size), case.drift.ordinary
    sample, probs = Sample(seen["rows"].float(), seen["classes"]), usual.softmax(1).numpy()
    for _ in range(count):
        rows = torch.from_numpy(_rows(random, labels, size, stream))
        evidence = ordinary.evidence(Sample(*(part[rows] for part in sample)), case.drift.widths, windows=199)
        own = seen["logits"][rows].softmax(1).numpy()
        found = {f"drift at {level:.0%}": evidence.p_value <= level for level in (0.01, 0.05)}
        found["told as classes"] = evidence.p_value > LEVEL >= evidence.class_p_value
        p_values: list[Any] = [ks_2samp(own[:, k], probs[:, k])[1] for k in range(10)]
        found["BBSD at 5%"] = min(p_values) <= 0.05 / 10
        if mmd:
            found["MMD at 5%"] = _mmd(seen["logits"][rows], usual[:300]) <= 0.05
        yield found


def _rows(random: np.random.Generator, classes: Tensor, size: int, stream: str) -> np.ndarray:
    """Return rows of a window. No image is in it twice: then it has the distribution of new images."""
    if stream == "mixed":
        return random.choice(len(classes), size, replace=False)
    counts = random.multinomial(size, random.dirichlet([0.3] * 10))
    members = [np.flatnonzero(classes.numpy() == k) for k in range(10)]
    return np.concatenate(
        [random.choice(own, number, replace=False) for own, number in zip(members, counts, strict=True)]
    )


def _mmd(own: Tensor, usual: Tensor, permutations: int = 99) -> float:
    """Return the p-value of the maximum mean discrepancy with a Gaussian kernel of median width, by permutations."""
    both, n = torch.cat([own, usual]), len(own)
    squares = torch.cdist(both, both).square()
    kernel = torch.exp(-squares / squares.median())
    signs = torch.full((1 + permutations, len(both)), -1 / len(usual))
    random = generator(n, "mmd")
    signs[0, :n] = 1 / n
    for row in signs[1:]:
        row[torch.randperm(len(both), generator=random)[:n]] = 1 / n
    values = ((signs @ kernel) * signs).sum(1)
    return float((1 + (values[1:] >= values[0]).sum()) / (1 + permutations))


def show_monitor(case: Case, results: Path, depth: int, streams: int) -> None:
    """Print how many unchanged streams alarm, and delays after a change, beside a CUSUM and an online MMD."""
    seen = read(results, "see", depth, CLEAN, 0)
    assert seen is not None
    ordinary, monitor = case.drift.ordinary.sample(), case.drift.monitor()
    fresh = Sample(seen["rows"].float(), seen["classes"])
    pool = torch.cat([monitor.scores(part) for part in (ordinary, fresh)]).numpy()
    groups = torch.cat([case.drift.ordinary.groups, case.drift.ordinary.group_of[fresh.classes]]).numpy()
    alarms = np.concatenate([null_streams(pool, groups, 50, 10_000, seed) for seed in range(streams // 50)])
    print(f"ResNet-{depth}: {len(alarms)} unchanged streams of 10,000 examples, {int(alarms.sum())} alarms at 1 %.\n")
    rows: dict[str, Row] = {}
    reference = Reference(torch.cat([case.network(part) for part in case.labelled[0].split(250)]))
    for name in CORRUPTIONS:
        for severity in (3, 1):
            found = read(results, "see", depth, name, severity)
            if found is not None:
                rows.setdefault(name, []).extend(delays(case, seen, found, reference))
    print(f"ResNet-{depth}: median delay in examples (of 11 streams), at severities 3 and 1\n")
    each = ["monitor", "CUSUM", "online MMD"]
    table([f"{who}, severity {s}" for s in (3, 1) for who in each], rows)


def null_streams(scores: np.ndarray, groups: np.ndarray, streams: int, length: int, seed: int) -> np.ndarray:
    """Return which streams alarm at 1 %. Calibration data and stream are independent draws of the same examples.

    This is what `Monitor` does, for many streams at once: its ranks, bets and shares are used.
    """
    random, calibration, channels = np.random.default_rng(seed), 2000, scores.shape[1]
    rows = random.integers(0, len(scores), (streams, calibration + length))
    shares, every = np.linspace(0, 1, BINS + 1)[1:-1], np.arange(streams)
    bins = np.empty((streams, calibration + length, channels), dtype=np.int64)
    counts = np.zeros((streams, channels, groups.max() + 1, BINS))
    for s, c in np.ndindex(streams, channels):
        own = scores[rows[s], c]
        bins[s, :, c] = np.searchsorted(np.quantile(own[:calibration], shares), own)
        np.add.at(counts[s, c], (groups[rows[s, :calibration]], bins[s, :calibration, c]), 1)
    capital, peak = np.zeros((streams, channels, 2 * len(POWERS))), np.zeros(streams)
    for t in range(length):
        group, own = groups[rows[:, calibration + t]], bins[:, calibration + t]
        p = rank(counts[every, :, group], own, random.random(own.shape))
        capital = np.minimum((capital + entering(t)) * bet_on(p), MOST)
        counts[every[:, None], np.arange(channels), group[:, None], own] += 1
        peak = np.maximum(peak, capital.mean((1, 2)) + 1 / math.log2(t + 3))
    return peak >= 100


class Reference:
    """A CUSUM of lost confidence, and MMD of the last 32 logits, with thresholds for 1 % of streams of 10,000."""

    def __init__(self, usual: Tensor) -> None:
        confidence = usual.softmax(1).amax(1).double()
        self.mean, self.std, self.against = float(confidence.mean()), float(confidence.std()), usual[:100]
        self.width = float(torch.pdist(self.against).square().median())
        streams = [usual[torch.randint(len(usual), (10_000,), generator=generator(i, "null"))] for i in range(100)]
        self.limits = [float(np.quantile([rule(x).max() for x in streams], 0.99)) for rule in (self.cusum, self.mmd)]

    def cusum(self, logits: Tensor) -> np.ndarray:
        """Return the CUSUM after each example: how far the sum of losses is above its lowest value so far."""
        lost = (self.mean - logits.softmax(1).amax(1).double().numpy()) / self.std - 0.5
        total = np.concatenate([[0.0], np.cumsum(lost)])
        return (total - np.minimum.accumulate(total))[1:]

    def mmd(self, logits: Tensor, size: int = 32) -> np.ndarray:
        """Return the squared MMD of the last examples after each one; zero before there are enough."""
        x = logits.float()
        near = torch.exp(-torch.cdist(x, self.against).square() / self.width).mean(1)
        within = torch.zeros(len(x) - size + 1, dtype=torch.float64)
        for lag in range(1, size):
            pairs = torch.exp(-(x[lag:] - x[:-lag]).square().sum(1) / self.width)
            within += 2 * _moving_sum(pairs, size - lag)
        found = within / (size * (size - 1)) - 2 * _moving_sum(near, size) / size
        return np.concatenate([np.full(size - 1, -math.inf), found.numpy()])

    def delays(self, logits: Tensor, before: int) -> list[float]:
        """Return after how many examples since the change each of them alarms."""
        both = zip((self.cusum(logits), self.mmd(logits)), self.limits, strict=True)
        passed = [np.flatnonzero(values[before:] > limit) for values, limit in both]
        return [float(each[0] + 1) if len(each) else math.inf for each in passed]


def _moving_sum(values: Tensor, size: int) -> Tensor:
    total = torch.cat([torch.zeros(1, dtype=torch.float64), values.double().cumsum(0)])
    return total[size:] - total[:-size]


def delays(case: Case, seen: dict[str, Tensor], changed: dict[str, Tensor], reference: Reference) -> Row:
    """Return median delays after 1,000 ordinary examples: of the monitor, a CUSUM and an online MMD."""
    found: list[list[float]] = []
    for repeat in range(11):
        random, monitor = generator(repeat, "delay"), case.drift.monitor()
        before = torch.randperm(1000, generator=random)  # none of them is among the corrupted ones
        after = torch.randperm(len(changed["logits"]), generator=random)
        monitor.bet(Sample(seen["rows"][before].float(), seen["classes"][before]))
        monitor.bet(Sample(changed["rows"][after].float(), changed["classes"][after]))
        own = monitor.alarms[0] - len(before) if monitor.alarms else math.inf
        now = torch.cat([seen["logits"][before], changed["logits"][after]])
        found.append([own, *reference.delays(now, len(before))])
    medians = [statistics.median(each) for each in zip(*found, strict=True)]
    return [f"{value:.0f}" if math.isfinite(value) else "none" for value in medians]


def draw_coverage(covered: dict[int, dict[int, list[tuple[float, float]]]], path: Path) -> None:
    """Draw the coverage of 90 % sets by severity, a dot for each corruption."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(covered), figsize=(4.2 * len(covered), 3.4), sharey=True, squeeze=False)
    for ax, (depth, own) in zip(axes[0], covered.items(), strict=True):
        for which, (name, colour) in enumerate((("drift.sets", "C0"), ("split conformal", "C1"))):
            places = [(s + 0.3 * which - 0.15, pair[which]) for s, pairs in own.items() for pair in pairs]
            ax.scatter(*zip(*places, strict=True), s=14, color=colour, alpha=0.7, label=name)
        ax.axhspan(85, 95, color="grey", alpha=0.15)
        ax.axhline(90, color="grey", linewidth=0.8)
        ax.set(title=f"ResNet-{depth}", xlabel="severity", xticks=list(own))
    axes[0][0].set(ylabel="truth is in the set, %", ylim=(0, 102))
    axes[0][-1].legend(loc="lower left")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("results", type=Path)
    parser.add_argument("--parts", nargs="*", default=["adapt", "clean", "accuracy", "test", "monitor"])
    parser.add_argument("--depths", nargs="*", type=int, default=[32, 20])
    parser.add_argument("--sizes", nargs="*", type=int, default=[10, 32, 100], help="windows of the test")
    kinds = ["mixed:0", "dirichlet:0", "mixed:1", "mixed:3"]
    parser.add_argument("--kinds", nargs="*", default=kinds, help="streams and severities of the test")
    parser.add_argument("--streams", nargs="*", default=STREAMS, help="of images as they are")
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    covered = {}
    for depth in options.depths:
        with torch.no_grad():
            case = Case(depth, options.folder, options.results)
            if "adapt" in options.parts:
                show_adapted(case, options.results, depth)
            if "clean" in options.parts:
                show_clean(case, options.results, depth, options.streams)
            if "accuracy" in options.parts:
                covered[depth] = show_accuracy(case, options.results, depth)
            if "test" in options.parts:
                show_tests(case, options.results, depth, options.sizes, options.kinds)
            if "monitor" in options.parts:
                show_monitor(case, options.results, depth, streams=500)
    if options.figure and covered:
        draw_coverage(covered, options.figure)


if __name__ == "__main__":
    main()
