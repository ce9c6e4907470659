"""Networks that are trained on all folds but one, side by side, and draws of them with batch-norm noise.

The noise is that of MCBN: batch statistics of random mini-batches, here drawn for all networks of a stack at once.

Each network leaves out one fold, and each seed has folds of its own. So every row of the training data has predictions
by R networks, one for each seed, that have never seen it. They choose how to train, and calibrate all that is said
about uncertainty. A prediction averages all networks.

Training goes in rounds, each twice as long as the one before, and in each the learning rate falls to zero. After a
round, held-out rows drop at least half of the candidates, and end the training if it no longer helps.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch
from torch import Tensor

from batchbayes._common.machine import single_threaded
from batchbayes._common.rng import GlobalStream, generator, stream_seed
from batchbayes.models import MLP
from batchbayes.training.loop import TrainingConfig
from batchbayes_tables.stack.stack import Noise, Stack, batch_noise, stack_networks, stack_outputs
from batchbayes_tables.stack.train import Examples, Loss, train_stack

FIRST_ROUND = 300
"""Steps of the first round."""
STEPS_OF_A_ROW = 6.5
"""Few rows are soon learnt: there are at most this many steps for each row, or two first rounds."""
MOST_EXAMPLES = 300_000
"""Large batches have fewer steps: a network sees at most this many examples, so that large tables take seconds."""
LEAST_GAIN = 0.01
"""Training ends if a round makes held-out errors smaller by a smaller share than this."""
JURY = 2
"""Seeds whose networks judge a round."""
JUDGES = 5000
"""Held-out rows that judge a round. More are no more certain."""
CHUNK = 4096
"""Rows that are predicted at a time."""
Score = Callable[[Tensor, Tensor], float]
"""From the outputs of R networks (R, N, K) and targets (N, K) to a score of their average, which should be small."""


@dataclass(frozen=True)
class Candidate:
    """One way to train."""

    weight_decay: float
    tail: float = 0.0
    """How heavy the tails of the errors are: 1 / degrees of freedom of Student's t. Zero is a Gaussian."""


@dataclass(frozen=True)
class Recipe:
    """How networks are built and trained."""

    hidden_widths: tuple[int, ...]
    candidates: tuple[Candidate, ...]
    num_steps: int
    batch_size: int
    learning_rate: float
    num_draws: int
    seed: int
    loss: Loss
    score: Score


@dataclass(frozen=True, eq=False)
class CrossFit:
    """G = R * F trained networks, one for each of R seeds and F folds, and the statistics of S mini-batches in each."""

    stack: Stack
    """The networks of the first seed, then those of the second one, and so on."""
    fold_of_network: Tensor
    """The fold that each network left out, (G,)."""
    statistics: Mapping[str, tuple[Tensor, Tensor]]
    """Mean and standard deviation of each batch-norm layer in each draw, (G, S, width)."""
    candidate: Candidate
    num_rounds: int = 1

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
        """Return the outputs of all draws of all, or of some, networks, (G, S, N, K).

        They are computed in float64, so that rounding does not depend on the other rows of a call.
        """
        chosen = torch.arange(len(self.stack)) if networks is None else networks
        stack = self.stack.select(chosen)
        stack = replace(stack, tensors={name: tensor.double() for name, tensor in stack.tensors.items()})
        kept = {name: (mean[chosen].double(), std[chosen].double()) for name, (mean, std) in self.statistics.items()}
        with single_threaded():
            parts = [stack_outputs(stack, part.double(), Noise(kept)) for part in inputs.split(CHUNK)]
        return torch.cat(parts, 2)

    def held_out_draws(self, inputs: Tensor, folds: Tensor) -> Tensor:
        """Return draws for each training row by the R networks that have not seen it, (R, S, N, K).

        `folds` has the folds of each seed, (R, N).
        """
        parts = []
        for own, numbers in zip(folds, torch.arange(len(self.stack)).split(self.num_folds), strict=True):
            order = own.argsort(stable=True)
            drawn = [self.draws(inputs[own == self.fold_of_network[number]], number[None]) for number in numbers]
            parts.append(torch.cat(drawn, 2)[:, :, order.argsort()])
        return torch.cat(parts)


