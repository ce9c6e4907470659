"""Detection with uncertainty: a small anchor-free detector with batch norm, on scenes of real digits and clothes.

    python benchmarks/detection.py DATA_FOLDER [--weights FILE] [--figure FILE]

DATA_FOLDER has MNIST and Fashion-MNIST. Each scene has two to six objects of twenty classes, which may hide each other,
and pieces of objects that are none. The detector learns from a fixed set of scenes (five minutes on one core). Scenes
for calibration and for the test are made of other images each.

The rule, written before the test scenes were made. Everything is fitted and chosen on calibration scenes:

- The batch size M of the draws is that of `BATCH_SIZES` with the lowest log loss of a logistic regression which says
  whether a box is right, from what the network and the draws say of it, with each fifth of the scenes held out in turn.
  The boxes are those of the network, so they are the same for each M.
- On test scenes three things are asked, with standard errors by resampling scenes. Is the average precision of the
  objects of draws that of the network, within two standard errors? Is their D-ECE with calibrated scores at most half
  of that of the network's raw scores? Are false boxes, among the boxes of the network, told better with the draws than
  by its score, and than by a logistic regression on what the network alone says?
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from batchbayes_papers.data.mnist import load_mnist
from torch import Tensor, nn
from torch.nn import functional as F

import batchbayes as bb
from batchbayes.metrics import area_under_roc, box_overlaps, detection_metrics, equal_width_reliability
from batchbayes.metrics.detection import class_average_precision, matched_overlaps
from batchbayes.tools import generator

SIDE, STRIDE, CLASSES = 72, 4, 20
TRAINING, CALIBRATION, TEST = 2000, 400, 800
"""Numbers of scenes, each set of 20,000 images of its own."""
BATCH, EPOCHS, RATE, WIDTH = 8, 14, 2e-3, 40
LEAST_SCORE, SUPPRESSED = 0.05, 0.5
FITTED, ROWS, DRAWS, BATCH_SIZES = 400, 32, 16, (8.0, 3.0, 1.3)
"""The fit reads 32 batches of 400 training scenes. Draws at 8, the batch size of training, and below."""
FOLDS, RESAMPLED, SHOWN = 5, 200, (0, 1, 2, 3)
CLOTHES = ("shirt", "trousers", "pullover", "dress", "coat", "sandal", "blouse", "sneaker", "bag", "boot")
NAMES = (*map(str, range(10)), *CLOTHES)
Truth = tuple[Tensor, Tensor]
"""Boxes (M, 4) as x1, y1, x2, y2, and classes (M,)."""


def objects(folder: Path, split: str, part: slice) -> tuple[Tensor, Tensor]:
    """Return images (N, 28, 28) from 0 to 1, and classes: digits are 0 to 9, clothes 10 to 19."""
    found = [load_mnist(name, split, folder) for name in ("mnist", "fashion_mnist")]
    images = torch.cat([images[part, 0] for images, _ in found]).float() / 255
    return images, torch.cat([labels[part] + 10 * number for number, (_, labels) in enumerate(found)])


def scene(images: Tensor, labels: Tensor, stream: np.random.Generator) -> tuple[Tensor, Truth]:
    """Return one scene (1, SIDE, SIDE), and what is in it."""
    canvas = torch.from_numpy(stream.normal(0.12, 0.1, (SIDE, SIDE)).astype(np.float32))
    boxes: list[list[int]] = []
    classes = []
    for number in range(stream.integers(4, 9)):
        size, which = int(stream.integers(14, 31)), int(stream.integers(len(images)))
        pixels = F.interpolate(images[None, None, which], (size, size), mode="bilinear", antialias=True)[0, 0]
        if number < 2:  # a piece that is no object
            size = size // 2
            start = stream.integers(0, size, 2)
            pixels = pixels[start[0] : start[0] + size, start[1] : start[1] + size]
        rows, columns = (pixels > 0.2).any(1).nonzero()[:, 0], (pixels > 0.2).any(0).nonzero()[:, 0]
        x, y = (int(stream.integers(0, SIDE - size + 1)) for _ in range(2))
        place = canvas[y : y + size, x : x + size]
        place.copy_(torch.maximum(place, pixels * float(stream.uniform(0.4, 1.0))))
        if number >= 2 and len(rows) and len(columns):
            boxes.append([x + int(columns[0]), y + int(rows[0]), x + int(columns[-1]) + 1, y + int(rows[-1]) + 1])
            classes.append(int(labels[which]))
    return canvas[None], (torch.tensor(boxes).float().reshape(-1, 4), torch.tensor(classes, dtype=torch.long))


def scenes(images: Tensor, labels: Tensor, count: int, seed: int) -> tuple[Tensor, list[Truth]]:
    """Return scenes (N, 1, SIDE, SIDE) and their truths."""
    stream = np.random.default_rng(seed)
    pixels, truths = zip(*(scene(images, labels, stream) for _ in range(count)), strict=True)
    return torch.stack(pixels), list(truths)


class Block(nn.Module):
    """Two convolutions with batch norm, and a way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return F.relu(inputs + self.body(inputs))


