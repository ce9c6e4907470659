"""Drift on two public CIFAR-10 networks: adapting, the test, the monitor, accuracy without labels, sets.

    python benchmarks/drift.py DATA_FOLDER RESULTS.jsonl [--images 256] [--parts adapt test monitor]

Each finished piece of work is a line of the results file, so the run can be stopped and started again. `--show` prints
the tables of what is there. Settings were chosen with ResNet-20 and the first 512 test images; reported are images
8,000 and up. Calibration is on images 5,000 to 7,000.
"""

import argparse
import copy
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from batchbayes_papers.data.cifar10 import load_cifar10, standardise
from batchbayes_papers.data.folder import data_file
from batchbayes_papers.models.pretrained import cifar_resnet
from corruptions import CORRUPTIONS, corrupt
from torch import Tensor, nn

import batchbayes as bb
from batchbayes.drift.adapt import adapt_to
from batchbayes.drift.detector import GATE_WINDOWS, LEVEL
from batchbayes.drift.windows import Sample
from batchbayes.tools import generator

REFERENCE, CALIBRATION, TEST = 2000, slice(5000, 7000), slice(8000, 10000)
STREAMS = ("mixed", "dirichlet", "sorted")
Predict = Callable[[Tensor], Tensor]


def windows(labels: Tensor, size: int, stream: str, count: int) -> list[Tensor]:
    """Return rows of images of some windows: in random order, with classes by Dirichlet(0.3), or sorted by class."""
    random, total = generator(0, "stream", stream, size), len(labels)
    rows = torch.randperm(total, generator=random)
    if stream == "sorted":
        rows = rows[labels[rows].argsort(stable=True)]
    if stream != "dirichlet":
        found = rows[: total // size * size].split(size)
        return [found[i * len(found) // count] for i in range(count)]
    numbers = np.random.default_rng(size)
    members, found = [torch.where(labels == k)[0].numpy() for k in range(10)], []
    for _ in range(count):
        classes = numbers.choice(10, size, p=numbers.dirichlet([0.3] * 10))
        found.append(torch.tensor([numbers.choice(members[k]) for k in classes]))
    return found


def blended(network: nn.Module, pseudo_count: float) -> nn.Module:
    """Return a copy that normalises by the batch, blended with a number of pseudo-examples of the running ones."""
    network = copy.deepcopy(network)

    def forward(layer: Any, h: Tensor) -> Tensor:
        share = len(h) / (len(h) + pseudo_count)
        variance, mean = torch.var_mean(h, (0, 2, 3), correction=0)
        mean = layer.running_mean + share * (mean - layer.running_mean)
        variance = layer.running_var + share * (variance - layer.running_var)
        scale = layer.weight / (variance + layer.eps).sqrt()
        return h * scale[:, None, None] + (layer.bias - mean * scale)[:, None, None]

    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.forward = lambda h, layer=layer: forward(layer, h)
    return network


def tent(network: nn.Module) -> Predict:
    """Return TENT (Wang et al., ICLR 2021): batch statistics, one step of Adam on the entropy for each batch."""
    network = blended(network, 0.0)
    layers = [layer for layer in network.modules() if isinstance(layer, nn.BatchNorm2d)]
    optimiser = torch.optim.Adam([p for layer in layers for p in (layer.weight, layer.bias)], lr=1e-3)

    def predict(inputs: Tensor) -> Tensor:
        with torch.enable_grad():
            logits = network(inputs)
            entropy = -(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean()
            optimiser.zero_grad()
            entropy.backward()
            optimiser.step()
        return logits.detach()

    return predict


class Case:
    """A network with everything that is fitted to it."""

    def __init__(self, depth: int, folder: str, images: int, fitted: Path) -> None:
        self.depth = depth
        self.network = cifar_resnet(depth, data_file(f"weights/resnet{depth}_cifar10_akamaster.safetensors", folder))
        train, test = load_cifar10("train", folder)[0], load_cifar10("test", folder)
        chosen = torch.randperm(len(train), generator=generator(0, "reference"))[:REFERENCE]
        self.labelled = standardise(test[0][CALIBRATION]), test[1][CALIBRATION]
        self.images, self.labels, self.num_images = test[0][TEST], test[1][TEST], images
        self.every, self.every_label = test
        self.kept: dict[tuple[str, int], tuple[Sample, Tensor]] = {}
        if not fitted.exists():
            bb.save(bb.drift(self.network, standardise(train[chosen]), calibration=[self.labelled]), fitted)
        self.drift = bb.load(fitted, self.network)
        logits = torch.cat([self.network(part) for part in self.labelled[0].split(250)])
        self.calibration_logits, probs = logits, logits.softmax(1)
        right = (probs.argmax(1) == self.labelled[1]).double().mean()
        self.threshold = probs.amax(1).double().quantile(1 - right)  # of average thresholded confidence
        scores = 1 - probs.gather(1, self.labelled[1][:, None])[:, 0]
        self.plain = float(scores.sort().values[math.ceil(0.9 * (len(scores) + 1)) - 1])

    def adapt(self, name: str, severity: int, stream: str, size: int) -> dict[str, Any]:
        """Return sums over all windows of a stream: right answers and NLL by method, expected accuracy, coverage."""
        chosen = windows(self.labels, size, stream, max(1, self.num_images // size))
        images = standardise(corrupt(self.images[torch.cat(chosen)], name, severity)).split(size)
        others: dict[str, Predict] = {
            "batch": blended(self.network, 0.0),
            "N = 16": blended(self.network, 16.0),
            "N = 64": blended(self.network, 64.0),
            "TENT": tent(self.network),
        }
        total: dict[str, list[float]] = {}
        expected: dict[str, list[float]] = {}
        for rows, x in zip(chosen, images, strict=True):
            y = self.labels[rows]
            found = {method: predict(x) for method, predict in others.items()} | self._own(x)
            for method, logits in found.items():
                nll = F.cross_entropy(logits.float(), y, reduction="sum")
                sums = float((logits.argmax(1) == y).sum()), float(nll), len(y)
                total[method] = [a + b for a, b in zip(total.get(method, [0.0] * 3), sums, strict=True)]
            for key, value in self._labelless(found, x, y).items():
                expected.setdefault(key, []).append(value)
        return {"total": total, "expected": {key: statistics.fmean(each) for key, each in expected.items()}}

    def _own(self, x: Tensor) -> dict[str, Tensor]:
        drift = self.drift
        _, sample, own = drift.seen(x, None)
        adapted = adapt_to(drift.sight, drift.moments, x).logits
        is_changed = drift.ordinary.evidence(sample, drift.widths, GATE_WINDOWS).p_value <= LEVEL
        return {"network": own, "drift": adapted if is_changed else own, "drift, ungated": adapted}

    def _labelless(self, found: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, float]:
        """Return what is expected of accuracies without labels, and what they are; coverage and size of 90 % sets."""
        confidence = self.drift.confidence
        assert confidence is not None
        own, adapted = found["network"], found["drift, ungated"]
        probs, sets = own.softmax(1), confidence.sets(adapted, 0.9)
        plain = 1 - probs <= self.plain
        return {
            "adapted": confidence.estimate(adapted, adapted.argmax(1)).value,
            "adapted, true": float((adapted.argmax(1) == y).double().mean()),
            "network": confidence.estimate(adapted, own.argmax(1)).value,
            "network, true": float((own.argmax(1) == y).double().mean()),
            "average confidence": float(probs.amax(1).mean()),
            "ATC": float((probs.amax(1) >= self.threshold).double().mean()),
            "coverage": float(sets.gather(1, y[:, None]).double().mean()),
            "set size": float(sets.double().sum(1).mean()),
            "plain coverage": float(plain.gather(1, y[:, None]).double().mean()),
            "plain set size": float(plain.double().sum(1).mean()),
        }

    @cached_property
    def unseen(self) -> tuple[Sample, Tensor]:
        """Test images 7,000 to 10,000, as they are."""
        return self.drift.seen(standardise(self.every[7000:]), None, math.inf)[1:]

    def corrupted(self, name: str, severity: int) -> tuple[Sample, Tensor]:
        """Twice the number of images, corrupted. They are kept for the next question."""
        if (name, severity) not in self.kept:
            images = corrupt(self.images[: 2 * self.num_images], name, severity)
            self.kept[name, severity] = self.drift.seen(standardise(images), None, math.inf)[1:]
        return self.kept[name, severity]

    def test(self, name: str, severity: int, stream: str, size: int, count: int) -> dict[str, float]:
        """Return shares of windows that are called changed, by the test, by BBSD and by MMD."""
        from scipy.stats import ks_2samp

        drift, (sample, logits) = self.drift, self.unseen if severity == 0 else self.corrupted(name, severity)
        classes = self.every_label[7000:] if severity == 0 else self.labels[: len(logits)]
        random = np.random.default_rng(size)
        usual = self.calibration_logits.softmax(1).numpy()
        found: dict[str, list[bool]] = {}
        for _ in range(count):
            rows = torch.from_numpy(_rows(random, classes, size, stream))
            evidence = drift.ordinary.evidence(Sample(*(part[rows] for part in sample)), drift.widths, windows=399)
            own = logits[rows].softmax(1).numpy()
            answers = {f"drift at {level:.0%}": evidence.p_value <= level for level in (0.01, 0.05)}
            answers["class mix at 5%"] = evidence.class_p_value <= 0.05
            answers["BBSD at 5%"] = min(ks_2samp(own[:, k], usual[:, k]).pvalue for k in range(10)) <= 0.05 / 10
            if severity:
                answers["MMD at 5%"] = _mmd(logits[rows].float(), self.calibration_logits[:300]) <= 0.05
            for key, answer in answers.items():
                found.setdefault(key, []).append(bool(answer))
        return {key: statistics.fmean(each) for key, each in found.items()} | {"windows": count}


def _rows(random: np.random.Generator, classes: Tensor, size: int, stream: str) -> np.ndarray:
    if stream == "mixed":
        return random.choice(len(classes), size, replace=False)
    members = [np.flatnonzero(classes.numpy() == k) for k in range(10)]
    return np.array([random.choice(members[k]) for k in random.choice(10, size, p=random.dirichlet([0.3] * 10))])


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
    values = torch.einsum("bi,ij,bj->b", signs, kernel, signs)
    return float((1 + (values[1:] >= values[0]).sum()) / (1 + permutations))


def monitor_null(case: Case, streams: int) -> dict[str, Any]:
    """Return how many of many unchanged streams alarm. Test images are dealt to calibration and stream anew."""
    pool = Sample(*(torch.cat(pair) for pair in zip(case.drift.ordinary.sample(), case.unseen[0], strict=True)))
    alarms, evidence = 0, []
    for stream in range(streams):
        rows = torch.randperm(len(pool.classes), generator=generator(stream, "deal"))
        monitor = case.drift.monitor()
        groups = case.drift.ordinary.group_of[pool.classes]
        monitor.calibrate(Sample(*(part[rows[:2000]] for part in pool)), groups[rows[:2000]])
        monitor.bet(Sample(*(part[rows[2000:]] for part in pool)))
        alarms += len(monitor.alarms) > 0
        evidence.append(monitor.watch.evidence)
    return {"streams": streams, "examples": len(pool.classes) - 2000, "alarms": alarms, "highest": max(evidence)}


def monitor_delay(case: Case, name: str, severity: int, repeats: int = 11) -> dict[str, Any]:
    """Return the median delay after 1,000 ordinary examples, beside a CUSUM of the confidence."""
    (ordinary, _), (drifted, logits) = case.unseen, case.corrupted(name, severity)
    usual, now = case.calibration_logits.softmax(1).amax(1).double(), logits.softmax(1).amax(1)
    delays: dict[str, list[float]] = {"monitor": [], "CUSUM": []}
    for repeat in range(repeats):
        monitor, random = case.drift.monitor(), generator(repeat, "delay")
        before = torch.randperm(1000, generator=random)  # none of them is among the corrupted ones
        after = torch.randperm(len(logits), generator=random)
        monitor.bet(Sample(*(part[before] for part in ordinary)))
        for row in after.split(1):
            if monitor.alarm:
                break
            monitor.bet(Sample(*(part[row] for part in drifted)))
        delays["monitor"].append(monitor.alarms[0] - len(before) if monitor.alarms else math.inf)
        delays["CUSUM"].append(_cusum(usual, now[after]))
    return {key: statistics.median(each) for key, each in delays.items()}


def _cusum(usual: Tensor, stream: Tensor) -> float:
    """Return after how many examples the CUSUM of lost confidence passes 25 standard deviations."""
    mean, std = float(usual.mean()), float(usual.std())
    total = 0.0
    for number, value in enumerate(stream.tolist(), 1):
        total = max(0.0, total + (mean - value) / std - 0.5)
        if total > 25:
            return number
    return math.inf


def work(parts: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield all pieces of work, the most telling first."""
    for depth in (32, 20):
        for size in (32, 8, 128, 1):
            for severity in (5, 0) if "adapt" in parts else ():
                for name in CORRUPTIONS if severity else ["gaussian noise"]:
                    for stream in STREAMS:
                        given = {"name": name, "severity": severity, "stream": stream, "size": size}
                        yield "adapt", {"depth": depth, **given}
        for name in CORRUPTIONS if "adapt" in parts else ():
            for severity in (1, 3):
                given = {"name": name, "severity": severity, "stream": "mixed", "size": 32}
                yield "adapt", {"depth": depth, **given}
        for size in (10, 32, 100) if "test" in parts else ():
            for stream in ("mixed", "dirichlet"):
                given = {"name": "gaussian noise", "severity": 0, "stream": stream, "size": size, "count": 1000}
                yield "test", {"depth": depth, **given}
            for name in CORRUPTIONS:
                for severity in (1, 3):
                    given = {"name": name, "severity": severity, "stream": "mixed", "size": size, "count": 20}
                    yield "test", {"depth": depth, **given}
        if "monitor" in parts:
            yield "monitor_null", {"depth": depth, "streams": 200}
            for name in CORRUPTIONS:
                yield "monitor_delay", {"depth": depth, "name": name, "severity": 3}


def run(kind: str, case: Case, given: dict[str, Any]) -> dict[str, Any]:
    own = {key: value for key, value in given.items() if key != "depth"}
    calls = {"adapt": case.adapt, "test": case.test}
    calls |= {"monitor_null": lambda **o: monitor_null(case, **o)}
    calls |= {"monitor_delay": lambda **o: monitor_delay(case, **o)}
    return calls[kind](**own)


def table(lines: list[dict[str, Any]], columns: list[str], rows: dict[str, list[float | str]]) -> None:
    print("| | " + " | ".join(columns) + " |\n|" + "---|" * (1 + len(columns)))
    for name, values in rows.items():
        print(f"| {name} | " + " | ".join(v if isinstance(v, str) else f"{v:.1f}" for v in values) + " |")
    print()


def show(lines: list[dict[str, Any]]) -> None:
    """Print tables of everything that was measured."""
    for depth in sorted({line["depth"] for line in lines}):
        own = [line for line in lines if line["depth"] == depth]
        print(f"## ResNet-{depth}\n")
        _show_adapted([line for line in own if line["kind"] == "adapt"])
        _show_expected([line for line in own if line["kind"] == "adapt"])
        _show_tests([line for line in own if line["kind"] == "test"])
        for line in own:
            if line["kind"].startswith("monitor"):
                about = {k: v for k, v in line.items() if k not in ("kind", "depth", "seconds")}
                print("- " + ", ".join(f"{key} {value}" for key, value in about.items()))


def _show_adapted(lines: list[dict[str, Any]]) -> None:
    keys = sorted({(line["size"], line["severity"], line["stream"]) for line in lines})
    for size, severity, stream in keys:
        own = [x for x in lines if (x["size"], x["severity"], x["stream"]) == (size, severity, stream)]
        rows: dict[str, list[float | str]] = {}
        for method in own[0]["total"]:
            sums = [x["total"][method] for x in own]
            errors = [100 * (1 - right / count) for right, _, count in sums]
            nll = statistics.fmean(loss / count for _, loss, count in sums)
            rows[method] = [statistics.fmean(errors), f"{nll:.2f}", *errors]
        print(f"Error in % and NLL: windows of {size}, {stream}, severity {severity}\n")
        table(own, ["mean", "NLL", *(x["name"] if severity else "clean" for x in own)], rows)


def _show_expected(lines: list[dict[str, Any]]) -> None:
    rows: dict[str, list[float | str]] = {}
    for size, severity in sorted({(x["size"], x["severity"]) for x in lines if x["size"] > 1}):
        own = [x["expected"] for x in lines if (x["size"], x["severity"], x["stream"]) == (size, severity, "mixed")]
        off = lambda key, true, own=own: 100 * statistics.fmean(abs(x[key] - x[true]) for x in own)  # noqa: E731
        pairs = [
            ("adapted", "adapted, true"),
            *((k, "network, true") for k in ("network", "average confidence", "ATC")),
        ]
        ranges = [[x[key] for x in own] for key in ("coverage", "plain coverage")]
        covered = [f"{100 * statistics.fmean(r):.0f} ({100 * min(r):.0f} to {100 * max(r):.0f})" for r in ranges]
        sizes = [f"{statistics.fmean(x[key] for x in own):.2f}" for key in ("set size", "plain set size")]
        rows[f"n = {size}, severity {severity}"] = [*(off(*pair) for pair in pairs), *covered, *sizes]
    if rows:
        print("Accuracy without labels, mean absolute error in points; coverage of 90 % sets in %\n")
        names = ["adapted", "network", "average confidence", "ATC", "sets", "plain sets", "size", "plain size"]
        table(lines, names, rows)


def _show_tests(lines: list[dict[str, Any]]) -> None:
    rows: dict[str, list[float | str]] = {}
    names = ["drift at 1%", "drift at 5%", "class mix at 5%", "BBSD at 5%", "MMD at 5%"]
    for size, severity, stream in sorted({(x["size"], x["severity"], x["stream"]) for x in lines}):
        own = [x for x in lines if (x["size"], x["severity"], x["stream"]) == (size, severity, stream)]
        values = [100 * statistics.fmean(x[name] for x in own) if name in own[0] else "" for name in names]
        rows[f"n = {size}, {stream}, severity {severity}"] = list(values)
    if rows:
        print("Windows that are called changed, in %\n")
        table(lines, names, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("results", type=Path)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--parts", nargs="*", default=["adapt", "test", "monitor"])
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    lines = [json.loads(line) for line in options.results.read_text().splitlines()] if options.results.exists() else []
    if options.show:
        return show(lines)
    done, cases = {json.dumps([line["kind"], line["given"]]) for line in lines}, dict[int, Case]()
    for kind, given in work(options.parts):
        if json.dumps([kind, given]) in done:
            continue
        with torch.no_grad():
            depth = given["depth"]
            if depth not in cases:
                fitted = options.results.with_suffix(f".{depth}.safetensors")
                cases[depth] = Case(depth, options.folder, options.images, fitted)
            case = cases[depth]
            start = time.monotonic()
            found = run(kind, case, given)
        line = {"kind": kind, "given": given, **given, **found, "seconds": round(time.monotonic() - start, 1)}
        with options.results.open("a") as file:
            file.write(json.dumps(line) + "\n")
    return None


if __name__ == "__main__":
    main()
