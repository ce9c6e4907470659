r"""How noisy the gradients of random weights are, by three estimators, in each layer of LeNet-300-100.

Kingma, Salimans and Welling, "Variational Dropout and the Local Reparameterization Trick" (NIPS 2015), explain why
noise in activations, independent for each example, gives better gradients than one draw of the weights for a whole
batch. Here the variance over draws is measured at a fixed batch, with mean-field weights at the start and after some
training, for the gradient with respect to the means and to the log standard deviations.

- Local reparametrisation: noise in the outputs of layers, independent for each example (`Noisy` with
  estimator="local").
- Reparametrisation: one draw of the weights for the whole batch, through which the gradient passes
  (estimator="weights").
- Score function: $L(W) \nabla \log q(W)$, which needs no gradient of the loss, here with the mean loss of the other
  draws as a baseline. It is the only one for discrete weights, and has by far the largest variance (Mohamed et al.,
  "Monte Carlo Gradient Estimation in Machine Learning", JMLR 2020).

Molchanov, Ashukha and Vetrov (ICML 2017) train $w = \theta + \sigma\epsilon$ (additive) instead of
$w = \theta(1 + \sqrt\alpha\epsilon)$ (multiplicative), whose gradient by theta is noisier the larger alpha is. Before
them alpha was kept below 1. A second table compares the three at the same distribution of a trained network.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import batchbayes as bb
from batchbayes.methods.weights.family import GaussianWeights
from batchbayes.tools import GlobalStream, count, shuffled
from batchbayes.training.loop import supervised
from batchbayes_papers.data.folder import DataFolder
from batchbayes_papers.image_networks import load_images
from batchbayes_papers.models.lenet import LeNet300
from batchbayes_papers.runner.experiment import Results, Unit
from batchbayes_papers.runner.tables import CellValue, ResultTable

ESTIMATORS = {"local": "local", "one weight draw": "weights", "score function": "score"}
STAGES = ("start", "trained")
FORMS = ("additive", "multiplicative", "multiplicative, alpha at most 1")
LOG_ALPHAS = (-4.0, -2.0, 0.0, 2.0)


@dataclass(frozen=True)
class VarianceConfig:
    """A configuration. The defaults are those of the preset `quick`."""

    data: Literal["mnist", "synthetic"] = "mnist"
    num_train: int = 6000
    epochs: int = 3
    batch_size: int = 100
    large_batch_size: int = 1000
    """Of a second measurement, because the ratio of two estimators grows with the batch."""
    initial_std: float = 0.05
    num_draws: int = 200


PRESETS = {
    "smoke": VarianceConfig("synthetic", num_train=200, epochs=1, large_batch_size=200, num_draws=10),
    "quick": VarianceConfig(),
}


def units(config: VarianceConfig) -> list[Unit]:
    """Return one unit for each stage of the training, and one for the forms of sparse VD."""
    return [*(Unit(stage, {"stage": stage}) for stage in STAGES), Unit("forms", {"stage": "forms"})]


def work(config: VarianceConfig, unit: Unit, needed: Results, data_folder: DataFolder = None) -> dict[str, Any]:
    """Return for each estimator and parameter the variance of its gradient, summed over the parameter."""
    data = load_images(config.data, config.num_train, 10, data_folder).train
    if unit.arguments["stage"] == "forms":
        return forms_result(config, data)
    with GlobalStream(0):
        network = bb.noisy(LeNet300(), bb.MeanField(initial_std=config.initial_std))
    if unit.arguments["stage"] == "trained":
        batches = shuffled(*data, config.batch_size, seed=0)
        training = bb.TrainingConfig(config.epochs, config.batch_size)
        bb.fit_noisy(network, batches, bb.categorical(), training, num_examples=config.num_train)
    found = {}
    for size, names in ((config.batch_size, list(ESTIMATORS)), (config.large_batch_size, list(ESTIMATORS)[:2])):
        images, labels = data[0][:size], data[1][:size]
        for name in names:
            with GlobalStream(1):
                loss = estimate(network, ESTIMATORS[name], images, labels)
                moments = gradient_moments(random_parameters(network), loss, config.num_draws)
            found[f"{name}, {size}"] = {parameter: float(v.sum()) for parameter, (_, v) in moments.items()}
    return found


def forms_result(config: VarianceConfig, data: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Return the variance of the gradient by the means of each layer, for each form, alpha and estimator."""
    with GlobalStream(0):
        dense = LeNet300()
    batches, training = shuffled(*data, config.batch_size, seed=0), bb.TrainingConfig(config.epochs, config.batch_size)
    bb.train(dense, batches, supervised(cross_entropy), training)
    images, labels = data[0][: config.batch_size], data[1][: config.batch_size]
    found = {}
    for log_alpha in LOG_ALPHAS:
        for form in FORMS:
            network = in_form(dense, form, log_alpha)
            means = {site.name: site.weight for site in network.sites}
            for estimator in ("local", "weights"):
                with GlobalStream(1):
                    loss = estimate(network, estimator, images, labels)
                    moments = gradient_moments(means, loss, config.num_draws)
                found[f"{form}, {log_alpha:g}, {estimator}"] = {
                    name: float(v.sum()) for name, (_, v) in moments.items()
                }
    return found


