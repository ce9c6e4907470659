"""Is the linear engine to be trusted? A comparison with a few exact draws."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from batchbayes._common.checks import whole_number
from batchbayes.engines.linear import MOST_OUTPUTS, require_linearisable
from batchbayes.errors import BatchbayesError, warn
from batchbayes.network.function import Function
from batchbayes.network.replicas import one_call
from batchbayes.network.source import spread_evenly
from batchbayes.posterior import Linearisable, Posterior

MOST_UNEXPLAINED, SCALES, LEAST_CORRELATION, EXACT = 0.15, (0.8, 1.25), 0.9, 0.03
"""The linear engine is trusted if it misses less than MOST_UNEXPLAINED of the deviations, if the ratio of linear to
exact variance is within SCALES, and if their rank correlation is at least LEAST_CORRELATION. If it misses less than
EXACT, the rank correlation does not count: the order of variances that are almost equal means nothing."""
SURE_UNEXPLAINED, SURE_SCALES, SURE_CORRELATION, SURE_EXACT = 0.055, (0.85, 1.18), 0.95, 0.015
"""The same, if `engine="auto"` is to take it. Chosen on small networks, and tried on others
(benchmarks/auto_engine.py)."""
CHECK_DRAWS, STEP, HALF_STEP = 3, 0.125, 0.5
"""Draws that are made exactly, and the part of a deviation that shows the slope along it (for a network in half
precision, the second one). With the centre, that takes seven passes."""
WRONG = 0.3
"""If the engine misses more of these slopes than this, its derivatives are wrong (as for a layer that does more than
normalise its input). Single examples that are sure may be off by half as much."""
GROUPS, OF_GROUP = 16, 4
"""Groups of examples, each with draws of its own: for the same number of passes, more draws are tried. A group has at
least OF_GROUP examples."""
MIXED = 4
"""Sums of outputs whose derivatives are taken: as many backward passes."""
CHECK_EXAMPLES, CHECK_NUMBERS, OF_ENGINE = (16, 64), 2**16, 16
"""The check takes 16 to 64 examples that hold about 65,000 numbers. On one in OF_ENGINE of them the engine itself is
compared with the slopes."""
FEWEST_MAPS, MAP_POSITIONS = 2, 2**12
"""If outputs are maps, positions are ranked, not examples. So fewer examples of the training data are enough, and of
each map an even selection of this many positions is compared."""
FEWEST_RANKED = 3
"""Fewer examples have no rank correlation."""
ROUNDING = 1e-12
"""Mutual information below this is that of rounding errors."""


@dataclass(frozen=True)
class Linearity:
    """How well the linear engine repeats exact draws, on a sample of inputs."""

    rank_correlation: float
    """Rank correlation of the exact and the linear variance, over examples, or over the positions of maps."""
    scale_ratio: float
    """Mean linear variance over mean exact variance."""
    unexplained: float
    """Share of the exact deviations, draw by draw, that the linear ones miss."""
    largest_spread: float = float("inf")
    """Largest linear variance, mean over outputs, of an example of the sample. Beyond it nothing is known."""
    error: float = 0.0
    """Root mean square over examples of the difference of both variances, over that of the exact one."""
    of_information: bool = False
    """Whether the variance is the mutual information of classes, which draws of logits are for."""

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Self:
        """Return what a file says. Files of earlier versions say more."""
        return cls(**{name: value for name, value in saved.items() if name in cls.__dataclass_fields__})

    @property
    def trusted(self) -> bool:
        """Whether the linear answer can stand for the exact one. What could not be measured is not trusted."""
        return self._is_within(MOST_UNEXPLAINED, SCALES, LEAST_CORRELATION, EXACT)

    @property
    def is_sure(self) -> bool:
        """Whether the linear answer is good for certain: `engine="auto"` then takes it.

        The promise: in at most 1 of 100 such cases the mean variance (or information) is more than 20 % off, or its
        rank correlation with the exact one below 0.9.
        """
        return self._is_within(SURE_UNEXPLAINED, SURE_SCALES, SURE_CORRELATION, SURE_EXACT)

    def _is_within(self, most: float, scales: tuple[float, float], least: float, exact: float) -> bool:
        ranked = self.rank_correlation >= least or self.unexplained < exact
        return self.unexplained < most and scales[0] < self.scale_ratio < scales[1] and ranked

    @property
    def worth(self) -> float:
        """The number of exact draws that would be as near: n draws know a variance up to a share sqrt(2 / n)."""
        return 2 / self.error**2 if self.error > 0 else math.inf

    def __str__(self) -> str:
        what = "mutual information" if self.of_information else "variance"
        rank = "not known" if math.isnan(self.rank_correlation) else f"{self.rank_correlation:.3f}"
        return (
            f"rank correlation of the {what} {rank}, its mean {self.scale_ratio:.2f} times the "
            f"exact one, unexplained {self.unexplained:.0%}"
        )


class Testable(Linearisable, Protocol):
    """A posterior whose linearity can be measured."""

    def at_each(self, omegas: Tensor, index: Tensor) -> Function:
        """Return the network with an omega (D,) for each example (n, ...): which of several (G, D), says index (n,)."""
        ...

    def through(self, mix: Callable[[Tensor], Tensor]) -> Self:
        """Return the same draws, with a function of the outputs in their place."""
        ...


def check_linearity(
    posterior: Posterior, inputs: Tensor, *, num_draws: int = 16, max_examples: int = 64, seed: int = 0
) -> Linearity:
    """Compare a few exact draws with linear ones on a sample of inputs (N, ...). Warn if they differ too much.

    >>> import batchbayes as bb
    >>> network = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2)).double()
    >>> posterior = bb.mcbn(network, torch.randn(4000, 3).double(), batch_size=400)
    >>> bb.check_linearity(posterior, torch.randn(50, 3).double()).trusted
    True
    """
    whole_number("num_draws", num_draws, least=2)
    whole_number("max_examples", max_examples)
    if not isinstance(inputs, Tensor) or not len(inputs):
        got = "no inputs" if isinstance(inputs, Tensor) else type(inputs).__name__
        fix = "pass some inputs, as in check_linearity(posterior, images[:100])"
        raise BatchbayesError(expected="a tensor of inputs (N, ...)", got=got, fix=fix)
    linear: Any = require_linearisable(posterior)
    with one_call():
        found = linear.linearity(contrasts=False) if linear.is_linear else None
        found = found or measure_linearity(linear, inputs, num_draws, max_examples, seed)
    warn_unless_trusted(found)
    return found


@dataclass(frozen=True, eq=False)
class Trial:
    """Some draws of some examples, made exactly and by their slopes. Each example has draws of its group."""

    middle: Tensor
    """Outputs at the centre, (1, n, ...)."""
    exact: Tensor
    """Draws, (S, n, ...)."""
    linear: Tensor
    """What the slope along each draw says of it, (S, n, ...)."""
    directions: Tensor
    """Of the noise, (Q, D)."""
    parts: Tensor
    """How each draw of each example combines the directions, (S, n, Q)."""

    def missed_by(self, slopes: Tensor, part: slice) -> float:
        """Return the share of the slopes that derivatives of mixed outputs along directions (Q, n, P) miss."""
        wanted = torch.stack([mixed(each) for each in (self.linear - self.middle)[:, part]])  # (S, n, P)
        found = torch.einsum("snq,qnp->snp", self.parts[:, part].to(slopes), slopes)
        total = float(wanted.square().sum())
        return float((wanted - found).square().sum()) / total if total > 0 else 0.0


@torch.no_grad()
def measure_linearity(
    posterior: Testable,
    inputs: Tensor,
    num_draws: int = CHECK_DRAWS,
    max_examples: int | None = None,
    seed: int = 0,
    *,
    contrasts: bool = False,
) -> Linearity:
    """Compare draws with what the slope along each of them says, on examples that are spread evenly over the inputs.

    A draw takes a pass for itself and one for its slope. The engine computes slopes in another way, by derivatives, so
    those are compared too, on a few of the examples.
    """
    sample = spread_sample(inputs, CHECK_EXAMPLES[0], max_examples).to(posterior.device)
    trial = trial_of(posterior, sample, num_draws, seed)
    few = slice(0, None, OF_ENGINE)
    is_map = trial.middle[0, 0].numel() > MOST_OUTPUTS  # the engine takes no derivatives of maps
    return compared(trial, None if is_map else slopes_along(posterior, sample[few], trial.directions), few, contrasts)


def trial_of(posterior: Testable, sample: Tensor, num_draws: int = CHECK_DRAWS, seed: int = 0) -> Trial:
    """Make draws of each group of examples, exactly and by their slopes."""
    groups = max(1, min(GROUPS, len(sample) // OF_GROUP))
    middle = posterior.function(posterior.center)(sample).cpu()
    step = STEP if middle.dtype in (torch.float32, torch.float64) else HALF_STEP
    directions, weights, index = posterior.combinations(groups * num_draws, seed)
    assert weights is not None
    parts = weights[index]  # (groups * S, Q)
    moves, own = parts @ directions, torch.arange(len(sample)) % groups * num_draws + torch.arange(num_draws)[:, None]
    exact, near = (
        torch.stack([posterior.at_each(posterior.center + part * moves, each)(sample).cpu() for each in own])
        for part in (1.0, step)
    )
    return Trial(middle[None], exact, middle + (near - middle) / step, directions, parts[own])


def compared(trial: Trial, slopes: Tensor | None, part: slice, contrasts: bool) -> Linearity:
    """Return what a trial says, and the derivatives of mixed outputs (Q, n, P) of some of its examples."""
    found = compare_with_exact(
        _rows(trial.middle), _rows(trial.linear), _rows(trial.exact), trial.middle.shape[1], contrasts=contrasts
    )
    missed = 0.0 if slopes is None else trial.missed_by(slopes, part)
    return replace(found, unexplained=found.unexplained + missed) if missed > WRONG else found


def slopes_along(posterior: Testable, sample: Tensor, directions: Tensor) -> Tensor:
    """Return the derivatives of mixed outputs along directions (Q, D), (Q, n, P), by P backward passes."""
    return posterior.through(mixed).tangents(sample, directions)[1].cpu()


def mixed(outputs: Tensor) -> Tensor:
    """Return a few sums of outputs (n, ...) with random signs, (n, P). They move as far as all outputs, on average."""
    flat = outputs.flatten(1) if outputs.ndim > 1 else outputs[:, None]
    if flat.shape[1] > MIXED:
        few = spread_evenly(flat.shape[1], MAP_POSITIONS)
        signs = torch.randint(0, 2, (len(few), MIXED), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
        flat = flat[:, few.to(flat.device)].to(torch.promote_types(flat.dtype, torch.float32))
        flat = flat @ signs.to(flat)
    return flat


def _rows(outputs: Tensor) -> Tensor:
    """Return outputs (s, n, K, ...) as rows (s, rows, K). Of maps, some positions of each example are the rows."""
    if outputs.ndim < 4:
        return outputs.reshape(*outputs.shape[:2], -1)
    positions = outputs.flatten(3)
    return positions[..., spread_evenly(positions.shape[3], MAP_POSITIONS)].movedim(2, 3).flatten(1, 2)


def spread_sample(inputs: Tensor, fewest: int, max_examples: int | None = None) -> Tensor:
    """Return examples that are spread evenly over the inputs, by default as many as the check takes."""
    return inputs[spread_evenly(len(inputs), max_examples or max(fewest, usual_size(inputs)))]


def usual_size(inputs: Any) -> int:
    """Return how many examples the check takes if it has many."""
    return min(CHECK_EXAMPLES[1], CHECK_NUMBERS // max(1, inputs[0].numel()))


def measure_beyond(posterior: Testable, inputs: Tensor, *, contrasts: bool) -> Linearity:
    """Measure on examples that are noisier than those of the fit. One or two of them say little of a ranking."""
    found = measure_linearity(posterior, inputs, contrasts=contrasts)
    is_few = len(inputs) < FEWEST_RANKED and math.isnan(found.rank_correlation)
    if is_few and found.unexplained < MOST_UNEXPLAINED:
        return replace(found, rank_correlation=1.0, scale_ratio=1.0)
    return found


def _rounding(outputs: Tensor) -> Tensor:
    """Return how far outputs of one function may differ when it is computed in two ways."""
    return 1000 * torch.finfo(outputs.dtype).eps * outputs.abs().max()


def compare_with_exact(
    middle: Tensor, drawn: Tensor, exact: Tensor, num_examples: int, *, contrasts: bool
) -> Linearity:
    """Compare linear draws with the same draws made exactly, (S, rows, K); each example has the same number of rows.

    `middle` has the outputs at the centre, (1, rows, K). With contrasts, outputs are logits. What they share within an
    example does not count then, and each class counts by its probability.
    """
    from batchbayes.metrics.ranking import rank_correlation

    logits = (drawn, exact)
    largest = float(drawn.var(0).reshape(num_examples, -1).mean(1).max())
    if contrasts:
        likely = middle.softmax(-1)  # (1, rows, K)
        middle, drawn, exact = (
            (part - (likely * part).sum(-1, keepdim=True)) * likely.sqrt() for part in (middle, drawn, exact)
        )
    if torch.equal(drawn, middle.expand_as(drawn)) and (exact - exact[0]).abs().max() <= _rounding(exact):  # no noise
        return Linearity(1.0, 1.0, 0.0)
    missed = (exact - drawn).square().sum() / (exact - middle).square().sum()
    is_known = contrasts and bool(_information(logits[1]).any())  # sure classes have none
    spread_of, parts = (_information, logits) if is_known else (_mean_variance, (drawn, exact))
    linear_spread, spread = map(spread_of, parts)  # (rows,)
    ranked = min(len(spread.unique()), len(linear_spread.unique())) >= FEWEST_RANKED
    correlation = rank_correlation(spread, linear_spread) if ranked else float("nan")
    error = (linear_spread - spread).square().mean().sqrt() / spread.square().mean().sqrt()
    ratio = float(linear_spread.mean() / spread.mean())
    return Linearity(correlation, ratio, float(missed), largest, float(error), is_known)


def _mean_variance(draws: Tensor) -> Tensor:
    """Return the mean variance of the outputs (S, rows, K) of each row."""
    return draws.var(0).mean(-1)


def _information(logits: Tensor) -> Tensor:
    """Return the mutual information of the class and the draw in each row of logits (S, rows, K)."""
    log_probs = logits.double().log_softmax(-1)
    probs = log_probs.exp()
    mean = probs.mean(0)
    found = (probs * log_probs).sum(-1).mean(0) - torch.special.xlogy(mean, mean).sum(-1)
    return torch.where(found > ROUNDING, found, 0.0)


def warn_unless_trusted(
    found: Linearity,
    advice: str = 'do not trust the linear engine here. Use engine="sample", or engine="auto", which chooses',
) -> None:
    """Warn if the linear answer differs too much from exact draws."""
    if not found.trusted:
        warn(f"the network is not linear enough in its batch statistics over their spread ({found}): {advice}.")
