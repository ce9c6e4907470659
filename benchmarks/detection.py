"""Detection with uncertainty: a small anchor-free detector with batch norm, on scenes of real digits and clothes.

    python benchmarks/detection.py DATA_FOLDER [--weights FILE] [--figure FILE]

DATA_FOLDER has MNIST and Fashion-MNIST. Each scene has two to six objects of twenty classes, which may hide each other,
and pieces of objects that are none. The detector learns from a fixed set of scenes (a few minutes on one core). Test
scenes are made of test images alone; scores are calibrated on scenes of other test images.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from batchbayes_papers.data.mnist import load_mnist
from torch import Tensor, nn
from torch.nn import functional as F

import batchbayes as bb
from batchbayes.metrics import box_overlaps, detection_metrics, is_true_detection
from batchbayes.tools import generator

SIDE, STRIDE, CLASSES = 72, 4, 20
TRAINING, CALIBRATION, TEST = 2000, 200, 200
"""Numbers of scenes."""
BATCH, EPOCHS, RATE, WIDTH = 8, 14, 2e-3, 40
LEAST_SCORE, SUPPRESSED = 0.05, 0.5
FITTED, ROWS, DRAWS, BATCH_SIZES = 400, 32, 16, (8.0, 2.5, 1.3)
"""The fit reads 32 batches of 400 training scenes. The batch size of draws is chosen on calibration scenes, by the log
loss of calibrated scores."""
RESAMPLED, SHOWN = 30, (0, 1, 2, 3)
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


class Found:
    """What a posterior found in calibration and test scenes, with scores as they are and calibrated."""

    def __init__(self, posterior: bb.Posterior, scenes_of: Sequence[tuple[Tensor, list[Truth]]]) -> None:
        (held, held_truths), (images, self.truths) = scenes_of
        calibration = kept(bb.detections(posterior, held, decode, num_samples=DRAWS))
        right, scores = (
            torch.cat(is_true_detection(calibration, held_truths)),
            torch.cat([each.scores for each in calibration]),
        )
        self.maps = {method: bb.calibrate.tune_scores(scores, right, method) for method in ("isotonic", "platt")}
        self.loss = float(F.binary_cross_entropy(self.maps["platt"](scores), right.double()))
        self._posterior, self._images = posterior, images

    @cached_property
    def test(self) -> list[bb.Detections]:
        return kept(bb.detections(self._posterior, self._images, decode, num_samples=DRAWS))

    def line(self, name: str) -> str:
        """Return a row of the table."""
        plain = detection_metrics(self.test, self.truths)
        tuned = {
            key: detection_metrics([each.calibrated(own) for each in self.test], self.truths)
            for key, own in self.maps.items()
        }
        cells = [plain["average_precision"], plain["d_ece"], tuned["isotonic"]["d_ece"], tuned["platt"]["d_ece"]]
        cells += [plain["la_ece"], tuned["isotonic"]["la_ece"], plain["false_box_auroc"]]
        return f"| {name} | {sum(map(len, self.test))} | " + " | ".join(f"{cell:.3f}" for cell in cells) + " |"


def differences(first: Found, second: Found) -> str:
    """Say how much better the second is, with standard errors from scenes that are drawn again with replacement."""
    stream, rows = np.random.default_rng(0), []
    for _ in range(RESAMPLED):
        which = stream.integers(0, len(first.truths), len(first.truths))
        both = [detection_metrics([f.test[k] for k in which], [f.truths[k] for k in which]) for f in (first, second)]
        rows.append([both[1][key] - both[0][key] for key in ("average_precision", "d_ece", "false_box_auroc")])
    spread = np.std(rows, axis=0)
    whole = [detection_metrics(f.test, f.truths) for f in (first, second)]
    names = {"average_precision": "average precision", "d_ece": "D-ECE", "false_box_auroc": "AUROC of false boxes"}
    return "; ".join(
        f"{text} {whole[1][key] - whole[0][key]:+.4f} ± {error:.4f}"
        for (key, text), error in zip(names.items(), spread, strict=True)
    )


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


def figure(path: Path, found: Found, images: Tensor) -> None:
    """Draw four test scenes, with calibrated scores."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(9.6, 2.6), layout="constrained")
    for ax, number in zip(drawing.subplots(1, 4), SHOWN, strict=True):
        own = found.test[number].calibrated(found.maps["isotonic"])
        bb.plots.boxes_figure(
            images[number, 0], own, names=NAMES, truth=found.truths[number][0], least_score=0.2, ax=ax
        )
    bb.plots.save_figure(drawing, path)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("data", type=Path)
    options.add_argument("--weights", type=Path, help="where trained weights are, or will be")
    options.add_argument("--figure", type=Path)
    given = options.parse_args()
    torch.set_num_threads(1)
    start = time.monotonic()
    pixels, truths = scenes(*objects(given.data, "train", slice(20000)), TRAINING, seed=0)
    if given.weights and given.weights.exists():
        network = Detector().eval()
        network.load_state_dict(torch.load(given.weights))
    else:
        network = trained(pixels, truths)
        print(f"trained in {time.monotonic() - start:.0f} s", file=sys.stderr)
        if given.weights:
            torch.save(network.state_dict(), given.weights)
    held = scenes(*objects(given.data, "test", slice(5000)), CALIBRATION, seed=1)
    test = scenes(*objects(given.data, "test", slice(5000, None)), TEST, seed=2)
    print("| scores by | boxes | AP | D-ECE | isotonic | Platt | LaECE | isotonic | AUROC of false boxes |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    plain = Found(bb.deterministic(network), (held, test))
    print(plain.line("the network"), flush=True)
    posterior = bb.mcbn(network, pixels[:FITTED], batch_size=BATCH, training_batch_size=BATCH, num_samples=ROWS)
    tried = {size: Found(posterior.at_batch_size(size), (held, test)) for size in BATCH_SIZES}
    best = min(tried, key=lambda size: tried[size].loss)
    for size in BATCH_SIZES:
        print(tried[size].line(f"MCBN, M = {size:g}"), flush=True)
    print(
        "\nLog loss of calibrated scores on calibration scenes: "
        + ", ".join(f"M = {size:g} {found.loss:.4f}" for size, found in tried.items())
        + f", network {plain.loss:.4f}"
    )
    print(f"MCBN with M = {best:g} less the network: {differences(plain, tried[best])}")
    print(f"largest difference from Python {by_onnx(posterior.at_batch_size(best), test[0][:6]):.1e}")
    if given.figure:
        figure(given.figure, tried[best], test[0])
    print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
