"""How much less variance the gradient has with local noise, and what the ratio has to be.

    python benchmarks/gradient_variance.py DATA_FOLDER

All variances are over the noise alone, at one fixed batch of 100 MNIST images. The first table compares a layer whose
inputs are not random with a formula. The other two go beyond `batchbayes reproduce gradient-variance`: the default
initial spread, and sparse VD by what became of the weights.
"""

import argparse
from collections.abc import Mapping

import torch
from batchbayes_papers.image_networks import load_images
from batchbayes_papers.models.lenet import LeNet300
from batchbayes_papers.weights.gradient_variance import estimate, gradient_moments, random_parameters
from torch import Tensor, nn

import batchbayes as bb
from batchbayes import Noisy, TrainingConfig
from batchbayes.methods.weights.sites import Site
from batchbayes.methods.weights.sparse import LIMIT, THRESHOLD, TINY
from batchbayes.tools import GlobalStream, shuffled
from batchbayes.training.loop import Step

BATCH = 100
Variances = dict[str, dict[str, Tensor]]
"""For each estimator and parameter the variance of each entry of its gradient."""


def variances(network: Noisy, images: Tensor, labels: Tensor, num_draws: int) -> Variances:
    """Measure both estimators."""
    found = {}
    biases = {f"{site.name} bias": site.bias for site in network.sites if site.bias is not None}
    for estimator in ("local", "weights"):
        with GlobalStream(1):
            loss = estimate(network, estimator, images, labels)
            moments = gradient_moments(random_parameters(network) | biases, loss, num_draws)
        found[estimator] = {name: variance for name, (_, variance) in moments.items()}
    network.estimator = "local"
    return found


def ratio(found: Variances, parts: Mapping[str, Tensor | float]) -> float:
    """Return one weight draw in local noise, for the sum over parameters of their variances times a factor."""
    weights, local = (
        sum(float((found[estimator][name] * factor).sum()) for name, factor in parts.items())
        for estimator in ("weights", "local")
    )
    return weights / local if local else float("nan")


def whole_layer(found: Variances, site: Site, own: str, by_std: Tensor) -> str:
    """Return the ratios of all parameters of a layer together, as two cells of a table.

    Args:
        found: the variances.
        site: the layer.
        own: the parameter of the standard deviations.
        by_std: the square of its derivative by the standard deviation.

    Returns:
        The sum over the parameters as the library has them, and the sum if standard deviations were parameters.
    """
    others = {site.name: 1.0, f"{site.name} bias": 1.0}
    ratios = [ratio(found, others | {f"{site.name} {own}": factor}) for factor in (1.0, by_std)]
    return " | ".join(f"{each:.1f}" for each in ratios)


def expected_ratio(inputs: Tensor, outputs: Tensor) -> float:
    """Return the ratio for the means of a last layer, if its inputs (n, d) are not random and its noise is small."""
    probs = outputs.softmax(-1)
    curvature = torch.diag_embed(probs) - probs[:, :, None] * probs[:, None, :]  # (n, K, K)
    alike = (inputs @ inputs.T).square() * torch.einsum("nkl,mkl->nm", curvature, curvature)
    return float(alike.sum() / alike.diagonal().sum())


