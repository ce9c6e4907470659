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
from batchbayes.engines.linear import LinearDraws, LinearPieces, linear_draws, plan_linear, require_linearisable
from batchbayes.errors import BatchbayesError, warn
from batchbayes.network.batches import spread_evenly
from batchbayes.network.shadow import one_call
from batchbayes.posterior import Linearisable, Posterior

MOST_UNEXPLAINED, SCALES, LEAST_CORRELATION, EXACT = 0.15, (0.8, 1.25), 0.9, 0.01
"""The linear engine is trusted if it misses less than MOST_UNEXPLAINED of the deviations, if the ratio of linear to
exact variance is within SCALES, and if their rank correlation is at least LEAST_CORRELATION. If it misses less than
EXACT, the rank correlation does not count: the order of variances that are almost equal means nothing."""
MOST_OFF, SURE_CORRELATION, HOPELESS_CORRELATION = 0.12, 0.94, 0.85
"""What `Linearity.is_sure` asks for: a logarithm of the ratio that is below MOST_OFF for certain, and this rank
correlation at 64 draws, or 0.01 more each time that draws are halved. Below HOPELESS_CORRELATION, or 0.05 less each
time that draws are halved, more draws would not help. Chosen on 100 small networks, and tried on 100 others
(benchmarks/auto_engine.py)."""
CHECK_DRAWS, CHECK_EXAMPLES, CHECK_NUMBERS = (8, 64), (16, 64), 2**16
"""The check makes 8 exact draws, and up to 64 if the answer is close, on 16 to 64 examples that hold about 65,000
numbers. On 16 rows of a table the check may pass by luck, on 64 it hardly ever does."""
FEWEST_MAPS, MAP_POSITIONS = 2, 2**12
"""If outputs are maps, positions are ranked, not examples. So fewer examples of the training data are enough, and of
each map an even selection of this many positions is compared."""
OPPOSITE, MOST_CURVED = 3, 0.2
"""Before anything else, this number of draws, their mirror images and the centre run on 16 examples, in 7 passes. What
opposite draws have in common is not linear, and the linear engine would miss it. Above this share of what draws change
there is no need for more: it is trusted up to 0.15."""
GROUPS = 8
"""Of draws, which are left out one after the other to see how sure a ratio is."""
FEWEST_RANKED = 3
"""Fewer examples have no rank correlation."""
ROUNDING = 1e-12
"""Mutual information below this is that of rounding errors."""
TOGETHER = 2**15
"""Several exact draws are made in one pass, of at most this many input numbers."""


