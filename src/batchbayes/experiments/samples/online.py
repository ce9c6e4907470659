"""Data in five parts: the posterior after one part is the prior for the next.

Compared on the test set after each part: mean field and structured Laplace, both online and by joint training on all
parts so far; online last layer on features of the first part; and fine-tuning, which goes on training one network on
each part alone. All of them have the same network and the same noise precision, which is measured on a fifth of the
first part.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from batchbayes._common.rng import generator
from batchbayes._common.text import count as count_of
from batchbayes.data.folder import DataFolder
from batchbayes.data.uci import SETS, load_regression, published_split
from batchbayes.experiments.samples.images import load_images
from batchbayes.likelihoods import TargetLikelihood, categorical, gaussian
from batchbayes.methods.point import deterministic
from batchbayes.methods.samples.deep_ensemble import made
from batchbayes.models.mlp import MLP
from batchbayes.online import LastLayer, MeanField, Part, StructuredLaplace
from batchbayes.plots import seeds_figure
from batchbayes.plots.style import Figure, house_style, new_figure
from batchbayes.prediction import predict
from batchbayes.reproduce.experiment import Results, Unit, warnings_ignored
from batchbayes.reproduce.tables import ResultTable, with_error
from batchbayes.training.batches import shuffled
from batchbayes.training.loop import TrainingConfig, half_squared_error, supervised, train

DATASETS = (*SETS, "mnist", "synthetic")
JOINT, ONLINE, JOINT_LAPLACE, LAPLACE, LAST, TUNED = METHODS = (
    "joint",
    "online mean field",
    "joint Laplace",
    "online Laplace",
    "online last layer",
    "fine-tuning",
)
COMPARED = ((LAPLACE, JOINT_LAPLACE), (LAPLACE, TUNED), (LAPLACE, JOINT), (ONLINE, JOINT), (LAST, JOINT))
"""Online methods, and what the table compares them with."""
NOISE = "noise"
"""The unit that measures the noise precision, which all methods use."""


@dataclass(frozen=True)
class OnlineConfig:
    """A configuration. The defaults are those of the preset `quick`."""

    datasets: tuple[str, ...] = ("boston", "concrete", "energy", "kin8nm", "power", "protein", "wine", "mnist")
    seeds: tuple[int, ...] = (0, 1, 2)
    num_parts: int = 5
    width: int = 50
    steps: int = 1500
    """Training steps for each part, and for joint training with as many parts in proportion."""
    batch_size: int = 32
    learning_rate: float = 5e-3
    prior_std: float = 0.5
    num_images: int = 2500
    """Training images of MNIST, in all parts together."""
    num_members: int = 50
    """Draws of the mean field."""


PRESETS = {
    "smoke": OnlineConfig(("synthetic",), (0,), 2, width=8, steps=20, num_members=5),
    "quick": OnlineConfig(),
    "paper": OnlineConfig(
        (*SETS, "mnist"), tuple(range(5)), width=100, steps=10_000, batch_size=100, num_images=60_000
    ),
}


@dataclass(frozen=True, eq=False)
class Task:
    """The parts and the test data of one data set and seed."""

    parts: list[Part]
    test: Part
    outputs: int
    likelihood: TargetLikelihood[Any] | None
    """None if it is a regression, whose noise is not known yet."""
    log_unit: float = 0.0
    """The log of the standard deviation of the targets. Added to an NLL, it gives the NLL in the unit of the data."""


def units(config: OnlineConfig) -> list[Unit]:
    """Return one unit for each data set, seed and method, and before them one for the noise of real targets."""
    found = []
    for name in config.datasets:
        for seed in config.seeds:
            first = () if name == "mnist" else (f"{name}, seed {seed}, {NOISE}",)
            found += [Unit(noise, {"dataset": name, "seed": seed, "method": NOISE}) for noise in first]
            found += [
                Unit(f"{name}, seed {seed}, {method}", {"dataset": name, "seed": seed, "method": method}, needs=first)
                for method in METHODS
            ]
    return found


def load_task(config: OnlineConfig, name: str, seed: int, folder: DataFolder = None) -> Task:
    """Load a data set, standardised by its first part, and cut the training set into random parts."""
    likelihood, outputs, log_unit = None, 1, 0.0
    if name == "mnist":
        images = load_images("mnist", (config.num_images, 0, 2000), seed, folder)
        inputs, targets = images.train
        test = F.avg_pool2d(images.test[0], 2).flatten(1), images.test[1]
        inputs, likelihood, outputs = F.avg_pool2d(inputs, 2).flatten(1), categorical(), 10
    else:
        inputs, targets, test = _regression(name, seed, folder)
    order = torch.randperm(len(inputs), generator=generator(seed, "parts")).chunk(config.num_parts)
    parts = [(inputs[rows], targets[rows]) for rows in order]
    if likelihood is None:
        scales = [(part.mean(0), part.std(0).clamp_min(1e-6)) for part in parts[0]]
        parts = [_scaled(part, scales) for part in parts]
        test = _scaled(test, scales)
        log_unit = float(scales[1][1].log())
    return Task(parts, test, outputs, likelihood, log_unit)


def _regression(name: str, seed: int, folder: DataFolder) -> tuple[Tensor, Tensor, Part]:
    if name == "synthetic":
        x = torch.randn(120, 3, generator=generator(seed, "x"))
        y = x.sum(1, keepdim=True).sin() + 0.3 * torch.randn(120, 1, generator=generator(seed, "noise"))
        return x[:90], y[:90], (x[90:], y[90:])
    data = load_regression(name, folder)
    inputs, targets = torch.tensor(data.inputs).float(), torch.tensor(data.targets).float()[:, None]
    train_rows, test_rows = (torch.as_tensor(rows) for rows in published_split(len(inputs), seed))
    return inputs[train_rows], targets[train_rows], (inputs[test_rows], targets[test_rows])


def _scaled(part: Part, scales: Sequence[tuple[Tensor, Tensor]]) -> Part:
    inputs, targets = ((values - mean) / std for values, (mean, std) in zip(part, scales, strict=True))
    return inputs, targets


def work(config: OnlineConfig, unit: Unit, needed: Results, data_folder: DataFolder = None) -> list[float] | float:
    """Return the NLL on test data after each part, for one method; or the noise precision."""
    seed, method = unit.arguments["seed"], unit.arguments["method"]
    task = load_task(config, unit.arguments["dataset"], seed, data_folder)
    with warnings_ignored():
        if method == NOISE:
            return _precision(config, task, seed)
        if task.likelihood is None:
            task = replace(task, likelihood=gaussian(needed[unit.needs[0]]))
        return [nll + task.log_unit for nll in LEARN[method](config, task, seed)]


def _network(config: OnlineConfig, task: Task, seed: int) -> MLP:
    return made(lambda: MLP(task.parts[0][0].shape[1], [config.width], task.outputs, norm=False), seed)  # type: ignore[return-value]


def _training(config: OnlineConfig, part: Part, seed: int) -> TrainingConfig:
    """Return a training of as many steps for each part, whatever its size."""
    size = min(config.batch_size, len(part[0]))
    epochs = max(1, round(config.steps / (len(part[0]) // size)))
    return TrainingConfig(epochs, size, config.learning_rate, seed=seed)


def _fit(config: OnlineConfig, network: MLP, part: Part, seed: int, task: Task) -> None:
    """Train a network on one part without any prior."""
    training = _training(config, part, seed)
    loss = half_squared_error if task.outputs == 1 else F.cross_entropy
    train(network, shuffled(*part, training.batch_size, seed), supervised(loss), training)


def _precision(config: OnlineConfig, task: Task, seed: int) -> float:
    """Return 1 over the mean squared error on the last fifth of the first part, by a mean field of the other four."""
    inputs, targets = task.parts[0]
    count = 4 * len(inputs) // 5
    part = inputs[:count], targets[:count]
    state = MeanField.start(_network(config, task, seed), gaussian(4.0), config.prior_std)
    state = state.update(part, _training(config, part, seed))
    found = predict(state.posterior(config.num_members), inputs[count:], gaussian(4.0))
    return 1 / float((found.mean - targets[count:]).square().mean())


def _nll(config: OnlineConfig, state: MeanField, task: Task) -> float:
    assert task.likelihood is not None
    posterior = state.posterior(config.num_members)
    found: Any = predict(posterior, task.test[0], task.likelihood, num_samples=config.num_members)
    return -float(found.log_prob(task.test[1]).mean())


def _online(config: OnlineConfig, task: Task, seed: int) -> list[float]:
    assert task.likelihood is not None
    state, found = MeanField.start(_network(config, task, seed), task.likelihood, config.prior_std), []
    for part in task.parts:
        state = state.update(part, _training(config, part, seed))
        found.append(_nll(config, state, task))
    return found


def _laplace(config: OnlineConfig, task: Task, seed: int) -> list[float]:
    assert task.likelihood is not None
    state, found = StructuredLaplace.start(_network(config, task, seed), task.likelihood, config.prior_std), []
    for part in task.parts:
        state = state.update(part, _training(config, part, seed))
        found.append(-float(state.log_prob(*task.test).mean()))
    return found


def _fine_tuned(config: OnlineConfig, task: Task, seed: int) -> list[float]:
    assert task.likelihood is not None
    network, found = _network(config, task, seed), []
    for part in task.parts:
        _fit(config, network, part, seed, task)
        predicted: Any = predict(deterministic(network), task.test[0], task.likelihood)
        found.append(-float(predicted.log_prob(task.test[1]).mean()))
    return found


def _last_layer(config: OnlineConfig, task: Task, seed: int) -> list[float]:
    assert task.likelihood is not None
    network, found = _network(config, task, seed), []
    _fit(config, network, task.parts[0], seed, task)

    def features(inputs: Tensor) -> Tensor:
        with torch.no_grad():
            return F.pad(network.hidden(inputs), (0, 1), value=1.0)

    state = LastLayer.start(task.outputs, config.width + 1, task.likelihood, prior_precision=1.0)
    for inputs, targets in task.parts:
        state = state.update((features(inputs), targets))
        found.append(-float(state.log_prob(features(task.test[0]), task.test[1]).mean()))
    return found


Learn = Callable[[OnlineConfig, Task, int], list[float]]


def _jointly(learn: Learn, config: OnlineConfig, task: Task, seed: int) -> list[float]:
    """Learn the first part, and all parts as one with as many steps in all; the points between are not needed."""
    found = []
    for count in (1, len(task.parts)):
        inputs, targets = (torch.cat(column) for column in zip(*task.parts[:count], strict=True))
        longer = replace(config, steps=count * config.steps)
        found += learn(longer, replace(task, parts=[(inputs, targets)]), seed)
    return found


LEARN: dict[str, Learn] = {
    JOINT: partial(_jointly, _online),
    ONLINE: _online,
    JOINT_LAPLACE: partial(_jointly, _laplace),
    LAPLACE: _laplace,
    LAST: _last_layer,
    TUNED: _fine_tuned,
}


def _curves(config: OnlineConfig, results: Results, dataset: str, method: str) -> dict[int, list[float]]:
    """Return the curves of one method by seed."""
    names = {seed: f"{dataset}, seed {seed}, {method}" for seed in config.seeds}
    return {seed: results[name] for seed, name in names.items() if name in results}


def tables(config: OnlineConfig, results: Results) -> list[ResultTable]:
    """Return the NLL after all parts, and how much worse than joint training and fine-tuning the online methods are."""
    ends = {
        name: {m: {seed: each[-1] for seed, each in _curves(config, results, name, m).items()} for m in METHODS}
        for name in config.datasets
    }
    values = [(name, *(with_error(list(last[m].values()), ".3f") for m in METHODS)) for name, last in ends.items()]
    shares = [(name, *(v for pair in COMPARED for v in _worse(last, *pair))) for name, last in ends.items()]
    seeds = "Behind ±: two standard errors over seeds."
    return [
        ResultTable(f"NLL after {config.num_parts} parts", ("data", *METHODS), tuple(values), notes=(seeds,)),
        ResultTable(
            "Online less joint training, and less fine-tuning",
            ("data", *(label for online, other in COMPARED for label in (f"{online} less {other}", f"of {other}"))),
            tuple(shares),
            ("", *["", "+.1%"] * len(COMPARED)),
            (f"{seeds} Differences are paired.",),
        ),
    ]


def _worse(last: Mapping[str, Mapping[int, float]], online: str, other: str) -> tuple[str, float | None]:
    """Return how much worse than another method an online one is: the difference, and its share of the other NLL."""
    both = [seed for seed in last[other] if seed in last[online]]
    worse = [last[online][seed] - last[other][seed] for seed in both]
    share = sum(worse) / abs(sum(last[other][seed] for seed in both)) if both else None
    return with_error(worse, ".3f"), share


def figures(config: OnlineConfig, results: Results) -> dict[str, Figure]:
    """Show the NLL after each part, in a panel for each data set."""
    parts, columns = list(range(1, config.num_parts + 1)), min(3, len(config.datasets))
    rows = -(-len(config.datasets) // columns)
    with house_style():
        figure, grid = new_figure(rows, columns, (1.2 + 3.2 * columns, 0.4 + 2.3 * rows), share=False)
        for panel, name in zip_longest(grid.flat, config.datasets):
            if name is None:
                panel.axis("off")
                continue
            found = {m: list(_curves(config, results, name, m).values()) for m in METHODS}
            lines = {
                m: ([1, len(parts)] if m in (JOINT, JOINT_LAPLACE) else parts, each)
                for m, each in found.items()
                if each
            }
            seeds_figure(lines, xlabel="parts", ylabel="NLL", ax=panel)
            panel.set(title=name, xticks=parts)
            panel.get_legend().remove()
        figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return {"NLL-after-each-part": figure}


def notes(config: OnlineConfig) -> list[str]:
    """Say what was trained."""
    return [
        f"One hidden layer of {config.width} units; {config.steps:,} steps of Adam for each part; mean over "
        f"{count_of(len(config.seeds), 'seed')}.",
        "The NLL of real targets is in nats, in the units of the data. MNIST images are averaged to 14 x 14 pixels.",
        "Joint training starts anew with the first part, and with all parts; between these two points is a line.",
    ]
