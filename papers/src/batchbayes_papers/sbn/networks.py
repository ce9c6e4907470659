"""The networks of stochastic batch normalisation: their images, and what each method predicts with them.

The networks are trained on known classes, and meet unknown ones. A prediction is the mean probability over draws of one
trained network.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

import batchbayes as bb
from batchbayes.methods.batchnorm.omega import as_buffers, unpack
from batchbayes.tools import Function, GlobalStream, generator
from batchbayes_papers.data.cifar10 import crop_and_flip, load_cifar10
from batchbayes_papers.data.folder import DataFolder
from batchbayes_papers.data.mnist import load_mnist
from batchbayes_papers.image_networks import Course, Prepare, colour_patterns, fast
from batchbayes_papers.models.atanov import VGG11, AtanovLeNet5, ResNet18

LENET, VGG, RESNET = "LeNet-5", "VGG-11", "ResNet-18"
LETTERS, CLASSES = "notMNIST", "the other five classes of CIFAR-10"
UNKNOWN = {LENET: LETTERS, VGG: CLASSES, RESNET: CLASSES}
KNOWN_CLASSES = 5
"""CIFAR-5 has the first five classes of CIFAR-10: airplane, automobile, bird, cat, deer."""
CROP = 4
NETWORK, SBN = "network", "SBN"
ENSEMBLE, ENSEMBLE_SBN = "deep ensemble", "deep ensemble, SBN"
DROPOUT, DROPOUT_SBN = "dropout", "dropout, SBN"
GEOMETRIC = "network, geometric mean of variances"
MOVING, CONVOLUTIONS = "SBN, moving average", "SBN, convolutions only"
CORRELATED, MCBN, TUNED, VIEWS = "correlated SBN", "MCBN", "MCBN, tuned M", "views"
VARIANTS = (GEOMETRIC, MOVING, CONVOLUTIONS, CORRELATED, MCBN, TUNED, VIEWS)
"""In the order of the table: open choices of the paper, then what lies beyond it."""
CHUNK = 500
NOVELTY_EXAMPLES = 4000

Probabilities = tuple[Tensor, Tensor]
"""Of known images (N, K) and of unknown images (N', K)."""


@dataclass(frozen=True)
class NetworkSetting:
    """How one of the networks is trained and tested. The defaults are those of the paper."""

    recipe: Course
    dropout_recipe: Course | None = None
    """For the network with dropout; None if there is none."""
    members: int = 6
    width: int = 64
    """The channels of the first stage. LeNet-5 has one width."""
    num_train: int = 60_000
    num_held_out: int = 0
    """Training images that are left out of training. They tune the batch size; 0 leaves that out."""
    num_known: int = 10_000
    num_unknown: int = 10_000
    passes: int = 50
    num_batches: int = 3000
    """Mini-batches that the moments of stochastic BN are estimated from."""


@dataclass(frozen=True, eq=False)
class SbnData:
    """Images for training as bytes, and others as inputs in [0, 1]."""

    train: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]
    known: tuple[Tensor, Tensor]
    unknown: Tensor


def load_sbn(
    name: str, source: Literal["real", "synthetic"], setting: NetworkSetting, folder: DataFolder = None
) -> SbnData:
    """Load the images of one network. The held-out ones are the last of those that are read for training."""
    count = setting.num_train + setting.num_held_out
    if source == "synthetic":
        train, known = (_patterns(name, number, part) for number, part in ((count, "train"), (setting.num_known, "t")))
        unknown = 255 - known[0][: setting.num_unknown]
    elif name == LENET:
        train, known = load_mnist("mnist", "train", folder, count), load_mnist("mnist", "test", folder)
        unknown = load_mnist("notmnist", "test", folder, setting.num_unknown)[0]
    else:
        images, labels = load_cifar10("train", folder, min(50_000, 3 * count))  # half of them are of known classes
        own = (labels < KNOWN_CLASSES).nonzero()[:count, 0]
        train = images[own], labels[own]
        images, labels = load_cifar10("test", folder)
        is_known = labels < KNOWN_CLASSES
        known, unknown = (images[is_known], labels[is_known]), images[~is_known][: setting.num_unknown]
    end, limit = setting.num_train, setting.num_known
    return SbnData(
        (train[0][:end], train[1][:end]),
        (scaled(train[0][end:]), train[1][end:]),
        (scaled(known[0][:limit]), known[1][:limit]),
        scaled(unknown),
    )


def _patterns(name: str, count: int, part: str) -> tuple[Tensor, Tensor]:
    images, labels = colour_patterns(count, part)
    return (images[:, :1, 2:30, 2:30], labels) if name == LENET else (images, labels % KNOWN_CLASSES)


def scaled(images: Tensor) -> Tensor:
    """Return bytes as numbers from 0 to 1, the inputs of all networks."""
    return images.float() / 255


def prepare_for(name: str) -> Prepare:
    """Return the transforms of training: a reflected crop and a flip for colour images, none for digits."""
    if name == LENET:
        return lambda images, _: scaled(images)
    return lambda images, random: scaled(crop_and_flip(images, random, CROP, reflect=True))


def one_view(name: str, images: Tensor, random: torch.Generator) -> Tensor:
    """Return a view of inputs (N, C, H, W): one random shift for all of them, and for colour images one flip."""
    padding = 2 if name == LENET else CROP
    padded = nn.functional.pad(images, [padding] * 4, mode="reflect")
    top, left = torch.randint(0, 2 * padding + 1, (2,), generator=random).tolist()
    seen = padded[..., top : top + images.shape[-2], left : left + images.shape[-1]]
    mirrored = name != LENET and float(torch.rand((), generator=random)) < 0.5
    return seen.flip(-1) if mirrored else seen


