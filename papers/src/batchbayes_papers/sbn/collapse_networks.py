"""The networks of the collapse with batch size: data, training, and the scores of each method."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import batchbayes as bb
from batchbayes.datasets import pixel_shuffled
from batchbayes.engines.check import measure_linearity
from batchbayes.tools import GlobalStream, shuffled
from batchbayes.training.loop import supervised
from batchbayes_papers.data.cifar10 import augmented_batches, load_cifar10, load_svhn, standardise
from batchbayes_papers.data.folder import DataFolder, data_file
from batchbayes_papers.data.mnist import load_grey_images, load_mnist, scale_pixels
from batchbayes_papers.image_networks import Course, augmented, fast, train_on_bytes
from batchbayes_papers.models.cifar_resnet import CifarResNet
from batchbayes_papers.models.pretrained import cifar_resnet
from batchbayes_papers.models.small_vgg import SmallVGG

DETERMINISTIC, AS_TRAINED, TUNED, REFITTED = "deterministic", "MCBN", "tuned MCBN", "tuned MCBN, small batches"
METHODS = DETERMINISTIC, AS_TRAINED, TUNED, REFITTED
PUBLIC_WEIGHTS = "weights/resnet{}_cifar10_akamaster.safetensors"
NOVELTY_EXAMPLES = 4000


@dataclass(frozen=True)
class CollapseConfig:
    """A configuration. The defaults are those of the preset `quick`."""

    datasets: tuple[str, ...] = ("fashion",)
    """Fashion-MNIST with MNIST unseen, by a small network or by a ResNet; CIFAR-10 with SVHN unseen; or noisy patterns
    and the same patterns with shuffled pixels ("synthetic")."""
    batch_sizes: tuple[int, ...] = (32, 128, 512, 2048)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    num_train: int = 10_000
    """So few that the network memorises them: a network that is not overconfident needs no noise."""
    num_held_out: int = 2000
    num_test: int = 2000
    """The number of test images of each kind, in and out of distribution."""
    epochs: int = 40
    """The same for each M, as in the paper. The final training loss on Fashion-MNIST is below 0.04 for each of them."""
    learning_rate: float = 2e-3
    """Not scaled with M, as in the paper."""
    num_samples: int = 64
    depth: int = 20
    """Of the ResNet."""
    public: bool = False
    """Whether training at each M begins with the public weights of the ResNet for CIFAR-10, or with new ones."""
    start: Course | None = None
    """How a ResNet with new weights is trained first, once for all M. None: not at all."""
    weight_decay: float = 5e-4
    """Of a ResNet."""
    bfloat16: bool = False
    """Whether a ResNet is trained in half precision. It is never used in predictions."""
    refit: bool = True
    """Whether noise of small batches is tuned, too."""
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What is different for a data set: names of fields and their values."""

    @property
    def methods(self) -> tuple[str, ...]:
        return METHODS if self.refit else METHODS[:-1]

    def of(self, dataset: str) -> "CollapseConfig":
        """Return the configuration of one data set."""
        return replace(self, datasets=(dataset,), changes={}, **self.changes.get(dataset, {}))


@dataclass(frozen=True)
class CollapseRow:
    """The scores of one method with one trained network."""

    seed: int
    batch_size: int
    """The batch size M of the training."""
    training_loss: float
    """The mean over the last epoch."""
    method: str
    noise_batch_size: float | None
    """The batch size M of the noise: that of the training, or the tuned one."""
    unexplained: float | None
    """The share of the exact deviations that the linear approximation misses, on 32 images of each kind."""
    accuracy: float
    nll: float
    information_in: float | None
    """The mean mutual information in nats, on test images of the kind that the network was trained on."""
    information_out: float | None
    """The same on images of another kind."""
    auroc_information: float | None
    """How well mutual information separates the two kinds."""
    auroc_entropy: float
    auroc_novelty: float | None = None
    """How well the novelty of one pass does; it needs no draws, so it stands with the network alone."""


@dataclass(frozen=True, eq=False)
class CollapseData:
    """The images (N, C, H, W) and labels (N,) for one seed."""

    train: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    strange: Tensor
    """Images of another kind than those of the training."""
    pixels: Tensor | None = None
    """The training images as bytes, if random crops and flips of them are the training data."""


def load_images(config: CollapseConfig, seed: int, data_folder: DataFolder = None) -> CollapseData:
    """Load the images for one seed. The seed chooses the images to train on and the images to hold out."""
    if is_colour(config):
        return _colour_images(config, data_folder)
    is_made_up = config.datasets[0] == "synthetic"
    counts = config.num_train, config.num_held_out, config.num_test
    known = load_grey_images("synthetic" if is_made_up else "fashion_mnist", counts, seed, data_folder)
    if is_made_up:
        strange = pixel_shuffled(known.test[0], seed)
    else:
        strange = scale_pixels(load_mnist("mnist", "test", data_folder, config.num_test)[0])
    return CollapseData(known.train, known.held_out, known.test, strange)


def _colour_images(config: CollapseConfig, folder: DataFolder) -> CollapseData:
    """Load CIFAR-10, and SVHN as what the network has never seen.

    Images are held out from the test set, after those of the test: the public networks know all training images.
    """
    pixels, labels = load_cifar10("train", folder, config.num_train)
    images, targets = load_cifar10("test", folder, config.num_test + config.num_held_out)
    inputs, end = standardise(images), config.num_test
    return CollapseData(
        (standardise(pixels), labels),
        (inputs[end:], targets[end:]),
        (inputs[:end], targets[:end]),
        standardise(load_svhn(folder, config.num_test)),
        pixels,
    )