class Detector(nn.Sequential):
    """For each cell of 4 x 4 pixels: the logit of an object, the logs of the distances to its sides, and its class."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(
            nn.Conv2d(1, width // 2, 3, 2, 1, bias=False),
            nn.BatchNorm2d(width // 2),
            nn.ReLU(),
            nn.Conv2d(width // 2, width, 3, 2, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            Block(width),
            Block(width),
            Block(width),
            nn.Conv2d(width, 5 + CLASSES, 1),
        )


def centres() -> tuple[Tensor, Tensor]:
    """Return x and y of the centre of each cell, (H, W) each."""
    along = (torch.arange(SIDE // STRIDE) + 0.5) * STRIDE
    y, x = torch.meshgrid(along, along, indexing="ij")
    return x, y


def decode(raw: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return boxes (M, 4), scores (M,) and class probabilities (M, K) of each scene, after suppression."""
    x, y = (axis.to(raw) for axis in centres())
    left, up, right, down = raw[:, 1:5].clamp(-2, 4).exp().unbind(1)
    boxes = torch.stack([x - left, y - up, x + right, y + down], -1).flatten(1, 2)  # (N, H * W, 4)
    scores, probs = raw[:, 0].sigmoid().flatten(1), raw[:, 5:].softmax(1).flatten(2).mT
    return [suppressed(*parts) for parts in zip(boxes, scores, probs, strict=True)]


