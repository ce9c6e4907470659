"""The verdict on a regression: in plain words for the first screen, and then in the terms of statistics.

What is predicted: its name and its unit, so that every number in a sentence keeps its unit.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from batchbayes._common.text import count, number, percent
from batchbayes.errors import BatchbayesError
from batchbayes.metrics import rank_correlation
from batchbayes.report.compare.compare import Choice
from batchbayes.report.compare.contenders import Contender
from batchbayes.report.compare.honesty import LARGE, SMALL, By, Group, shared_groups, worst_group
from batchbayes.report.compare.intervals import LEVEL, Intervals, Kind, fifths_of
from batchbayes.report.compare.rows import Rows
from batchbayes.report.read.examples import Examples
from batchbayes.report.words.shared import (
    ASIDE,
    DOUBT,
    Verdict,
    give_or_take,
    next_step,
    no_gain,
    novelty_terms,
    numbers,
    of_100,
    place,
    sentence_of_choice,
    strange_sentence,
    too_few,
)

FEWEST = 20
"""With fewer test examples nothing is said about where 90 % of true values are."""


DOUBTFUL = "do not rely on its intervals where they are called too narrow below"
REMEDIES = {
    Kind.SPREAD: "Their width follows how far predictions of this size are usually off",
    Kind.GROUPS: "Predictions of each size have a width of their own",
    Kind.QUANTILES: "How far they reach down and up follows the errors of predictions of this size",
}
CHECK = (
    "Do not use it yet. Check that inputs and targets are prepared as in training (scaling, units, the order of the "
    "columns), and that these are the right weights."
)


@dataclass(frozen=True)
class Quantity:
    """One output of a regression."""

    name: str
    unit: str = ""
    """Empty if it is not known."""

    def text(self, value: float) -> str:
        """Write a number with its unit.

        >>> Quantity("strength", "MPa").text(10.21), Quantity("strength").text(10.21)
        ('10.2 MPa', '10.2')
        """
        return f"{number(value)} {self.unit}".rstrip()

    @property
    def label(self) -> str:
        """What stands in the brackets of an axis."""
        return self.unit or self.name


def quantities(name: str | None, units: Sequence[str] | None, outputs: int) -> list[Quantity]:
    """Return the quantities of a network with this number of outputs. Units that are not given are read from the name.

    >>> quantities("strength (MPa)", None, 1)
    [Quantity(name='strength', unit='MPa')]
    >>> [quantity.name for quantity in quantities(None, ("m", "s"), 2)]
    ['output 1', 'output 2']
    """
    found = UNIT.fullmatch(name or "")
    base, unit = (found[1], found[2]) if found else (name, "")
    if units is not None and len(units) not in (1, outputs):
        raise BatchbayesError(
            expected=f"one unit, or {outputs} with commas between them", got=", ".join(units), fix="check --unit"
        )
    each = [unit] * outputs if units is None else list(units) * (outputs if len(units) == 1 else 1)
    if outputs == 1:
        return [Quantity(base or "target", each[0])]
    return [Quantity(f"{base or 'output'} {i}", unit) for i, unit in enumerate(each, start=1)]


OFFERS = {
    By.PREDICTION: ' Intervals by groups of the predictions, or scaled by their spread (intervals="groups" or '
    '"spread", --intervals) follow this better if there is enough calibration data.',
    By.COLUMN: " No interval that depends on the prediction alone can follow this. What helps is a network that "
    "predicts its own spread (bb.heteroscedastic_gaussian), or intervals for each group of that column (Mondrian): "
    "UncertainRegressor().fit(X, y, groups=...).",
}
"""What helps where intervals are too narrow."""


@dataclass(frozen=True, eq=False)
class Findings:
    """What there is to say about a regression with D outputs."""

    rows: Rows
    """The rows of predictions.csv."""
    contenders: Sequence[Contender[Any]]
    """All that was compared, the network as it is first."""
    choice: Choice
    targets: Tensor
    """The test targets, (N, D)."""
    errors: Tensor
    """What the recommended method predicts minus the targets, (N, D)."""
    intervals: Intervals
    ends: tuple[Tensor, Tensor]
    """The ends of its intervals, (N, D) each."""
    plain: tuple[Tensor, Tensor]
    """The ends of plain conformal intervals, (N, D) each."""
    columns: Mapping[str, Tensor]
    """The inputs of a table, (N,) each."""
    spread: Tensor | None
    """How far its draws of the first output scatter, (N,); None if it makes no draws."""
    quantities: Sequence[Quantity]
    """What the outputs are."""
    ood: Examples | None
    calibration_count: int
    """How many examples the intervals were calibrated on."""

    def predictions(self, output: int) -> Tensor:
        """Return what was predicted for an output, (N,)."""
        return (self.targets + self.errors)[:, output]

    def inside(self, output: int, ends: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Return which targets of an output are in their intervals, (N,)."""
        (lower, upper), targets = ends or self.ends, self.targets
        return ((targets >= lower) & (targets <= upper))[:, output]


