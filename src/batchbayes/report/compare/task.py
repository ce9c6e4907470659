"""What an assessment asks of its task, and the comparison from end to end.

There are three tasks: classes of examples (`classes.py`), classes of their pixels or tokens (`pixels.py`), and values
(`values.py`). All else is the same for all of them.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from batchbayes.engines.linear import Drawn
from batchbayes.methods.candidates import Candidate
from batchbayes.report.compare.choice import CHECKED, Choice, judge_all, recommend
from batchbayes.report.compare.columns import MetricColumn
from batchbayes.report.compare.contenders import Contender, by_candidate, with_exact_draws
from batchbayes.report.compare.price import tell_time
from batchbayes.report.compare.rows import Rows
from batchbayes.report.read.case import Case
from batchbayes.report.words.shared import FEWEST

if TYPE_CHECKING:
    from batchbayes.report.result import Assessment

MOST_SHOWN = 6
"""This many candidates are predicted on the test data: the best on calibration data, beside the network."""
FLAGGED_SHARE = 0.1
"""On average, at most this share of new examples is above the threshold for flags."""


class Task(ABC):
    """A task: how candidates are judged and tested, and what there is to say about the recommended one."""

    columns: ClassVar[Sequence[MetricColumn]]
    strange_columns: ClassVar[Sequence[MetricColumn]] = ()
    """Those of inputs that the network should be unsure about."""
    checked: ClassVar[int] = CHECKED
    """This many calibration examples tell how wrong the scores of the linear engine are."""

    @abstractmethod
    def fit(self, case: Case) -> list[Candidate]:
        """Return the candidates to compare."""

    @abstractmethod
    def judge(self, case: Case, candidate: Candidate) -> list[Contender]:
        """Predict the calibration data for a candidate, tune, and return its contenders."""

    @abstractmethod
    def test(self, case: Case, contenders: Sequence[Contender], is_told: bool) -> Iterable[Contender]:
        """Predict the test data for the contenders of one candidate.

        `is_told` says whether strange data is told about it: it is the network, or one of its contenders is
        recommended.
        """

    @abstractmethod
    def uncertainty(self, case: Case, chosen: Contender) -> tuple[Tensor, Tensor]:
        """Return the scores by which calibration and test examples are flagged, (N,) or (N, outputs) each."""

    def threshold(self, scores: Tensor) -> Any:
        """Return the limit above which a new example is flagged, by the scores of others."""
        return float(flag_threshold(scores))

    @abstractmethod
    def notes(self, case: Case, chosen: Contender) -> dict[str, Any]:
        """Return what one has to know of this task to predict new data."""

    @abstractmethod
    def truth(self, case: Case, chosen: Contender) -> Rows:
        """Return the columns of predictions.csv that are known only with targets."""

    @abstractmethod
    def told(self, found: "Assessment", limit_count: int) -> "Assessment":
        """Return the assessment with its words, figures and facts. `limit_count` examples have set the threshold."""


def flag_threshold(scores: Tensor) -> Tensor:
    """Return the limit above which the flagged share of new examples lies, by the scores (N, ...) of others.

    The rank is chosen so that this holds on average for any number of examples. Below nine it is the highest one.

    >>> float(flag_threshold(torch.arange(8))), float(flag_threshold(torch.arange(99)))
    (7.0, 89.0)
    """
    rank = math.ceil((1 - FLAGGED_SHARE) * (len(scores) + 1) - 1e-9)
    return scores.double().sort(0).values[min(rank, len(scores)) - 1]


def scores_for_limit(held_out: Tensor, test: Tensor) -> Tensor:
    """Return the scores (N, ...) that set a limit: of the calibration data, and of the test data too if it is small.

    A limit by few examples is a matter of luck: with 8 it marks half of 10 others in one of 35 cases. It needs no
    labels, so the test data can help to set it.
    """
    return held_out if len(held_out) >= FEWEST else torch.cat([held_out, test])


def compare(case: Case, task: Task) -> tuple[Case, list[Contender], Choice]:
    """Choose a method on the calibration data, and see how it and others do on the test data, the simplest first.

    If the linear engine could be trusted on the calibration data but not on other data, all is done again with exact
    draws, which the returned case then asks for.
    """
    settings = case.settings
    candidates = task.fit(case)
    tell_time(case, candidates)
    judged = judge_all(case, candidates, task.judge, task.checked)
    choice = recommend(judged, settings.budget, settings.recommend)
    after: dict[Contender, Contender] = {}
    for group in _shown(judged, choice):
        is_told = group[0].is_network or choice.recommended in group
        after |= dict(zip(group, task.test(case, group, is_told), strict=True))
    parts = [part for each in after.values() for part in (each.seen.test, each.seen.ood) if part is not None]
    if settings.engine == "auto" and any(part.drawn is Drawn.BOTH for part in parts):
        return compare(with_exact_draws(case), task)
    contenders = sorted(after.values(), key=lambda contender: contender.simplicity)
    return case, contenders, replace(choice, recommended=after[choice.recommended], best=after[choice.best])


def _shown(judged: Sequence[Contender], choice: Choice) -> list[list[Contender]]:
    """Return the candidates that the tables show: the network, those of the choice, and the best of the others."""
    first, *others = by_candidate(judged).values()

    def place(group: list[Contender]) -> tuple[bool, float]:
        is_chosen = choice.recommended in group or choice.best in group
        return not is_chosen, min(contender.calibration_loss for contender in group)

    kept = [first, *sorted(others, key=place)[:MOST_SHOWN]]
    return [group for group in (first, *others) if group in kept]