def in_form(dense: nn.Module, form: str, log_alpha: float) -> bb.Noisy:
    """Return random weights around those of a network, all with the same alpha, as one form has them as parameters."""
    if form != "additive":
        limit = 0.0 if form.endswith("1") else log_alpha
        return bb.noisy(dense, bb.VariationalDropout("weight", initial_log_alpha=min(log_alpha, limit)))
    network = bb.noisy(dense, bb.SparseVD())
    with torch.no_grad():
        for site in network.sites:
            network.parameters_of(site)["log_var"].copy_(log_alpha + (site.weight.square() + 1e-16).log())
    return network


def estimate(network: bb.Noisy, estimator: str, images: Tensor, labels: Tensor) -> Callable[[], Tensor]:
    """Return a function that estimates the mean loss of a batch."""
    if estimator == "score":
        own = network.network

        def loss(weights: dict[str, Tensor]) -> Tensor:
            return cross_entropy(own(images, tensors=weights), labels)

        return lambda: score_function_loss(network, loss)
    network.estimator = "local" if estimator == "local" else "weights"
    return lambda: cross_entropy(network(images), labels)


def tables(config: VarianceConfig, results: Results) -> list[ResultTable]:
    """Return the variances of all estimators as multiples of the local one, and those of forms of the additive one."""
    return [estimators_table(config, results), forms_table(config, results.get("forms", {}))]


def forms_table(config: VarianceConfig, found: Results) -> ResultTable:
    """Return what the multiplicative form and a limit of alpha do to the noise of the gradient by the means."""
    rows: list[tuple[CellValue, ...]] = []
    additive, multiplicative, limited = FORMS
    for log_alpha in LOG_ALPHAS if found else ():
        for layer, variance in found[f"{additive}, {log_alpha:g}, local"].items():
            each = {
                (form, how): found[f"{form}, {log_alpha:g}, {how}"][layer]
                for form in FORMS
                for how in ("local", "weights")
            }
            local, drawn = variance, each[additive, "weights"]
            ratios = (each[multiplicative, "local"] / local, each[limited, "local"] / local)
            by_draw = (each[multiplicative, "weights"] / drawn, each[limited, "weights"] / drawn)
            rows.append((f"{log_alpha:g}", layer, local, *ratios, drawn, *by_draw))
    columns = (
        "log alpha", "weight", "additive, local noise", "multiplicative / additive", "the same, alpha at most 1",
        "additive, one weight draw", "multiplicative / additive ", "the same, alpha at most 1 ",
    )  # fmt: skip
    title = f"Variance of the gradient by the means of a trained network, batch {config.batch_size}"
    return ResultTable(title, columns, tuple(rows), ("", "", ".1e", ".2f", ".2f", ".1e", ".2f", ".2f"))


def estimators_table(config: VarianceConfig, results: Results) -> ResultTable:
    rows: list[tuple[CellValue, ...]] = []
    local, weights, score = ESTIMATORS
    for stage in STAGES:
        found = results.get(stage, {})
        for parameter, variance in found.get(f"{local}, {config.batch_size}", {}).items():
            layer, _, own = parameter.partition(" ")
            ratios = [
                found[f"{name}, {size}"][parameter] / found[f"{local}, {size}"][parameter]
                for name, size in (
                    (weights, config.batch_size), (weights, config.large_batch_size), (score, config.batch_size)
                )
            ]  # fmt: skip
            correlation = (ratios[0] - 1) / (config.batch_size - 1)
            rows.append((stage, layer, own or "mean", variance, *ratios[:2], correlation, ratios[2]))
    columns = (
        "stage", "weight", "parameter", "local", "one weight draw / local",
        f"the same, batch {config.large_batch_size}", "correlation of two examples", "score function / local",
    )  # fmt: skip
    return ResultTable(
        f"Variance of the gradient of a batch of {config.batch_size}, layer by layer",
        columns,
        tuple(rows),
        ("", "", "", ".2e", ".1f", ".1f", ".3f", ".1e"),
        (f"Summed over each parameter, from {config.num_draws} draws at one fixed batch. The score function has "
         "two draws, each with the loss of the other as its baseline. If the gradients of two examples at one draw "
         "of the weights have the correlation r, the ratio is about 1 + (n - 1) r for a batch of n; r is found "
         "from the first ratio. It exceeds one where the estimators differ in the variance of one example, too.",),
    )  # fmt: skip


