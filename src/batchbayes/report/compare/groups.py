"""Are percentages and intervals as right as they say, on average and in groups of test examples?

A group is all of them, the surest ones, a fifth of the predictions, of the confidences or of a column, the examples
with one value of a column, those of one predicted class, or those that are marked. Many groups are looked at, so each
needs more evidence.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from statistics import NormalDist

import torch
from torch import Tensor

from batchbayes.report.compare.tuning import DOUBT
from batchbayes.report.read.examples import Examples

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
FIFTHS = 5
MATTERS = 0.05
"""A group is named if what came true is below what was said by more than this share."""
MOST_COLUMNS = 64
"""Inputs with more numbers than this are not looked at column by column."""


class Trust(Enum):
    """Which way percentages are off."""

    HONEST = "honest"
    TOO_SURE = "too sure"
    TOO_UNSURE = "too unsure"
    UNKNOWN = "unknown"


class By(Enum):
    """What examples are put into groups by."""

    ALL = "all"
    SUREST = "surest"
    PREDICTION = "prediction"
    CONFIDENCE = "confidence"
    CLASS = "class"
    COLUMN = "column"
    FLAG = "flag"


@dataclass(frozen=True)
class Group:
    """Some of the test examples: what was said about them, and what came true."""

    by: By
    name: str
    """The column, or the class."""
    low: float
    high: float
    """The smallest and the largest value in the group."""
    count: int
    said: float
    """The share of examples that should be right, or in their intervals."""
    held: float
    """The share that is."""
    error: float
    """The standard error of the share if what was said is true."""

    @property
    def gap(self) -> float:
        return self.said - self.held

    @property
    def trust(self) -> Trust:
        """Which way it is off, if the difference matters and is more than chance.

        >>> [everything(said, 0.8, error).trust.value for said, error in ((0.86, 0.035), (0.82, 0.005), (0.8, 0.2))]
        ['honest', 'too sure', 'unknown']
        """
        doubt = DOUBT * self.error * (SUREST_DOUBT if self.by is By.SUREST else 1)
        if abs(self.gap) <= max(SMALL, doubt):
            return Trust.HONEST if doubt <= VAGUE else Trust.UNKNOWN
        return Trust.TOO_SURE if self.gap > 0 else Trust.TOO_UNSURE

    @property
    def is_off(self) -> bool:
        """Whether percentages are known to be wrong."""
        return self.trust in (Trust.TOO_SURE, Trust.TOO_UNSURE)

    @property
    def is_little(self) -> bool:
        """Whether they are off by little."""
        return self.is_off and abs(self.gap) < LARGE


def everything(said: float, held: float, error: float, by: By = By.ALL) -> Group:
    """Return the group of all examples, or of the surest ones."""
    return Group(by, "", 0.0, 1.0, 0, said, held, error)


def of_classes(confidence: Tensor, right: Tensor) -> Group:
    """Return the group of all confidences (N,); or of the highest ones, if these are too high and the mean is right."""

    def judged(some: Tensor, by: By) -> Group:
        said, held = (float(values[some].double().mean()) for values in (confidence, right))
        return everything(said, held, binomial_error(confidence[some]), by)

    found, sure = judged(confidence >= 0, By.ALL), confidence >= SURE
    if found.trust is Trust.HONEST and int(sure.sum()) >= FEWEST:
        surest = judged(sure, By.SUREST)
        return surest if surest.trust is Trust.TOO_SURE else found
    return found


def of_images(confidence: Tensor, wrong: Tensor) -> Group:
    """Return the group of all pixels of images, from mean confidences and shares of wrong pixels, (N,) each.

    Pixels of one image depend on each other, so the images are what is counted.
    """
    gaps = confidence - (1 - wrong)
    error = float(gaps.std()) / len(gaps) ** 0.5 if len(gaps) > 1 else 1.0
    return everything(float(confidence.mean()), 1 - float(wrong.mean()), error)


def share_error(share: float, examples: int) -> float:
    """Return the standard error of a share of independent examples. It is not zero if the share is 0 or 1."""
    return (max(share * (1 - share), 1 / (examples + 4)) / examples) ** 0.5


def binomial_error(confidence: Tensor) -> float:
    """Return the standard error of the share of right answers if the confidences (N,) are the truth."""
    return float((confidence * (1 - confidence)).sum().sqrt()) / max(1, len(confidence))


def groups_by(
    by: By, values: Tensor, said: Tensor, held: Tensor, *, name: str = "", extra: float = 0.0
) -> Iterator[Group]:
    """Yield groups of examples with similar values (N,): fifths, or one for each value if there are few.

    Args:
        by: what the values are.
        values: of each example, (N,).
        said: the probability with which each example was said to be right, (N,).
        held: whether it is, (N,).
        name: of the column, or of the class.
        extra: variance of the share that does not come from the test examples.
    """
    group = in_groups(values)[0] if len(values.unique()) > FIFTHS else values.unique(return_inverse=True)[1]
    for number in range(int(group.max()) + 1):
        some = group == number
        if int(some.sum()) < FEWEST:
            continue
        own, error = values[some].double(), (binomial_error(said[some]) ** 2 + extra) ** 0.5
        shares = float(said[some].double().mean()), float(held[some].double().mean())
        yield Group(by, name, float(own.min()), float(own.max()), len(own), *shares, error)


def shared_groups(
    columns: Mapping[str, Tensor], flagged: Tensor, said: Tensor, held: Tensor, extra: float = 0.0
) -> list[Group]:
    """Return the groups that all tasks have: by each column of a table, and the examples that are marked."""
    every = [(By.COLUMN, name, values) for name, values in columns.items()] + [(By.FLAG, "", flagged)]
    found = [group for by, name, values in every for group in groups_by(by, values, said, held, name=name, extra=extra)]
    return [group for group in found if group.by is not By.FLAG or group.low > 0]


def worst_group(groups: Iterable[Group]) -> Group | None:
    """Return the group in which least came true of what was said, if this is more than chance and matters."""
    every = list(groups)
    doubt = doubt_among(len(every))
    off = [group for group in every if group.gap > max(MATTERS, doubt * group.error)]
    return max(off, key=lambda group: group.gap, default=None)


def doubt_among(count: int) -> float:
    """Return how many standard errors are evidence if the worst of `count` groups is looked at: two for one.

    >>> round(doubt_among(1), 2), round(doubt_among(50), 2)
    (1.96, 3.29)
    """
    return NormalDist().inv_cdf(1 - 0.025 / max(1, count))


def in_groups(values: Tensor, count: int = FIFTHS) -> tuple[Tensor, list[float]]:
    """Return the number of the group of equal size that each value is in, (N,), and the edges, halfway between values.

    Equal values are in the same group, so there may be fewer groups.

    >>> group, edges = in_groups(torch.arange(10.0))
    >>> group.tolist(), edges
    ([0, 0, 1, 1, 2, 2, 3, 3, 4, 4], [1.5, 3.5, 5.5, 7.5])
    """
    ordered = values.double().sort().values
    places = [round(len(ordered) * k / count) for k in range(1, count)]
    edges = {float(ordered[at - 1] + ordered[at]) / 2 for at in places if at > 0 and ordered[at - 1] < ordered[at]}
    found = torch.tensor(sorted(edges), dtype=torch.float64)
    return torch.bucketize(values.double().contiguous(), found), found.tolist()


def columns_of(data: Examples) -> dict[str, Tensor]:
    """Return the columns of a table by name, (N,) each, as they were before any preprocessing; none of images."""
    raw = data.raw()
    first, _ = next(iter(raw))
    if first.ndim != 2 or first.shape[1] > MOST_COLUMNS:
        return {}
    names = data.feature_names or [f"x{i}" for i in range(first.shape[1])]
    return dict(zip(names, torch.cat([inputs for inputs, _ in raw]).double().T, strict=True))