def value_verdict(found: Findings) -> Verdict:
    """Return the sentences of the first screen."""
    rows, quantities, targets, errors = found.rows, found.quantities, found.targets, found.errors
    each = list(zip(quantities, errors.T, targets.T, strict=True))
    good = [_within(quantity, error) for quantity, error, _ in each]
    worst = [worst_group(interval_groups(found, i)) for i in range(len(quantities))]
    narrow = any(worst)
    verdict = {
        "headline": f"90 % of true values fall within {_listed(good, quantities)} of the prediction"
        + (", but its intervals are too narrow for some of them." if narrow else "."),
        "What to do next": next_step(
            found.choice,
            value_gains(found.choice, found.contenders[0]),
            marks=any(rows["flag"]),
            but=DOUBTFUL if narrow else "",
        ),
        "How good is it?": " ".join(_good(*every, named=len(each) > 1) for every in each)
        + f" This was counted on {count(len(targets), 'test example')}.",
        "Can its intervals be believed?": " ".join(_believed(found, i, group) for i, group in enumerate(worst)),
        "When to look twice": _marked(found),
    }
    if found.ood is not None:
        verdict["Strange inputs"] = strange_sentence(rows, found.ood.name)
    if len(targets) < FEWEST:
        return Verdict(too_few(len(targets), "test example", 100), is_usable=False)
    if all(_explained(error, target) <= 0 for _, error, target in each):
        headline = (
            "It is no better than guessing: the mean of the test values as the answer to all inputs does as well."
        )
        return Verdict(verdict | {"headline": headline, "What to do next": CHECK}, is_usable=False)
    return Verdict(verdict)


def value_gains(choice: Choice, network: Contender[Any]) -> list[str]:
    """Say what the recommended method does better than the network as it is."""
    if choice.is_network:
        return []
    chosen, own = choice.recommended.metrics, network.metrics
    named = {"rmse": ("typical errors are", "smaller"), "conformal_width": ("the intervals are", "narrower")}
    less = {key: 1 - chosen[key] / own[key] for key in named if key in chosen and own.get(key)}
    found = [f"{named[key][0]} {percent(share, 0)} {named[key][1]}" for key, share in less.items() if share >= SMALL]
    if not found and chosen["nll"] < own["nll"]:
        found = ["the intervals fit each prediction better"]
    return found or [no_gain(choice, network)]


def _reach(errors: Tensor) -> float:
    """Return how far 90 % of the absolute errors reach."""
    return float(errors.double().abs().quantile(0.9)) if len(errors) else math.nan


def _within(quantity: Quantity, errors: Tensor) -> str:
    return f"±{quantity.text(_reach(errors))}"


def _listed(texts: Sequence[str], quantities: Sequence[Quantity]) -> str:
    """Join texts, each with the name of its quantity if there are several."""
    if len(texts) == 1:
        return texts[0]
    return ", ".join(f"{text} ({quantity.name})" for text, quantity in zip(texts, quantities, strict=True))


def _good(quantity: Quantity, errors: Tensor, targets: Tensor, *, named: bool) -> str:
    """Say how far predictions are off, and how far the mean of the targets would be off."""
    subject = f"The prediction of {quantity.name}" if named else "The prediction"
    if float(targets.double().var(correction=0)) == 0:
        return f"{subject} is within {_within(quantity, errors)} in 90 % of cases. All test targets are equal."
    half = quantity.text(float(errors.double().abs().median()))
    guess = _within(quantity, targets - targets.double().mean())
    return (
        f"{subject} is off by less than {half} in half of the cases, and within {_within(quantity, errors)} in 90 % of "
        f"them. If the mean of all were the answer, this would be {guess}."
    )