def network_rows(
    config: CollapseConfig, seed: int, batch_size: int, data: CollapseData, network: nn.Module
) -> list[CollapseRow]:
    """Train a network at one batch size, and score it without noise, by MCBN, and by MCBN tuned in two ways."""
    loss = train_network(config, seed, batch_size, data, network)

    def fitted(size: int) -> bb.BatchNormPosterior:
        images, count = data.train[0], config.num_samples
        batches = images if data.pixels is None else augmented_batches(data.pixels, size, seed)
        return bb.mcbn(network, batches, batch_size=size, num_samples=count, seed=seed, center="running")

    def tuned(posterior: bb.BatchNormPosterior) -> bb.BatchNormPosterior:
        images, count = [data.held_out], config.num_samples
        return bb.tune_batch_size(posterior, images, bb.categorical(), num_samples=count, seed=seed).posterior

    as_trained, smallest = fitted(batch_size), min(config.batch_sizes)
    own = measure(bb.deterministic(network), 1, seed, data)
    detector = bb.novelty(network, data.train[0], num_examples=NOVELTY_EXAMPLES, seed=seed)
    unusual = bb.metrics.ood_auroc(detector.score(data.test[0]), detector.score(data.strange, whole=False))
    rows = [CollapseRow(seed, batch_size, loss, DETERMINISTIC, None, None, **own, auroc_novelty=unusual)]
    posteriors = {AS_TRAINED: as_trained, TUNED: tuned(as_trained)}
    if config.refit and batch_size > smallest:
        posteriors[REFITTED] = tuned(fitted(smallest))
    for method, posterior in posteriors.items():
        seen = measure(posterior, config.num_samples, seed, data)
        both = torch.cat([data.test[0][:32], data.strange[:32]])
        linearity = measure_linearity(posterior, both, num_draws=16, max_examples=len(both), seed=seed)
        rows.append(CollapseRow(seed, batch_size, loss, method, posterior.batch_size, linearity.unexplained, **seen))
    return [*rows, replace(rows[-1], method=REFITTED)] if config.refit and batch_size == smallest else rows


def is_colour(config: CollapseConfig) -> bool:
    """Return whether the images are those of CIFAR-10."""
    return config.datasets[0] in ("cifar10", "cifar10-deeper")


def is_residual(config: CollapseConfig) -> bool:
    """Return whether the network of a data set is a ResNet."""
    return is_colour(config) or config.datasets[0] == "fashion-resnet"


def new_network(config: CollapseConfig, seed: int, folder: DataFolder = None) -> nn.Module:
    """Return the network that training at some batch size begins with. The seed alone sets new weights."""
    if config.public:
        return cifar_resnet(config.depth, data_file(PUBLIC_WEIGHTS.format(config.depth), folder))
    channels = 3 if is_colour(config) else 1
    with GlobalStream(seed):
        return fast(CifarResNet(config.depth, channels=channels) if is_residual(config) else SmallVGG())


def train_network(config: CollapseConfig, seed: int, batch_size: int, data: CollapseData, network: nn.Module) -> float:
    """Train a network in place, and return its mean training loss in the last epoch."""
    if not is_residual(config):
        training = bb.TrainingConfig(config.epochs, batch_size, config.learning_rate, seed=seed)
        return bb.train(network, shuffled(*data.train, batch_size, seed), supervised(cross_entropy), training)[-1]
    rate, decay = config.learning_rate, config.weight_decay
    recipe = Course(config.epochs, batch_size, rate, weight_decay=decay, bfloat16=config.bfloat16)
    return train_residual(recipe, seed, data, network)


def train_residual(recipe: Course, seed: int, data: CollapseData, network: nn.Module) -> float:
    """Train a ResNet in place, on random crops and flips if its images are in colour, and return its last loss."""
    if data.pixels is not None:
        return train_on_bytes(network, data.pixels, data.train[1], recipe, augmented, seed)
    return train_on_bytes(network, *data.train, recipe, lambda images, _: images, seed)


def measure(posterior: bb.Posterior, num_samples: int, seed: int, data: CollapseData) -> dict[str, Any]:
    """Compare familiar with strange images by exact draws. Return the fields of a row from accuracy on."""
    images, labels = data.test
    familiar, strange = (
        bb.predict(posterior, inputs, bb.categorical(), num_samples=num_samples, seed=seed)
        for inputs in (images, data.strange)
    )
    inside, outside = familiar.mutual_information, strange.mutual_information
    informed = num_samples > 1  # one function cannot disagree with itself
    return {
        "accuracy": bb.metrics.accuracy(familiar.probs, labels),
        "nll": bb.metrics.negative_log_likelihood(familiar.log_prob(labels)),
        "information_in": bb.metrics.mean_score(inside) if informed else None,
        "information_out": bb.metrics.mean_score(outside) if informed else None,
        "auroc_information": bb.metrics.ood_auroc(inside, outside) if informed else None,
        "auroc_entropy": bb.metrics.ood_auroc(familiar.entropy, strange.entropy),
    }