@dataclass(frozen=True)
class Linearity:
    """How well the linear engine repeats exact draws, on a sample of inputs."""

    rank_correlation: float
    """Rank correlation of the exact and the linear variance, over examples, or over the positions of maps."""
    scale_ratio: float
    """Mean linear variance over mean exact variance."""
    unexplained: float
    """Share of the exact deviations, draw by draw, that the linear ones miss."""
    left_out: float = 0.0
    """The part of `unexplained` that is expected because directions are left out."""
    largest_spread: float = float("inf")
    """Largest linear variance, mean over outputs, of an example of the sample. Beyond it nothing is known."""
    scale_error: float = 0.0
    """Standard error of the logarithm of `scale_ratio`, by leaving out draws."""
    num_draws: int = CHECK_DRAWS[-1]
    """How many exact draws were compared."""
    of_information: bool = False
    """Whether the variance is the mutual information of classes, which draws of logits are for."""

    @property
    def trusted(self) -> bool:
        """Whether the linear answer can stand for the exact one. What could not be measured is not trusted."""
        (low, high), missed = SCALES, self.unexplained - self.left_out
        ranked = self.rank_correlation >= LEAST_CORRELATION or self.unexplained < EXACT
        return missed < MOST_UNEXPLAINED and low < self.scale_ratio < high and ranked

    @property
    def is_sure(self) -> bool:
        """Whether the linear answer is good for certain: `engine="auto"` then takes it.

        The promise: in at most 1 of 100 such cases the mean variance (or information) is more than 20 % off, or its
        rank correlation with the exact one below 0.9.
        """
        least = SURE_CORRELATION + 0.01 * self._halvings
        ranked = self.rank_correlation >= least or self.unexplained < EXACT
        return self.trusted and ranked and self._log_ratio + 2 * self.scale_error <= MOST_OFF

    @property
    def is_hopeless(self) -> bool:
        """Whether more draws would hardly change that the linear answer is not good enough."""
        least = HOPELESS_CORRELATION - 0.05 * self._halvings
        is_off = self._log_ratio - 2 * self.scale_error > math.log(SCALES[1])
        return is_off or not self.rank_correlation >= least

    @property
    def _log_ratio(self) -> float:
        return abs(math.log(self.scale_ratio)) if 0 < self.scale_ratio < math.inf else math.inf

    @property
    def _halvings(self) -> float:
        return max(0.0, math.log2(CHECK_DRAWS[-1] / max(1, self.num_draws)))

    def __str__(self) -> str:
        what = "mutual information" if self.of_information else "variance"
        rank = "not known" if math.isnan(self.rank_correlation) else f"{self.rank_correlation:.3f}"
        return (
            f"rank correlation of the {what} {rank}, its mean {self.scale_ratio:.2f} times the "
            f"exact one, unexplained {self.unexplained:.0%}"
            + (f", about {self.left_out:.0%} by directions left out" if self.left_out else "")
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
    num_draws: int = CHECK_DRAWS[0],
    max_examples: int | None = None,
    seed: int = 0,
    *,
    contrasts: bool = False,
) -> Linearity:
    """Make the comparison on examples that are spread evenly over the inputs."""
    sample = _sample(inputs, CHECK_EXAMPLES[0], max_examples).to(posterior.device)
    pieces = sample.split(max(1, TOGETHER // max(1, sample[0].numel())))
    first = exact_draws(posterior, pieces[0], num_draws, seed)
    exact = [_rows(first), *(_rows(exact_draws(posterior, piece, num_draws, seed)) for piece in pieces[1:])]
    plan = plan_linear(posterior, first[0, 0].numel(), num_draws, seed, contrasts=contrasts)
    linear = LinearPieces(tuple(_as_rows(linear_draws(posterior, piece, plan)) for piece in pieces))
    return compare_with_exact(linear, torch.cat(exact, dim=1), len(sample), contrasts=plan.contrasts)


def _rows(outputs: Tensor) -> Tensor:
    """Return outputs (s, n, K, ...) as rows (s, rows, K). Of maps, some positions of each example are the rows."""
    if outputs.ndim < 4:
        return outputs.reshape(*outputs.shape[:2], -1)
    positions = outputs.flatten(3)
    return positions[..., spread_evenly(positions.shape[3], MAP_POSITIONS)].movedim(2, 3).flatten(1, 2)


def _as_rows(draws: LinearDraws) -> LinearDraws:
    return replace(draws, middle=_rows(draws.middle[None])[0], tangents=_rows(draws.tangents))


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


def known_linearity(posterior: Linearisable, inputs: Tensor, *, contrasts: bool, until_sure: bool = True) -> Linearity:
    """Return what was measured before, or measure it now, on training examples or else on these inputs.

    What is measured on enough examples is kept. `until_sure` makes more draws if a few do not settle the answer.
    """
    known = _KNOWN.setdefault(posterior, {})
    if (examples := _examples_of(posterior).get(contrasts)) is not None:
        inputs = _like(examples, inputs)
    is_few = examples is None and len(inputs) < CHECK_EXAMPLES[0]
    if is_few and contrasts not in known:
        known = {} if until_sure else _OF_FEW.setdefault(posterior, {})
    found = known[contrasts] = _tested(posterior, inputs, contrasts, known.get(contrasts), until_sure)
    return found


def _like(examples: Tensor, inputs: Tensor) -> Tensor:
    """Return kept examples in the type of the inputs: the network may have another precision by now."""
    return examples.to(inputs.dtype) if isinstance(inputs, Tensor) and isinstance(examples, Tensor) else examples


def _tested(
    posterior: Linearisable, inputs: Tensor, contrasts: bool, found: Linearity | None, until_sure: bool
) -> Linearity:
    """Measure with more and more draws, until the answer is sure or hopeless, or all functions are drawn."""
    most = min(CHECK_DRAWS[-1], getattr(posterior, "num_functions", None) or CHECK_DRAWS[-1])
    found = found or measure_linearity(posterior, inputs, min(CHECK_DRAWS[0], most), contrasts=contrasts)
    while until_sure and found.num_draws < most and not (found.is_sure or found.is_hopeless):
        found = measure_linearity(posterior, inputs, min(2 * found.num_draws, most), contrasts=contrasts)
    return found


_CURVED: "weakref.WeakKeyDictionary[Linearisable, dict[bool, float]]" = weakref.WeakKeyDictionary()
"""The share that opposite draws have in common, for each posterior, with and without contrasts."""


@torch.no_grad()
def known_curvature(posterior: Linearisable, inputs: Tensor, *, contrasts: bool) -> float:
    r"""Return the share $\|e\|^2 / (\|e\|^2 + \|o\|^2)$ of what draws change that is not linear for certain.

    For a deviation d of a draw, $e = f(c + d) + f(c - d) - 2 f(c)$ and $o = f(c + d) - f(c - d)$. It is measured once.
    With contrasts, classes count by their probability, and what all logits of an example share does not. Training
    examples are taken if the fit has kept some.
    """
    known = _CURVED.setdefault(posterior, {})
    if contrasts not in known:
        inputs = _like(_EXAMPLES[posterior][0], inputs) if posterior in _EXAMPLES else inputs
        sample = _sample(inputs, CHECK_EXAMPLES[0], CHECK_EXAMPLES[0]).to(posterior.device)
        directions, weights, index = posterior.combinations(OPPOSITE, 0)
        moves = [torch.zeros_like(posterior.center)]
        moves += [side * weights[which] @ directions for which in index.tolist() for side in (1, -1)]
        rows = _rows(
            torch.stack([posterior.function(posterior.center + move)(sample).cpu() for move in moves])
        ).double()
        if contrasts:
            likely = rows[:1].softmax(-1)
            rows = (rows - (likely * rows).sum(-1, keepdim=True)) * likely.sqrt()
        even, odd = rows[1::2] + rows[2::2] - 2 * rows[:1], rows[1::2] - rows[2::2]
        total = float(even.square().sum() + odd.square().sum())
        known[contrasts] = float(even.square().sum()) / total if total > 0 else 0.0
    return known[contrasts]


def is_known(posterior: Linearisable, *, contrasts: bool) -> bool:
    """Whether the linear engine was checked before, perhaps before a file was written."""
    return contrasts in _KNOWN.get(posterior, {})


def known_beyond(posterior: Linearisable, inputs: Tensor, *, contrasts: bool) -> Linearity:
    """Return what is known about examples that are noisier than those of `known_linearity`, or measure it now.

    Where the linear engine is trusted on them, the largest spread that it is trusted up to grows.
    """
    refused = _REFUSED.setdefault(posterior, {})
    known = next((each[posterior] for each in (_KNOWN, _OF_FEW) if contrasts in each.get(posterior, {})), {})
    found = refused.get(contrasts) or measure_linearity(posterior, inputs, contrasts=contrasts)
    is_few = len(inputs) < FEWEST_RANKED and math.isnan(found.rank_correlation) and contrasts not in refused
    if is_few and found.unexplained - found.left_out < MOST_UNEXPLAINED:
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
    _KNOWN[posterior] = {kinds[name]: Linearity(**values) for name, values in found.items()}


def exact_draws(posterior: Linearisable, inputs: Tensor, num_draws: int, seed: int) -> Tensor:
    """Make the first draws exactly, (S, n, ...), on the CPU. If inputs are few, one pass makes several draws.

    If a layer does more than normalise its input, the first draw comes out different when it is made together with
    others. Then all draws are made one by one.
    """
    size = max(1, TOGETHER // max(1, inputs.numel()))
    parts = [range(num_draws)[start : start + size] for start in range(0, num_draws, size)]
    first = posterior.draw(seed, 0)(inputs).cpu()
    together = torch.cat([posterior.draw_together(seed, part)(inputs).cpu() for part in parts])
    if (together[0] - first).abs().max() <= _rounding(first):
        return together
    return torch.stack([first, *(posterior.draw(seed, s)(inputs).cpu() for s in range(1, num_draws))])


def _rounding(outputs: Tensor) -> Tensor:
    """Return how far outputs of one function may differ when it is computed in two ways."""
    return 1000 * torch.finfo(outputs.dtype).eps * outputs.abs().max()


def compare_with_exact(draws: LinearPieces, exact: Tensor, num_examples: int, *, contrasts: bool) -> Linearity:
    """Compare linear draws with the same draws made exactly, (S, rows, K); each example has the same number of rows.

    With contrasts, what counts is how the logits of likely classes move relative to the best class. If there are many
    classes, each counts by its probability.
    """
    from batchbayes.metrics.ranking import rank_correlation

    middle, drawn = draws.middle[None], draws.outputs()
    logits = (drawn, exact)
    largest = float(drawn.var(0).reshape(num_examples, -1).mean(1).max())
    left_out = sum(piece.left_out for piece in draws.pieces) / len(draws.pieces)
    if many := draws.pieces[0].basis is not None:
        likely = middle.softmax(-1)  # (1, rows, K)
        middle, drawn, exact = (
            (part - (likely * part).sum(-1, keepdim=True)) * likely.sqrt() for part in (middle, drawn, exact)
        )
    elif contrasts:
        best = middle.argmax(-1, keepdim=True)  # (1, rows, 1)
        middle, drawn, exact = (
            part - part.gather(-1, best.expand(len(part), -1, -1)) for part in (middle, drawn, exact)
        )
    if torch.equal(drawn, middle.expand_as(drawn)) and (exact - exact[0]).abs().max() <= _rounding(exact):  # no noise
        return Linearity(1.0, 1.0, 0.0)
    if contrasts and not many:
        exact = torch.where(_counted(middle[0], drawn), exact, middle)
    missed = (exact - drawn).square().sum() / (exact - middle).square().sum()
    is_known = contrasts and bool(_information(logits[1]).any())  # sure classes have none
    spread_of, parts = (_information, logits) if is_known else (_mean_variance, (drawn, exact))
    linear_spread, spread = map(spread_of, parts)  # (rows,)
    ranked = min(len(spread.unique()), len(linear_spread.unique())) >= FEWEST_RANKED
    correlation = rank_correlation(spread, linear_spread) if ranked else float("nan")
    ratio, error = float(linear_spread.mean() / spread.mean()), _log_ratio_error(*parts, spread_of)
    return Linearity(correlation, ratio, float(missed), left_out, largest, error, len(exact), is_known)


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


def _log_ratio_error(drawn: Tensor, exact: Tensor, spread_of: Callable[[Tensor], Tensor]) -> float:
    """Return the standard error of the log of the ratio of the mean spreads: a jackknife over groups of draws."""
    if len(exact) < 4:
        return math.inf
    logs = []
    for group in torch.arange(len(exact)).chunk(GROUPS):
        kept = torch.ones(len(exact), dtype=torch.bool)
        kept[group] = False
        logs.append((spread_of(drawn[kept]).mean() / spread_of(exact[kept]).mean()).double().log())
    found = torch.stack(logs)
    error = float(((len(found) - 1) * found.var(correction=0)).sqrt())
    return error if math.isfinite(error) else math.inf


def _counted(middle: Tensor, drawn: Tensor) -> Tensor:
    """Return which classes count, (n, K): the two best, and all others that the linear draws move."""
    two = middle.topk(min(2, middle.shape[-1]), dim=-1).indices
    return (drawn != middle).any(0).scatter(-1, two, True)


def warn_unless_trusted(
    found: Linearity,
    advice: str = 'do not trust the linear engine here. Use engine="sample", or engine="auto", which chooses',
) -> None:
    """Warn if the linear answer differs too much from exact draws."""
    if not found.trusted:
        warn(f"the network is not linear enough in its batch statistics over their spread ({found}): {advice}.")
