"""The choice of a method: the simplest of those that are as good as the best, as far as the calibration data can tell.

The test data takes no part in the choice, so what it says about the recommended method holds for new data.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from batchbayes._common.text import number
from batchbayes.assessment.contenders import Contender, Trial

T = TypeVar("T", Trial, Contender[Any])

DOUBT = 2.0
"""Two methods count as equally good if their mean losses differ by at most this many standard errors."""
FREE_DOUBT = 1.0
"""The same limit for one method with and without a temperature, because a temperature costs nothing."""
FEWEST = 5
"""Fewer calibration examples cannot tell methods apart."""


@dataclass(frozen=True, eq=False)
class Choice(Generic[T]):
    """What calibration data says. It is about trials, or about contenders, which have seen the test data too."""

    recommended: T
    """The one to use."""
    best: T
    """The one with the lowest mean loss that can be paid for. It may be less simple."""
    beyond: Trial | None
    """The best one that the budget does not pay for, if it is clearly better than the recommended one."""
    is_network: bool
    """Whether it is best to use the network as it is."""

    @property
    def name(self) -> str:
        """The recommended method, in a sentence."""
        return "the network as it is" if self.is_network else self.recommended.name


def recommend(trials: Sequence[Trial], budget: int | None = None) -> Choice[Trial]:
    """Choose the simplest trial whose losses on calibration data leave a doubt that the best one is better.

    Args:
        trials: all of them. The simplest, which costs one forward pass, is the network as it is.
        budget: most forward passes that a prediction may cost; None for any number.
    """
    affordable = [trial for trial in trials if budget is None or trial.passes <= budget]
    best = min(affordable, key=lambda trial: trial.mean_loss)
    ordered = sorted(affordable, key=lambda trial: trial.simplicity)
    chosen = next(trial for trial in ordered if _is_as_good(trial, best))
    for other in affordable:
        if _differs_in_temperature(chosen, other) and not _is_as_good(chosen, other):
            chosen = other
    overall = min(trials, key=lambda trial: trial.mean_loss)
    beyond = None if _is_as_good(chosen, overall) or overall is best else overall
    return Choice(chosen, best, beyond, is_network=chosen is ordered[0])


def _is_as_good(trial: Trial, best: Trial) -> bool:
    """Return whether the paired differences of losses leave a doubt that the best is better."""
    difference, error = paired_difference(trial.losses, best.losses)
    if trial is best or len(trial.losses) < FEWEST:
        return True
    return difference <= (FREE_DOUBT if _differs_in_temperature(trial, best) else DOUBT) * error


def _differs_in_temperature(trial: Trial, other: Trial) -> bool:
    """Return whether two trials have the same draws, so that only the temperature may differ."""
    return trial.candidate.posterior is other.candidate.posterior and trial.num_samples == other.num_samples


def paired_difference(losses: Tensor, others: Tensor) -> tuple[float, float]:
    """Return the mean of the differences of losses of the same examples, and its standard error.

    >>> paired_difference(Tensor([1.0, 3.0]), Tensor([0.0, 0.0]))
    (2.0, 1.0)
    """
    difference = (losses - others).double()
    return float(difference.mean()), float(difference.std(correction=0)) / max(1, len(difference) - 1) ** 0.5


def sentence_of_choice(choice: Choice[Contender[Any]]) -> str:
    """Say which method to use, why, and how."""
    chosen, best = choice.recommended, choice.best
    low = number(best.trial.mean_loss)
    if chosen is best:
        why = f"It has the lowest NLL on the calibration data, {low}."
    else:
        why = (
            f"It is simpler than {best.name}, which has the lowest NLL on the calibration data, {low}. Its own NLL "
            f"there is {number(chosen.trial.mean_loss)}: the data cannot tell them apart."
        )
    told = f"On the test data, which took no part in the choice, its NLL is {number(chosen.mean_loss)}."
    more = ""
    if choice.beyond is not None:
        more = (
            f" {choice.beyond.name} is better ({number(choice.beyond.mean_loss)} on the calibration data), but costs "
            f"{choice.beyond.passes:g} forward passes, which is beyond the budget."
        )
    return f"Use {choice.name}. {why} {told}{more} {chosen.trial.candidate.advice}."
