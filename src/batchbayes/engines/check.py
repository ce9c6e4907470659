"""Is the linear engine to be trusted? A comparison with a few exact draws."""

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from batchbayes._common.checks import whole_number
from batchbayes.engines.linear import AFFORDABLE, BACKWARD_COST, linear_draws, plan_linear, require_linearisable
from batchbayes.errors import BatchbayesError, warn
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
GROUPS, OF_GROUP = 8, 4
"""Groups of examples, each with draws of its own: for the same number of passes, more draws are tried. A group has at
least OF_GROUP examples."""
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
    with one_call():
        found = measure_linearity(require_linearisable(posterior), inputs, num_draws, max_examples, seed)
    warn_unless_trusted(found)
    return found


@torch.no_grad()
def measure_linearity(
    posterior: Linearisable,
    inputs: Tensor,
    num_draws: int = CHECK_DRAWS,
    max_examples: int | None = None,
    seed: int = 0,
    *,
    contrasts: bool = False,
) -> Linearity:
    """Compare draws with what the slope along each of them says, on examples that are spread evenly over the inputs.

    A draw takes a pass for itself and one for its slope. The engine computes slopes in another way, so it is compared
    too, on a few of the examples.
    """
    sample = _sample(inputs, CHECK_EXAMPLES[0], max_examples).to(posterior.device)
    groups = max(1, min(GROUPS, len(sample) // OF_GROUP))
    middle, exact, linear = _ends(posterior, sample, num_draws, groups, seed)
    found = compare_with_exact(_rows(middle), _rows(linear), _rows(exact), len(sample), contrasts=contrasts)
    num_outputs = middle[0, 0].numel()
    if found.unexplained >= MOST_UNEXPLAINED and num_outputs * BACKWARD_COST > AFFORDABLE:
        return found  # before it is measured along which axes outputs move
    few = slice(0, groups * max(1, len(sample) // OF_ENGINE), groups)  # of the first group
    plan = plan_linear(posterior, num_outputs, num_draws, seed, contrasts=contrasts)
    draws = linear_draws(posterior, sample[few], plan)
    rows = _rows(middle[:, few]), _rows(draws.outputs()), _rows(linear[:, few])
    missed = _missed(*rows, contrasts=contrasts) - draws.left_out
    return replace(found, unexplained=found.unexplained + missed) if missed > WRONG else found


def _ends(
    posterior: Linearisable, sample: Tensor, num_draws: int, groups: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs at the centre (1, n, ...), draws of each group of examples (S, n, ...), and the same by slopes."""
    middle = posterior.function(posterior.center)(sample).cpu()
    step = STEP if middle.dtype in (torch.float32, torch.float64) else HALF_STEP
    exact, near = (middle.new_empty(num_draws, *middle.shape) for _ in range(2))
    for number in range(groups * num_draws):
        own, draw, move = (
            slice(number // num_draws, None, groups),
            number % num_draws,
            posterior.deviation(seed, number),
        )
        for part, found in ((1.0, exact), (step, near)):
            found[draw, own] = posterior.function(posterior.center + part * move)(sample[own]).cpu()
    return middle[None], exact, middle + (near - middle) / step


def _missed(middle: Tensor, drawn: Tensor, slopes: Tensor, *, contrasts: bool) -> float:
    """Return the share of linear deviations (S, rows, K) that the engine's own draws miss.

    With contrasts, a class counts by its probability and relative to the best class, if the engine moves it at all.
    """
    drawn, slopes = drawn - middle, slopes - middle
    if contrasts:
        best = middle.argmax(-1, keepdim=True)  # (1, rows, 1)
        two = middle[0].topk(min(2, middle.shape[-1])).indices
        counts = middle.softmax(-1).sqrt() * drawn.any(0).scatter(-1, two, True)
        drawn, slopes = ((part - part.gather(-1, best.expand(len(part), -1, -1))) * counts for part in (drawn, slopes))
    total = float(slopes.square().sum())
    return float((slopes - drawn).square().sum()) / total if total > 0 else 0.0


def _rows(outputs: Tensor) -> Tensor:
    """Return outputs (s, n, K, ...) as rows (s, rows, K). Of maps, some positions of each example are the rows."""
    if outputs.ndim < 4:
        return outputs.reshape(*outputs.shape[:2], -1)
    positions = outputs.flatten(3)
    return positions[..., spread_evenly(positions.shape[3], MAP_POSITIONS)].movedim(2, 3).flatten(1, 2)


def _sample(inputs: Tensor, fewest: int, max_examples: int | None = None) -> Tensor:
    """Return examples that are spread evenly over the inputs, by default as many as the check takes."""
    count = max_examples or max(fewest, min(CHECK_EXAMPLES[1], CHECK_NUMBERS // max(1, inputs[0].numel())))
    return inputs[spread_evenly(len(inputs), count)]


Kinds = Callable[[], Iterable[bool]]
"""For which outputs a posterior is to be checked: without contrasts, with them, or both."""
_EXAMPLES: "weakref.WeakKeyDictionary[Linearisable, tuple[Tensor, Kinds]]" = weakref.WeakKeyDictionary()
"""Training examples to measure on when it is first needed."""
_KNOWN: "weakref.WeakKeyDictionary[Linearisable, dict[bool, Linearity]]" = weakref.WeakKeyDictionary()
"""What was measured for each posterior, with and without contrasts."""
_OF_FEW: "weakref.WeakKeyDictionary[Linearisable, dict[bool, Linearity]]" = weakref.WeakKeyDictionary()
"""The same, measured on few examples: enough for a warning where the linear engine was asked for, not for a choice."""
_REFUSED: "weakref.WeakKeyDictionary[Linearisable, dict[bool, Linearity]]" = weakref.WeakKeyDictionary()
"""The same, measured on noisier examples, where the linear engine was not trusted."""


def keep_examples(posterior: Linearisable, inputs: Tensor, kinds: Kinds, *, are_maps: bool) -> None:
    """Keep some training inputs. If a prediction or a file needs one of these kinds of linearity, it is measured there.

    Few examples say little, so they are not kept. `kinds` must not hold the posterior.
    """
    fewest = FEWEST_MAPS if are_maps else CHECK_EXAMPLES[0]
    if len(inputs) >= fewest:
        _EXAMPLES[posterior] = _sample(inputs, fewest), kinds


def _examples_of(posterior: Linearisable) -> dict[bool, Tensor]:
    """Return the examples that were kept, for each kind that is to be checked."""
    if (kept := _EXAMPLES.get(posterior)) is None:
        return {}
    return dict.fromkeys(kept[1](), kept[0])


def known_linearity(posterior: Linearisable, inputs: Tensor, *, contrasts: bool, for_choice: bool = True) -> Linearity:
    """Return what was measured before, or measure it now, on training examples or else on these inputs.

    What is measured on enough examples is kept. Few are enough for a warning, but not for a choice: they are measured
    again.
    """
    known = _KNOWN.setdefault(posterior, {})
    if (examples := _examples_of(posterior).get(contrasts)) is not None:
        inputs = examples.to(inputs.dtype) if isinstance(inputs, Tensor) else examples  # perhaps another precision
    if contrasts not in known and examples is None and len(inputs) < CHECK_EXAMPLES[0]:
        known = {} if for_choice else _OF_FEW.setdefault(posterior, {})
    if contrasts not in known:
        known[contrasts] = measure_linearity(posterior, inputs, contrasts=contrasts)
    return known[contrasts]


def known_beyond(posterior: Linearisable, inputs: Tensor, *, contrasts: bool) -> Linearity:
    """Return what is known about examples that are noisier than those of `known_linearity`, or measure it now.

    Where the linear engine is trusted on them, the largest spread that it is trusted up to grows.
    """
    refused = _REFUSED.setdefault(posterior, {})
    known = next((each[posterior] for each in (_KNOWN, _OF_FEW) if contrasts in each.get(posterior, {})), {})
    found = refused.get(contrasts) or measure_linearity(posterior, inputs, contrasts=contrasts)
    is_few = len(inputs) < FEWEST_RANKED and math.isnan(found.rank_correlation) and contrasts not in refused
    if is_few and found.unexplained < MOST_UNEXPLAINED:
        found = replace(found, rank_correlation=1.0, scale_ratio=1.0)  # of one or two examples they say little
    if not found.trusted:
        refused[contrasts] = found
    elif contrasts in known:
        spread = max(known[contrasts].largest_spread, found.largest_spread)
        known[contrasts] = replace(known[contrasts], largest_spread=spread)
    return found


def linearity_to_json(posterior: Linearisable) -> dict[str, dict[str, Any]]:
    """Return what is known about a posterior, for a file. What a fit has left to be measured is measured now."""
    with suppress(BatchbayesError, RuntimeError):  # the network has changed
        for contrasts, examples in _examples_of(posterior).items():
            with suppress(BatchbayesError, RuntimeError):  # gradients cannot pass: there is no linear engine
                known_linearity(posterior, examples, contrasts=contrasts)
    names = {False: "values", True: "contrasts"}
    return {names[kind]: asdict(found) for kind, found in _KNOWN.get(posterior, {}).items()}


def linearity_from_json(posterior: Linearisable, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Remember what a file says about a posterior."""
    kinds = {"values": False, "contrasts": True}
    fields = Linearity.__dataclass_fields__  # files of earlier versions have others too
    _KNOWN[posterior] = {
        kinds[name]: Linearity(**{field: value for field, value in values.items() if field in fields})
        for name, values in found.items()
    }


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