def notes(config: VarianceConfig) -> list[str]:
    """Say what was measured."""
    return [
        f"Mean-field weights with an initial standard deviation of {config.initial_std:g}; trained on "
        f"{config.num_train:,} images for {count(config.epochs, 'epoch')}.",
    ]


def score_function_loss(
    network: bb.Noisy, loss: Callable[[dict[str, Tensor]], Tensor], *, num_draws: int = 2
) -> Tensor:
    """Return a number whose gradient is the score-function estimate of that of the expected loss.

    Args:
        network: the random weights.
        loss: from weights by name to the loss; it needs no gradient.
        num_draws: draws to average over. The baseline of each draw is the mean loss of the others, so two at least.
    """
    if num_draws < 2:
        raise bb.BatchbayesError("two draws or more, for the baseline", str(num_draws), "raise num_draws")
    given = network.distributions()
    with torch.no_grad():
        fixed = network.distributions()
        drawn = [{name: each.sample() for name, each in fixed.items()} for _ in range(num_draws)]
        losses = torch.stack([loss(weights) for weights in drawn])
    baselines = (losses.sum() - losses) / (num_draws - 1)
    scores = torch.stack(
        [torch.stack([log_density(given[name], weight) for name, weight in weights.items()]).sum() for weights in drawn]
    )
    return ((losses - baselines) * scores).mean()


def log_density(distribution: Any, weight: Tensor) -> Tensor:
    """Return log q(W) of one weight, or of the mask that a weight with dropout shows, as a number with a gradient."""
    if (logit := getattr(distribution, "logit", None)) is not None:  # that of the rate of dropout
        kept, rate = weight.transpose(0, 1).flatten(1).abs().sum(1) > 0, logit.sigmoid()
        return torch.where(kept, torch.log1p(-rate), rate.log()).sum()
    noise = getattr(distribution, "noise", "gaussian")
    if not isinstance(distribution, GaussianWeights) or noise != "gaussian":
        got = f"{type(distribution).__name__} with {noise} noise"
        raise bb.BatchbayesError("weights whose density is known", got, "use another family or estimator")
    return torch.distributions.Normal(distribution.mean, distribution.variance.sqrt()).log_prob(weight).sum()


def random_parameters(network: bb.Noisy) -> dict[str, Tensor]:
    """Return the parameters of each random weight that are trained.

    The names are that of the weight for its means, and that of the weight and of the parameter for the family's own.
    """
    parameters = {site.name: site.weight for site in network.sites if site.weight.requires_grad}
    for site in network.sites:
        parameters |= {f"{site.name} {name}": value for name, value in network.parameters_of(site).items()}
    return parameters


def gradient_moments(
    parameters: Mapping[str, Tensor], estimate: Callable[[], Tensor], num_draws: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return mean and variance over draws of the gradient with respect to some parameters, by their names.

    Args:
        parameters: mostly `random_parameters(network)`.
        estimate: returns a new estimate of the loss, with a gradient.
        num_draws: how often it is called.
    """
    total, squares = torch.zeros(2, sum(value.numel() for value in parameters.values()), dtype=torch.float64)
    for _ in range(num_draws):
        found = torch.autograd.grad(estimate(), list(parameters.values()))
        gradient = torch.cat([each.flatten() for each in found]).double()
        total += gradient
        squares += gradient.square()
    mean = total / num_draws
    variance = (squares - num_draws * mean.square()) / (num_draws - 1)
    sizes = [value.numel() for value in parameters.values()]
    return {
        name: (m.view(value.shape), v.view(value.shape))
        for (name, value), m, v in zip(parameters.items(), mean.split(sizes), variance.split(sizes), strict=True)
    }