def suppressed(boxes: Tensor, scores: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keep the best of boxes that overlap."""
    scores = scores * probs.amax(-1)
    order = scores.argsort(descending=True)[: int((scores >= LEAST_SCORE).sum().clamp_max(60))]
    boxes, scores, probs = boxes[order], scores[order], probs[order]
    near, kept = (box_overlaps(boxes, boxes) >= SUPPRESSED).tolist(), list[int]()
    for row in range(len(boxes)):
        if not any(near[row][other] for other in kept):
            kept.append(row)
    return boxes[kept], scores[kept], probs[kept]


def targets(truths: Sequence[Truth]) -> tuple[Tensor, Tensor, Tensor]:
    """Return which cells lie in the middle of an object (N, H, W), its sides (N, 4, H, W) and its class (N, H, W)."""
    x, y = centres()
    found = []
    for boxes, classes in truths:
        here, sides, kinds = torch.zeros_like(x), torch.zeros(4, *x.shape), torch.zeros(x.shape, dtype=torch.long)
        nearest = torch.full_like(x, torch.inf)
        for box, label in zip(boxes, classes, strict=True):
            x1, y1, x2, y2 = box.tolist()
            far = torch.maximum((x - (x1 + x2) / 2).abs() / (x2 - x1), (y - (y1 + y2) / 2).abs() / (y2 - y1))
            own = (far < 0.25) & (far < nearest)
            nearest = torch.where(own, far, nearest)
            here, kinds = torch.where(own, 1.0, here), torch.where(own, label, kinds)
            sides = torch.where(own, torch.stack([x - x1, y - y1, x2 - x, y2 - y]), sides)
        found.append((here, sides.clamp_min(0.3).log(), kinds))
    here, sides, kinds = map(torch.stack, zip(*found, strict=True))
    return here, sides, kinds


def trained(images: Tensor, truths: Sequence[Truth]) -> Detector:
    """Train a detector on a fixed set of scenes."""
    torch.manual_seed(0)
    network, wanted = Detector(), targets(truths)
    steps = EPOCHS * (len(images) // BATCH)
    optimizer = torch.optim.AdamW(network.parameters(), RATE, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps)
    for epoch in range(EPOCHS):
        total = 0.0
        for rows in torch.randperm(len(images), generator=generator(epoch, "scenes")).split(BATCH):
            if len(rows) < BATCH:
                continue
            raw, (here, sides, kinds) = network(images[rows]), (part[rows] for part in wanted)
            on = here > 0
            loss = F.binary_cross_entropy_with_logits(raw[:, 0], here)
            loss = loss + 0.5 * F.smooth_l1_loss(raw[:, 1:5].movedim(1, -1)[on], sides.movedim(1, -1)[on], beta=0.1)
            loss = loss + 0.3 * F.cross_entropy(raw[:, 5:].movedim(1, -1)[on], kinds[on])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        print(f"epoch {epoch}: loss {total / (len(images) // BATCH):.3f}", file=sys.stderr, flush=True)
    return network.eval()


def kept(found: list[bb.Detections]) -> list[bb.Detections]:
    """Leave out objects below the score from which on the detector itself reports boxes."""
    return [each[each.scores >= LEAST_SCORE] for each in found]


def of_network(found: bb.Detections) -> Tensor:
    """Return what one pass says of each object, (O, 3): its score, how sure its class is, and its size."""
    sides = (found.boxes[:, 2:] - found.boxes[:, :2]).clamp_min(1)
    classes = -torch.special.xlogy(found.probs, found.probs).sum(-1)
    return torch.stack([torch.logit(found.scores, 1e-4), classes, sides.prod(-1).log()], 1)


def of_draws(found: bb.Detections) -> Tensor:
    """Return what only draws say of each object, (O, 5)."""
    sides = (found.boxes[:, 2:] - found.boxes[:, :2]).clamp_min(1)
    spread = (found.box_std.mean(-1) / sides.prod(-1).sqrt() + 1e-3).log()
    scores = torch.logit(found.scores, 1e-4)
    return torch.stack([scores, found.share_found, found.mutual_information, found.entropy, spread], 1)


def beside(boxes: bb.Detections, found: bb.Detections) -> tuple[Tensor, Tensor]:
    """Return what draws say of each box, by the object that overlaps it most: the mean score, and columns (O, 6).

    The columns are `of_draws`, and how probable the draws find the class of the box. A box without an object has zeros.
    """
    columns = torch.cat([of_draws(found), torch.tensor([[-9.0, 0, 0, 0, -9]], dtype=torch.float64)])
    overlaps = torch.cat([box_overlaps(boxes.boxes, found.boxes), torch.full((len(boxes), 1), SUPPRESSED)], 1)
    nearest = overlaps.argmax(1)
    probs = torch.cat([found.probs, found.probs.new_zeros(1, CLASSES)])[nearest].gather(1, boxes.classes[:, None])
    means = torch.cat([found.scores, found.scores.new_zeros(1)])[nearest]
    return means, torch.cat([columns[nearest], torch.logit(probs, 1e-4)], 1)


class Logistic:
    """The probability that a box is right, by a logistic regression on standardised columns, with a ridge of one."""

    def __init__(self, columns: Tensor, right: Tensor) -> None:
        self.centre, self.spread = columns.mean(0), columns.std(0).clamp_min(1e-9)
        values, wanted = self._columns(columns), right.double()
        self.weights = values.new_zeros(values.shape[1])
        ridge = torch.ones_like(self.weights).diag()
        ridge[-1, -1] = 0
        for _ in range(50):
            probs = (values @ self.weights).sigmoid()
            curvature = (values.T * (probs * (1 - probs))) @ values + ridge
            self.weights = self.weights + torch.linalg.solve(
                curvature, values.T @ (wanted - probs) - ridge @ self.weights
            )

    def _columns(self, columns: Tensor) -> Tensor:
        return torch.cat([(columns - self.centre) / self.spread, columns.new_ones(len(columns), 1)], 1)

    def __call__(self, columns: Tensor) -> Tensor:
        return (self._columns(columns) @ self.weights).sigmoid()


def held_out_loss(columns: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Return the log loss of a logistic regression, each fifth of the scenes by a fit to the others."""
    losses = []
    for fold in range(FOLDS):
        train, test = [], []
        for number, pair in enumerate(zip(columns, right, strict=True)):
            (test if number % FOLDS == fold else train).append(pair)
        fitted = Logistic(*(torch.cat(each) for each in zip(*train, strict=True)))
        own, wanted = (torch.cat(each) for each in zip(*test, strict=True))
        losses.append(F.binary_cross_entropy(fitted(own), wanted.double(), reduction="none"))
    return float(torch.cat(losses).mean())


@dataclass
class Boxes:
    """Boxes of test scenes with their scores, and whether they are right: what metrics need, scene by scene."""

    scores: list[Tensor]
    classes: list[Tensor]
    matched: list[Tensor]
    """The overlap of each box with its object; zero for false boxes."""
    kinds: list[Tensor]
    """The classes of the objects of each scene."""

    @classmethod
    def of(cls, found: Sequence[bb.Detections], truths: Sequence[Truth]) -> "Boxes":
        kinds = [kind for _, kind in truths]
        return cls([f.scores for f in found], [f.classes for f in found], matched_overlaps(found, truths), kinds)

    def metrics(self, which: Sequence[int] | None = None) -> dict[str, float]:
        """Return the metrics of the scenes at these positions, which may come twice; of all by default."""
        rows = range(len(self.scores)) if which is None else which
        scores, classes, matched, kinds = (
            torch.cat([part[row] for row in rows]) for part in (self.scores, self.classes, self.matched, self.kinds)
        )
        right = matched > 0
        return {
            "AP": class_average_precision(scores, classes, right, kinds),
            "D-ECE": equal_width_reliability(scores, right, 20).expected_calibration_error(),
            "AUROC": area_under_roc(-scores, ~right),
            "log loss": float(F.binary_cross_entropy(scores.clamp(1e-6, 1 - 1e-6), right.double())),
        }


def resampled(boxes: Mapping[str, Boxes], key: str, pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Say each value, and the differences of pairs, with standard errors from scenes drawn again with replacement."""
    count = len(next(iter(boxes.values())).scores)
    stream = np.random.default_rng(0)
    draws = [stream.integers(0, count, count).tolist() for _ in range(RESAMPLED)]
    found = {name: [own.metrics(rows)[key] for rows in draws] for name, own in boxes.items()}
    whole = {name: own.metrics()[key] for name, own in boxes.items()}
    lines = [f"{key}, {name}: {whole[name]:.4f} ± {np.std(found[name]):.4f}" for name in boxes]
    for first, second in pairs:
        error = np.std(np.subtract(found[first], found[second]))
        gain = whole[first] - whole[second]
        lines.append(f"{key}, {first} less {second}: {gain:+.4f} ± {error:.4f} ({gain / error:+.1f} standard errors)")
    return lines


def by_onnx(posterior: bb.Posterior, images: Tensor) -> float:
    """Export the draws of raw outputs, decode them outside, and return the largest difference of boxes and scores."""
    import onnxruntime

    path = Path(tempfile.mkdtemp()) / "detector.onnx"
    written = bb.export(posterior, path, images, bb.gaussian(1.0), num_samples=4, keep_draws=True)
    session = onnxruntime.InferenceSession(str(path))
    draws = session.run(["draws"], {session.get_inputs()[0].name: images.numpy()})[0]  # (N, S, ...)
    decoded = [decode(torch.from_numpy(draws[:, s])) for s in range(draws.shape[1])]
    expected = bb.detections(posterior, images, decode, num_samples=4)
    print(f"ONNX: {written.num_bytes / 1e6:.1f} MB, {written.passes:.1f} passes for 4 draws", end=", ")
    worst = 0.0
    for number, own in enumerate(expected):
        found = bb.merge_detections([draw[number] for draw in decoded])
        assert len(found) == len(own)
        worst = max(
            worst, *(float((getattr(found, key) - getattr(own, key)).abs().max()) for key in ("boxes", "scores"))
        )
    return worst


def figure(path: Path, found: Sequence[bb.Detections], scenes_of: tuple[Tensor, list[Truth]]) -> None:
    """Draw four test scenes, with fitted scores."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(9.6, 2.6), layout="constrained")
    for ax, number in zip(drawing.subplots(1, 4), SHOWN, strict=True):
        truth = scenes_of[1][number][0]
        bb.plots.boxes_figure(scenes_of[0][number, 0], found[number], names=NAMES, truth=truth, least_score=0.2, ax=ax)
    bb.plots.save_figure(drawing, path)


def right_of(found: Sequence[bb.Detections], truths: Sequence[Truth]) -> list[Tensor]:
    return [each > 0 for each in matched_overlaps(found, truths)]


def together(found: Sequence[bb.Detections]) -> list[Tensor]:
    """Return all columns of the objects of draws, for each scene."""
    return [torch.cat([of_network(each), of_draws(each)], 1) for each in found]


def line(name: str, held: Sequence[bb.Detections], test: Sequence[bb.Detections], truths: Sequence[list[Truth]]) -> str:
    """Return a row of the table: scores as they are, and calibrated on calibration scenes."""
    right, scores = torch.cat(right_of(held, truths[0])), torch.cat([each.scores for each in held])
    maps = [bb.calibrate.tune_scores(scores, right, method) for method in ("isotonic", "platt")]
    plain, *tuned = [
        detection_metrics(own, truths[1]) for own in (test, *([each.calibrated(m) for each in test] for m in maps))
    ]
    cells = [plain["average_precision"], plain["d_ece"], tuned[0]["d_ece"], tuned[1]["d_ece"]]
    cells += [plain["la_ece"], tuned[0]["la_ece"], plain["false_box_auroc"]]
    return f"| {name} | {sum(map(len, test))} | " + " | ".join(f"{cell:.3f}" for cell in cells) + " |"


def network_of(given: argparse.Namespace, pixels: Tensor, truths: Sequence[Truth]) -> Detector:
    """Return the trained detector, from a file if there is one."""
    if given.weights and given.weights.exists():
        network = Detector().eval()
        network.load_state_dict(torch.load(given.weights))
        return network
    network = trained(pixels, truths)
    if given.weights:
        torch.save(network.state_dict(), given.weights)
    return network


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("data", type=Path)
    options.add_argument("--weights", type=Path, help="where trained weights are, or will be")
    options.add_argument("--figure", type=Path)
    given = options.parse_args()
    torch.set_num_threads(1)
    start = time.monotonic()

    def say(text: str) -> None:
        print(f"{text}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)

    pixels, truths = scenes(*objects(given.data, "train", slice(20000)), TRAINING, seed=0)
    network = network_of(given, pixels, truths)
    say("trained")
    plain = bb.deterministic(network)
    posterior = bb.mcbn(network, pixels[:FITTED], batch_size=BATCH, training_batch_size=BATCH, num_samples=ROWS)

    def find(at: bb.Posterior, images: Tensor) -> list[bb.Detections]:
        return bb.detections(at, images, decode, num_samples=DRAWS)

    held, held_truths = scenes(*objects(given.data, "train", slice(20000, 40000)), CALIBRATION, seed=11)
    own = find(plain, held)
    right = right_of(own, held_truths)
    held_of, losses = {}, {}
    for size in BATCH_SIZES:
        held_of[size] = find(posterior.at_batch_size(size), held)
        columns = [torch.cat([of_network(a), beside(a, b)[1]], 1) for a, b in zip(own, held_of[size], strict=True)]
        losses[size] = held_out_loss(columns, right)
        say(f"calibration scenes, M = {size:g}")
    best = min(losses, key=losses.__getitem__)
    alone = held_out_loss(list(map(of_network, own)), right)
    print("Log loss of held-out calibration scenes: network alone " + f"{alone:.4f}, with draws of M = ", end="")
    print(", ".join(f"{size:g} {loss:.4f}" for size, loss in losses.items()) + f". Chosen: M = {best:g}.\n", flush=True)

    test = scenes(*objects(given.data, "train", slice(40000, 60000)), TEST, seed=12)
    seen, every = find(plain, test[0]), find(posterior.at_batch_size(best), test[0])
    say("test scenes")
    on_held, drawn = kept(held_of[best]), kept(every)
    fitted = Logistic(torch.cat(together(on_held)), torch.cat(right_of(on_held, held_truths)))

    def rescored(found: Sequence[bb.Detections]) -> list[bb.Detections]:
        return [replace(each, scores=fitted(own)) for each, own in zip(found, together(found), strict=True)]

    print("| scores by | boxes | AP | D-ECE | isotonic | Platt | LaECE | isotonic | AUROC of false boxes |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    both = held_truths, test[1]
    print(line("the network", own, seen, both))
    print(line(f"MCBN, M = {best:g}", on_held, drawn, both), flush=True)
    print(line(f"MCBN, M = {best:g}, fitted", rescored(on_held), rescored(drawn), both), flush=True)

    boxes = {
        "network": Boxes.of(seen, test[1]),
        "draws": Boxes.of(drawn, test[1]),
        "draws, fitted": Boxes.of(rescored(drawn), test[1]),
    }
    print("\nObjects of the network and of the draws:")
    for key in ("AP", "D-ECE", "AUROC"):
        print("\n".join(resampled(boxes, key, [("draws", "network"), ("draws, fitted", "network")])), flush=True)
    same = on_the_same(own, held_of[best], right, seen, every, boxes["network"])
    first = "network and draws, fitted"
    pairs = [("mean score of draws", "score"), (first, "score"), (first, "network alone, fitted")]
    print("\nThe boxes of the network, each with what the draws say of it:")
    for key in ("AUROC", "log loss"):
        print("\n".join(resampled(same, key, pairs)), flush=True)
    say("resampled")
    print(f"largest difference from Python {by_onnx(posterior.at_batch_size(best), test[0][:6]):.1e}")
    if given.figure:
        figure(given.figure, rescored(drawn), test)
    say("all")


def on_the_same(
    own: list[bb.Detections],
    held: list[bb.Detections],
    right: list[Tensor],
    seen: list[bb.Detections],
    drawn: list[bb.Detections],
    boxes: Boxes,
) -> dict[str, Boxes]:
    """Return the boxes of the network in test scenes, scored in several ways. Which are right does not change."""
    by_draws = [beside(a, b) for a, b in zip(seen, drawn, strict=True)]
    alone = Logistic(torch.cat(list(map(of_network, own))), torch.cat(right))
    columns = [torch.cat([of_network(a), beside(a, b)[1]], 1) for a, b in zip(own, held, strict=True)]
    joint = Logistic(torch.cat(columns), torch.cat(right))
    print(
        "\nWeights of standardised columns (score, class entropy, size; of draws: score, share found, mutual "
        f"information, entropy, spread, class; constant): {', '.join(f'{w:+.2f}' for w in joint.weights.tolist())}"
    )
    scores = {
        "score": [each.scores for each in seen],
        "network alone, fitted": [alone(of_network(each)) for each in seen],
        "mean score of draws": [mean for mean, _ in by_draws],
        "share found": [own[:, 1] for _, own in by_draws],
        "network and draws, fitted": [
            joint(torch.cat([of_network(each), own], 1)) for each, (_, own) in zip(seen, by_draws, strict=True)
        ],
    }
    return {name: replace(boxes, scores=own) for name, own in scores.items()}


if __name__ == "__main__":
    main()