def new_network(name: str, setting: NetworkSetting, seed: int, *, dropout: bool = False) -> nn.Module:
    """Return a network with random weights."""
    make = {
        LENET: lambda: AtanovLeNet5(0.5 if dropout else 0.0),
        VGG: lambda: VGG11(KNOWN_CLASSES, setting.width, (0.5, 0.3) if dropout else (0.0, 0.0)),
        RESNET: partial(ResNet18, KNOWN_CLASSES, setting.width),
    }[name]
    with GlobalStream(seed):
        return fast(make())


def training_batches(name: str, images: Tensor, batch_size: int, count: int) -> list[Tensor]:
    """Return `count` mini-batches as in training: in epochs without replacement, with the transforms of training."""
    random, prepare, rows = generator(0, "statistics"), prepare_for(name), torch.empty(0, dtype=torch.long)
    found = []
    for _ in range(count):
        if len(rows) < batch_size:
            rows = torch.randperm(len(images), generator=random)
        found.append(prepare(images[rows[:batch_size]], random))
        rows = rows[batch_size:]
    return found


@torch.no_grad()
def mean_probabilities(functions: Sequence[Function], data: SbnData) -> Probabilities:
    """Return the mean softmax of several drawn networks."""
    found = []
    for images in (data.known[0], data.unknown):
        chunks = []
        for chunk in images.split(CHUNK):
            total: Any = sum(function(chunk).double().softmax(-1) for function in functions)
            chunks.append(total / len(functions))
        found.append(torch.cat(chunks))
    return found[0], found[1]


def draws_of(posterior: bb.Posterior, passes: int) -> list[Function]:
    """Return one draw for each pass, or a single one if all are the same."""
    return [posterior.draw(0, index) for index in range(1 if posterior.is_point else passes)]


def fit_sbn(name: str, network: nn.Module, data: SbnData, setting: NetworkSetting, **options: Any) -> Any:
    """Fit stochastic BN to mini-batches of the size of training."""
    size = setting.recipe.batch_size
    batches = training_batches(name, data.train[0], size, setting.num_batches)
    options = {"center": "batches", "num_samples": setting.num_batches, **options}
    return bb.stochastic_bn(network, batches, batch_size=size, **options)


def member_probabilities(
    name: str, network: nn.Module, data: SbnData, setting: NetworkSetting
) -> dict[str, Probabilities]:
    """Return the predictions of a network as it is, and by stochastic BN."""
    posterior = fit_sbn(name, network, data, setting)
    return {
        NETWORK: mean_probabilities(draws_of(bb.deterministic(network), 1), data),
        SBN: mean_probabilities(draws_of(posterior, setting.passes), data),
    }


def dropout_probabilities(
    name: str, network: nn.Module, data: SbnData, setting: NetworkSetting
) -> dict[str, Probabilities]:
    """Return the predictions by dropout masks, and by masks together with draws of stochastic BN."""
    statistics = fit_sbn(name, network, data, setting, dropout=True)
    alone = bb.mc_dropout(network)
    return {
        DROPOUT: mean_probabilities(draws_of(alone, setting.passes), data),
        DROPOUT_SBN: mean_probabilities(
            [dropped_draw(network, statistics, index) for index in range(setting.passes)], data
        ),
    }


def dropped_draw(network: nn.Module, statistics: bb.BatchNormPosterior, index: int) -> Function:
    """Return a draw of the masks and of the statistics together."""
    omega = statistics.center + statistics.deviation(0, index)
    buffers = as_buffers(statistics.sites, unpack(statistics.sites, omega))
    noisy = copy.deepcopy(network)
    noisy.load_state_dict({**noisy.state_dict(), **buffers})
    return bb.mc_dropout(noisy).draw(0, index)


def variant_probabilities(
    name: str, network: nn.Module, data: SbnData, setting: NetworkSetting
) -> dict[str, Probabilities]:
    """Return the predictions by the choices that paper and code leave open, and by methods beyond the paper."""
    size = setting.recipe.batch_size

    def batches(count: int) -> list[Tensor]:
        return training_batches(name, data.train[0], size, count)

    def noiseless() -> bb.Posterior:
        fitted = fit_sbn(name, network, data, setting)
        return replace(fitted, deviations=torch.zeros_like(fitted.center)[None], noise="rows")

    def tuned() -> bb.Posterior:
        fitted = bb.mcbn(network, batches(64), batch_size=size, num_samples=64, center="running")
        return bb.tune_batch_size(fitted, [data.held_out], bb.categorical(), num_samples=32).posterior

    fits: dict[str, Callable[[], bb.Posterior]] = {
        GEOMETRIC: noiseless,
        MOVING: lambda: fit_sbn(name, network, data, setting, estimator="moving-average"),
        CORRELATED: lambda: fit_sbn(name, network, data, setting, covariance="correlated"),
        MCBN: lambda: bb.mcbn(
            network, batches(setting.passes), batch_size=size, num_samples=setting.passes, center="batches"
        ),
        VIEWS: lambda: bb.with_views(bb.deterministic(network), partial(one_view, name)),
    }
    if name == LENET:
        fits[CONVOLUTIONS] = lambda: fit_sbn(name, network, data, setting, sites=("norm1", "norm2"))
    if len(data.held_out[0]):
        fits[TUNED] = tuned
    return {method: mean_probabilities(draws_of(fit(), setting.passes), data) for method, fit in fits.items()}


def novelty_auroc(network: nn.Module, data: SbnData) -> float:
    """Return how well the novelty of one pass tells unknown from known images."""
    detector = bb.novelty(network, scaled(data.train[0][:NOVELTY_EXAMPLES]))
    return bb.metrics.ood_auroc(detector.score(data.known[0]), detector.score(data.unknown, whole=False))
