"""Variance networks on MNIST: weights with zero mean, whose variances alone carry what was learnt.

Neklyudov, Molchanov, Ashukha and Vetrov, "Variance Networks: When Expectation Does Not Meet Your Expectations" (ICLR
2019). The first table has the accuracy of one draw, of the means and of the mean over draws, for a LeNet-5 whose hidden
dense layer is a variance layer, and for the same network with dropout. The figure shows the phase transition of
variational dropout with one alpha: during training the means stop mattering, and the variances take over. The second
table has the evidence lower bounds of four parametrisations of variational dropout.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import batchbayes as bb
from batchbayes.methods.weights.family import Family
from batchbayes.tools import Figure, GlobalStream, generator, shuffled
from batchbayes.training.loop import Step, supervised
from batchbayes_papers.data.folder import DataFolder
from batchbayes_papers.data.mnist import load_mnist
from batchbayes_papers.image_networks import ImageData, fast, load_images
from batchbayes_papers.models.lenet import NormalisedLeNet5
from batchbayes_papers.runner.experiment import Results, Unit
from batchbayes_papers.runner.figures import Line, lines_figure
from batchbayes_papers.runner.tables import CellValue, ResultTable, interleaved

PUBLISHED = {"dropout": (99.1, 99.4, 99.4), "variance": (95.9, 10.1, 99.3)}
"""Accuracy of one draw, of the means, and of the mean over draws, in per cent."""
ELBOS = {
    "layer": (bb.VariationalDropout("layer"), -5.9e2, 11.3, 99.2),
    "neuron": (bb.VariationalDropout("neuron"), -7.7e2, 11.3, 99.2),
    "additive": (bb.SparseVD(), -2.3e4, 96.3, 99.2),
    "weight": (bb.VariationalDropout("weight"), -6.4e4, 81.3, 99.2),
}
"""Families, and the published ELBO in nats and accuracy of the means and of the mean over draws, in per cent."""
CURVES = {
    "one draw": "stochastic",
    "means": "deterministic",
    "mean over draws": "ensemble",
    "means set to zero": "zeroed",
    "variances permuted": "permuted",
}


@dataclass(frozen=True)
class DropoutCourse:
    """How variational dropout is trained. The defaults are those of the paper."""

    num_train: int = 60_000
    epochs: int = 200
    batch_size: int = 200
    learning_rate: float = 1e-3
    decay_from: int = 0
    """The epoch from which the learning rate falls to zero."""

    def fit(self, network: bb.Noisy, data: ImageData, after_step: Callable[[Step], None] | None = None) -> None:
        """Train a network with random weights on the first images."""
        images, labels = (part[: self.num_train] for part in data.train)
        bb.fit_noisy(
            network,
            shuffled(images, labels, self.batch_size, seed=0),
            bb.categorical(),
            bb.TrainingConfig(self.epochs, self.batch_size, self.learning_rate),
            num_examples=len(images),
            schedule=bb.Schedule(decay_from=self.decay_from),
            after_step=after_step,
        )


@dataclass(frozen=True)
class VarianceNetworksConfig:
    """A configuration. The defaults are those of the paper."""

    data: Literal["mnist", "synthetic"] = "mnist"
    num_train: int = 60_000
    num_test: int = 10_000
    num_samples: int = 100
    networks: DropoutCourse = DropoutCourse()
    """For the networks with a variance layer and with dropout."""
    transition: DropoutCourse = DropoutCourse(epochs=100)
    transition_every: int = 1
    """Epochs between two looks at the phase transition."""
    transition_test: int = 2000
    elbo: DropoutCourse = DropoutCourse()


FEW = DropoutCourse(200, epochs=2, batch_size=50)
PRESETS = {
    "smoke": VarianceNetworksConfig("synthetic", 200, 100, num_samples=3, networks=FEW, transition=FEW, elbo=FEW),
    "quick": VarianceNetworksConfig(
        num_samples=20, networks=DropoutCourse(epochs=6), transition=DropoutCourse(10_000, 50, 50, 6e-3, decay_from=42),
        transition_every=2, transition_test=1000, elbo=DropoutCourse(60_000, 16, 50, 6e-3, decay_from=11),
    ),
    "paper": VarianceNetworksConfig(),
}  # fmt: skip


def units(config: VarianceNetworksConfig) -> list[Unit]:
    """Return units for the two networks, for the phase transition, and for each ELBO."""
    networks = [Unit(name, {"task": name}, effort=4) for name in reversed(PUBLISHED)]
    elbos = [Unit(f"ELBO, alpha for each {name}", {"task": "elbo", "family": name}, effort=6) for name in ELBOS]
    return [*networks, Unit("phase transition", {"task": "transition"}, effort=4), *elbos]


def work(config: VarianceNetworksConfig, unit: Unit, needed: Results, data_folder: DataFolder = None) -> Any:
    """Train one network and look at it."""
    data = load_images(config.data, config.num_train, config.num_test, data_folder)
    task = unit.arguments["task"]
    if task == "transition":
        return transition(config, data)
    if task == "elbo":
        return elbo_result(config, data, *ELBOS[unit.arguments["family"]][:1])
    posterior = (variance_posterior if task == "variance" else dropout_posterior)(config, data)
    return network_result(config, posterior, data, data_folder)


def variance_posterior(config: VarianceNetworksConfig, data: ImageData) -> bb.Posterior:
    """Train a LeNet-5 whose hidden dense layer has no means."""
    network = bb.noisy(new_lenet(), bb.Variance(), layers=["dense1"])
    config.networks.fit(network, data)
    return network.posterior()


def dropout_posterior(config: VarianceNetworksConfig, data: ImageData) -> bb.Posterior:
    """Train the same network with dropout before its hidden dense layer."""
    network, recipe = new_lenet(dropout=0.5), config.networks
    training = bb.TrainingConfig(recipe.epochs, recipe.batch_size, recipe.learning_rate)
    schedule = bb.Schedule(decay_from=0)

    def decay(step: Step) -> None:
        step.set_learning_rate(schedule.learning_rate(step.epoch, training))

    batches = shuffled(*data.train, recipe.batch_size, seed=0)
    bb.train(network, batches, supervised(cross_entropy), training, after_step=decay)
    return bb.mc_dropout(network)


def new_lenet(dropout: float = 0.0) -> nn.Module:
    with GlobalStream(0):
        return fast(NormalisedLeNet5(dropout))


def network_result(
    config: VarianceNetworksConfig, posterior: bb.Posterior, data: ImageData, data_folder: DataFolder
) -> dict[str, float]:
    """Return accuracies in per cent, and how well the entropy of the mean over draws tells other images from digits."""
    images, _ = data.test
    strange = bb.predict(posterior, strange_images(config, images, data_folder), bb.categorical(), num_samples=10)
    few = bb.predict(posterior, images, bb.categorical(), num_samples=10)
    found = draw_accuracies(posterior, data.test, config.num_samples)
    return {**found, "auroc": bb.metrics.ood_auroc(few.entropy, strange.entropy)}


def draw_accuracies(posterior: bb.Posterior, test: tuple[Tensor, Tensor], num_samples: int) -> dict[str, float]:
    """Return accuracies in per cent: of one draw (the mean of five), of the means, and of the mean over draws."""
    images, labels = test
    draws = bb.predict(posterior, images, bb.categorical(), num_samples=num_samples)
    single = bb.predict(posterior, images, bb.categorical(), num_samples=5, seed=1, keep_draws=True).draws
    means = bb.predict(bb.deterministic(at_means(posterior)), images, bb.categorical())
    return {
        "stochastic": 100 * sum(bb.metrics.accuracy(one.softmax(-1), labels) for one in single) / len(single),
        "deterministic": 100 * bb.metrics.accuracy(means.probs, labels),
        "ensemble": 100 * bb.metrics.accuracy(draws.probs, labels),
    }


def strange_images(config: VarianceNetworksConfig, images: Tensor, data_folder: DataFolder) -> Tensor:
    """Return images of clothes, scaled as the digits are, or noise."""
    if config.data == "synthetic":
        return torch.randn(images.shape, generator=generator(0, "strange"))
    clothes, _ = load_mnist("fashion_mnist", "test", data_folder, config.num_test)
    digits, _ = load_mnist("mnist", "train", data_folder, config.num_train)
    return clothes.float() / 256 - digits.float().mean(0) / 256


def at_means(posterior: Any) -> nn.Module:
    """Return the network without noise: with the means in the place of random weights."""
    module = copy.deepcopy(posterior.network.module)
    if isinstance(posterior, bb.WeightsPosterior):
        module.load_state_dict({name: given.mean for name, given in posterior.distributions.items()}, strict=False)
    return module


def transition(config: VarianceNetworksConfig, data: ImageData) -> list[dict[str, float]]:
    """Train variational dropout with one alpha for the hidden dense layer, and look at it from time to time."""
    network = bb.noisy(new_lenet(), bb.VariationalDropout("layer"), layers=["dense1"])
    images, labels = (part[: config.transition_test] for part in data.test)
    steps = max(1, config.transition.num_train // config.transition.batch_size) * config.transition_every
    history = []

    def look(step: Step) -> None:
        if step.number % steps == 0:
            history.append({"epoch": step.epoch + 1, **transition_point(network, images, labels)})

    config.transition.fit(network, data, look)
    return history


@torch.no_grad()
def transition_point(network: bb.Noisy, images: Tensor, labels: Tensor) -> dict[str, float]:
    """Return accuracies in per cent: as it is, with zero means, and with permuted variances; and log alpha.

    Zero means and permuted variances move the outputs of the layer away from the running statistics of the batch norm
    that follows. So this layer then takes the statistics of the test images, as the authors' scripts do.
    """
    posterior = network.posterior()
    name = posterior.sites[0].name
    given: Any = posterior.distributions[name]
    std = given.variance.sqrt()
    order = torch.randperm(std.numel(), generator=generator(0, "permutation"))
    permuted = std.flatten()[order].view_as(std)
    noise = torch.randn(std.shape, generator=generator(0, "noise"))
    of_batch = {"norm3.running_mean": None, "norm3.running_var": None}

    def right(weight: Tensor, statistics: dict[str, None] | None = None) -> float:
        outputs = posterior.network(images, tensors={name: weight, **(statistics or {})})
        return 100 * bb.metrics.accuracy(outputs.softmax(-1), labels)

    return {
        "log_alpha": float(given.log_alpha.mean()),
        "stochastic": right(given.mean + std * noise),
        "deterministic": right(given.mean),
        "ensemble": 100
        * bb.metrics.accuracy(bb.predict(posterior, images, bb.categorical(), num_samples=10).probs, labels),
        "zeroed": right(std * noise, of_batch),
        "permuted": right(given.mean + permuted * noise, of_batch),
    }


def elbo_result(config: VarianceNetworksConfig, data: ImageData, family: Family) -> dict[str, float]:
    """Train one parametrisation in the hidden dense layer, and return its ELBO on the training set, and accuracies."""
    network = bb.noisy(new_lenet(), family, layers=["dense1"])
    config.elbo.fit(network, data)
    posterior = network.eval().posterior()
    images, labels = (part[: config.elbo.num_train] for part in data.train)
    with torch.no_grad(), GlobalStream(1):
        divergence = float(network.divergence())
        losses = [cross_entropy(in_parts(network, images), labels, reduction="sum") for _ in range(10)]
    draws = bb.predict(posterior, data.test[0], bb.categorical(), num_samples=config.num_samples)
    means = bb.predict(bb.deterministic(at_means(posterior)), data.test[0], bb.categorical())
    return {
        "elbo": -float(torch.stack(losses).mean()) - divergence,
        "divergence": divergence,
        "deterministic": 100 * bb.metrics.accuracy(means.probs, data.test[1]),
        "ensemble": 100 * bb.metrics.accuracy(draws.probs, data.test[1]),
    }


def in_parts(network: nn.Module, images: Tensor) -> Tensor:
    """Return the outputs for many images, some at a time."""
    return torch.cat([network(part) for part in images.split(2000)])


def tables(config: VarianceNetworksConfig, results: Results) -> list[ResultTable]:
    """Return accuracies and ELBOs beside the published ones."""
    rows: list[tuple[CellValue, ...]] = []
    for method, published in PUBLISHED.items():
        found = results.get(method, {})
        ours = [found.get(name) for name in ("stochastic", "deterministic", "ensemble")]
        rows.append((method, *interleaved(ours, published), found.get("auroc")))
    elbos: list[tuple[CellValue, ...]] = []
    for name, (_, *published) in ELBOS.items():
        found = results.get(f"ELBO, alpha for each {name}", {})
        ours = [found.get(key) for key in ("elbo", "deterministic", "ensemble")]
        each = published[0] / VarianceNetworksConfig().num_train
        for_image = ours[0] / config.elbo.num_train if ours[0] is not None else None
        elbos.append((name, *interleaved([ours[0], for_image], [published[0], each]), found.get("divergence"),
                      *interleaved(ours[1:], published[1:])))  # fmt: skip
    kinds = ("one draw", "published", "means", "published ", "mean over draws", "published  ")
    return [
        ResultTable(
            "Test accuracy of LeNet-5 with noise in its hidden dense layer, per cent",
            ("noise", *kinds, "AUROC, clothes by entropy"),
            tuple(rows),
            ("", *[".1f"] * 6, ".3f"),
        ),
        ResultTable(
            "Variational dropout in the hidden dense layer of LeNet-5: ELBO in nats, and test accuracy, per cent",
            ("alpha for each", "ELBO", "published", "ELBO of an image", "published ", "KL", "means", "published  ",
             "mean over draws", "published   "),
            tuple(elbos),
            ("", ".3g", ".3g", ".3g", ".3g", ".3g", *[".1f"] * 4),
        ),
    ]  # fmt: skip


def figures(config: VarianceNetworksConfig, results: Results) -> dict[str, Figure]:
    """Show the phase transition."""
    history = results["phase transition"]
    epochs = [point["epoch"] for point in history]
    lines = [Line(label, epochs, [point[name] for point in history]) for label, name in CURVES.items()]
    alphas = [Line("hidden dense layer", epochs, [point["log_alpha"] for point in history])]
    return {"phase-transition": lines_figure({"test accuracy, %": lines, "log alpha": alphas}, "epoch")}


def notes(config: VarianceNetworksConfig) -> list[str]:
    """Say how this differs from the paper."""
    found = [
        "The paper does not say in which layers the noise is. Here it is in the hidden dense layer, in all tables.",
        "Batch norm uses its running statistics at prediction; the authors' code uses those of test batches. In the "
        "figure the curves with zero means and with permuted variances use those of the test images, too.",
    ]
    for what, own, full in (
        ("The networks of the first table are", config.networks, DropoutCourse()),
        ("The phase transition is", config.transition, DropoutCourse(epochs=100)),
        ("The networks with an ELBO are", config.elbo, DropoutCourse()),
    ):
        if own != full:
            found.append(
                f"{what} trained on {own.num_train:,} images in batches of {own.batch_size}, for {own.epochs} epochs "
                f"at a learning rate of {own.learning_rate:g} that falls from epoch {own.decay_from} on; in the paper "
                f"on 60,000 in batches of 200, for {full.epochs} epochs at 0.001 that falls from the start."
            )
    return found
