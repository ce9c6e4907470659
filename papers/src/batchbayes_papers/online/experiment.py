"""Data in five parts: the posterior after one part is the prior for the next.

Compared on the test set after each part:

- a linear layer on wide features, which are fixed with the first part ("wide layer"): online, by joint training on all
  parts, and fine-tuned, which is to go on training on each part alone;
- one small network, which all other methods share: mean field and structured Laplace, both online and by joint
  training; elastic weight consolidation (EWC); online last layer on features of the first part; and fine-tuning. They
  also share the noise precision, which is measured on a fifth of the first part.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import batchbayes as bb
from batchbayes.models import MLP
from batchbayes.tools import Figure, house_style, made, new_figure
from batchbayes.tools import count as count_of
from batchbayes_papers import online
from batchbayes_papers.data.folder import DataFolder
from batchbayes_papers.data.uci import SETS
from batchbayes_papers.online import wide
from batchbayes_papers.online.setup import OnlineConfig, Task, fit, load_task, together, training_of
from batchbayes_papers.runner.experiment import Results, Unit, warnings_ignored
from batchbayes_papers.runner.figures import seeds_figure
from batchbayes_papers.runner.tables import ResultTable, with_error

DATASETS = (*SETS, "mnist", "synthetic")
JOINT_WIDE, WIDE, TUNED_WIDE, JOINT, ONLINE, JOINT_LAPLACE, LAPLACE, ELASTIC, LAST, TUNED = METHODS = (
    "joint wide layer",
    "online wide layer",
    "fine-tuned wide layer",
    "joint",
    "online mean field",
    "joint Laplace",
    "online Laplace",
    "EWC",
    "online last layer",
    "fine-tuning",
)
SAME_FEATURES = "joint wide layer on the features of the first part"
"""For classes only: for real targets it is equal to the online wide layer."""
COMPARED = (
    *((WIDE, other) for other in (JOINT_WIDE, SAME_FEATURES, JOINT_LAPLACE, JOINT, TUNED_WIDE, TUNED)),
    *((LAPLACE, other) for other in (JOINT_LAPLACE, ELASTIC, TUNED)),
    (ELASTIC, TUNED),
    *((method, JOINT) for method in (LAPLACE, ONLINE, LAST)),
)
"""Online methods, and what the table compares them with."""
DRAWN = (WIDE, JOINT_WIDE, TUNED_WIDE, LAPLACE, JOINT_LAPLACE, TUNED)
"""The lines of the figure."""
NOISE = "noise"
"""The unit that measures the noise precision, which all methods with the small network use."""


PRESETS = {
    "smoke": OnlineConfig(("synthetic",), (0,), 2, width=8, steps=20, num_members=5, wide=20),
    "quick": OnlineConfig(),
    "paper": OnlineConfig(
        (*SETS, "mnist"), tuple(range(5)), width=100, steps=10_000, batch_size=100, num_images=60_000
    ),
}


def units(config: OnlineConfig) -> list[Unit]:
    """Return one unit for each data set, seed and method, and before them one for the noise of real targets."""
    found = []
    for name in config.datasets:
        for seed in config.seeds:
            first = () if name == "mnist" else (f"{name}, seed {seed}, {NOISE}",)
            found += [Unit(noise, {"dataset": name, "seed": seed, "method": NOISE}) for noise in first]
            for method in (*METHODS, *([SAME_FEATURES] if name == "mnist" else [])):
                arguments = {"dataset": name, "seed": seed, "method": method}
                needs = () if method in (JOINT_WIDE, WIDE, TUNED_WIDE) else first
                found.append(Unit(f"{name}, seed {seed}, {method}", arguments, needs=needs))
    return found


def work(config: OnlineConfig, unit: Unit, needed: Results, data_folder: DataFolder = None) -> list[float] | float:
    """Return the NLL on test data after each part, for one method; or the noise precision."""
    seed, method = unit.arguments["seed"], unit.arguments["method"]
    task = load_task(config, unit.arguments["dataset"], seed, data_folder)
    with warnings_ignored():
        if method == NOISE:
            return _precision(config, task, seed)
        if task.likelihood is None and unit.needs:
            task = replace(task, likelihood=bb.gaussian(needed[unit.needs[0]]))
        return [nll + task.log_unit for nll in LEARN[method](config, task, seed)]


def _network(config: OnlineConfig, task: Task, seed: int) -> MLP:
    return made(lambda: MLP(task.parts[0][0].shape[1], [config.width], task.outputs, norm=False), seed)  # type: ignore[return-value]


def _precision(config: OnlineConfig, task: Task, seed: int) -> float:
    """Return 1 over the mean squared error on the last fifth of the first part, by a mean field of the other four."""
    inputs, targets = task.parts[0]
    count = 4 * len(inputs) // 5
    part = inputs[:count], targets[:count]
    state = online.OnlineMeanField.start(_network(config, task, seed), bb.gaussian(4.0), config.prior_std)
    state = state.update(part, training_of(config, part, seed))
    found = bb.predict(state.posterior(config.num_members), inputs[count:], bb.gaussian(4.0))
    return 1 / float((found.mean - targets[count:]).square().mean())


def _online(config: OnlineConfig, task: Task, seed: int) -> list[float]:
    state, found = online.OnlineMeanField.start(_network(config, task, seed), task.likelihood, config.prior_std), []
    for part in task.parts:
        state = state.update(part, training_of(config, part, seed))
        posterior = state.posterior(config.num_members)
        predicted = bb.predict(posterior, task.test[0], task.likelihood, num_samples=config.num_members)
        found.append(-float(predicted.log_prob(task.test[1]).mean()))
    return found


def _maximum(kind: Any, config: OnlineConfig, task: Task, seed: int) -> list[float]:
    """Learn by a Gaussian around the maximum: with Kronecker factors and draws, or with a diagonal (EWC)."""
    state, found = kind.start(_network(config, task, seed), task.likelihood, config.prior_std), []
    for part in task.parts:
        state = state.update(part, training_of(config, part, seed))
        found.append(-float(state.log_prob(*task.test).mean()))
    return found


def _fine_tuned(config: OnlineConfig, task: Task, seed: int) -> list[float]:
    network, found = _network(config, task, seed), []
    for part in task.parts:
        fit(config, network, part, seed)
        predicted = bb.predict(bb.deterministic(network), task.test[0], task.likelihood)
        found.append(-float(predicted.log_prob(task.test[1]).mean()))
    return found


def _last_layer(config: OnlineConfig, task: Task, seed: int) -> list[float]:
    network = _network(config, task, seed)
    fit(config, network, task.parts[0], seed)

    def features(inputs: Tensor) -> Tensor:
        with torch.no_grad():
            return F.pad(network.hidden(inputs), (0, 1), value=1.0)

    state = online.OnlineLastLayer.start(task.outputs, config.width + 1, task.likelihood, prior_precision=1.0)
    return wide.learned(state, features, task.parts, task.test)


Learn = Callable[[OnlineConfig, Task, int], list[float]]


def _jointly(learn: Learn, config: OnlineConfig, task: Task, seed: int) -> list[float]:
    """Learn the first part, and all parts as one with as many steps in all; the points between are not needed."""
    found = []
    for count in (1, len(task.parts)):
        longer = replace(config, steps=count * config.steps)
        found += learn(longer, replace(task, parts=[together(task.parts[:count])]), seed)
    return found


LEARN: dict[str, Learn] = {
    JOINT_WIDE: wide.joint_wide,
    WIDE: wide.online_wide,
    TUNED_WIDE: wide.fine_tuned_wide,
    SAME_FEATURES: wide.joint_on_first_features,
    JOINT: partial(_jointly, _online),
    ONLINE: _online,
    JOINT_LAPLACE: partial(_jointly, partial(_maximum, online.StructuredLaplace)),
    LAPLACE: partial(_maximum, online.StructuredLaplace),
    ELASTIC: partial(_maximum, online.ElasticWeights),
    LAST: _last_layer,
    TUNED: _fine_tuned,
}


def _curves(config: OnlineConfig, results: Results, dataset: str, method: str) -> dict[int, list[float]]:
    """Return the curves of one method by seed."""
    names = {seed: f"{dataset}, seed {seed}, {method}" for seed in config.seeds}
    return {seed: results[name] for seed, name in names.items() if name in results}


def tables(config: OnlineConfig, results: Results) -> list[ResultTable]:
    """Return the NLL after all parts, and how much worse than joint training and fine-tuning the online methods are."""
    methods = (*METHODS, SAME_FEATURES)
    ends = {
        name: {m: {seed: each[-1] for seed, each in _curves(config, results, name, m).items()} for m in methods}
        for name in config.datasets
    }
    values = [(name, *(with_error(list(last[m].values()), ".3f") for m in METHODS)) for name, last in ends.items()]
    shares = [
        (name, f"{online} less {other}", *_worse(last, online, other))
        for name, last in ends.items()
        for online, other in COMPARED
        if last[other] or other != SAME_FEATURES
    ]
    seeds = "Behind ±: two standard errors over seeds."
    return [
        ResultTable(f"NLL after {config.num_parts} parts", ("data", *METHODS), tuple(values), notes=(seeds,)),
        ResultTable(
            "Online less joint training, and less fine-tuning",
            ("data", "methods", "difference", "share of the second"),
            tuple(shares),
            ("", "", "", "+.1%"),
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
            found = {m: list(_curves(config, results, name, m).values()) for m in DRAWN}
            where = {JOINT_WIDE: parts[-1:], JOINT_LAPLACE: [1, config.num_parts]}
            lines = {m: (where.get(m, parts), each) for m, each in found.items() if each}
            seeds_figure(lines, xlabel="parts", ylabel="NLL", ax=panel)
            panel.set(title=name, xticks=parts)
            panel.get_legend().remove()
        handles, labels = grid.flat[0].get_legend_handles_labels()
        wide = 3 if columns > 1 else 2  # three are wider than one panel
        figure.legend(handles, labels, loc="outside lower center", ncols=wide, frameon=False)
    return {"NLL-after-each-part": figure}


def notes(config: OnlineConfig) -> list[str]:
    """Say what was trained."""
    return [
        f"One hidden layer of {config.width} units; {config.steps:,} steps of Adam for each part; mean over "
        f"{count_of(len(config.seeds), 'seed')}.",
        f"The wide features of a table are waves in {config.wide} directions; those of images are {config.wide_images} "
        f"components of {config.filters} kinds of patches.",
        "The NLL of real targets is in nats, in the units of the data. MNIST images are averaged to 14 x 14 pixels.",
        "Joint training starts anew with the first part, and with all parts; between these two points is a line. The "
        "joint wide layer has the point of all parts only.",
    ]
