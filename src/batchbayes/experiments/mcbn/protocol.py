"""The protocol of the regression tables of the MCBN paper: data, networks, training, choice of hyper-parameters.

Teye, Azizpour, Smith, "Bayesian Uncertainty Estimation for Batch Normalized Deep Networks", ICML 2018, and the code
that its authors published. Two hidden layers of 50 units (protein 100); inputs and targets standardised by the part
that is trained on, everything reported in the units of the target; five folds in lock-step, the validation RMSE looked
at every 20 epochs, the training over after 10 looks without a new best; the weight decay, and the batch size or dropout
rate, with the lowest validation RMSE chosen separately for each way to predict.

Where we differ: networks start from our own random streams; folds and configurations of one split are trained as one
stack; a configuration ends when all of its ways to predict have run out of patience; at the cap of epochs all folds
stop; the final training takes exactly the chosen number of epochs; validation draws are the same at every look.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from batchbayes._common.rng import generator
from batchbayes.data.uci import load_regression, published_folds, published_split
from batchbayes.experiments.mcbn.scores import ANY, Limits
from batchbayes.models.mlp import MLP
from batchbayes.training.loop import TrainingConfig
from batchbayes.training.stack.convert import stack_networks, unstack
from batchbayes.training.stack.noise import Noise, batch_noise, mask_noise, stack_outputs
from batchbayes.training.stack.stack import Stack
from batchbayes.training.stack.train import train_stack

Kind = Literal["BN", "DO"]
"""What makes a network stochastic: batch norm or dropout."""
WAYS: dict[Kind, tuple[str, str]] = {"BN": ("MCBN", "BN"), "DO": ("MCDO", "DO")}
"""The two ways to predict with each: by many draws, and without noise."""

SYNTHETIC = "synthetic"
PRECISIONS = {
    "boston": (0.01, 10.0),
    "concrete": (0.001, 10.0),
    "energy": (0.01, 100.0),
    "kin8nm": (10.0, 1000.0),
    "power": (0.01, 10.0),
    "protein": (0.01, 10.0),
    "wine": (0.01, 10.0),
    "yacht": (0.01, 100.0),
    SYNTHETIC: ANY,
}
"""Between which precisions tau of the observation noise was sought, as published."""
DROPOUT_BATCH_SIZE = 32
EPSILON = 1e-10
"""Of batch norm, as published."""
WEIGHT_STD = 0.1
"""Of the initial weights, before they are cut off at two standard deviations."""
SELECTION_SEED = 1
"""Every configuration starts from the same seed."""


@dataclass(frozen=True)
class Protocol:
    """What a preset can change. The defaults are those of the paper, but for the weight decays."""

    datasets: tuple[str, ...]
    splits: int = 5
    seeds: int = 5
    """Networks trained for each split with the chosen configuration."""
    weight_decays: tuple[float, ...] = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 0.0)
    """Those from 1e-7 to 1e-15 of the paper make no difference to a network, and stand here as one 0."""
    batch_sizes: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)
    dropout_rates: tuple[float, ...] = (0.2, 0.1, 0.05, 0.01, 0.005, 0.001)
    max_epochs: int = 2000
    every: int = 20
    patience: int = 10
    """Looks without a new best after which a configuration ends."""
    selection_draws: int = 500
    """For the validation RMSE of MCBN and MC dropout."""
    num_samples: int = 500
    """For everything after the choice."""
    reductions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Other values of these fields for single data sets."""

    def of(self, dataset: str) -> "Protocol":
        """The protocol for one data set."""
        limited = replace(self, batch_sizes=tuple(m for m in self.batch_sizes if dataset != "energy" or m <= 512))
        return replace(limited, **self.reductions.get(dataset, {}))


@dataclass(frozen=True, eq=False)
class Part:
    """Examples to train on, standardised by their own mean and deviation, and others to predict."""

    inputs: Tensor
    targets: Tensor
    """(N, 1)"""
    others: Tensor
    """Inputs, standardised in the same way."""
    truth: Tensor
    """Targets of the others, (n,), in their own unit and in double precision."""
    center: float
    scale: float

    def in_units(self, outputs: Tensor) -> Tensor:
        """Outputs (..., 1) as targets in their own unit, (...)."""
        return outputs.squeeze(-1).double() * self.scale + self.center