@torch.no_grad()
def around(module: nn.Module, layer: str, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inputs of the last layer, and its outputs."""
    seen: list[Tensor] = []

    def look(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.extend(inputs)

    handle = module.get_submodule(layer).register_forward_pre_hook(look)
    outputs = module(images)
    handle.remove()
    return seen[0], outputs


def last_layers(images: Tensor, labels: Tensor) -> None:
    """Print measured ratios beside those of the formula."""
    print("| network | trained | measured | formula |\n|---|---|---:|---:|")
    few, targets = images[:BATCH].double(), labels[:BATCH]
    for name, make, layer, epochs in (
        ("one layer", lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), "1", (0, 10)),
        ("LeNet-300-100, last layer", LeNet300, "dense3", (0, 3)),
    ):
        for count in epochs:
            with GlobalStream(0):
                network = bb.noisy(make(), bb.MeanField(initial_std=0.005), layers=[layer])
            if count:
                train(network, images, labels, count)
            network.double()
            expected = expected_ratio(*around(network.module, layer, few))
            found = ratio(variances(network, few, targets, 1000), {f"{layer}.weight": 1.0})
            print(f"| {name} | {count} epochs | {found:.2f} | {expected:.2f} |", flush=True)


def train(network: Noisy, images: Tensor, labels: Tensor, epochs: int) -> None:
    """Train with a learning rate of 0.001."""
    batches, config = shuffled(images, labels, BATCH, seed=0), TrainingConfig(epochs, BATCH)
    bb.fit_noisy(network, batches, bb.categorical(), config, num_examples=len(images))


def mean_field(images: Tensor, labels: Tensor) -> None:
    """Print the ratios of means, of log standard deviations, and of whole layers."""
    print(
        "| initial std | trained | weight | mean | log std | std | whole layer | whole layer in units of the weights |"
    )
    print("|---:|---|---|---:|---:|---:|---:|---:|")
    few, every = 6000, len(images)
    for initial_std, epochs, count in (
        (0.05, 0, few),
        (0.05, 3, few),
        (0.01, 0, few),
        (0.01, 5, few),
        (0.01, 20, every),
    ):
        with GlobalStream(0):
            network = bb.noisy(LeNet300(), bb.MeanField(initial_std=initial_std))
        if epochs:
            train(network, images[:count], labels[:count], epochs)
        found = variances(network, images[:BATCH], labels[:BATCH], 200)
        for site in network.sites:
            by_std = (-2 * network.parameters_of(site)["log_std"].detach().double()).exp()  # (d log std / d std)^2
            log_std = f"{site.name} log_std"
            parts: tuple[dict[str, Tensor | float], ...] = ({site.name: 1.0}, {log_std: 1.0}, {log_std: by_std})
            cells = " | ".join(f"{ratio(found, each):.1f}" for each in parts)
            whole = whole_layer(found, site, "log_std", by_std)
            print(f"| {initial_std} | {epochs} epochs | {site.module_name} | {cells} | {whole} |", flush=True)


def sparse_vd(images: Tensor, labels: Tensor) -> None:
    """Print the ratios of sparse VD, for the weights that are kept, for those at the limit of alpha, and for layers."""
    columns = "all means | kept | at the limit | share kept | share at the limit | log variances | whole layer"
    print(f"| epoch | weight | {columns} | whole layer in units of the weights |")
    print("|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    with GlobalStream(0):
        network = bb.noisy(LeNet300(), bb.SparseVD())

    def look(epoch: int) -> None:
        found = variances(network, images[:BATCH], labels[:BATCH], 200)
        for site in network.sites:
            log_var = network.parameters_of(site)["log_var"].detach()
            log_alpha = (log_var - (site.weight.detach().square() + TINY).log()).clamp(max=LIMIT)
            kept, at_limit = (log_alpha <= THRESHOLD).double(), (log_alpha > LIMIT - 1e-3).double()
            means = " | ".join(f"{ratio(found, {site.name: group}):.1f}" for group in (1.0, kept, at_limit))
            shares, own = f"{kept.mean():.3f} | {at_limit.mean():.3f}", ratio(found, {f"{site.name} log_var": 1.0})
            whole = whole_layer(found, site, "log_var", 4 * (-log_var.double()).exp())  # (d log var / d std)^2
            print(f"| {epoch} | {site.module_name} | {means} | {shares} | {own:.1f} | {whole} |", flush=True)

    def after_step(step: Step) -> None:
        if step.number in (300, 1200, 2400, 6000):
            look(step.number // 300)

    look(0)
    schedule, config = bb.Schedule(1, 4, decay_from=10), TrainingConfig(20, 200, 3e-3)
    batches = shuffled(images, labels, 200, seed=0)
    bb.fit_noisy(
        network, batches, bb.categorical(), config, num_examples=len(images), schedule=schedule, after_step=after_step
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data_folder")
    torch.set_num_threads(1)
    train_images, train_labels = load_images("mnist", 60_000, 10, parser.parse_args().data_folder).train
    last_layers(train_images[:6000], train_labels[:6000])
    mean_field(train_images, train_labels)
    sparse_vd(train_images, train_labels)
