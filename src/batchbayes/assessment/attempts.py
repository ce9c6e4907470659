"""How all entries do on the calibration data, compared with one engine, what they cost, and which one is chosen.

The linear engine is cheap, and almost right. Exact draws of some examples measure how wrong its scores are. If that
could change the choice of a method, exact draws of all examples are compared, so that the choice does not depend on the
engine.
"""

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from batchbayes._common.progress import hidden_progress
from batchbayes.assessment.contenders import Contender, Trial, is_linear
from batchbayes.assessment.entries import EXACT_DRAWS, Entry
from batchbayes.assessment.load import Case
from batchbayes.assessment.recommend import DOUBT, Choice, recommend
from batchbayes.assessment.views import some_inputs
from batchbayes.batches import spread_evenly
from batchbayes.engines.choose import EXACT_TOO
from batchbayes.errors import BatchbayesWarning, warn
from batchbayes.methods.point import deterministic
from batchbayes.posterior import Posterior
from batchbayes.prediction import Predicted, predict, predict_stream

T = TypeVar("T")
FEW_EXACT = f"sample: {EXACT_DRAWS} exact draws"
CHECKED = 256
"""So many calibration examples tell how wrong the scores of the linear engine are."""

Attempt = Callable[[Case, Entry], tuple[list[Trial], Any]]
"""Predicts the calibration data for an entry. Returns its trials, and what else the caller needs."""
Tried = list[tuple[Entry, list[Trial], Any]]
Test = Callable[[Case, Entry, Sequence[Trial], Any, Trial], Iterable[Contender[Any]]]
"""Predicts the test data for the trials of an entry. It gets what the attempt returned, and the recommended trial."""
MOST_SHOWN = 6
"""So many posteriors are predicted on the test data: the best on calibration data, beside the network."""


def compare(
    case: Case, fit: Callable[[Case], Sequence[Entry]], attempt: Attempt, test: Test, checked: int = CHECKED
) -> tuple[Case, list[Contender[Any]], Choice[Contender[Any]]]:
    """Choose a method on the calibration data, and see how it and others do on the test data, the simplest first.

    If the linear engine could be trusted on the calibration data but not on other data, all is done again with exact
    draws, which the returned case then asks for.
    """
    tried = try_all(case, fit(case), attempt, checked)
    picked = recommend([trial for _, trials, _ in tried for trial in trials], case.settings.budget)
    contenders = [each for shown in _shown(tried, picked) for each in test(case, *shown, picked.recommended)]
    engines = [engine for contender in contenders for engine in contender.seen.engines]
    if case.settings.engine == "auto" and any(EXACT_TOO in engine for engine in engines):
        return compare(_with_exact_draws(case), fit, attempt, test, checked)
    contenders.sort(key=lambda contender: contender.trial.simplicity)
    of = {contender.trial: contender for contender in contenders}
    return case, contenders, Choice(of[picked.recommended], of[picked.best], picked.beyond, picked.is_network)


def _shown(tried: Tried, picked: Choice[Trial]) -> Tried:
    """Return the entries that the tables show: the network, those of the choice, and the best of the others."""
    first, *others = tried

    def place(each: tuple[Entry, list[Trial], Any]) -> tuple[bool, float]:
        trials = each[1]
        return not (picked.recommended in trials or picked.best in trials), min(trial.mean_loss for trial in trials)

    kept = [first, *sorted(others, key=place)[:MOST_SHOWN]]
    return [each for each in tried if each in kept]


def _with_exact_draws(case: Case) -> Case:
    return replace(case, settings=replace(case.settings, engine="sample"))


def try_all(case: Case, entries: Sequence[Entry], attempt: Attempt, checked: int = CHECKED) -> Tried:
    """Try all entries on the calibration data. Those that the linear engine could draw are compared with one engine.

    If it does not hold for one of them, or if its error could change the choice, exact draws of all are compared.
    """
    found = [_priced(case, entry, *attempt(case, entry)) for entry in entries]
    drawn = {entry: is_linear(trials[0].engine) for entry, trials, _ in found if _may_be_linear(entry)}
    if not any(drawn.values()) or (all(drawn.values()) and _is_safe(case, found, drawn, attempt, checked)):
        return found
    exact = _with_exact_draws(case)
    again = {entry: _priced(exact, entry, *attempt(exact, entry)) for entry, _, _ in found if drawn.get(entry)}
    if case.settings.engine != "linear":
        return [again.get(each[0], each) for each in found]
    warn(
        "the scores of the linear engine are not exact enough to choose a method, so exact draws of the calibration "
        'data decided. All else is of the linear engine, as was asked for; engine="auto" would use exact draws.'
    )
    return [(entry, _judged(trials, again.get(entry, (entry, trials))[1]), more) for entry, trials, more in found]


def _judged(trials: Sequence[Trial], others: Sequence[Trial]) -> list[Trial]:
    """Return trials with the losses of others."""
    return [replace(one, losses=other.losses) for one, other in zip(trials, others, strict=True)]


def _may_be_linear(entry: Entry) -> bool:
    return entry.posterior.linear is not None and not (entry.views or entry.posterior.is_point)


