"""Small claims of the paper on variance networks, each tried on a LeNet-5 with noise in its hidden dense layer.

Neklyudov, Molchanov, Ashukha and Vetrov, "Variance Networks: When Expectation Does Not Meet Your Expectations" (ICLR
2019), and its slides: other noise than Gaussian works the same; other priors lead to variance networks too; with a
large alpha that weights share, N(mu, alpha mu^2) may be replaced by N(0, alpha mu^2); |eps| may be replaced by
N(0.8, 0.6^2); how much noise a layer bears; permuted variances; a toy problem.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

import batchbayes as bb
from batchbayes.methods.weights.family import Family
from batchbayes.tools import Figure, GlobalStream, generator, shuffled
from batchbayes.training.loop import supervised
from batchbayes_papers.data.folder import DataFolder
from batchbayes_papers.image_networks import ImageData, load_images
from batchbayes_papers.runner.experiment import Results, Unit
from batchbayes_papers.runner.figures import Line, lines_figure
from batchbayes_papers.runner.tables import CellValue, ResultTable
from batchbayes_papers.weights.variance_networks import DropoutCourse, new_lenet

NOISES = {noise: bb.Variance(noise) for noise in ("gaussian", "bernoulli", "uniform")}
LEARNT = {
    "one alpha": bb.VariationalDropout("layer", initial_log_alpha=0.0),
    "one alpha, ARD prior": bb.VariationalDropout("layer", "ard", initial_log_alpha=0.0),
    "alpha for each neuron": bb.VariationalDropout("neuron", initial_log_alpha=0.0),
    "alpha for each weight": bb.VariationalDropout("weight", initial_log_alpha=0.0),
    "mean and variance for each weight": bb.MeanField(),
}
MAGNITUDES = ("|eps|", "N(0.8, 0.6^2)")
ABS_MEAN, ABS_STD = math.sqrt(2 / math.pi), math.sqrt(1 - 2 / math.pi)
"""Mean and standard deviation of |eps| for standard normal eps: 0.798 and 0.603."""
DEGREES = (3.0, 1.0, 0.1, 0.01, 0.001)
COLUMNS = {"draw": "one draw", "means": "means", "mean": "mean over draws", "zeroed": "means set to zero",
           "permuted": "variances permuted"}  # fmt: skip


FULL, FEW = DropoutCourse(), DropoutCourse(200, epochs=1, batch_size=50)


@dataclass(frozen=True)
class ClaimsConfig:
    """A configuration. The paper has no protocol for these claims; the defaults are as long as its other networks."""

    data: Literal["mnist", "synthetic"] = "mnist"
    num_train: int = 60_000
    num_test: int = 10_000
    short: DropoutCourse = FULL
    """For noise whose size is fixed or has no prior."""
    learnt: DropoutCourse = FULL
    """For alphas that are learnt, which takes long."""
    alphas: tuple[float, ...] = (0.25, 1, 4, 16, 64, 256, 1024, 4096)
    num_samples: int = 20
    toy_steps: int = 21_000


PRESETS = {
    "smoke": ClaimsConfig("synthetic", 200, 100, FEW, FEW, alphas=(1, 16), num_samples=2, toy_steps=5),
    "quick": ClaimsConfig(
        num_train=10_000, num_test=2000, short=DropoutCourse(10_000, 8, 50, 2e-3),
        learnt=DropoutCourse(10_000, 30, 50, 6e-3, decay_from=24), num_samples=10, toy_steps=3000,
    ),
    "paper": ClaimsConfig(),
}  # fmt: skip


def units(config: ClaimsConfig) -> list[Unit]:
    """Return a unit for each network."""
    learnt = [Unit(name, {"family": name}, effort=10) for name in LEARNT]
    noises = [Unit(f"{name} noise", {"noise": name}) for name in NOISES]
    fixed = [Unit(f"alpha {alpha:g}", {"alpha": alpha}) for alpha in config.alphas]
    magnitudes = [Unit(name, {"magnitude": name}) for name in MAGNITUDES]
    return [*learnt, *noises, *fixed, *magnitudes, Unit("toy", {"toy": True})]


def work(config: ClaimsConfig, unit: Unit, needed: Results, data_folder: DataFolder = None) -> dict[str, Any]:
    """Train one network, and return accuracies in per cent."""
    given = unit.arguments
    if "toy" in given:
        return toy_result(config)
    data = load_images(config.data, config.num_train, config.num_test, data_folder)
    if "magnitude" in given:
        return magnitude_result(config, data, is_normal=given["magnitude"] != "|eps|")
    if "family" in given:
        return family_result(config, data, LEARNT[given["family"]], config.learnt)
    family = NOISES[given["noise"]] if "noise" in given else bb.GaussianDropout(given["alpha"])
    return family_result(config, data, family, config.short)


@torch.no_grad()
def family_result(config: ClaimsConfig, data: ImageData, family: Family, course: DropoutCourse) -> dict[str, Any]:
    """Train the hidden dense layer with random weights, and try it as it is, and with other means and variances.

    The batch norm that follows takes the statistics of the test images each time, as the authors' scripts do.
    """
    network = bb.noisy(new_lenet(), family, layers=["dense1"])
    with torch.enable_grad():
        course.fit(network, data)
    posterior = network.posterior()
    name = posterior.sites[0].name
    given: Any = posterior.distributions[name]
    order = torch.randperm(given.std.numel(), generator=generator(0, "permutation"))
    permuted = given.std.flatten()[order].view_as(given.std)
    source = generator(0, "noise")
    images, labels = data.test

    def probs(weight: Tensor) -> Tensor:
        of_batch = {"norm3.running_mean": None, "norm3.running_var": None}
        return posterior.network(images, tensors={name: weight, **of_batch}).softmax(-1)

    is_gaussian = not isinstance(family, bb.Variance) or family.noise == "gaussian"

    def right(mean: Tensor, std: Tensor, draws: int = config.num_samples) -> float:
        total = torch.zeros(())
        for _ in range(draws):
            normal = mean + std * torch.randn(std.shape, generator=source)
            total = total + probs(normal if is_gaussian else given.sample(source))
        return 100 * bb.metrics.accuracy(total / draws, labels)

    found = {
        "draw": right(given.mean, given.std, 1),
        "means": 100 * bb.metrics.accuracy(probs(given.mean), labels),
        "mean": right(given.mean, given.std),
        "zeroed": right(torch.zeros_like(given.mean), given.std) if is_gaussian else None,
        "permuted": right(given.mean, permuted) if is_gaussian else None,
    }
    alpha = (given.variance / given.mean.square()).log().median() if family.has_means else torch.tensor(math.inf)
    return found | {"log_alpha": float(alpha) if alpha.isfinite() else None}


class Magnitude(nn.Module):
    """A variance layer and the absolute value of its outputs: their spread times |eps|, or N(0.8, 0.6^2) instead."""

    def __init__(self, inputs: int, outputs: int, is_normal: bool) -> None:
        super().__init__()
        self.std, self.is_normal = nn.Parameter(nn.Linear(inputs, outputs).weight.detach().clone()), is_normal

    def forward(self, inputs: Tensor) -> Tensor:
        spread = (linear(inputs.square(), self.std.square()) + 1e-16).sqrt()
        noise = torch.randn_like(spread)
        return spread * (ABS_MEAN + ABS_STD * noise if self.is_normal else noise.abs())


def magnitude_result(config: ClaimsConfig, data: ImageData, is_normal: bool) -> dict[str, float]:
    """Train a LeNet-5 whose hidden dense layer returns magnitudes of noise."""
    network: Any = new_lenet()
    with GlobalStream(0):
        network.dense1 = Magnitude(800, 500, is_normal)
    course = config.short
    images, labels = (part[: course.num_train] for part in data.train)
    training = bb.TrainingConfig(course.epochs, course.batch_size, course.learning_rate)
    bb.train(network, shuffled(images, labels, course.batch_size, seed=0), supervised(cross_entropy), training)
    with torch.no_grad(), GlobalStream(1):
        draws = [network.eval()(data.test[0]).softmax(-1) for _ in range(config.num_samples)]
    right = [100 * bb.metrics.accuracy(each, data.test[1]) for each in (draws[0], sum(draws) / len(draws))]
    return {"draw": right[0], "mean": right[1]}


def toy_result(config: ClaimsConfig) -> dict[str, float]:
    """Train a network whose two hidden numbers have zero means to tell four clouds in the plane."""
    source = generator(0, "toy")
    centres = torch.tensor([[3.0, 3], [3, 10], [10, 3], [10, 10]])
    labels = torch.arange(4).repeat_interleave(500)
    points = centres[labels] + torch.randn(2000, 2, generator=source)
    with GlobalStream(0):
        before = [part for i in range(4) for part in (nn.Linear(2 if i == 0 else 100, 100), nn.LeakyReLU())]
        network = nn.Sequential(*before, nn.Linear(100, 2), nn.Linear(2, 100), nn.LeakyReLU(), nn.Linear(100, 4))
    random = bb.noisy(network, bb.Variance(), layers=["8"])
    training = bb.TrainingConfig(config.toy_steps, 2000, 1e-4 if config.toy_steps > 10_000 else 1e-3)
    bb.fit_noisy(random, [(points, labels)], bb.categorical(), training, num_examples=2000)
    posterior = random.posterior()
    draws = bb.predict(posterior, points, bb.categorical(), num_samples=100, keep_draws=True)
    with torch.no_grad():
        means = posterior.network(points).softmax(-1)
    return {
        "draw": 100 * bb.metrics.accuracy(draws.draws[0].softmax(-1), labels),
        "means": 100 * bb.metrics.accuracy(means, labels),
        "mean": 100 * bb.metrics.accuracy(draws.probs, labels),
    }


def tables(config: ClaimsConfig, results: Results) -> list[ResultTable]:
    """Return accuracies of all networks, and the slope of the KL of a Student-t prior."""
    rows: list[tuple[CellValue, ...]] = []
    for unit in units(config):
        found = results.get(unit.name, {})
        rows.append((unit.name, found.get("log_alpha"), *(found.get(key) for key in COLUMNS)))
    slopes = [(degrees, *(student_slope(std, degrees) for std in (0.1, 1.0, 10.0))) for degrees in DEGREES]
    return [
        ResultTable(
            "Test accuracy with noise in the hidden dense layer, per cent",
            ("noise", "median log alpha", *COLUMNS.values()),
            tuple(rows),
            ("", *[".1f"] * 6),
        ),
        ResultTable(
            "Slope of the KL from a Student-t prior, for log sigma",
            ("degrees of freedom", "sigma = 0.1", "sigma = 1", "sigma = 10"),
            tuple(slopes),
            ("g", *[".3f"] * 3),
        ),
    ]


def student_slope(std: float, degrees: float) -> float:
    """Return the derivative of KL(N(0, std^2) || Student-t) by log std.

    >>> abs(student_slope(1.0, 1e-9)) < 1e-4  # at few degrees of freedom the variance is free
    True
    """
    network = bb.noisy(nn.Linear(1, 1, bias=False).double(), bb.Variance(degrees=degrees))
    (own,) = network.own.values()
    with torch.no_grad():
        own.fill_(std)
    return std * float(torch.autograd.grad(network.divergence(), own)[0])


def figures(config: ClaimsConfig, results: Results) -> dict[str, Figure]:
    """Show how much noise of a fixed size the layer bears."""
    seen = [(alpha, results[name]) for alpha in config.alphas if (name := f"alpha {alpha:g}") in results]
    lines = [
        Line(COLUMNS[key], [alpha for alpha, _ in seen], [found[key] for _, found in seen])
        for key in ("draw", "means", "mean", "zeroed")
    ]
    return {"accuracy-and-noise": lines_figure({"test accuracy, %": lines}, "alpha, fixed", log_positions=True)}


def notes(config: ClaimsConfig) -> list[str]:
    """Say what the paper leaves open."""
    return [
        "The paper states these claims in its text or slides, without numbers. Networks and training are ours.",
        "Batch norm behind the layer takes the statistics of the test images in each column.",
        f"{config.learnt.num_train:,} training and {config.num_test:,} test images. Epochs: {config.learnt.epochs} "
        f"where alphas or means and variances are learnt, {config.short.epochs} elsewhere.",
    ]
