"""Networks that are trained on all folds but one, side by side, and draws of them with batch-norm noise.

Each network leaves out one fold, and each seed has folds of its own. So every row of the training data has predictions
by R networks, one for each seed, that have never seen it: they choose the weight decay, and calibrate noise,
temperature and intervals. A prediction averages all networks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from batchbayes._common.machine import single_threaded
from batchbayes._common.rng import GlobalStream, generator, stream_seed
from batchbayes.models import MLP
from batchbayes.training.loop import TrainingConfig
from batchbayes.training.stack.stack import Noise, Stack, batch_noise, stack_networks, stack_outputs
from batchbayes.training.stack.train import Loss, train_stack

Key = tuple[float, int, int]
"""Weight decay, seed and fold of a network."""
LAST_SHARE, LAST_RATE = 0.25, 0.1
"""The last quarter of the training has a tenth of the learning rate."""
CHUNK = 4096
"""Rows that are predicted at a time."""


@dataclass(frozen=True)
class Recipe:
    """How networks are built and trained."""

    hidden_widths: tuple[int, ...]
    weight_decays: tuple[float, ...]
    num_steps: int
    batch_size: int
    learning_rate: float
    num_draws: int
    seed: int
    loss: Loss


@dataclass(frozen=True, eq=False)
class CrossFit:
    """G = R * F trained networks, one for each of R seeds and F folds, and the statistics of S mini-batches in each."""

    stack: Stack
    """The networks of the first seed, then those of the second one, and so on."""
    fold_of_network: Tensor
    """The fold that each network left out, (G,)."""
    statistics: Mapping[str, tuple[Tensor, Tensor]]
    """Mean and standard deviation of each batch-norm layer in each draw, (G, S, width)."""
    weight_decay: float

    @property
    def num_folds(self) -> int:
        return int(self.fold_of_network.max()) + 1

    @property
    def num_seeds(self) -> int:
        return len(self.fold_of_network) // self.num_folds

    def scaled(self, factor: float) -> "CrossFit":
        """Return the networks with their noise scaled: a factor of 2 is that of batches of a quarter of the size."""
        scaled = {
            name: (_scaled(mean, factor), _scaled(std.log(), factor).exp())
            for name, (mean, std) in self.statistics.items()
        }
        return replace(self, statistics=scaled)

    @torch.no_grad()
    def draws(self, inputs: Tensor, networks: Tensor | None = None) -> Tensor:
        """Return the outputs of all draws of all, or of some, networks, (G * S, N, K).

        They are computed in float64, so that rounding does not depend on the other rows of a call.
        """
        chosen = torch.arange(len(self.stack)) if networks is None else networks
        stack = self.stack.select(chosen)
        stack = replace(stack, tensors={name: tensor.double() for name, tensor in stack.tensors.items()})
        kept = {name: (mean[chosen].double(), std[chosen].double()) for name, (mean, std) in self.statistics.items()}
        with single_threaded():
            parts = [stack_outputs(stack, part.double(), Noise(kept)).flatten(0, 1) for part in inputs.split(CHUNK)]
        return torch.cat(parts, 1)

    def held_out_draws(self, inputs: Tensor, folds: Tensor) -> Tensor:
        """Return draws for each training row by the R networks that have not seen it, (R * S, N, K).

        `folds` has the folds of each seed, (R, N).
        """
        parts = []
        for own, numbers in zip(folds, torch.arange(len(self.stack)).split(self.num_folds), strict=True):
            order = own.argsort(stable=True)
            drawn = [self.draws(inputs[own == self.fold_of_network[number]], number[None]) for number in numbers]
            parts.append(torch.cat(drawn, 1)[:, order.argsort()])
        return torch.cat(parts)


def _scaled(values: Tensor, factor: float) -> Tensor:
    """Move the draws (G, S, width) of a statistic towards their mean, or away from it."""
    return values.mean(1, keepdim=True) + factor * (values - values.mean(1, keepdim=True))


def cross_fit(inputs: Tensor, targets: Tensor, folds: Tensor, recipe: Recipe) -> CrossFit:
    """Train networks for each fold, with the weight decay that is best for those of the first seed.

    `folds` has the folds of each seed, (R, N).
    """
    numbers = folds[0].unique().tolist()
    batches = inputs[_batches(len(inputs), recipe)]  # (S, M, Q)

    def fit(stack: Stack, decay: float) -> CrossFit:
        left_out = torch.tensor(numbers).repeat(len(stack) // len(numbers))
        return CrossFit(stack, left_out, _statistics(stack, batches), decay)

    def trained(keys: Sequence[Key]) -> Stack:
        return _trained(inputs, targets, folds, recipe, keys)

    with single_threaded():
        tried = trained([(decay, 0, fold) for decay in recipe.weight_decays for fold in numbers])
        parts = torch.arange(len(tried)).split(len(numbers))
        fits = [fit(tried.select(part), decay) for part, decay in zip(parts, recipe.weight_decays, strict=True)]
        best = min(fits, key=lambda each: _error(each, inputs, targets, folds[:1], recipe.loss))
        if len(folds) == 1:
            return best
        more = [(best.weight_decay, seed, fold) for seed in range(1, len(folds)) for fold in numbers]
        return fit(best.stack.joined(trained(more)), best.weight_decay)


def _trained(inputs: Tensor, targets: Tensor, folds: Tensor, recipe: Recipe, keys: Sequence[Key]) -> Stack:
    """Train networks side by side."""
    data = [(inputs[folds[seed] != fold], targets[folds[seed] != fold]) for _, seed, fold in keys]
    with GlobalStream(stream_seed(recipe.seed, "networks", keys[0][1])):
        networks = [MLP(inputs.shape[1], recipe.hidden_widths, targets.shape[1]).to(inputs.dtype) for _ in keys]
        stack = stack_networks(networks)
    for share, rate in ((1 - LAST_SHARE, 1.0), (LAST_SHARE, LAST_RATE)):
        epochs = _epochs(recipe, min(len(x) for x, _ in data), share)
        configs = [
            TrainingConfig(
                epochs,
                recipe.batch_size,
                recipe.learning_rate * rate,
                decay,
                seed=stream_seed(recipe.seed, "order", seed),
            )
            for decay, seed, _ in keys
        ]
        stack = train_stack(stack, data, configs, loss=recipe.loss)
    return stack


def _statistics(stack: Stack, batches: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the statistics of mini-batches (S, M, Q) in each network, moved so that they scatter around the running
    statistics: a few mini-batches know the spread well, but the middle less so."""
    found, epsilons = {}, {layer.norm: layer.epsilon for layer in stack.layers}
    for name, (mean, std) in batch_noise(stack, batches).statistics.items():
        middle, variance = (stack.tensors[f"{name}.running_{kind}"][:, None] for kind in ("mean", "var"))
        log_std = std.log()
        moved = log_std - log_std.mean(1, keepdim=True) + 0.5 * (variance + epsilons[name]).log()
        found[name] = (mean - mean.mean(1, keepdim=True) + middle, moved.exp())
    return found


def _epochs(recipe: Recipe, rows: int, share: float) -> int:
    """Return the number of epochs that has about the wanted number of steps."""
    steps = max(1, rows // min(recipe.batch_size, rows))
    return max(1, math.ceil(share * recipe.num_steps / steps))


def _batches(rows: int, recipe: Recipe) -> Tensor:
    """Return the rows of S random mini-batches, (S, M)."""
    random, size = generator(recipe.seed, "batches"), min(recipe.batch_size, rows)
    return torch.stack([torch.randperm(rows, generator=random)[:size] for _ in range(recipe.num_draws)])


def _error(fit: CrossFit, inputs: Tensor, targets: Tensor, folds: Tensor, loss: Loss) -> float:
    """Return how far held-out predictions are from the targets."""
    draws = fit.held_out_draws(inputs, folds)
    if loss == "half_squared_error":
        return float((draws.mean(0) - targets).double().square().mean())
    probs = draws.double().softmax(-1).mean(0)
    return float(-(targets * probs.clamp_min(1e-12).log()).sum(-1).mean())
