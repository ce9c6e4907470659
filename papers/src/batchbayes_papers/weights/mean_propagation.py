"""Mean propagation and few bits: how many weights of a network with noise need their noise, and their digits.

Neklyudov et al., "Variance Networks" (ICLR 2019), replace weights by their means where kappa, the variance times the
curvature of the loss, is below a threshold. The accuracy stays while most weights lose their noise. Here the LeNet-5 of
`variance-networks` is trained past its phase transition, by variational dropout with one alpha for the hidden dense
layer. The paper takes the curvature at the means. There most units of this layer are off, so that kappa is zero for
weights that matter in every draw. So kappa is also averaged over draws, and both are compared with the order of the
variances and with a random order. The last table has the bits that the spread of each layer of a LeNet-300-100 allows,
for mean-field weights, and the accuracy with weights rounded to them.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, linear

import batchbayes as bb
from batchbayes.tools import Figure, generator, shuffled
from batchbayes_papers.data.folder import DataFolder
from batchbayes_papers.image_networks import ImageData, error_percent, load_images, new_network
from batchbayes_papers.runner.experiment import Results, Unit
from batchbayes_papers.runner.figures import Line, lines_figure
from batchbayes_papers.runner.records import pack_weights, unpack_weights
from batchbayes_papers.runner.tables import CellValue, ResultTable
from batchbayes_papers.weights.propagation import bits_needed, curvatures, kappas, partly_drawn, rounded_means
from batchbayes_papers.weights.variance_networks import DropoutCourse, new_lenet

PUBLISHED = {1.0: (98.3, 98.3, 37), 1.5: (98.2, 98.2, 70), 2.0: (97.95, 97.9, 155), 2.5: (97.35, 97.25, 450),
             3.0: (92.0, 91.1, 2200)}  # fmt: skip
"""By log10 of the threshold: accuracy with means, with zeros, and weights for each noisy one (read off a figure)."""
LAYER = "dense1"
OVER_DRAWS, AT_MEANS, VARIANCE, RANDOM = "kappa over draws", "kappa at the means", "variance", "at random"
ORDERS = OVER_DRAWS, AT_MEANS, VARIANCE, RANDOM
"""By what the weights that keep their noise are chosen."""
WAYS = [(fill, statistics) for fill in ("means", "zeros") for statistics in ("running", "of the batch")]
"""What the other weights become, and the statistics of the batch norm that follows."""


@dataclass(frozen=True)
class PropagationConfig:
    """A configuration. The defaults are those of the preset `quick`."""

    data: Literal["mnist", "synthetic"] = "mnist"
    num_train: int = 10_000
    num_test: int = 5000
    epochs: int = 60
    decay_from: int = 50
    """The epoch from which the learning rate falls to zero."""
    batch_size: int = 50
    learning_rate: float = 5e-3
    num_curved: int = 2000
    """Training images for the curvature, which is then scaled to all of them."""
    kappa_draws: int = 20
    """Draws of the weights over which kappa is averaged. They are not the draws of the accuracies."""
    num_draws: int = 3
    bits_epochs: int = 30


PRESETS = {
    "smoke": PropagationConfig(
        "synthetic",
        200,
        100,
        epochs=2,
        decay_from=1,
        num_curved=100,
        kappa_draws=2,
        num_draws=2,
        bits_epochs=2,
    ),
    "quick": PropagationConfig(),
}


def units(config: PropagationConfig) -> list[Unit]:
    """Return the training of the network with variational dropout, and one unit for each question."""
    return [
        Unit("training", {}, effort=10),
        Unit("mean propagation", {}, ("training",)),
        Unit("few bits", {}, effort=3),
    ]


def work(config: PropagationConfig, unit: Unit, needed: Results, data_folder: DataFolder = None) -> Any:
    """Train a network, or answer one question."""
    data = load_images(config.data, config.num_train, config.num_test, data_folder)
    if unit.name == "few bits":
        return bits_result(mean_field(config, data), data)
    network = bb.noisy(new_lenet(), bb.VariationalDropout("layer"), layers=[LAYER])
    if unit.name == "mean propagation":
        unpack_weights(network, needed["training"]["weights"])
        return propagation_result(config, network.posterior(), data)
    recipe = DropoutCourse(config.num_train, config.epochs, config.batch_size, config.learning_rate, config.decay_from)
    recipe.fit(network, data)
    return {"weights": pack_weights(network)}


def mean_field(config: PropagationConfig, data: ImageData) -> bb.WeightsPosterior:
    """Train a LeNet-300-100 with mean-field weights."""
    network = bb.noisy(new_network("LeNet-300-100", seed=0), bb.MeanField(initial_std=0.01))
    training = bb.TrainingConfig(config.bits_epochs, 100, 3e-3)
    schedule = bb.Schedule(kl_full=config.bits_epochs // 3, decay_from=config.bits_epochs // 2)
    batches = shuffled(*data.train, 100, seed=0)
    bb.fit_noisy(network, batches, bb.categorical(), training, num_examples=len(data.train[0]), schedule=schedule)
    return network.posterior()


@dataclass(frozen=True, eq=False)
class Head:
    """The layers from the one with noise on, and the features of images that come into it."""

    network: nn.Module
    """A `NormalisedLeNet5` in evaluation mode."""
    features: Tensor
    labels: Tensor

    @classmethod
    def of(cls, posterior: bb.WeightsPosterior, examples: tuple[Tensor, Tensor]) -> "Head":
        network: Any = posterior.network.module
        names = [name for name, _ in network.named_children()]
        before = nn.Sequential(*list(network.children())[: names.index(LAYER)])
        with torch.no_grad():
            return cls(network, torch.cat([before(part) for part in examples[0].split(1000)]), examples[1])

    def hidden(self, weight: Tensor, statistics: str = "running") -> Tensor:
        """Return the units (N, H) after batch norm and ReLU, for some weights of the layer with noise."""
        network: Any = self.network
        own, before = network.norm3, linear(self.features, weight)
        if statistics == "running":
            return own(before).relu()
        return batch_norm(before, None, None, own.weight, own.bias, training=True, eps=own.eps).relu()

    @torch.no_grad()
    def accuracy(self, weight: Tensor, statistics: str) -> float:
        """Return the accuracy in per cent."""
        network: Any = self.network
        return 100 * bb.metrics.accuracy(network.dense2(self.hidden(weight, statistics)).softmax(-1), self.labels)


def propagation_result(config: PropagationConfig, posterior: bb.WeightsPosterior, data: ImageData) -> dict[str, Any]:
    """Return accuracies of single draws with noise only in the weights that come first in each order."""
    name = posterior.sites[0].name
    seen = data.train[0][: config.num_curved], data.train[1][: config.num_curved]
    head, orders = Head.of(posterior, data.test), orders_of(config, posterior, seen)
    every = torch.ones_like(orders[RANDOM], dtype=torch.bool)
    found: dict[str, Any] = {
        "all": accuracies(config, posterior, head, every)["means"],
        "means": {way: head.accuracy(posterior.distributions[name].mean, way) for _, way in WAYS[:2]},
        "log_alpha": float(posterior.own[name]["log_alpha"]),
        "dead": dead_units(posterior, seen),
        "zero": {order: float((orders[order] == 0).double().mean()) for order in (AT_MEANS, OVER_DRAWS)},
        "rows": [],
    }
    for order in ORDERS:
        ranks = orders[order].flatten().argsort(descending=True).argsort().view_as(every)
        for _, _, ratio in PUBLISHED.values():
            noisy = ranks < round(every.numel() / ratio)
            least = float(orders[order][noisy].min())
            own = accuracies(config, posterior, head, noisy)
            found["rows"].append({"order": order, "ratio": ratio, "least": least, **own})
    return found


def orders_of(
    config: PropagationConfig, posterior: bb.WeightsPosterior, examples: tuple[Tensor, Tensor]
) -> dict[str, Tensor]:
    """Return what each order goes by, for each weight of the layer. Kappas are of the loss summed over all images."""
    name, scale = posterior.sites[0].name, config.num_train / len(examples[0])
    given: Any = posterior.distributions[name]

    def kappa(num_draws: int) -> Tensor:
        curvature = curvatures(
            posterior,
            [examples],
            bb.categorical(),
            method="gauss-newton",
            num_probes=0,
            num_draws=num_draws,
            seed=1,
        )
        return scale * kappas(posterior, curvature)[name]

    return {
        OVER_DRAWS: kappa(config.kappa_draws),
        AT_MEANS: kappa(0),
        VARIANCE: given.variance,
        RANDOM: torch.rand(given.variance.shape, generator=generator(0, "order")),
    }


@torch.no_grad()
def dead_units(posterior: bb.WeightsPosterior, examples: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Return the share of units of the layer that are zero for all images, at the means and in one draw."""
    head, name = Head.of(posterior, examples), posterior.sites[0].name
    weights = {"at the means": posterior.distributions[name].mean, "in a draw": posterior.weights(0, 0)[name]}
    return {where: float((head.hidden(w).amax(0) == 0).double().mean()) for where, w in weights.items()}


