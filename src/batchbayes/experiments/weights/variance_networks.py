"""Variance networks on MNIST: weights with zero mean, whose variances alone carry what was learnt.

Neklyudov, Molchanov, Ashukha and Vetrov, "Variance Networks: When Expectation Does Not Meet Your Expectations" (ICLR
2019). The first table has the accuracy of one draw, of the means and of the mean over draws, for a LeNet-5 whose hidden
dense layer is a variance layer, and for the same network with dropout. The figure shows the phase transition of
variational dropout with one alpha: during training the means stop to matter, and the variances take over. The second
table has the evidence lower bounds of four parametrisations of variational dropout.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from batchbayes._common.rng import GlobalStream, generator
from batchbayes.data.folder import DataFolder
from batchbayes.data.mnist import load_mnist
from batchbayes.experiments.weights.images import ImageData, fast, load_images, new_network
from batchbayes.likelihoods import categorical
from batchbayes.methods.dropout import mc_dropout
from batchbayes.methods.point import deterministic
from batchbayes.methods.weights.family import Family
from batchbayes.methods.weights.fit import Schedule, fit_noisy
from batchbayes.methods.weights.noisy import Noisy, noisy
from batchbayes.methods.weights.posterior import WeightsPosterior
from batchbayes.methods.weights.sparse import SparseVD
from batchbayes.methods.weights.variance import Variance
from batchbayes.methods.weights.variational_dropout import VariationalDropout
from batchbayes.metrics import accuracy, ood_auroc
from batchbayes.models.lenet import NormalisedLeNet5
from batchbayes.plots.style import Figure
from batchbayes.posterior import Posterior
from batchbayes.prediction import predict
from batchbayes.reproduce.experiment import Results, Unit
from batchbayes.reproduce.tables import CellValue, ResultTable
from batchbayes.training.batches import shuffled
from batchbayes.training.loop import Step, TrainingConfig, supervised, train

PUBLISHED = {"dropout": (99.1, 99.4, 99.4), "variance": (95.9, 10.1, 99.3)}
"""Accuracy of one draw, of the means, and of the mean over draws, in per cent."""
ELBOS = {
    "layer": (VariationalDropout("layer"), -5.9e2, 11.3, 99.2),
    "neuron": (VariationalDropout("neuron"), -7.7e2, 11.3, 99.2),
    "additive": (SparseVD(), -2.3e4, 96.3, 99.2),
    "weight": (VariationalDropout("weight"), -6.4e4, 81.3, 99.2),
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
class VarianceNetworksConfig:
    """A configuration. The defaults are those of the paper."""

    data: Literal["mnist", "synthetic"] = "mnist"
    num_train: int = 60_000
    num_test: int = 10_000
    epochs: int = 200
    batch_size: int = 200
    num_samples: int = 100
    transition_train: int = 60_000
    transition_epochs: int = 100
    transition_batch_size: int = 200
    transition_learning_rate: float = 1e-3
    transition_decay_from: int = 0
    """The epoch from which the learning rate falls to zero."""
    transition_every: int = 1
    """Epochs between two looks."""
    transition_test: int = 2000
    elbo_network: str = "LeNet-5"
    elbo_epochs: int = 200
    elbo_learning_rate: float = 1e-3
    learning_rate: float = 1e-3


PRESETS = {
    "smoke": VarianceNetworksConfig(
        "synthetic", 200, 100, epochs=2, batch_size=50, num_samples=3, transition_train=200, transition_epochs=2,
        transition_batch_size=50, elbo_network="LeNet-300-100", elbo_epochs=2,
    ),
    "quick": VarianceNetworksConfig(
        epochs=6, num_samples=20, transition_train=10_000, transition_epochs=50, transition_batch_size=50,
        transition_learning_rate=6e-3, transition_decay_from=42, transition_every=2, transition_test=1000,
        elbo_network="LeNet-300-100", elbo_epochs=8, elbo_learning_rate=6e-3,
    ),
    "paper": VarianceNetworksConfig(),
}  # fmt: skip


def units(config: VarianceNetworksConfig) -> list[Unit]:
    """Return units for the two networks, for the phase transition, and for each ELBO."""
    networks = [Unit(name, {"task": name}, effort=4) for name in reversed(PUBLISHED)]
    elbos = [Unit(f"ELBO, alpha for each {name}", {"task": "elbo", "family": name}, effort=2) for name in ELBOS]
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


def training(config: VarianceNetworksConfig) -> TrainingConfig:
    return TrainingConfig(config.epochs, config.batch_size, config.learning_rate)


def variance_posterior(config: VarianceNetworksConfig, data: ImageData) -> Posterior:
    """Train a LeNet-5 whose hidden dense layer has no means."""
    network = noisy(new_lenet(), Variance(), layers=["dense1"])
    fit(network, data.train, training(config))
    return network.posterior()


def dropout_posterior(config: VarianceNetworksConfig, data: ImageData) -> Posterior:
    """Train the same network with dropout before its hidden dense layer."""
    network = new_lenet(dropout=0.5)
    schedule = Schedule(decay_from=0)

    def decay(step: Step) -> None:
        for group in step.optimiser.param_groups:
            group["lr"] = schedule.learning_rate(step.epoch, training(config))

    batches = shuffled(*data.train, config.batch_size, seed=0)
    train(network, batches, supervised(cross_entropy), training(config), after_step=decay)
    return mc_dropout(network)


def new_lenet(dropout: float = 0.0) -> nn.Module:
    with GlobalStream(0):
        return fast(NormalisedLeNet5(dropout))


def fit(
    network: Noisy, data: tuple[Tensor, Tensor], config: TrainingConfig, decay_from: int = 0, **options: Any
) -> None:
    """Train with a learning rate that falls linearly to zero."""
    schedule = Schedule(decay_from=decay_from)
    batches = shuffled(*data, config.batch_size, seed=0)
    fit_noisy(network, batches, categorical(), config, num_examples=len(data[0]), schedule=schedule, **options)


def network_result(
    config: VarianceNetworksConfig, posterior: Posterior, data: ImageData, data_folder: DataFolder
) -> dict[str, float]:
    """Return accuracies in per cent, and how well the entropy of the mean over draws tells strange images."""
    images, labels = data.test
    draws = predict(posterior, images, categorical(), num_samples=config.num_samples)
    single = predict(posterior, images, categorical(), num_samples=5, seed=1, keep_draws=True)
    strange = predict(posterior, strange_images(config, images, data_folder), categorical(), num_samples=10)
    few = predict(posterior, images, categorical(), num_samples=10)
    return {
        "stochastic": 100 * sum(accuracy(one.softmax(-1), labels) for one in single.draws) / len(single.draws),
        "deterministic": 100 * accuracy(predict(at_means(posterior), images, categorical()).probs, labels),
        "ensemble": 100 * accuracy(draws.probs, labels),
        "auroc": ood_auroc(few.entropy, strange.entropy),
    }


def strange_images(config: VarianceNetworksConfig, images: Tensor, data_folder: DataFolder) -> Tensor:
    """Return images of clothes, scaled as the digits are, or noise."""
    if config.data == "synthetic":
        return torch.randn(images.shape, generator=generator(0, "strange"))
    clothes, _ = load_mnist("fashion_mnist", "test", data_folder, config.num_test)
    digits, _ = load_mnist("mnist", "train", data_folder, config.num_train)
    return clothes.float() / 256 - digits.float().mean(0) / 256


def at_means(posterior: Any) -> Posterior:
    """Return the network without noise."""
    if not isinstance(posterior, WeightsPosterior):
        return deterministic(posterior.network.module)
    return with_weights(posterior, {name: given.mean for name, given in posterior.distributions.items()})


def with_weights(posterior: WeightsPosterior, weights: dict[str, Tensor]) -> Posterior:
    """Return the network with other weights in the place of the random ones."""
    module = copy.deepcopy(posterior.network.module)
    module.load_state_dict(weights, strict=False)
    return deterministic(module)


def transition(config: VarianceNetworksConfig, data: ImageData) -> list[dict[str, float]]:
    """Train variational dropout with one alpha for the hidden dense layer, and look at it from time to time."""
    network = noisy(new_lenet(), VariationalDropout("layer"), layers=["dense1"])
    inside = tuple(part[: config.transition_train] for part in data.train)
    images, labels = (part[: config.transition_test] for part in data.test)
    steps = max(1, config.transition_train // config.transition_batch_size) * config.transition_every
    history = []

    def look(step: Step) -> None:
        if step.number % steps == 0:
            history.append({"epoch": step.epoch + 1, **transition_point(network, images, labels)})

    settings = TrainingConfig(config.transition_epochs, config.transition_batch_size, config.transition_learning_rate)
    fit(network, inside, settings, decay_from=config.transition_decay_from, after_step=look)  # type: ignore[arg-type]
    return history


@torch.no_grad()
def transition_point(network: Noisy, images: Tensor, labels: Tensor) -> dict[str, float]:
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
        return 100 * accuracy(outputs.softmax(-1), labels)

    return {
        "log_alpha": float(given.log_alpha.mean()),
        "stochastic": right(given.mean + std * noise),
        "deterministic": right(given.mean),
        "ensemble": 100 * accuracy(predict(posterior, images, categorical(), num_samples=10).probs, labels),
        "zeroed": right(std * noise, of_batch),
        "permuted": right(given.mean + permuted * noise, of_batch),
    }


def elbo_result(config: VarianceNetworksConfig, data: ImageData, family: Family) -> dict[str, float]:
    """Train one parametrisation in all layers, and return its ELBO on the training set, and accuracies."""
    network = noisy(new_network(config.elbo_network, seed=0), family)
    fit(network, data.train, TrainingConfig(config.elbo_epochs, 100, config.elbo_learning_rate))
    posterior = network.posterior()
    images, labels = data.train
    draws = 10
    log_likelihood = sum(
        float(-cross_entropy(function(x), y, reduction="sum"))
        for function in (posterior.draw(0, index) for index in range(draws))
        for x, y in zip(images.split(2000), labels.split(2000), strict=True)
    )
    divergence = float(network.divergence().detach())
    test = predict(posterior, data.test[0], categorical(), num_samples=20)
    return {
        "elbo": log_likelihood / draws - divergence,
        "divergence": divergence,
        "deterministic": 100 * accuracy(predict(at_means(posterior), data.test[0], categorical()).probs, data.test[1]),
        "ensemble": 100 * accuracy(test.probs, data.test[1]),
    }


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
        elbos.append((name, *interleaved(ours, published)))
    kinds = ("one draw", "published", "means", "published ", "mean over draws", "published  ")
    return [
        ResultTable(
            "Test accuracy of LeNet-5 with noise in its hidden dense layer, per cent",
            ("noise", *kinds, "AUROC, clothes by entropy"),
            tuple(rows),
            ("", *[".1f"] * 6, ".3f"),
        ),
        ResultTable(
            f"Variational dropout in all layers: ELBO in nats ({config.elbo_network}; published: LeNet-5)",
            ("alpha for each", "ELBO", *kinds[1:]),
            tuple(elbos),
            ("", ".3g", ".3g", *[".1f"] * 4),
        ),
    ]


def interleaved(ours: Sequence[CellValue], published: Sequence[CellValue]) -> list[CellValue]:
    """Return our values, each with the published one behind it.

    >>> interleaved([1, 2], [3, 4])
    [1, 3, 2, 4]
    """
    return [cell for pair in zip(ours, published, strict=True) for cell in pair]


def figures(config: VarianceNetworksConfig, results: Results) -> dict[str, Figure]:
    """Show the phase transition."""
    from batchbayes.plots.lines import Line, lines_figure

    history = results["phase transition"]
    epochs = [point["epoch"] for point in history]
    lines = [Line(label, epochs, [point[name] for point in history]) for label, name in CURVES.items()]
    alphas = [Line("hidden dense layer", epochs, [point["log_alpha"] for point in history])]
    return {"phase-transition": lines_figure({"test accuracy, %": lines, "log alpha": alphas}, "epoch")}


def notes(config: VarianceNetworksConfig) -> list[str]:
    """Say how this differs from the paper."""
    found = [
        "The paper does not say which of its layers is the variance layer; ours is the hidden dense layer.",
        "Batch norm uses its running statistics at prediction; the authors' code uses those of test batches. In the "
        "figure the curves with zero means and with permuted variances use those of the test images, too.",
    ]
    if config.epochs != 200:
        found.append(f"{config.epochs} epochs instead of 200 for the accuracies.")
    if config.elbo_network != "LeNet-5":
        found.append(f"The ELBOs are those of {config.elbo_network} after {config.elbo_epochs} epochs.")
    if config.transition_train != 60_000:
        found.append(
            f"The phase transition is trained on {config.transition_train:,} images in batches of "
            f"{config.transition_batch_size}, for {config.transition_epochs} epochs at a learning rate of "
            f"{config.transition_learning_rate:g} that falls from epoch {config.transition_decay_from} on."
        )
    if config.data == "synthetic":
        found.append("Noisy patterns replace images, only to test the program.")
    return found
