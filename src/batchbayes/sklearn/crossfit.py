"""Networks that are trained on all folds but one, side by side, and draws of them with batch-norm noise.

Each network leaves out one fold. So every row of the training data has predictions by networks that have never seen it:
they choose the weight decay, and calibrate noise, temperature and intervals. A prediction averages all networks.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from batchbayes._common.rng import GlobalStream, generator, stream_seed
from batchbayes._common.threads import single_threaded
from batchbayes.models.mlp import MLP
from batchbayes.training.loop import TrainingConfig
from batchbayes.training.stack.convert import stack_networks
from batchbayes.training.stack.group import Loss
from batchbayes.training.stack.noise import Noise, batch_noise, stack_outputs
from batchbayes.training.stack.stack import Stack
from batchbayes.training.stack.train import train_stack

LAST_SHARE, LAST_RATE = 0.25, 0.1
"""The last quarter of the training has a tenth of the learning rate."""
CHUNK = 4096
"""Rows that are predicted at a time."""


@dataclass(frozen=True)
class Recipe:
    """How networks are built and trained."""

    hidden_widths: tuple[int, ...]
    weight_decays: tuple[float, ...]
    num_folds: int
    num_seeds: int
    num_steps: int
    batch_size: int
    learning_rate: float
    num_draws: int
    seed: int
    loss: Loss


@dataclass(frozen=True, eq=False)
class CrossFit:
    """G trained networks, the batch statistics of S mini-batches in each of them, and which fold each left out."""

    stack: Stack
    fold_of_network: Tensor
    """(G,)"""
    statistics: Mapping[str, tuple[Tensor, Tensor]]
    """Mean and standard deviation of each batch-norm layer in each draw, (G, S, width)."""
    weight_decay: float

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
        """Return draws for each training row by networks that have not seen it, (R * S, N, K)."""
        found: Tensor | None = None
        for fold in folds.unique().tolist():
            drawn = self.draws(inputs[folds == fold], (self.fold_of_network == fold).nonzero()[:, 0])
            found = drawn.new_empty(drawn.shape[0], len(inputs), drawn.shape[2]) if found is None else found
            found[:, folds == fold] = drawn
        assert found is not None
        return found


def _scaled(values: Tensor, factor: float) -> Tensor:
    """Move the draws (G, S, width) of a statistic towards their mean, or away from it."""
    return values.mean(1, keepdim=True) + factor * (values - values.mean(1, keepdim=True))


def cross_fit(inputs: Tensor, targets: Tensor, folds: Tensor, recipe: Recipe) -> CrossFit:
    """Train networks for each fold, weight decay and seed, and keep those of the best weight decay."""
    numbers = folds.unique().tolist()
    keys = [(d, f, r) for d in recipe.weight_decays for f in numbers for r in range(recipe.num_seeds)]
    with GlobalStream(stream_seed(recipe.seed, "networks")):
        networks = [MLP(inputs.shape[1], recipe.hidden_widths, targets.shape[1]) for _ in keys]
    parts = {f: (inputs[folds != f], targets[folds != f]) for f in numbers}
    data = [parts[f] for _, f, _ in keys]
    seeds = [stream_seed(recipe.seed, "order", r) for _, _, r in keys]
    with single_threaded():
        stack = stack_networks(networks)
        for share, rate in ((1 - LAST_SHARE, 1.0), (LAST_SHARE, LAST_RATE)):
            epochs = _epochs(recipe, min(len(x) for x, _ in parts.values()), share)
            configs = [
                TrainingConfig(epochs, recipe.batch_size, recipe.learning_rate * rate, decay, seed=seed)
                for (decay, _, _), seed in zip(keys, seeds, strict=True)
            ]
            stack = train_stack(stack, data, configs, loss=recipe.loss)
        fold_of_network = torch.tensor([f for _, f, _ in keys])
        batches = inputs[_batches(len(inputs), recipe)]  # (S, M, Q)
        fits = []
        for number, decay in enumerate(recipe.weight_decays):
            each = len(keys) // len(recipe.weight_decays)
            own = stack.select(range(number * each, (number + 1) * each))
            fits.append(CrossFit(own, fold_of_network[:each], _statistics(own, batches), decay))
    return min(fits, key=lambda fit: _error(fit, inputs, targets, folds, recipe.loss))


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