@dataclass(frozen=True, eq=False)
class Split:
    """One split of a data set."""

    folds: list[Part]
    """Training parts of the cross-validation; the others are the fold left out."""
    whole: Part
    """All but the test rows; the others are those."""
    precisions: Limits
    """Within which the observation noise is sought."""


def load_split(dataset: str, split: int, folder: str | os.PathLike[str] | None) -> Split:
    """A published split, by its seed (1 to 5)."""
    inputs, targets = synthetic_data() if dataset == SYNTHETIC else _loaded(dataset, folder)
    train, test = published_split(len(targets), split)
    folds = [standardised(inputs, targets, rows, left_out) for rows, left_out in published_folds(train)]
    return Split(folds, standardised(inputs, targets, train, test), PRECISIONS[dataset])


def _loaded(dataset: str, folder: str | os.PathLike[str] | None) -> tuple[np.ndarray, np.ndarray]:
    data = load_regression(dataset, folder)
    return data.inputs, data.targets


def synthetic_data(count: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """A smooth function of three of five inputs, with noise that grows along the first."""
    source = np.random.RandomState(0)
    inputs = source.uniform(-1, 1, (count, 5))
    noise = source.normal(size=count) * (0.05 + 0.2 * (inputs[:, 0] > 0))
    return inputs, 3 + np.sin(3 * inputs[:, 0]) + inputs[:, 1] * inputs[:, 2] + noise


def standardised(inputs: np.ndarray, targets: np.ndarray, rows: np.ndarray, others: np.ndarray) -> Part:
    """Rows to train on and others to predict; a feature that is constant in the former is only centred."""
    mean, std = inputs[rows].mean(0), inputs[rows].std(0)
    std[std == 0] = 1
    center, scale = float(targets[rows].mean()), float(targets[rows].std()) or 1.0

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))

    return Part(
        tensor((inputs[rows] - mean) / std),
        tensor((targets[rows, None] - center) / scale),
        tensor((inputs[others] - mean) / std),
        torch.from_numpy(targets[others].astype(np.float64)),
        center,
        scale,
    )


@dataclass(frozen=True)
class Candidate:
    """What is chosen by cross-validation."""

    weight_decay: float
    batch_size: int
    dropout_rate: float = 0.0
    """0 is a network with batch norm instead."""
    epochs: int = 0


def new_network(in_features: int, dataset: str, dropout_rate: float, source: torch.Generator) -> MLP:
    """An untrained network as in the paper: truncated normal weights, biases before a ReLU positive."""
    width = 100 if dataset == "protein" else 50
    network = MLP(in_features, [width, width], 1, norm=not dropout_rate, epsilon=EPSILON, dropout=dropout_rate)
    with torch.no_grad():
        for name, module in network.named_modules():
            if isinstance(module, nn.Linear):
                for parameter in module.parameters():
                    nn.init.trunc_normal_(parameter, 0, WEIGHT_STD, -2 * WEIGHT_STD, 2 * WEIGHT_STD, generator=source)
                if module.bias is not None and name != "output":
                    module.bias.abs_()
    return network


def trained(
    dataset: str, parts: Sequence[Part], candidate: Candidate, seeds: Sequence[int], streams: Sequence[int | str]
) -> list[MLP]:
    """Networks of one candidate, each on its own part from its own seed; the streams name their first weights."""
    sources = [generator(seed, "weights", stream) for seed, stream in zip(seeds, streams, strict=True)]
    features = parts[0].inputs.shape[1]
    networks = [new_network(features, dataset, candidate.dropout_rate, source) for source in sources]
    configs = [
        TrainingConfig(candidate.epochs, candidate.batch_size, weight_decay=candidate.weight_decay, seed=seed)
        for seed in seeds
    ]
    stack = stack_networks(networks)
    unstack(train_stack(stack, [(part.inputs, part.targets) for part in parts], configs), networks)
    return [network.eval() for network in networks]