def _scaled(values: Tensor, factor: float) -> Tensor:
    """Move the draws (G, S, width) of a statistic towards their mean, or away from it."""
    return values.mean(1, keepdim=True) + factor * (values - values.mean(1, keepdim=True))


def cross_fit(
    inputs: Tensor, targets: Tensor, folds: Tensor, recipe: Recipe, start: CrossFit | None = None
) -> CrossFit:
    """Train networks for each fold and seed, in the way that is best for those of the first two seeds.

    `targets` are (N, K), where K is the number of outputs, and `folds` has the folds of each seed, (R, N). With a
    start, its networks are trained for one more short round, as they were.
    """
    with single_threaded():
        training = _Training(inputs, targets, folds, recipe)
        if start is None:
            stack, candidate, rounds = _tournament(training)
        else:
            candidate, rounds = start.candidate, start.num_rounds
            stack = training.round(start.stack, [candidate], range(len(folds)), 0)
        seeds = range(JURY, len(folds))
        if seeds and start is None:
            more = training.fresh(seeds)
            for number in range(rounds):
                more = training.round(more, [candidate], seeds, number)
            stack = stack.joined(more)
        statistics = _statistics(stack, inputs[_batches(len(inputs), recipe)])
    return CrossFit(stack, training.numbers.repeat(len(folds)), statistics, candidate, rounds)


