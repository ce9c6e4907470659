"""What is compared: the network as it is and what each method offers, without and with views."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from batchbayes._common.text import number
from batchbayes.assessment.contenders import Trial
from batchbayes.assessment.load import Case
from batchbayes.assessment.tuning import FOLDS
from batchbayes.assessment.views import num_views, words
from batchbayes.batches import spread_evenly
from batchbayes.likelihoods import TargetLikelihood
from batchbayes.methods.candidates import Candidate, Setting, find_candidates
from batchbayes.methods.point import deterministic
from batchbayes.methods.samples.weight_samples import weight_samples
from batchbayes.methods.views.posterior import with_views
from batchbayes.posterior import Posterior, num_draws

TUNING_EXAMPLES = 1000
"""This many examples are enough to find the minimum of one smooth curve."""
DRAWS, EXACT_DRAWS = 64, 16
"""Numbers of draws, unless the user says how many: by the linear approximation, where they cost nothing, and exact
ones."""
MOST_VIEWS, AVERAGED = 16, 4
"""So many views are as good as more, and a draw averages the logits of so many of them (docs/results/views.md)."""


@dataclass(frozen=True, eq=False)
class Entry:
    """A posterior that is drawn from. The contenders of one entry share its draws."""

    candidate: Candidate
    sizes: tuple[int, ...]
    """The numbers of draws that are compared, ascending."""
    views: int = 0
    """How many views a draw averages; 0 without views."""

    @property
    def posterior(self) -> Posterior:
        return self.candidate.posterior


def compared_entries(
    case: Case,
    likelihood: TargetLikelihood[Any],
    *,
    tuning_samples: int | None = None,
    tuning_examples: int = TUNING_EXAMPLES,
    averaged: int = AVERAGED,
) -> list[Entry]:
    """Fit all methods. Return the network as it is, what methods offer, and all of them with views.

    Methods are tuned by the likelihood, on `tuning_examples` of the calibration data, by `tuning_samples` draws (by
    default as many as for prediction). With views, a draw is the mean of `averaged` of them.
    """
    settings, total = case.settings, len(case.calibration.rows())
    rows = spread_evenly(total, tuning_examples)  # data is often in the order of classes, or of time
    some = case.calibration if len(rows) == total else case.calibration.some(rows.tolist())
    setting = Setting(
        model=case.network,
        train=case.train.batches,
        calibration=[(inputs, targets) for inputs, targets in some if targets is not None],
        likelihood=likelihood,
        num_samples=settings.draws or DRAWS,
        tuning_samples=tuning_samples or settings.draws or DRAWS,
        seed=settings.seed,
        batch_size=settings.batch_size,
        center=settings.center,
        folds=FOLDS,
    )
    network = Candidate(
        "deterministic", "the network as it is", deterministic(case.network), "Take its own output", rank=0
    )
    tuned = [_with_gains_of_all(each, rows, total) for each in find_candidates(case.methods, setting)]
    alone = [network, *_ensemble(case), *tuned]
    entries = [Entry(each, (num_draws(each.posterior, settings.draws or DRAWS),)) for each in alone]
    return entries + [seen for each in alone if (seen := _with_views(each, case, averaged)) is not None]


def _ensemble(case: Case) -> list[Candidate]:
    """Return the networks with all weights that were given, if there are several."""
    if not case.members:
        return []
    posterior = weight_samples(case.network, [case.network.state_dict(), *case.members])
    name = f"ensemble of {len(posterior)}"
    return [Candidate(name, "mean of networks with weights of their own", posterior, f"Average the {name}", rank=1)]


def _with_gains_of_all(candidate: Candidate, rows: Tensor, total: int) -> Candidate:
    """Return the candidate with the gain of each of all calibration examples; tuning used some rows of them."""
    if candidate.tuning_gain is None:
        return candidate
    gains = candidate.tuning_gain.new_zeros(total).index_copy(0, rows, candidate.tuning_gain)
    return replace(candidate, tuning_gain=gains)


def _with_views(base: Candidate, case: Case, averaged: int) -> Entry | None:
    """Return a candidate that sees random views of its inputs; None if there are none, or too few to pay for."""
    most, transform = min(MOST_VIEWS, case.settings.budget or MOST_VIEWS), case.views
    if transform is None or most < 2:
        return None
    count = num_views(transform, most) if base.posterior.is_point else most
    average = min(averaged, count)
    draws = count // average
    candidate = replace(
        base,
        posterior=with_views(base.posterior, transform, average=average),
        settings={**base.settings, "views": words(transform), "average": average},
        curve=None,
    )
    sizes = sorted({max(1, AVERAGED // average), draws} if base.posterior.is_point else {draws})
    return Entry(candidate, tuple(size for size in sizes if size <= draws), average)


def trial_of(
    entry: Entry, size: int, losses: Tensor, engine: str, *, tuned: dict[str, Any], temperature: bool = False
) -> Trial:
    """Put together what is known about `size` draws of an entry from calibration data.

    The losses (N,) of its examples are those with numbers that were tuned on other examples. `temperature` says whether
    the `tuned` numbers are a temperature that is not left at 1.
    """
    gain = entry.candidate.tuning_gain
    return Trial(
        candidate=_variant(entry, size, tuned if temperature else None),
        num_samples=size,
        simplicity=(entry.candidate.rank, float(entry.views > 0), float(size * entry.views), float(temperature)),
        tuned=tuned,
        losses=losses if gain is None else losses.double() + gain,
        engine=engine,
    )


def _variant(entry: Entry, size: int, scaled: dict[str, Any] | None) -> Candidate:
    """Return the candidate with the name of its variant. `scaled` holds the temperature, if there is one."""
    base, count = entry.candidate, size * entry.views
    is_network = base.rank == 0
    name, about, advice = base.name, base.about, base.advice
    if entry.views:
        name = f"{count} views" if is_network else f"{base.short_name} with {count} views"
        seen = f"{count} random views of each input ({base.settings['views']})"
        about = f"the network on {seen}" if is_network else f"{about}, on {seen}"
        advice = f"Average its outputs over {seen}" if is_network else f"{advice}, over {seen}"
    if scaled is not None:
        temperature = scaled["temperature"]
        plain = name if entry.views else base.short_name
        name = "temperature scaling" if is_network and not entry.views else f"{plain} + temperature"
        about = f"{about}, with logits divided by one number tuned on calibration data"
        advice = f"{advice}, and divide the logits by {number(temperature)}"
    return replace(base, name=name, about=about, advice=advice, curve=None if scaled else base.curve)
