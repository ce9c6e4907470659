"""Are percentages as right as they say? Gaps between what was said and what came true, as records."""

from dataclasses import dataclass, replace
from enum import Enum

from torch import Tensor

from batchbayes.report.compare.choose import DOUBT

SMALL, LARGE = 0.01, 0.03
"""Differences of shares below the first do not matter to anybody. Those below the second are called little."""
VAGUE = 0.1
"""If a share is not known better than this, nothing is said about it."""
SURE = 0.9
"""Answers with at least this confidence are the surest ones."""
FEWEST = 20
"""With fewer answers the surest ones are not judged apart."""
SUREST_DOUBT = 1.25
"""The surest answers are judged after all of them, so they need more evidence by this factor."""


class Trust(Enum):
    """Which way percentages are off."""

    HONEST = "honest"
    TOO_SURE = "too sure"
    TOO_UNSURE = "too unsure"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Honesty:
    """How honest percentages are."""

    trust: Trust
    is_little: bool = False
    """Whether they are off by little."""
    of_surest: bool = False
    """Whether only the surest answers are off."""

    @property
    def is_off(self) -> bool:
        """Whether percentages are known to be wrong."""
        return self.trust in (Trust.TOO_SURE, Trust.TOO_UNSURE)


def honesty(gap: float, error: float) -> Honesty:
    """Judge percentages by how far they are above the truth in the mean, and the standard error of that.

    >>> honesty(0.06, 0.035).trust.value, honesty(0.02, 0.005), honesty(0.0, 0.2).trust.value
    ('honest', Honesty(trust=<Trust.TOO_SURE: 'too sure'>, is_little=True, of_surest=False), 'unknown')
    """
    if abs(gap) <= max(SMALL, DOUBT * error):
        return Honesty(Trust.HONEST if DOUBT * error <= VAGUE else Trust.UNKNOWN)
    return Honesty(Trust.TOO_SURE if gap > 0 else Trust.TOO_UNSURE, is_little=abs(gap) < LARGE)


def class_honesty(confidence: Tensor, right: Tensor) -> Honesty:
    """Judge confidences (N,) in the mean, and if they are right, whether the highest ones are too high."""

    def judged(some: Tensor, doubt: float) -> Honesty:
        of_some = confidence[some]
        return honesty(float((of_some - right[some].double()).mean()), doubt * binomial_error(of_some))

    sure = confidence >= SURE
    found = judged(confidence >= 0, 1.0)
    if found.trust is Trust.HONEST and int(sure.sum()) >= FEWEST:
        surest = judged(sure, SUREST_DOUBT)
        if surest.trust is Trust.TOO_SURE:
            return replace(surest, of_surest=True)
    return found


def image_honesty(confidence: Tensor, wrong: Tensor) -> Honesty:
    """Judge the mean confidence and the share of wrong pixels of images, (N,) each.

    Pixels of one image depend on each other, so the images are what is counted.
    """
    gaps = confidence - (1 - wrong)
    return honesty(float(gaps.mean()), float(gaps.std()) / len(gaps) ** 0.5 if len(gaps) > 1 else 1.0)


def share_error(share: float, examples: int) -> float:
    """Return the standard error of a share of independent examples. It is not zero if the share is 0 or 1."""
    return (max(share * (1 - share), 1 / (examples + 4)) / examples) ** 0.5


def binomial_error(confidence: Tensor) -> float:
    """Return the standard error of the share of right answers if the confidences (N,) are the truth."""
    return float((confidence * (1 - confidence)).sum().sqrt()) / max(1, len(confidence))
