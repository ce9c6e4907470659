"""The choice of a method: the simplest of those that are as good as the best, as far as the test data can tell."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from batchbayes._common.text import number
from batchbayes.assessment.contenders import Contender

DOUBT = 2.0
"""Two methods count as equally good if their mean losses differ by at most this many standard errors."""


@dataclass(frozen=True, eq=False)
class Choice:
    """The contender to use, and the one with the lowest mean loss, which may be less simple."""

    recommended: Contender[Any]
    best: Contender[Any]
    is_network: bool
    """Whether the network as it is is recommended."""

    @property
    def name(self) -> str:
        """The recommended method, in a sentence."""
        return "the network as it is" if self.is_network else self.recommended.name


def recommend(contenders: Sequence[Contender[Any]]) -> Choice:
    """Choose among contenders in the order of simplicity. The network as it is comes first."""
    best = min(contenders, key=lambda contender: contender.mean_loss)
    chosen = next(contender for contender in contenders if _is_as_good(contender, best))
    return Choice(chosen, best, is_network=chosen is contenders[0])


def _is_as_good(contender: Contender[Any], best: Contender[Any]) -> bool:
    """Return whether the paired differences of losses leave a doubt that the best is better."""
    difference = (contender.losses - best.losses).double()
    error = float(difference.std(correction=0)) / max(1, len(difference) - 1) ** 0.5
    return contender is best or float(difference.mean()) <= DOUBT * error


def sentence_of_choice(choice: Choice) -> str:
    """Say which method to use, why, and how."""
    chosen, best = choice.recommended, choice.best
    why = f"It has the lowest NLL on the test data, {number(best.mean_loss)}."
    if chosen is not best:
        why = (
            f"It is simpler than {best.name}, which has the lowest NLL on the test data, {number(best.mean_loss)}. "
            f"Its own NLL is {number(chosen.mean_loss)}: the test data cannot tell them apart."
        )
    return f"Use {choice.name}. {why} {chosen.advice}"
