"""The comparison from end to end: calibration data judges all candidates, one is chosen, test data sees the best.

All candidates are judged with one engine. The linear engine is cheap, and almost right. Exact draws of some examples
measure how wrong its scores are. If that could change the choice of a method, exact draws of all examples are compared,
so that the choice does not depend on the engine.

Recommended is the simplest of the methods that are as good as the best, as far as the calibration data can tell. The
test data takes no part in the choice, so what it says about the recommended method holds for new data.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from threading import get_ident
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from batchbayes.engines.choose import plan_for
from batchbayes.engines.linear import BACKWARD_COST, Drawn, linear_draws, require_linearisable
from batchbayes.errors import unknown_name, warn
from batchbayes.methods.candidates import Candidate
from batchbayes.methods.deterministic import deterministic
from batchbayes.network.batches import spread_evenly
from batchbayes.predict import Predicted, predict_stream
from batchbayes.report.compare.contenders import EXACT_DRAWS, Contender, by_candidate
from batchbayes.report.compare.honesty import Trust
from batchbayes.report.compare.tuning import DOUBT, paired_difference
from batchbayes.report.read.case import Case
from batchbayes.report.read.views import some_inputs

T = TypeVar("T")
CHECKED = 256
"""This many calibration examples tell how wrong the scores of the linear engine are."""
PRICED = 128
"""Examples on which the passes of the linear engine are counted."""
FREE_DOUBT = 1.0
"""The same number of standard errors for one method with and without a temperature, which costs nothing."""
FEWEST = 5
"""Fewer calibration examples cannot tell methods apart."""
MOST_SHOWN = 6
"""This many candidates are predicted on the test data: the best on calibration data, beside the network."""
FEW_EXACT = f"sample: {EXACT_DRAWS} exact draws"

Judge = Callable[[Case, Candidate], list[Contender[Any]]]
"""Predicts the calibration data for a candidate, tunes, and returns its contenders."""
Test = Callable[[Case, Sequence[Contender[Any]], bool], Iterable[Contender[Any]]]
"""Predicts the test data for the contenders of one candidate. The last argument says whether strange data is told about
it: it is the network, or one of its contenders is recommended."""
Price = Callable[[Case, Contender[Any]], float]
"""Says what a prediction costs, in forward passes."""


@dataclass(frozen=True, eq=False)
class Choice:
    """What calibration data says."""

    recommended: Contender[Any]
    """The one to use."""
    best: Contender[Any]
    """The one with the lowest mean loss that can be paid for. It may be less simple."""
    beyond: Contender[Any] | None
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


def recommend(contenders: Sequence[Contender[Any]], budget: int | None = None, name: str | None = None) -> Choice:
    """Choose the simplest contender whose losses on calibration data leave a doubt that the best one is better.

    Args:
        contenders: all of them. The simplest, which costs one forward pass, is the network as it is.
        budget: most forward passes that a prediction may cost, also in a file; None for any number.
        name: how the name of the one to recommend begins, if the user wants a certain one.
    """
    affordable = [each for each in contenders if budget is None or max(each.passes, each.file_passes) <= budget]
    best = min(affordable, key=lambda each: each.calibration_loss)
    ordered = sorted(affordable, key=lambda each: each.simplicity)
    if name is not None:
        named = [each for each in ordered if each.name.startswith(name)]
        if not named:
            raise unknown_name("a method that was compared", name, [each.name for each in ordered])
        return Choice(named[0], best, None, asked=True)
    chosen = next(each for each in ordered if _is_as_good(each, best))
    for other in affordable:
        if _differ_in_temperature(chosen, other) and not _is_as_good(chosen, other):
            chosen = other
    overall = min(contenders, key=lambda each: each.calibration_loss)
    beyond = None if _is_as_good(chosen, overall) or overall is best else overall
    return Choice(chosen, best, beyond)


def _is_as_good(contender: Contender[Any], best: Contender[Any]) -> bool:
    """Return whether the paired differences of losses leave a doubt that the best is better."""
    difference, error = paired_difference(contender.calibration_losses, best.calibration_losses)
    if contender is best or len(contender.calibration_losses) < FEWEST:
        return True
    if not _differ_in_temperature(contender, best):
        return difference <= DOUBT * error
    return difference <= (0.0 if _points_right(best) else FREE_DOUBT) * error


def _points_right(contender: Contender[Any]) -> bool:
    """Return whether the temperature moves percentages the way in which the calibration data says they are off."""
    wanted = {Trust.TOO_SURE: 1, Trust.TOO_UNSURE: -1}.get(contender.trust, 0)
    return bool(wanted) and contender.has_temperature and wanted * math.log(contender.tuned["temperature"]) > 0


def _differ_in_temperature(one: Contender[Any], other: Contender[Any]) -> bool:
    """Return whether two contenders have the same draws, so that only the temperature may differ."""
    return one.posterior is other.posterior and one.num_samples == other.num_samples


def compare(
    case: Case, fit: Callable[[Case], Sequence[Candidate]], judge: Judge, test: Test, checked: int = CHECKED
) -> tuple[Case, list[Contender[Any]], Choice]:
    """Choose a method on the calibration data, and see how it and others do on the test data, the simplest first.

    If the linear engine could be trusted on the calibration data but not on other data, all is done again with exact
    draws, which the returned case then asks for.
    """
    settings = case.settings
    judged = judge_all(case, fit(case), judge, checked)
    choice = recommend(judged, settings.budget, settings.recommend)
    after: dict[Contender[Any], Contender[Any]] = {}
    for group in _shown(judged, choice):
        is_told = group[0].is_network or choice.recommended in group
        after |= dict(zip(group, test(case, group, is_told), strict=True))
    if settings.engine == "auto" and any(Drawn.BOTH in contender.seen.drawn for contender in after.values()):
        return compare(with_exact_draws(case), fit, judge, test, checked)
    contenders = sorted(after.values(), key=lambda contender: contender.simplicity)
    return case, contenders, replace(choice, recommended=after[choice.recommended], best=after[choice.best])


def _shown(judged: Sequence[Contender[Any]], choice: Choice) -> list[list[Contender[Any]]]:
    """Return the candidates that the tables show: the network, those of the choice, and the best of the others."""
    first, *others = by_candidate(judged).values()

    def place(group: list[Contender[Any]]) -> tuple[bool, float]:
        is_chosen = choice.recommended in group or choice.best in group
        return not is_chosen, min(contender.calibration_loss for contender in group)

    kept = [first, *sorted(others, key=place)[:MOST_SHOWN]]
    return [group for group in (first, *others) if group in kept]


def judge_all(
    case: Case, candidates: Sequence[Candidate], judge: Judge, checked: int = CHECKED, price: Price | None = None
) -> list[Contender[Any]]:
    """Judge all candidates on the calibration data. Those that the linear engine could draw are judged by one engine.

    If it does not hold for one of them, or if its error could change the choice, exact draws of all are compared.
    """
    price = price or price_of
    found = {candidate: _priced(case, judge(case, candidate), price) for candidate in candidates}
    linear = {each: found[each][0].drawn is Drawn.LINEAR for each in candidates if _may_be_linear(each)}
    everyone = [contender for group in found.values() for contender in group]
    if not any(linear.values()) or (all(linear.values()) and _is_safe(case, everyone, list(linear), judge, checked)):
        return everyone
    exact = with_exact_draws(case)
    again = {each: _priced(exact, judge(exact, each), price) for each, is_linear in linear.items() if is_linear}
    if case.settings.engine != "linear":
        return [contender for each in candidates for contender in again.get(each, found[each])]
    warn(
        "the scores of the linear engine are not exact enough to choose a method, so exact draws of the calibration "
        'data decided. All else is of the linear engine, as was asked for; engine="auto" would use exact draws.'
    )
    return [
        replace(one, calibration_losses=other.calibration_losses)
        for each in candidates
        for one, other in zip(found[each], again.get(each, found[each]), strict=True)
    ]


def _priced(case: Case, contenders: list[Contender[Any]], price: Price) -> list[Contender[Any]]:
    passes = {each.num_samples: each for each in contenders}
    known = {size: price(case, each) for size, each in passes.items()}
    told = [replace(each, passes=known[each.num_samples]) for each in contenders]
    return [replace(each, file_passes=passes_in_file(case, each)) for each in told]


def with_exact_draws(case: Case) -> Case:
    """Return the case with the exact engine."""
    return replace(case, settings=replace(case.settings, engine="sample"))


def _may_be_linear(candidate: Candidate) -> bool:
    return candidate.posterior.linear is not None and not (candidate.views or candidate.posterior.is_point)


def _is_safe(
    case: Case, contenders: Sequence[Contender[Any]], linear: Sequence[Candidate], judge: Judge, checked: int
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


def calibration_draws(case: Case, candidate: Candidate) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return the draws of a candidate on the calibration data, (S, N, ...), the targets, and how they were made."""

    def keep(predicted: Predicted) -> tuple[Tensor, Tensor]:
        return predicted.predictives[0].draws, predicted.batch[1]

    most, batches = candidate.sizes[-1], lambda: case.calibration
    found, size, how = predict_calibration(case, candidate, most, batches, [case.likelihood], keep, keep_draws=True)
    draws, targets = zip(*found, strict=True)
    return torch.cat(draws, 1), torch.cat(targets), how if size == most else how | {"engine": FEW_EXACT}