def _believed(found: Findings, output: int, worst: Group | None) -> str:
    """Say whether intervals hold as many targets as they should, on average and in groups, as far as data can tell."""
    quantity, targets = found.quantities[output], found.targets[:, output]
    lower, upper = (end[:, output] for end in found.ends)
    if not bool(lower.isfinite().all()):
        return "There are none: too little calibration data."
    variance, counts = LEVEL * (1 - LEVEL), (len(targets), found.calibration_count)
    held = float(found.inside(output).double().mean())
    slack = max(SMALL, DOUBT * sum(variance / max(1, each) for each in counts) ** 0.5)
    gap = held - LEVEL
    if abs(gap) > slack:
        word = "No, they are too narrow." if gap < 0 else "Yes, but they are too wide."
    elif worst is not None:
        word = "On average, but not everywhere."
    else:
        word = "Yes." if abs(gap) < LARGE else f"Yes, as far as {len(targets)} examples can tell."
    half = (upper - lower).double() / 2
    narrow, wide = float(half.min()), float(half.max())
    about = f" of {quantity.name}" if len(found.quantities) > 1 else ""
    kind = (
        f"Each prediction{about} has an interval of its own, from ±{quantity.text(narrow)} to ±{quantity.text(wide)}"
        if wide > 1.02 * narrow
        else f"All predictions{about} have the same interval, ±{quantity.text(wide)}"
    )
    return (
        f"{word} {kind}. Of 100 true values {of_100(held)} fell into theirs, and {of_100(LEVEL)} should."
        f"{_remedy(found, output)}{_told_group(worst, quantity)}"
    )


def interval_groups(found: Findings, output: int) -> list[Group]:
    """Return groups of test examples, and which share of each is inside of its intervals."""
    inside = found.inside(output)
    extra = LEVEL * (1 - LEVEL) / max(1, found.calibration_count)
    said = torch.full_like(inside, LEVEL, dtype=torch.float64)
    groups = fifths_of(found.predictions(output), inside, found.calibration_count)
    return groups + shared_groups(found.columns, numbers(found.rows, "flag"), said, inside, extra)


def _remedy(found: Findings, output: int) -> str:
    """Say what the intervals do beyond plain ones, and what it gains in the fifth where those are worst."""
    kind, mean = found.intervals.outputs[output].kind, found.predictions(output)
    each = [fifths_of(mean, inside) for inside in (found.inside(output), found.inside(output, found.plain))]
    if kind is Kind.PLAIN or not all(each):
        return ""
    own, plain = (of_100(min(group.held for group in groups)) for groups in each)
    return (
        f" {REMEDIES[kind]}: in the worst fifth of the predictions {own} of 100 fell into theirs. With plain intervals "
        f"it would be {plain}."
    )


def _told_group(group: Group | None, quantity: Quantity) -> str:
    """Name a group in which intervals are too narrow."""
    if group is None:
        return ""
    return (
        f" They are too narrow {place(group, quantity.unit)}: of 100 true values {of_100(group.held)} fell into theirs "
        f"there{give_or_take(group.error)}.{OFFERS.get(group.by, '')}"
    )


def _marked(found: Findings) -> str:
    """Say how much larger the errors are of what is marked."""
    flagged = numbers(found.rows, "flag") > 0
    if not bool(flagged.any()):
        novel = "" if "" in found.rows["novelty"] else ", but would mark inputs unlike the training data"
        follows = any(each.kind is not Kind.PLAIN for each in found.intervals.outputs)
        certain = (
            "Its certainty depends on the size of the prediction alone"
            if follows
            else "It is equally certain about all inputs"
        )
        return (
            f"{certain}, so it does not tell which predictions are worse than others. "
            f"predictions.csv marks none{novel}."
        )
    inside, outside = (
        _listed(list(map(_within, found.quantities, found.errors[part].T)), found.quantities)
        for part in (flagged, ~flagged)
    )
    return (
        f"predictions.csv marks {of_100(float(flagged.double().mean()))} of 100 predictions (flag = 1). 90 % of true "
        f"values fall within {inside} of those, and within {outside} of the others."
    )


