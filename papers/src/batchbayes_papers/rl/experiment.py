"""Noise in the weights of a policy: CartPole and Acrobot with a plain policy, a variance layer and parameter noise.

Neklyudov, Molchanov, Ashukha and Vetrov, "Variance Networks" (ICLR 2019), show the mean score in training for these
three policies. The paper states neither the algorithm nor the network nor what is counted along the axis; here it is
REINFORCE with a baseline, 100 iterations of some episodes each, and a network with two hidden layers, of which the
second has the noise. Needs the extra "rl" of this package.
"""

from dataclasses import dataclass
from statistics import fmean
from typing import Any

from batchbayes.tools import Figure, GlobalStream, stream_seed
from batchbayes_papers.data.folder import DataFolder
from batchbayes_papers.rl.environments import make_environments
from batchbayes_papers.rl.policies import Kind, Policy, learn_policy
from batchbayes_papers.runner.experiment import Results, Unit
from batchbayes_papers.runner.figures import seeds_figure
from batchbayes_papers.runner.tables import ResultTable, with_error

KINDS: tuple[Kind, ...] = ("deterministic", "variance", "parameter noise")
MOST_STEPS = {"CartPole": 200, "Acrobot": 500}
DATASETS = tuple(MOST_STEPS)
PUBLISHED_AT = (10, 20, 30, 40, 50, 60, 70, 80, 90, 98)
PUBLISHED = {
    ("CartPole", "deterministic"): (35, 79, 124, 150, 161, 169, 173, 173, 178, 179),
    ("CartPole", "variance"): (23, 37, 64, 118, 154, 173, 174, 181, 189, 191),
    ("CartPole", "parameter noise"): (22, 33, 53, 97, 139, 160, 171, 175, 181, 181),
    ("Acrobot", "deterministic"): (-396, -301, -258, -241, -211, -211, -223, -227, -227, -223),
    ("Acrobot", "variance"): (-493, -465, -386, -316, -264, -227, -204, -188, -176, -169),
    ("Acrobot", "parameter noise"): (-388, -316, -285, -254, -239, -230, -222, -206, -199, -203),
}
"""Mean scores read off the published figure."""


@dataclass(frozen=True)
class RlConfig:
    """A configuration. The defaults are those of the preset `quick`."""

    datasets: tuple[str, ...] = DATASETS
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    iterations: int = 100
    episodes: int = 16
    """Episodes of an iteration, side by side; each iteration is one step of Adam."""
    width: int = 32
    learning_rate: float = 0.01
    discount: float = 0.99


PRESETS = {
    "smoke": RlConfig(seeds=(0,), iterations=2, episodes=3, width=4),
    "quick": RlConfig(),
    "paper": RlConfig(seeds=tuple(range(20)), episodes=32, width=64),
}


def units(config: RlConfig) -> list[Unit]:
    """Return one unit for each environment, seed and policy."""
    return [
        Unit(
            _name(task, seed, kind), {"task": task, "seed": seed, "kind": kind}, effort=3.0 if task == "Acrobot" else 1
        )
        for task in config.datasets
        for seed in config.seeds
        for kind in KINDS
    ]


def _name(task: str, seed: int, kind: str) -> str:
    return f"{task}, seed {seed}, {kind}"


def work(config: RlConfig, unit: Unit, needed: Results, data_folder: DataFolder = None) -> list[float]:
    """Return the mean score of the episodes of each iteration."""
    task, seed, kind = (unit.arguments[name] for name in ("task", "seed", "kind"))
    environments = make_environments(task, config.episodes, MOST_STEPS[task])
    with GlobalStream(seed):
        policy = Policy(environments.num_inputs, environments.num_actions, kind, config.width)
    return learn_policy(
        policy, environments, iterations=config.iterations, count=config.episodes, rate=config.learning_rate,
        discount=config.discount, seed=stream_seed(seed, task, "episodes"),
    )  # fmt: skip


def _curves(config: RlConfig, results: Results, task: str, kind: str) -> list[list[float]]:
    return [results[name] for seed in config.seeds if (name := _name(task, seed, kind)) in results]


def tables(config: RlConfig, results: Results) -> list[ResultTable]:
    """Return the mean score over seeds early, in the middle and at the end, beside the published readings."""
    last = config.iterations
    ends = sorted({min(end, last) for end in (20, 50, last)})
    lines = []
    for task in config.datasets:
        for kind in KINDS:
            found = _curves(config, results, task, kind)
            scores = [with_error([fmean(each[max(0, end - 10) : end]) for each in found], ".0f") for end in ends]
            final = " ".join(f"{fmean(each[-10:]):.0f}" for each in found)
            lines.append((task, kind, *scores, final, PUBLISHED[task, kind][1], PUBLISHED[task, kind][4],
                          PUBLISHED[task, kind][-1]))  # fmt: skip
    return [
        ResultTable(
            "Mean score in training",
            ("task", "policy", *(f"up to {end}" for end in ends), "last, each seed", "paper at 20", "at 50", "at 98"),
            tuple(lines),
            ("", "", *[""] * len(ends), "", *["d"] * 3),
            ("Scores: means over the ten iterations up to the one that is named, and two standard errors over seeds.",),
        )
    ]


def figures(config: RlConfig, results: Results) -> dict[str, Figure]:
    """Show the score in training, beside the published readings."""
    found = {}
    for task in config.datasets:
        own = {kind: _curves(config, results, task, kind) for kind in KINDS}
        lines = {kind: (range(1, config.iterations + 1), scores) for kind, scores in own.items() if scores}
        published = {kind: (PUBLISHED_AT, PUBLISHED[task, kind]) for kind in KINDS}
        labels: Any = {"xlabel": "iterations", "ylabel": f"mean score on {task}"}
        found[f"score-on-{task}"] = seeds_figure(lines, published=published, **labels)
    return found


def notes(config: RlConfig) -> list[str]:
    """Say what is ours where the paper is silent."""
    return [
        "The paper does not state its algorithm, network and axis. Here: REINFORCE with the mean return of the other "
        f"episodes as baseline, {config.episodes} episodes an iteration, Adam with a rate of {config.learning_rate:g}, "
        f"discount {config.discount:g}, two hidden layers of {config.width} units.",
        "Scores are those of the episodes that are learnt from, with all their noise.",
    ]
