"""Which method to use: the simplest of those that are as good as the best, as far as the test data can tell."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batchbayes._common.text import number
from batchbayes.assess.job import Scored

DOUBT = 2.0
"""Standard errors of the mean difference within which two methods are taken as equally good."""


@dataclass(frozen=True)
class Choice:
    """The method to use, and how sure that is."""

    recommended: str
    best: str
    """The lowest mean loss, which may be of another, less simple method."""


def choose(scored: Sequence[Scored]) -> Choice:
    """Choose by paired differences of losses; the methods come in the order of simplicity."""
    best = min(scored, key=lambda method: float(method.losses.double().mean()))
    for method in scored:
        difference = (method.losses - best.losses).double()
        error = float(difference.std(correction=0)) / max(1, len(difference) - 1) ** 0.5
        if method is best or float(difference.mean()) <= DOUBT * error:
            return Choice(method.name, best.name)
    raise AssertionError("the best method is as good as itself")


def sentence_of_choice(
    recommended: str, best: str, means: Mapping[str, float], loss: str, advice: Mapping[str, str]
) -> str:
    """Which method to use, why, and how."""
    name = "the network as it is" if recommended == "deterministic" else recommended
    why = f"it has the lowest {loss} on the test data, {number(means[best])}"
    if recommended != best:
        why = (
            f"at {number(means[recommended])} its {loss} cannot be told from the lowest, {number(means[best])} "
            f"({best}), and it is simpler"
        )
    return f"Use {name}: {why}. {advice[recommended]}"
