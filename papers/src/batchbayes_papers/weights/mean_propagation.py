"""Mean propagation and few bits: how many weights of a network with noise need their noise, and their digits.

Neklyudov et al., "Variance Networks" (ICLR 2019), replace weights by their means where kappa, the variance times the
curvature of the loss, is below a threshold. The accuracy stays while most weights lose their noise. Here the LeNet-5 of
`variance-networks` is trained past its phase transition, by variational dropout with one alpha for the hidden dense
layer. The second table has the bits that the spread of each layer of a LeNet-300-100 allows, for mean-field weights,
and the accuracy with weights rounded to them.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

import batchbayes as bb
from batchbayes.tools import Figure, shuffled
from batchbayes_papers.data.folder import DataFolder
from batchbayes_papers.image_networks import ImageData, error_percent, load_images, new_network
from batchbayes_papers.runner.experiment import Results, Unit
from batchbayes_papers.runner.figures import Line, lines_figure
from batchbayes_papers.runner.tables import ResultTable, interleaved
from batchbayes_papers.weights.propagation import bits_needed, curvatures, kappas, partly_drawn, rounded_means
from batchbayes_papers.weights.variance_networks import DropoutCourse, at_means, new_lenet

PUBLISHED = {1.0: (98.3, 98.3, 37), 1.5: (98.2, 98.2, 70), 2.0: (97.95, 97.9, 155), 2.5: (97.35, 97.25, 450),
             3.0: (92.0, 91.1, 2200)}  # fmt: skip
"""By log10 of the threshold: accuracy with means, with zeros, and weights for each noisy one (read off a figure)."""
THRESHOLDS = (-4.0, -3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0)


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
    num_probes: int = 10
    num_draws: int = 3
    bits_epochs: int = 30


PRESETS = {
    "smoke": PropagationConfig(
        "synthetic", 200, 100, epochs=2, decay_from=1, num_curved=100, num_probes=2, num_draws=2, bits_epochs=2
    ),
    "quick": PropagationConfig(),
}


def units(config: PropagationConfig) -> list[Unit]:
    """Return one unit for each question."""
    return [Unit("mean propagation", {}), Unit("few bits", {})]


def work(config: PropagationConfig, unit: Unit, needed: Results, data_folder: DataFolder = None) -> Any:
    """Train a network and answer one question."""
    data = load_images(config.data, config.num_train, config.num_test, data_folder)
    if unit.name == "few bits":
        return bits_result(mean_field(config, data), data)
    network = bb.noisy(new_lenet(), bb.VariationalDropout("layer"), layers=["dense1"])
    recipe = DropoutCourse(config.num_train, config.epochs, config.batch_size, config.learning_rate, config.decay_from)
    recipe.fit(network, data)
    return propagation_result(config, network.posterior(), data)


def mean_field(config: PropagationConfig, data: ImageData) -> bb.WeightsPosterior:
    """Train a LeNet-300-100 with mean-field weights."""
    network = bb.noisy(new_network("LeNet-300-100", seed=0), bb.MeanField(initial_std=0.01))
    training = bb.TrainingConfig(config.bits_epochs, 100, 3e-3)
    schedule = bb.Schedule(kl_full=config.bits_epochs // 3, decay_from=config.bits_epochs // 2)
    batches = shuffled(*data.train, 100, seed=0)
    bb.fit_noisy(network, batches, bb.categorical(), training, num_examples=len(data.train[0]), schedule=schedule)
    return network.posterior()


def propagation_result(config: PropagationConfig, posterior: bb.WeightsPosterior, data: ImageData) -> dict[str, Any]:
    """Return accuracies of single draws with noise only where kappa is above each threshold."""
    batches = [(data.train[0][: config.num_curved], data.train[1][: config.num_curved])]
    curvature = curvatures(posterior, batches, bb.categorical(), method="gauss-newton", num_probes=config.num_probes)
    scale = config.num_train / config.num_curved
    kappa = {name: scale * values for name, values in kappas(posterior, curvature).items()}
    count = sum(values.numel() for values in kappa.values())
    every = dict.fromkeys(kappa, torch.tensor(True))
    found: dict[str, Any] = {
        "all": accuracy_of(config, posterior, data, every, zero=False),
        "means": 100 - error_percent(at_means(posterior), data.test),
        "log_alpha": float(posterior.own[posterior.sites[0].name]["log_alpha"]),
        "rows": [],
    }
    for threshold in THRESHOLDS:
        noisy = {name: values > 10**threshold for name, values in kappa.items()}
        above = sum(int(mask.sum()) for mask in noisy.values())
        means, zeros = (accuracy_of(config, posterior, data, noisy, zero=zero) for zero in (False, True))
        found["rows"].append({"threshold": threshold, "means": means, "zeros": zeros, "ratio": count / max(1, above)})
    return found


def accuracy_of(
    config: PropagationConfig, posterior: bb.WeightsPosterior, data: ImageData, noisy: dict[str, Tensor], *, zero: bool
) -> float:
    """Return the mean accuracy of single draws in per cent; the weights without noise are their means, or zero."""
    images, labels = data.test
    right = 0
    for index in range(config.num_draws):
        weights = partly_drawn(posterior, noisy, 0, index)
        if zero:
            weights = {name: weight * noisy[name] for name, weight in weights.items()}
        with torch.no_grad():
            right += int((posterior.network(images, tensors=weights).argmax(1) == labels).sum())
    return 100 * right / (config.num_draws * len(labels))


def bits_result(posterior: bb.WeightsPosterior, data: ImageData) -> dict[str, Any]:
    """Return the bits of each layer, and errors before and after rounding."""
    bits, network = bits_needed(posterior), posterior.network.module
    network.load_state_dict(posterior.means())
    error = error_percent(network, data.test)
    network.load_state_dict(rounded_means(posterior))
    return {"bits": bits, "error": error, "rounded_error": error_percent(network, data.test)}


def tables(config: PropagationConfig, results: Results) -> list[ResultTable]:
    """Return accuracy by threshold beside the published one, and bits by layer."""
    found, rows = results.get("mean propagation", {}), []
    for number, threshold in enumerate(THRESHOLDS):
        ours = found["rows"][number] if found else {}
        own = [ours.get(name) for name in ("means", "zeros", "ratio")]
        rows.append((threshold, *interleaved(own, PUBLISHED.get(threshold, (None,) * 3))))
    bits = results.get("few bits", {})
    columns = ("means %", "published", "zeros %", "published ", "weights for each noisy one", "published  ")
    return [
        ResultTable(
            "Accuracy of one draw with noise only in weights whose kappa is above a threshold",
            ("log10 kappa", *columns),
            tuple(rows),
            (".1f", ".2f", ".2f", ".2f", ".2f", ".0f", ".0f"),
            (
                f"With all noise: {found['all']:.2f} %; with all means: {found['means']:.2f} %; log alpha is "
                f"{found['log_alpha']:.1f}.",
            )
            if found
            else (),
        ),
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


def figures(config: PropagationConfig, results: Results) -> dict[str, Figure]:
    """Show accuracy and the number of noisy weights against the threshold."""
    rows = results["mean propagation"]["rows"]
    at = [row["threshold"] for row in rows]
    accuracies = [
        Line("means below the threshold", at, [row["means"] for row in rows]),
        Line("zeros below the threshold", at, [row["zeros"] for row in rows]),
        Line("published, means", list(PUBLISHED), [values[0] for values in PUBLISHED.values()]),
    ]
    return {
        "accuracy-against-the-threshold": lines_figure(
            {"test accuracy, %": accuracies}, "log10 of the threshold of kappa"
        )
    }


def notes(config: PropagationConfig) -> list[str]:
    """Say how this differs from the paper."""
    return [
        f"Trained on {config.num_train:,} images for {config.epochs} epochs in batches of {config.batch_size} at a "
        f"learning rate of {config.learning_rate:g}. The published values are read off a figure; the recipe of the "
        "paper for it is not known.",
        "The curvature is that of the loss summed over the training set: the diagonal of the Gauss-Newton matrix. It "
        f"is exact for this network, with {config.num_probes} drawn labels for each of {config.num_curved:,} images.",
        f"The bits are those of a LeNet-300-100 after {config.bits_epochs} epochs.",
    ]