def accuracies(
    config: PropagationConfig, posterior: bb.WeightsPosterior, head: Head, noisy: Tensor
) -> dict[str, dict[str, float]]:
    """Return mean accuracies of single draws in per cent, by what weights without noise are and by the statistics."""
    name = posterior.sites[0].name
    found: dict[str, dict[str, float]] = {}
    for fill, statistics in WAYS:
        total = 0.0
        for index in range(config.num_draws):
            weight = partly_drawn(posterior, {name: noisy}, 0, index)[name]
            total += head.accuracy(weight * noisy if fill == "zeros" else weight, statistics)
        found.setdefault(fill, {})[statistics] = total / config.num_draws
    return found


def bits_result(posterior: bb.WeightsPosterior, data: ImageData) -> dict[str, Any]:
    """Return the bits of each layer, and errors before and after rounding."""
    bits, network = bits_needed(posterior), posterior.network.module
    network.load_state_dict(posterior.means())
    error = error_percent(network, data.test)
    network.load_state_dict(rounded_means(posterior))
    return {"bits": bits, "error": error, "rounded_error": error_percent(network, data.test)}


def tables(config: PropagationConfig, results: Results) -> list[ResultTable]:
    """Return accuracy by number of noisy weights beside the published one, and bits by layer."""
    found, bits = results.get("mean propagation", {}), results.get("few bits", {})
    return [
        orders_table(found),
        ResultTable(
            "Bits of each weight that the posterior spread allows",
            ("layer", "bits"),
            tuple(bits.get("bits", {}).items()),
            (),
            (f"Test error {bits['error']:.2f} % with the means, {bits['rounded_error']:.2f} % after rounding.",)
            if bits
            else (),
        ),
    ]