def _is_safe(case: Case, found: Tried, drawn: dict[Entry, bool], attempt: Attempt, checked: int) -> bool:
    """Return whether the choice stays the same if the losses of the linear engine are corrected by their error."""
    total = len(found[0][1][0].losses)
    rows, is_whole = spread_evenly(total, checked), total <= checked
    few = replace(case, calibration=case.calibration.some(rows.tolist()), settings=replace(case.settings, budget=None))
    exact = _with_exact_draws(few)
    errors: dict[Trial, Tensor] = {}
    for entry, trials, _ in found:
        if entry in drawn:
            plain = entry if is_whole else replace(entry, candidate=replace(entry.candidate, tuning_gain=None))
            linear = trials if is_whole else attempt(few, plain)[0]
            every = zip(trials, linear, attempt(exact, plain)[0], strict=True)
            errors |= {trial: other.losses.double() - one.losses.double() for trial, one, other in every}
    unseen = (1 - len(rows) / total) ** 0.5

    def choice(doubt: float) -> str:
        every = [
            replace(t, losses=_corrected(t.losses, rows, errors[t], doubt * unseen)) if t in errors else t
            for _, trials, _ in found
            for t in trials
        ]
        return recommend(every, case.settings.budget).recommended.name

    chosen = recommend([t for _, trials, _ in found for t in trials], case.settings.budget).recommended.name
    return all(choice(doubt) == chosen for doubt in (-DOUBT, 0.0, DOUBT))


def _corrected(losses: Tensor, rows: Tensor, errors: Tensor, doubt: float) -> Tensor:
    """Add the errors (n,) to the losses of some rows, and their mean, up to so many standard errors, to the others."""
    standard_error = float(errors.std(correction=0)) / max(1, len(errors) - 1) ** 0.5
    added = (errors.mean() + doubt * standard_error).repeat(len(losses))
    added[rows] = errors + doubt * standard_error
    return losses.double() + added


def calibration_draws(case: Case, entry: Entry) -> tuple[Tensor, Tensor, str]:
    """Return the draws of an entry on the calibration data, (S, N, ...), the targets, and the engine that made them."""

    def keep(predicted: Predicted) -> tuple[Tensor, Tensor]:
        return predicted.predictives[0].draws, predicted.batch[1]

    most, batches = entry.sizes[-1], lambda: case.calibration
    found, size, engine = predict_calibration(case, entry, most, batches, [case.likelihood], keep, keep_draws=True)
    draws, targets = zip(*found, strict=True)
    return torch.cat(draws, 1), torch.cat(targets), engine if size == most else FEW_EXACT


def predict_calibration(
    case: Case,
    entry: Entry,
    size: int,
    batches: Callable[[], Iterable[Any]],
    likelihoods: Sequence[Any],
    keep: Callable[[Predicted], T],
    **options: Any,
) -> tuple[list[T], int, str]:
    """Predict batches of calibration data. Return what is kept of each, the number of draws, and the engine.

    There are `size` draws; but if so many are meant for the linear approximation, and it does not hold, a few exact
    ones. What the linear engine cannot draw, such as views, is always drawn exactly.
    """
    posterior, engine = entry.posterior, case.settings.engine
    is_fixed = entry.views or posterior.is_point or posterior.num_functions or case.settings.draws
    if engine == "linear" and posterior.linear is None and not posterior.is_point:
        engine = "sample"
    drawing: Any = {"num_samples": size, "seed": case.settings.seed, "engine": engine}
    found, name = [], ""
    for predicted in predict_stream(posterior, batches(), likelihoods, **drawing, **options):
        name = predicted.predictives[0].engine
        if size > EXACT_DRAWS and not (is_fixed or is_linear(name)):
            exact = _with_exact_draws(case)
            return predict_calibration(exact, entry, EXACT_DRAWS, batches, likelihoods, keep, **options)
        found.append(keep(predicted))
    return found, size, name


def affordable(entry: Entry, count: int, engine: str, budget: int | None) -> list[int]:
    """Return the numbers of draws to compare, of `count` that were made: the budget limits exact ones."""
    if entry.views:
        return [size for size in entry.sizes if size <= count]
    return [count if is_linear(engine) or budget is None else min(count, budget)]


def _priced(case: Case, entry: Entry, trials: list[Trial], more: Any) -> tuple[Entry, list[Trial], Any]:
    """Add what a prediction costs to the trials of an entry."""
    passes = {size: price(case, entry, size, trials[0].engine) for size in {trial.num_samples for trial in trials}}
    return entry, [replace(trial, passes=passes[trial.num_samples]) for trial in trials], more


def price(case: Case, entry: Entry, size: int, engine: str) -> float:
    """Return what a prediction costs, in forward passes: counted, or measured if the engine is linear."""
    if entry.posterior.is_point or entry.views:
        return float(size * max(1, entry.views))
    return measured_passes(case, entry.posterior, size) if is_linear(engine) else float(size)


def measured_passes(case: Case, posterior: Posterior, num_samples: int) -> float:
    """Return how long a prediction takes, in units of a forward pass: the shortest of three of each."""
    inputs = some_inputs(case.calibration, 128)

    def seconds(of: Posterior, engine: Any) -> float:
        start = time.perf_counter()
        predict(of, inputs, case.likelihood, num_samples=num_samples, seed=case.settings.seed, engine=engine)
        return time.perf_counter() - start

    own = deterministic(case.network)
    with hidden_progress(True), warnings.catch_warnings():
        warnings.simplefilter("ignore", BatchbayesWarning)  # what is to be said about the engine is said elsewhere
        pairs = [(seconds(posterior, case.settings.engine), seconds(own, "sample")) for _ in range(3)]
    drawn, once = (min(column) for column in zip(*pairs, strict=True))
    return round(max(1.0, drawn / once), 1)