def predict_calibration(
    case: Case,
    candidate: Candidate,
    size: int,
    batches: Callable[[], Iterable[Any]],
    likelihoods: Sequence[Any],
    keep: Callable[[Predicted], T],
    **options: Any,
) -> tuple[list[T], int, dict[str, Any]]:
    """Predict batches of calibration data. Return what is kept of each, the number of draws, and how they were made.

    There are `size` draws; but if they are meant for the linear approximation, and it does not hold, a few exact
    ones. What the linear engine cannot draw, such as views, is always drawn exactly.
    """
    posterior, engine = candidate.posterior, case.settings.engine
    is_ensemble = posterior.num_functions and posterior.linear is None
    is_fixed = candidate.views or posterior.is_point or is_ensemble or case.settings.draws
    if engine == "linear" and posterior.linear is None and not posterior.is_point:
        engine = "sample"
    drawing: Any = {"num_samples": size, "seed": case.settings.seed, "engine": engine}
    found, how = [], {}
    for predicted in predict_stream(posterior, batches(), likelihoods, **drawing, **options):
        how = {"drawn": predicted.predictives[0].drawn, "engine": predicted.predictives[0].engine}
        if size > EXACT_DRAWS and not (is_fixed or how["drawn"] is Drawn.LINEAR):
            exact = with_exact_draws(case)
            return predict_calibration(exact, candidate, EXACT_DRAWS, batches, likelihoods, keep, **options)
        found.append(keep(predicted))
    return found, size, how