_WAY_COLUMNS = ("means, running", "means, of the batch", "published ", "zeros, running", "zeros, of the batch",
                "published  ")  # fmt: skip


def _cells(row: Any, published: Any) -> list[CellValue]:
    """Return accuracies with means and with zeros, each by both statistics and beside the published one."""
    cells: list[CellValue] = []
    for fill, paper in zip(("means", "zeros"), published, strict=True):
        cells += [row[fill][statistics] if row else None for statistics in ("running", "of the batch")]
        cells.append(paper)
    return cells


def orders_table(found: Results) -> ResultTable:
    """Return the accuracy for as many noisy weights as in the paper, chosen in four ways."""
    by_order = {(row["order"], row["ratio"]): row for row in found.get("rows", [])}
    rows: list[tuple[CellValue, ...]] = []
    for threshold, (*paper, ratio) in PUBLISHED.items():
        for order in ORDERS:
            own = by_order.get((order, ratio))
            is_kappa = order in (OVER_DRAWS, AT_MEANS)
            least = math.log10(own["least"]) if own and is_kappa and own["least"] > 0 else None
            rows.append((ratio, order, least, threshold if is_kappa else None, *_cells(own, paper)))
    return ResultTable(
        "Accuracy of one draw with as many noisy weights as in the paper, by how they are chosen",
        ("weights for each noisy one", "chosen by", "log10 threshold", "published", *_WAY_COLUMNS),
        tuple(rows),
        (".0f", "", ".1f", ".1f", *[".2f"] * 6),
        tuple(facts(found)) if found else (),
    )


def facts(found: Results) -> list[str]:
    """Say how good the whole network is, and how much of it is off at the means."""
    both = {name: " / ".join(f"{found[name][way]:.2f} %" for _, way in WAYS[:2]) for name in ("all", "means")}
    dead, zero = found["dead"], found["zero"]
    return [
        f"With all noise: {both['all']}; with all means: {both['means']} (running statistics / those of the batch). "
        f"Log alpha is {found['log_alpha']:.1f}.",
        f"Units of the layer that are zero for all images of the curvature: {dead['at the means']:.1%} at the means, "
        f"{dead['in a draw']:.1%} in a draw. Weights whose kappa is exactly zero: {zero[AT_MEANS]:.1%} at the means, "
        f"{zero[OVER_DRAWS]:.1%} over draws.",
    ]


def figures(config: PropagationConfig, results: Results) -> dict[str, Figure]:
    """Show accuracy against the number of noisy weights, by how they are chosen."""
    rows, panels, paper = results["mean propagation"]["rows"], {}, list(PUBLISHED.values())
    for number, (fill, statistics) in enumerate([WAYS[0], WAYS[-1]]):
        lines = []
        for order in ORDERS:
            own = [row for row in rows if row["order"] == order]
            lines.append(Line(order, [row["ratio"] for row in own], [row[fill][statistics] for row in own]))
        lines.append(Line("published", [values[2] for values in paper], [values[number] for values in paper], "points"))
        panels[f"accuracy, % ({fill}, {statistics})"] = lines
    return {
        "accuracy-against-the-number-of-noisy-weights": lines_figure(
            panels, "weights for each noisy one", log_positions=True
        )
    }


def notes(config: PropagationConfig) -> list[str]:
    """Say how this differs from the paper."""
    return [
        f"Trained on {config.num_train:,} images for {config.epochs} epochs in batches of {config.batch_size} at a "
        f"learning rate of {config.learning_rate:g}. The published values are read off a figure; the recipe of the "
        "paper for it is not known. The paper takes kappa at the means.",
        "The curvature is that of the loss summed over the training set: the diagonal of the Gauss-Newton matrix. It "
        f"is exact for this network, with all classes of each of {config.num_curved:,} images, at the means or averaged"
        f" over {config.kappa_draws} draws. Accuracies are means over {config.num_draws} others.",
        "Statistics of the batch are those of the test images in the batch norm after the layer with noise, as in the "
        "figure of variance networks: other weights move its inputs away from the running statistics.",
        f"The bits are those of a LeNet-300-100 after {config.bits_epochs} epochs.",
    ]
