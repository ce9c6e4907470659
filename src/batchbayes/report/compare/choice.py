"""The choice: calibration data judges all candidates, and one is recommended.

Recommended is the cheapest of the methods that are as good as the best, as far as the calibration data can tell, or the
simplest of several that cost the same. The test data takes no part in the choice, so what it says about the recommended
method holds for new data.

All candidates are judged with one engine. The linear engine is cheap, and almost right. Exact draws of some examples
measure how wrong its scores are. If that could change the choice of a method, exact draws of all examples are compared,
so that the choice does not depend on the engine.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from batchbayes._common.progress import LINE_SECONDS, Progress
from batchbayes.engines.linear import Drawn
from batchbayes.errors import unknown_name, warn
from batchbayes.methods.candidates import Candidate
from batchbayes.network.source import spread_evenly
from batchbayes.report.compare.contenders import Contender, by_candidate, with_exact_draws
from batchbayes.report.compare.groups import Trust
from batchbayes.report.compare.price import exact_passes, passes_in_file, price_of
from batchbayes.report.compare.tuning import DOUBT, paired_difference
from batchbayes.report.read.case import Case
from batchbayes.report.words.methods import short_name
from batchbayes.report.words.say import say

CHECKED = 256
"""This many calibration examples tell how wrong the scores of the linear engine are."""
FREE_DOUBT = 1.0
"""The same number of standard errors for one method with and without a temperature, which costs nothing."""
ALIKE = 0.005
"""A difference of mean losses in nats that is not worth more passes: the truth is half a percent more probable."""
DEARER = 1.5
"""One contender costs more than another if it takes this many times its passes."""
FEWEST = 5
"""Fewer calibration examples cannot tell methods apart."""

Judge = Callable[[Case, Candidate], list[Contender]]
"""Predicts the calibration data for a candidate, tunes, and returns its contenders."""


@dataclass(frozen=True, eq=False)
class Choice:
    """What calibration data says."""

    recommended: Contender
    """The one to use."""
    best: Contender
    """The one with the lowest mean loss that can be paid for. It may be less simple."""
    beyond: Contender | None
    """The best one that the budget does not pay for, if it is clearly better than the recommended one."""
    asked: bool = False
    """Whether the user said which one to recommend."""

    @property
    def is_network(self) -> bool:
        """Whether it is best to use the network as it is."""
        return self.recommended.is_network

    @property
    def name(self) -> str:
        """The recommended method, in a sentence."""
        return "the network as it is" if self.is_network else self.recommended.name


def recommend(contenders: Sequence[Contender], budget: int | None = None, name: str | None = None) -> Choice:
    """Choose the simplest of the cheap ones whose losses on calibration data leave a doubt that the best is better.

    Args:
        contenders: all of them. The simplest, which costs one forward pass, is the network as it is.
        budget: most forward passes that a prediction may cost, also in a file; None for any number.
        name: how the name of the one to recommend begins, if the user wants a certain one.
    """
    affordable = [each for each in contenders if budget is None or each.cost <= budget]
    best = min(affordable, key=lambda each: each.calibration_loss)
    ordered = sorted(affordable, key=lambda each: each.simplicity)
    if name is not None:
        named = [each for each in ordered if each.name.startswith(name)]
        if not named:
            raise unknown_name("a method that was compared", name, [each.name for each in ordered])
        return Choice(named[0], best, None, asked=True)
    good = [each for each in ordered if _is_as_good(each, best)]
    cheapest = min(good, key=lambda each: each.cost)
    chosen = next(each for each in good if each.cost <= DEARER * cheapest.cost)
    for other in affordable:
        if _differ_in_temperature(chosen, other) and not _is_as_good(chosen, other):
            chosen = other
    overall = min(contenders, key=lambda each: each.calibration_loss)
    beyond = None if _is_as_good(chosen, overall) or overall is best else overall
    return Choice(chosen, best, beyond)


def _is_as_good(contender: Contender, best: Contender) -> bool:
    """Return whether the paired differences of losses leave a doubt that the best is better."""
    difference, error = paired_difference(contender.calibration_losses, best.calibration_losses)
    if contender is best or len(contender.calibration_losses) < FEWEST:
        return True
    if not _differ_in_temperature(contender, best):
        return difference <= max(DOUBT * error, ALIKE if best.cost > DEARER * contender.cost else 0.0)
    return difference <= (0.0 if _points_right(best) else FREE_DOUBT) * error


def _points_right(contender: Contender) -> bool:
    """Return whether the temperature moves percentages the way in which the calibration data says they are off."""
    wanted = {Trust.TOO_SURE: 1, Trust.TOO_UNSURE: -1}.get(contender.trust, 0)
    return bool(wanted) and contender.has_temperature and wanted * math.log(contender.tuned["temperature"]) > 0


def _differ_in_temperature(one: Contender, other: Contender) -> bool:
    """Return whether two contenders have the same draws, so that only the temperature may differ."""
    return one.posterior is other.posterior and one.num_samples == other.num_samples


def judge_all(
    case: Case,
    candidates: Sequence[Candidate],
    judge: Judge,
    checked: int = CHECKED,
    price: Callable[[Case, Contender], float] = price_of,
) -> list[Contender]:
    """Judge all candidates on the calibration data. Those that the linear engine could draw are judged by one engine.

    If it does not hold for one of them, or if its error could change the choice, exact draws of all are compared.
    """
    found: dict[Candidate, list[Contender]] = {}
    total = sum(map(exact_passes, candidates))
    with Progress("comparing methods, passes of each example", total, lines=True, after=LINE_SECONDS) as shown:
        for candidate in candidates:
            shown.about = short_name(candidate)
            found[candidate] = _priced(case, judge(case, candidate), price)
            shown.advance(exact_passes(candidate))
    linear = {each: found[each][0].drawn is Drawn.LINEAR for each in candidates if _may_be_linear(each)}
    everyone = [contender for group in found.values() for contender in group]
    if not any(linear.values()) or (all(linear.values()) and _is_safe(case, everyone, list(linear), judge, checked)):
        return everyone
    exact = with_exact_draws(case)
    again = {each: _priced(exact, judge(exact, each), price) for each, is_linear in linear.items() if is_linear}
    if case.settings.engine != "linear":
        return [contender for each in candidates for contender in again.get(each, found[each])]
    warn(say("data.linear"))
    return [
        replace(one, calibration_losses=other.calibration_losses)
        for each in candidates
        for one, other in zip(found[each], again.get(each, found[each]), strict=True)
    ]


def _priced(case: Case, contenders: list[Contender], price: Callable[[Case, Contender], float]) -> list[Contender]:
    passes = {each.num_samples: each for each in contenders}
    known = {size: price(case, each) for size, each in passes.items()}
    told = [replace(each, passes=known[each.num_samples]) for each in contenders]
    return [replace(each, file_passes=passes_in_file(case, each)) for each in told]


def _may_be_linear(candidate: Candidate) -> bool:
    return candidate.posterior.linear is not None and not (candidate.views or candidate.posterior.is_point)


def _is_safe(
    case: Case, contenders: Sequence[Contender], linear: Sequence[Candidate], judge: Judge, checked: int
) -> bool:
    """Return whether the choice stays the same if the losses of the linear engine are corrected by their error."""
    total, budget = len(contenders[0].calibration_losses), case.settings.budget
    rows, is_whole = spread_evenly(total, checked), total <= checked
    few = replace(case, calibration=case.calibration.some(rows.tolist()), settings=replace(case.settings, budget=None))
    groups, errors = by_candidate(contenders), {}
    for candidate in linear:
        plain = candidate if is_whole else replace(candidate, tuning_gain=None)
        own = groups[candidate] if is_whole else judge(few, plain)
        for contender, one, other in zip(groups[candidate], own, judge(with_exact_draws(few), plain), strict=True):
            errors[contender] = other.calibration_losses.double() - one.calibration_losses.double()
    unseen = (1 - len(rows) / total) ** 0.5

    def choice(doubt: float) -> int:
        corrected = [
            replace(c, calibration_losses=_corrected(c.calibration_losses, rows, errors[c], doubt * unseen))
            if c in errors
            else c
            for c in contenders
        ]
        return corrected.index(recommend(corrected, budget).recommended)

    chosen = list(contenders).index(recommend(contenders, budget).recommended)
    return all(choice(doubt) == chosen for doubt in (-DOUBT, 0.0, DOUBT))


def _corrected(losses: Tensor, rows: Tensor, errors: Tensor, doubt: float) -> Tensor:
    """Add the errors (n,) to the losses of some rows, and their mean to the others, plus `doubt` standard errors."""
    standard_error = float(errors.std(correction=0)) / max(1, len(errors) - 1) ** 0.5
    added = (errors.mean() + doubt * standard_error).repeat(len(losses))
    added[rows] = errors + doubt * standard_error
    return losses.double() + added