def _explained(errors: Tensor, targets: Tensor) -> float:
    """Return the share of the variance of the targets that is explained; 1 if there is none to explain."""
    variance = float(targets.double().var(correction=0))
    return 1 - float(errors.double().square().mean()) / variance if variance else 1.0


def value_terms(found: Findings) -> dict[str, str]:
    """Return the verdict in the terms of statistics."""
    errors, targets, quantities = found.errors, found.targets, found.quantities
    terms = {"Which method": sentence_of_choice(found.choice)}
    for i, quantity in enumerate(quantities):
        root = quantity.text(float(errors[:, i].double().square().mean()) ** 0.5)
        name = f" of {quantity.name}" if len(quantities) > 1 else ""
        terms[f"Error{name}"] = (
            f"The root mean squared error (RMSE) is {root}. It explains "
            f"{percent(_explained(errors[:, i], targets[:, i]), 0)} of the variance of the targets."
        )
    terms["Intervals"] = _conformal(found, found.choice.recommended.metrics)
    if found.spread is not None:
        terms["Setting the uncertain ones aside"] = _rejection(found.spread, errors[:, 0], quantities[0])
    if found.ood is not None:
        terms["Strange inputs"] = f"{_strange(found.contenders, found.ood.name)} {novelty_terms(found.rows)}"
    return terms


def _conformal(found: Findings, chosen: Mapping[str, float]) -> str:
    text = f"The 90 % intervals of the predicted distribution hold {percent(chosen['coverage_90'])} of the targets."
    if "conformal_coverage" not in chosen:
        return f"{text} There is too little calibration data for conformal intervals."
    lower, upper = found.ends
    widths = [each.text(float(width)) for each, width in zip(found.quantities, (upper - lower).mean(0), strict=True)]
    kinds = [each.kind.value for each in found.intervals.outputs]
    shares = ", ".join(percent(group.held, 0) for group in fifths_of(found.predictions(0), found.inside(0)))
    of_first = f" of {found.quantities[0].name}" if len(kinds) > 1 else ""
    return (
        f"{text} Conformal intervals ({', '.join(dict.fromkeys(kinds))}), which are stretched to fit the calibration "
        f"data, hold {percent(chosen['conformal_coverage'])}. Their mean width is {_listed(widths, found.quantities)}."
        + (f" In fifths of the predictions{of_first}, from the lowest, they hold {shares}." if shares else "")
    )


def _rejection(spread: Tensor, errors: Tensor, quantity: Quantity) -> str:
    """Say what is gained if the inputs about which the draws disagree most are set aside."""
    correlation = rank_correlation(spread, errors.abs())
    kept = spread.argsort(stable=True)[: max(1, round((1 - ASIDE) * len(spread)))]
    before, after = (quantity.text(float(part.square().mean()) ** 0.5) for part in (errors, errors[kept]))
    limit = quantity.text(float(spread[kept].max()))
    return (
        f"The uncertainty of a prediction is the standard deviation of its draws. Without the {percent(ASIDE, 0)} "
        f"above {limit} the RMSE changes from {before} to {after}. The rank correlation of this spread and the actual "
        f"error is {correlation:.2f} (0: not related, 1: in the same order)."
    )


def _strange(contenders: Sequence[Contender[Any]], name: str) -> str:
    """Say how well inputs from elsewhere are noticed by the method that notices them best."""
    found = [(each.metrics["ood_auroc"], each.name) for each in contenders if "ood_auroc" in each.metrics]
    if not found:
        return f"No method gives inputs of {name} another spread than test inputs."
    value, method = max(found)
    return (
        f"By the spread of {method}, of one input of {name} and one test input, the strange one is the more uncertain "
        f"in {percent(value)} of all pairs (50 % is guessing)."
    )


UNIT = re.compile(r"(.*\S)\s*[(\[]([^()\[\]]+)[)\]]\s*")
"""A name with a unit in brackets at its end: "strength (MPa)", "time [s]"."""