def choose(
    protocol: Protocol, dataset: str, folds: Sequence[Part], kind: Kind, batch_size: int
) -> dict[str, list[dict[str, float]]]:
    """Train all weight decays (and dropout rates) at one batch size on all folds; how good each is, and when.

    Returns, for each way to predict, the candidates with the mean validation RMSE and the epochs at their best.
    """
    rates = protocol.dropout_rates if kind == "DO" else (0.0,)
    candidates = [Candidate(decay, batch_size, rate) for rate in rates for decay in protocol.weight_decays]
    networks, data, configs = [], [], []
    for candidate in candidates:
        for fold, part in enumerate(folds):
            source = generator(SELECTION_SEED, "weights", fold)
            networks.append(new_network(part.inputs.shape[1], dataset, candidate.dropout_rate, source))
            data.append((part.inputs, part.targets))
            configs.append(
                TrainingConfig(
                    protocol.max_epochs, batch_size, weight_decay=candidate.weight_decay, seed=SELECTION_SEED
                )
            )
    looks = Looks(protocol, folds, kind, batch_size, len(candidates))
    train_stack(stack_networks(networks), data, configs, observe=looks.look, every=protocol.every)
    return {way: looks.found(way, candidates) for way in WAYS[kind]}


class Looks:
    """The validation RMSE of all candidates as they are trained, and who has run out of patience."""

    def __init__(
        self, protocol: Protocol, folds: Sequence[Part], kind: Kind, batch_size: int, num_candidates: int
    ) -> None:
        self._folds, self._patience = folds, protocol.patience * protocol.every
        self._noises = [
            noise_makers(kind, part, batch_size, protocol.selection_draws, fold) for fold, part in enumerate(folds)
        ]
        shape = (len(WAYS[kind]), num_candidates)
        self._ways = WAYS[kind]
        self._best, self._epoch = (
            torch.full(shape, float("inf"), dtype=torch.float64),
            torch.zeros(shape, dtype=torch.int64),
        )

    def look(self, epoch: int, stack: Stack, numbers: Tensor) -> Tensor:
        """Score the networks that are left; those go on whose candidate has had a new best lately, in any way."""
        fold_of, alive = numbers % len(self._folds), (numbers // len(self._folds)).unique()
        scores = torch.stack([self._scores(stack.select(fold_of == fold), fold) for fold in range(len(self._folds))])
        scores = scores.mean(0)  # (ways, candidates alive), over folds
        better = scores <= self._best[:, alive]
        self._best[:, alive] = torch.where(better, scores, self._best[:, alive])
        self._epoch[:, alive] = torch.where(better, epoch, self._epoch[:, alive])
        going = (epoch - self._epoch[:, alive] < self._patience).any(0)
        return going.repeat_interleave(len(self._folds))

    def _scores(self, stack: Stack, fold: int) -> Tensor:
        part = self._folds[fold]
        means = [part.in_units(stack_outputs(stack, part.others, make(stack)).mean(1)) for make in self._noises[fold]]
        return torch.stack([(mean - part.truth).square().mean(1).sqrt() for mean in means])  # (ways, candidates alive)

    def found(self, way: str, candidates: Sequence[Candidate]) -> list[dict[str, float]]:
        """Each candidate at its best."""
        index = self._ways.index(way)
        return [
            {
                "weight_decay": candidate.weight_decay,
                "batch_size": candidate.batch_size,
                "dropout_rate": candidate.dropout_rate,
                "epochs": int(self._epoch[index, number]),
                "rmse": float(self._best[index, number]),
            }
            for number, candidate in enumerate(candidates)
        ]


def noise_makers(
    kind: Kind, part: Part, batch_size: int, num_draws: int, fold: int
) -> list[Callable[[Stack], Noise | None]]:
    """How to draw for each way to predict: the first by many draws, the second without noise."""
    if kind == "DO":
        return [
            lambda stack: mask_noise(stack, num_draws, generator(SELECTION_SEED, "masks", fold)),
            lambda stack: None,
        ]
    whole = part.inputs[None]

    def population(stack: Stack) -> Noise:
        return batch_noise(stack, whole)

    if batch_size >= len(part.inputs):
        return [population, population]
    source = generator(SELECTION_SEED, "batches", fold)
    rows = torch.stack([torch.randperm(len(part.inputs), generator=source)[:batch_size] for _ in range(num_draws)])
    return [lambda stack: batch_noise(stack, part.inputs[rows]), population]


def best_candidate(found: Sequence[Mapping[str, float]]) -> Candidate:
    """The one with the lowest validation RMSE; of equal ones the last, as published."""
    best = min(reversed(found), key=lambda candidate: candidate["rmse"])
    return Candidate(best["weight_decay"], int(best["batch_size"]), best["dropout_rate"], int(best["epochs"]))
