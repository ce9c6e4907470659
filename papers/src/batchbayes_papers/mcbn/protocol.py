"""The protocol of the regression tables of the MCBN paper: networks, training and choice of hyper-parameters.

It follows the paper and the code that its authors published:

- Networks have two hidden layers of 50 units (100 for protein).
- Inputs and targets are standardised by the rows that the network is trained on. All scores are in the unit of the
  target.
- Five folds are trained side by side. Their mean validation RMSE is measured every 20 epochs. Training stops after 10
  measurements without a new best value.
- The weight decay, and the batch size or the dropout rate, are those with the lowest validation RMSE. They are chosen
  separately for each way to predict.

Differences from the paper: Networks start from our own random streams. All folds and configurations of one split are
trained as one stack. A configuration stops when all of its ways to predict have stopped improving. All folds stop at
the largest number of epochs. The final training takes exactly the chosen number of epochs. The validation draws are the
same at every measurement.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from batchbayes_tables.stack.stack import (
    Noise,
    Stack,
    batch_noise,
    mask_noise,
    stack_networks,
    stack_outputs,
    unstack,
)
from batchbayes_tables.stack.train import train_stack
from torch import Tensor, nn

from batchbayes import TrainingConfig
from batchbayes.models import MLP
from batchbayes.tools import generator
from batchbayes_papers.mcbn.splits import StandardisedPart

NetworkKind = Literal["BN", "DO"]
"""The source of noise in a network: batch norm or dropout."""
WAYS: dict[NetworkKind, tuple[str, str]] = {"BN": ("MCBN", "BN"), "DO": ("MCDO", "DO")}
"""The two ways to predict with each kind: with many draws, and without noise."""
DROPOUT_BATCH_SIZE = 32
EPSILON = 1e-10
"""The published epsilon of batch norm."""
WEIGHT_STD = 0.1
"""The standard deviation of the initial weights, which are truncated at two standard deviations."""
SELECTION_SEED = 1
"""All configurations start from this seed."""


@dataclass(frozen=True)
class UciProtocol:
    """The settings that a preset can change. The defaults are those of the paper, except for the weight decays."""

    datasets: tuple[str, ...]
    splits: int = 5
    seeds: int = 5
    """How many networks are trained for each split with the chosen configuration."""
    weight_decays: tuple[float, ...] = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 0.0)
    """The paper's values from 1e-7 to 1e-15 have no visible effect on a network. One 0 replaces all of them."""
    batch_sizes: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)
    dropout_rates: tuple[float, ...] = (0.2, 0.1, 0.05, 0.01, 0.005, 0.001)
    max_epochs: int = 2000
    every: int = 20
    """The number of epochs between two measurements of the validation RMSE."""
    patience: int = 10
    """The number of measurements without a new best value after which a configuration stops."""
    selection_draws: int = 500
    """The number of draws for the validation RMSE of MCBN and MC dropout."""
    num_samples: int = 500
    """The number of draws for everything after the choice."""
    reductions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Other values of these fields for single data sets."""

    def of(self, dataset: str) -> "UciProtocol":
        """Return the protocol for one data set."""
        limited = replace(self, batch_sizes=tuple(m for m in self.batch_sizes if dataset != "energy" or m <= 512))
        return replace(limited, **self.reductions.get(dataset, {}))


@dataclass(frozen=True)
class GridPoint:
    """Hyper-parameters: one point of the grid that cross-validation chooses from."""

    weight_decay: float
    batch_size: int
    dropout_rate: float = 0.0
    """0 means a network with batch norm instead of dropout."""
    epochs: int = 0

    def training(self, epochs: int, seed: int) -> TrainingConfig:
        """Return the training configuration of this point."""
        return TrainingConfig(epochs, self.batch_size, weight_decay=self.weight_decay, seed=seed)


def new_network(in_features: int, dataset: str, dropout_rate: float, source: torch.Generator) -> MLP:
    """Return an untrained network as in the paper: truncated normal weights, and positive biases before a ReLU."""
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


def train_candidate(
    dataset: str,
    parts: Sequence[StandardisedPart],
    candidate: GridPoint,
    seeds: Sequence[int],
    streams: Sequence[int | str],
) -> list[MLP]:
    """Train networks of one candidate, each on its own part with its own seed. `streams` name the initial weights."""
    networks = [
        new_network(part.inputs.shape[1], dataset, candidate.dropout_rate, generator(seed, "weights", stream))
        for part, seed, stream in zip(parts, seeds, streams, strict=True)
    ]
    configs = [candidate.training(candidate.epochs, seed) for seed in seeds]
    stack = stack_networks(networks)
    unstack(train_stack(stack, [(part.inputs, part.targets) for part in parts], configs), networks)
    return [network.eval() for network in networks]


def cross_validate(
    protocol: UciProtocol, dataset: str, folds: Sequence[StandardisedPart], kind: NetworkKind, batch_size: int
) -> dict[str, list[dict[str, float]]]:
    """Train all weight decays (and dropout rates) at one batch size on all folds.

    Returns, for each way to predict, the candidates with their lowest mean validation RMSE and its number of epochs.
    """
    rates = protocol.dropout_rates if kind == "DO" else (0.0,)
    candidates = [GridPoint(decay, batch_size, rate) for rate in rates for decay in protocol.weight_decays]
    networks, data, configs = [], [], []
    for candidate in candidates:
        for fold, part in enumerate(folds):
            source = generator(SELECTION_SEED, "weights", fold)
            networks.append(new_network(part.inputs.shape[1], dataset, candidate.dropout_rate, source))
            data.append((part.inputs, part.targets))
            configs.append(candidate.training(protocol.max_epochs, SELECTION_SEED))
    history = ValidationHistory(protocol, folds, kind, batch_size, len(candidates))
    train_stack(stack_networks(networks), data, configs, observe=history.observe, every=protocol.every)
    return {way: history.best_of(way, candidates) for way in WAYS[kind]}


class ValidationHistory:
    """The best validation RMSE of each candidate during training, and which candidates still improve."""

    def __init__(
        self,
        protocol: UciProtocol,
        folds: Sequence[StandardisedPart],
        kind: NetworkKind,
        batch_size: int,
        num_candidates: int,
    ) -> None:
        self._folds, self._ways, self._patience = folds, WAYS[kind], protocol.patience * protocol.every
        self._noises = [
            noise_makers(kind, part, batch_size, protocol.selection_draws, fold) for fold, part in enumerate(folds)
        ]
        shape = (len(self._ways), num_candidates)
        self._best = torch.full(shape, float("inf"), dtype=torch.float64)
        self._epoch = torch.zeros(shape, dtype=torch.int64)

    def observe(self, epoch: int, stack: Stack, numbers: Tensor) -> Tensor:
        """Measure the networks that are left. Return for each one whether its candidate still improves in any way."""
        fold_of, alive = numbers % len(self._folds), (numbers // len(self._folds)).unique()
        scores = torch.stack([self._scores(stack.select(fold_of == fold), fold) for fold in range(len(self._folds))])
        scores = scores.mean(0)  # (ways, candidates alive), over folds
        better = scores <= self._best[:, alive]
        self._best[:, alive] = torch.where(better, scores, self._best[:, alive])
        self._epoch[:, alive] = torch.where(better, epoch, self._epoch[:, alive])
        improving = (epoch - self._epoch[:, alive] < self._patience).any(0)
        return improving.repeat_interleave(len(self._folds))

    def _scores(self, stack: Stack, fold: int) -> Tensor:
        part = self._folds[fold]
        means = [part.in_units(stack_outputs(stack, part.others, make(stack)).mean(1)) for make in self._noises[fold]]
        return torch.stack([(mean - part.truth).square().mean(1).sqrt() for mean in means])  # (ways, candidates alive)

    def best_of(self, way: str, candidates: Sequence[GridPoint]) -> list[dict[str, float]]:
        """Return each candidate with its lowest RMSE and its number of epochs."""
        epochs, errors = (values[self._ways.index(way)].tolist() for values in (self._epoch, self._best))
        return [
            asdict(candidate) | {"epochs": epoch, "rmse": rmse}
            for candidate, epoch, rmse in zip(candidates, epochs, errors, strict=True)
        ]


def noise_makers(
    kind: NetworkKind, part: StandardisedPart, batch_size: int, num_draws: int, fold: int
) -> list[Callable[[Stack], Noise | None]]:
    """Return functions that make the noise for each way to predict: first for many draws, then without noise."""
    if kind == "DO":
        return [
            lambda stack: mask_noise(stack, num_draws, generator(SELECTION_SEED, "masks", fold)),
            lambda stack: None,
        ]

    def population(stack: Stack) -> Noise:
        return batch_noise(stack, part.inputs[None])

    if batch_size >= len(part.inputs):
        return [population, population]
    source = generator(SELECTION_SEED, "batches", fold)
    rows = torch.stack([torch.randperm(len(part.inputs), generator=source)[:batch_size] for _ in range(num_draws)])
    return [lambda stack: batch_noise(stack, part.inputs[rows]), population]


def best_candidate(found: Sequence[Mapping[str, float]]) -> GridPoint:
    """Return the candidate with the lowest validation RMSE; of equal ones the last, as in the published code."""
    best = min(reversed(found), key=lambda candidate: candidate["rmse"])
    return GridPoint(best["weight_decay"], int(best["batch_size"]), best["dropout_rate"], int(best["epochs"]))