def affordable(candidate: Candidate, count: int, drawn: Drawn, budget: int | None) -> list[int]:
    """Return the numbers of draws to compare, of `count` that were made: the budget limits exact ones."""
    if candidate.views:
        return [size for size in candidate.sizes if size <= count]
    return [count if drawn is Drawn.LINEAR or budget is None else min(count, budget)]


def charged(candidate: Candidate, losses: Tensor) -> Tensor:
    """Return losses (N,) with what the tuning of the candidate has gained on the examples that took part in it."""
    return losses if candidate.tuning_gain is None else losses.double() + candidate.tuning_gain


def price_of(case: Case, contender: Contender[Any]) -> float:
    """Return what a prediction costs, in forward passes. Those of the linear engine are counted."""
    if contender.drawn is Drawn.LINEAR:
        return counted_passes(case, contender)
    return float(contender.num_samples * max(1, contender.candidate.views))


def counted_passes(case: Case, contender: Contender[Any]) -> float:
    """Return how many passes a prediction makes for each example: forward ones, and backward ones at their price.

    Layers are known by their weights, which copies of a network share. The most costly layer counts. Checks of the
    engine are not part of it.
    """
    inputs, posterior = some_inputs(case.calibration, PRICED), require_linearisable(contender.posterior)
    contrasts = bool(case.likelihood.shift_invariant)
    plan, _ = plan_for(posterior, inputs, contender.num_samples, case.settings.seed, contrasts)

    def counts(predict: Callable[[], object]) -> Counter[int]:
        rows: Counter[int] = Counter()

        def see(module: nn.Module, _: object, output: object) -> None:
            key = id(getattr(module, "weight", None))
            if key in own and isinstance(output, Tensor) and get_ident() == here:
                rows[key] += len(output)
                if output.requires_grad:
                    output.register_hook(lambda slope: rows.update({key: BACKWARD_COST * len(slope)}))  # type: ignore[dict-item]

        handle = register_module_forward_hook(see)
        try:
            predict()
        finally:
            handle.remove()
        return rows

    here = get_ident()  # the hook sees the passes of all threads
    layers = [layer for layer in case.network.modules() if not next(layer.children(), None)]
    own = {id(layer.weight) for layer in layers if isinstance(getattr(layer, "weight", None), Tensor)}
    once = counts(lambda: deterministic(case.network).draw(0, 0)(inputs))
    all_passes = counts(lambda: linear_draws(posterior, inputs, plan))
    return round(max((all_passes[key] / rows for key, rows in once.items()), default=float(contender.num_samples)), 1)


def passes_in_file(case: Case, contender: Contender[Any]) -> float:
    """Return what a prediction of an exported file costs. It follows every class, and Python those that matter."""
    is_backward = contender.drawn is Drawn.LINEAR and contender.passes > 1
    if is_backward and case.task == "classification" and case.likelihood.shift_invariant:
        return max(contender.passes, 1 + BACKWARD_COST * case.num_outputs)
    return contender.passes
