"""The figures that all tasks have: quality against price, novelty, and how methods were tuned."""

from collections.abc import Sequence
from typing import Any, TypeVar

from batchbayes import plots
from batchbayes.assessment.contenders import Contender
from batchbayes.assessment.load import Case
from batchbayes.assessment.novelty import novelty_level
from batchbayes.assessment.result import Figures, MetricColumn
from batchbayes.assessment.rows import Rows
from batchbayes.assessment.words import numbers
from batchbayes.detection.novelty import Novelty

C = TypeVar("C", bound=Contender[Any])
SHOWN = 6
"""Methods in a figure with a line or a panel for each."""
PRICED = ("nll", "accuracy", "ece", "rmse", "crps")
"""Metrics that are drawn against their price, as far as a task has them."""


def shared_figures(
    case: Case,
    contenders: Sequence[Contender[Any]],
    chosen: Contender[Any],
    columns: Sequence[MetricColumn],
    rows: Rows,
    novelty: Novelty | None,
) -> Figures:
    """Draw quality against price, the novelty of test and strange inputs, and curves of tuning."""
    return {
        **_price(contenders, chosen, [column for column in columns if column.key in PRICED]),
        **_novelty(rows, novelty_level(novelty), case.ood.name if case.ood else None),
        **_tuning(contenders),
    }


def most_telling(contenders: Sequence[C], chosen: Contender[Any]) -> list[C]:
    """Return the network, the recommended contender and the best others, as many as a figure can show, in order."""
    first = [contenders[0], chosen, *sorted(contenders, key=lambda contender: contender.mean_loss)]
    kept = list(dict.fromkeys(first))[:SHOWN]
    return [contender for contender in contenders if contender in kept]


def _price(contenders: Sequence[Contender[Any]], chosen: Contender[Any], columns: Sequence[MetricColumn]) -> Figures:
    qualities = {
        f"{column.label}{', %' if column.percent else ''} ({column.better} is better)": [
            (100 if column.percent else 1) * contender.metrics[column.key] for contender in contenders
        ]
        for column in columns
    }
    figure = plots.price_figure(
        [contender.name for contender in contenders],
        [contender.passes for contender in contenders],
        qualities,
        recommended=chosen.name,
    )
    caption = (
        "Quality against price: what each method reaches on the test data, and how many times as long as one pass of "
        "the network it takes. The recommended one has a ring. The choice was made on calibration data."
    )
    return {"quality-price": (figure, caption)}


def _novelty(rows: Rows, level: float, strange: str | None) -> Figures:
    if "" in rows["novelty"]:
        return {}
    p_values = {"test data": numbers(rows, "novelty")}
    if strange is not None:
        p_values[strange] = numbers(rows, "novelty", "ood")
    caption = (
        "How unusual the inputs are to the network. The p-value of an input is the share of ordinary inputs that are "
        f"at least as unusual. Those with {level:.2g} or less are called novel. Data like that of training is spread "
        "evenly."
    )
    return {"novelty": (plots.novelty_figure(p_values, level=level), caption)}


def _tuning(contenders: Sequence[Contender[Any]]) -> Figures:
    """Draw the curve by which each method was tuned, if there are any."""
    curves = {id(each): each for contender in contenders if (each := contender.trial.candidate.curve) is not None}
    return {
        f"tuning-{i}": (
            plots.batch_size_figure(
                curve.values, curve.losses, best=curve.best, trained_with=curve.start, score="NLL on calibration data"
            ),
            curve.caption,
        )
        for i, curve in enumerate(curves.values(), start=1)
    }