def _tournament(training: "_Training") -> tuple[Stack, Candidate, int]:
    """Train the candidates in rounds. Return the networks of the best one, and how many rounds it had."""
    alive, seeds = list(training.recipe.candidates), range(min(JURY, len(training.folds)))
    own = torch.arange(len(seeds) * len(training.numbers))  # the networks of one candidate
    fresh = training.fresh(seeds)
    stack = fresh.select(own.repeat(len(alive)))
    best: tuple[float, Stack, Candidate, int] = math.inf, stack, alive[0], 0
    for number in count():
        stack = training.round(stack, alive, seeds, number)
        scores = [training.score(stack.select(own + i * len(own)), seeds) for i in range(len(alive))]
        ranks = sorted(range(len(alive)), key=lambda each: scores[each])
        before, found = best, scores[ranks[0]]
        if found < before[0]:
            best = found, stack.select(own + ranks[0] * len(own)), alive[ranks[0]], number + 1
        if found >= (1 - LEAST_GAIN) * before[0] or not training.steps(number + 1):
            return best[1:]
        kept = sorted(ranks[: max(1, len(alive) // 2)])
        stack = stack.select(torch.cat([own + i * len(own) for i in kept]))
        alive = [alive[i] for i in kept]
    raise AssertionError("rounds come to an end, because steps do")


class _Training:
    """The data and the recipe, and what is done with them."""

    def __init__(self, inputs: Tensor, targets: Tensor, folds: Tensor, recipe: Recipe) -> None:
        self.inputs, self.targets, self.folds, self.recipe = inputs, targets, folds, recipe
        self.numbers = folds[0].unique()
        self._parts: dict[tuple[int, int, float], Examples] = {}

    def fresh(self, seeds: Sequence[int]) -> Stack:
        """Return new networks for each seed and fold."""
        networks = []
        for seed in seeds:
            with GlobalStream(stream_seed(self.recipe.seed, "networks", seed)):
                widths = self.inputs.shape[1], self.recipe.hidden_widths, self.targets.shape[1]
                networks += [MLP(*widths).to(self.inputs.dtype) for _ in self.numbers]
        return stack_networks(networks)

    def round(self, stack: Stack, candidates: Sequence[Candidate], seeds: Sequence[int], number: int) -> Stack:
        """Train for one more round: for each candidate the networks of all seeds and folds."""
        recipe = self.recipe
        keys = [(each, seed, fold) for each in candidates for seed in seeds for fold in self.numbers.tolist()]
        data = [self._part(seed, fold, each.tail) for each, seed, fold in keys]
        rows = min(len(x) for x, _ in data)
        epochs = max(1, round(self.steps(number) / max(1, rows // min(recipe.batch_size, rows))))
        configs = [
            TrainingConfig(
                epochs,
                recipe.batch_size,
                recipe.learning_rate,
                each.weight_decay,
                seed=stream_seed(recipe.seed, "order", seed, number),
            )
            for each, seed, _ in keys
        ]
        return train_stack(stack, data, configs, loss=recipe.loss, schedule=_falling)

    def steps(self, number: int) -> int:
        """Return the steps of a round: the first ones double, and the last one has what is left, or zero."""
        least = min(FIRST_ROUND, 100 + len(self.inputs) // 2)
        before = least * (2**number - 1)
        enough = max(2 * FIRST_ROUND, round(STEPS_OF_A_ROW * len(self.inputs)))
        left = (
            min(self.recipe.num_steps, enough, max(2 * FIRST_ROUND, MOST_EXAMPLES // self.recipe.batch_size)) - before
        )
        return 0 if number and left < least else max(1, min(left, least * 2**number))

    def score(self, stack: Stack, seeds: Sequence[int]) -> float:
        """Return the score that an average of all networks would have for held-out rows.

        Single networks would prefer those that average badly, because they hardly differ.
        """
        some = torch.linspace(0, len(self.inputs) - 1, min(JUDGES, len(self.inputs))).long()
        inputs, targets = self.inputs[some], self.targets[some].double()
        outputs = stack_outputs(stack, inputs)[:, 0].double()  # (R * F, N, K)
        folds = self.folds[list(seeds)][:, some]
        places = torch.arange(len(seeds))[:, None] * len(self.numbers) + folds
        held_out = outputs[places, torch.arange(len(some))]  # (R, N, K)
        together = self.recipe.score(held_out, targets)
        alone = sum(self.recipe.score(each[None], targets) for each in held_out) / len(seeds)
        return of_all(alone, together, len(seeds), len(self.folds) * len(self.numbers))

    def _part(self, seed: int, fold: int, tail: float) -> Examples:
        """Return what a network is trained on: the rows of the other folds, and beside the target what its loss asks
        for. Equal parts are one object, which the stack gathers once."""
        key = seed, fold, tail
        if key not in self._parts:
            used = self.folds[seed] != fold
            targets = self.targets[used]
            if tail:
                targets = torch.cat([targets[:, :1], torch.full_like(targets[:, :1], tail)], 1)
            self._parts[key] = self.inputs[used], targets
        return self._parts[key]


def of_all(alone: float, together: float, count: int, total: int) -> float:
    """Return the score of the average of all networks, from that of single ones, and of `count` of them together.

    If the average of m networks has $a + b / m$, as a squared error has, then these two tell $a$ and $b$.

    >>> of_all(alone=3.0, together=2.0, count=2, total=4)
    1.5
    """
    if count == 1:
        return together
    gain = max(0.0, alone - together) * (1 / count - 1 / total) / (1 - 1 / count)
    return max(together - gain, together * count / total)


def _falling(done: float) -> float:
    """A short warm-up, then half a cosine."""
    return min(1.0, 0.1 + done / 0.05) * 0.5 * (1 + math.cos(math.pi * done))


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


def _batches(rows: int, recipe: Recipe) -> Tensor:
    """Return the rows of S random mini-batches, (S, M)."""
    random, size = generator(recipe.seed, "batches"), min(recipe.batch_size, rows)
    return torch.stack([torch.randperm(rows, generator=random)[:size] for _ in range(recipe.num_draws)])
