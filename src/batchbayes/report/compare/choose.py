"""The choice of a method: the simplest of those that are as good as the best, as far as the calibration data can tell.

The test data takes no part in the choice, so what it says about the recommended method holds for new data.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from batchbayes.errors import unknown_name
from batchbayes.report.compare.contenders import Contender

DOUBT = 2.0
"""Two methods count as equally good if their mean losses differ by at most this many standard errors."""
FREE_DOUBT = 1.0
"""The same limit for one method with and without a temperature, because a temperature costs nothing."""
FEWEST = 5
"""Fewer calibration examples cannot tell methods apart."""


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
        budget: most forward passes that a prediction may cost; None for any number.
        name: how the name of the one to recommend begins, if the user wants a certain one.
    """
    affordable = [each for each in contenders if budget is None or each.passes <= budget]
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
    return difference <= (FREE_DOUBT if _differ_in_temperature(contender, best) else DOUBT) * error


def _differ_in_temperature(one: Contender[Any], other: Contender[Any]) -> bool:
    """Return whether two contenders have the same draws, so that only the temperature may differ."""
    return one.posterior is other.posterior and one.num_samples == other.num_samples


def paired_difference(losses: Tensor, others: Tensor) -> tuple[float, float]:
    """Return the mean of the differences of losses of the same examples, and its standard error.

    >>> paired_difference(Tensor([1.0, 3.0]), Tensor([0.0, 0.0]))
    (2.0, 1.0)
    """
    difference = (losses - others).double()
    return float(difference.mean()), float(difference.std(correction=0)) / max(1, len(difference) - 1) ** 0.5
