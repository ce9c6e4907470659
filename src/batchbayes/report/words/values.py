"""The verdict on a regression: in plain words for the first screen, and then in the terms of statistics.

Every number in a sentence keeps its unit.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from batchbayes._common.text import count, number, percent
from batchbayes.errors import BatchbayesError
from batchbayes.metrics import rank_correlation
from batchbayes.report.compare.groups import LARGE, SMALL, By, Group, shared_groups, worst_group
from batchbayes.report.compare.intervals import LEVEL, Kind, fifths_of
from batchbayes.report.words.shared import (
    ASIDE,
    DOUBT,
    FEWEST,
    Verdict,
    give_or_take,
    next_step,
    no_gain,
    numbers,
    of_100,
    place,
    sentence_of_choice,
    strange_sentence,
    strange_terms,
    too_few,
    yes,
)

if TYPE_CHECKING:
    from batchbayes.report.result import Assessment

UNIT = re.compile(r"(.*\S)\s*[(\[]([^()\[\]]+)[)\]]\s*")
"""A name with a unit in brackets at its end: "strength (MPa)", "time [s]"."""
DOUBTFUL = "do not rely on its intervals where they are called too narrow below"
REMEDIES = {
    Kind.SPREAD: "Their width follows how far predictions of this size are usually off",
    Kind.GROUPS: "Predictions of each size have a width of their own",
    Kind.QUANTILES: "How far they reach down and up follows the errors of predictions of this size",
}
OFFERS = {
    By.PREDICTION: ' Intervals by groups of the predictions, or scaled by their spread (intervals="groups" or '
    '"spread", --intervals) follow this better if there is enough calibration data.',
    By.COLUMN: " No interval that depends on the prediction alone can follow this. What helps is a network that "
    "predicts its own spread (bb.heteroscedastic_gaussian), or intervals for each group of that column (Mondrian): "
    "UncertainRegressor().fit(X, y, groups=...).",
}
"""What helps where intervals are too narrow."""
CHECK = (
    "Do not use it yet. Check that inputs and targets are prepared as in training (scaling, units, the order of the "
    "columns), and that these are the right weights."
)
GUESS = "It is no better than guessing: the mean of the test values as the answer to all inputs does as well."


def names_and_units(name: str | None, units: Sequence[str] | None, outputs: int) -> list[tuple[str, str]]:
    """Return name and unit of each output of a network. Units that are not given are read from the name of the target.

    >>> names_and_units("strength (MPa)", None, 1)
    [('strength', 'MPa')]
    >>> names_and_units(None, ("m", "s"), 2)
    [('output 1', 'm'), ('output 2', 's')]
    """
    found = UNIT.fullmatch(name or "")
    base, unit = (found[1], found[2]) if found else (name, "")
    if units is not None and len(units) not in (1, outputs):
        raise BatchbayesError(
            expected=f"one unit, or {outputs} with commas between them", got=", ".join(units), fix="check --unit"
        )
    each = [unit] * outputs if units is None else list(units) * (outputs if len(units) == 1 else 1)
    if outputs == 1:
        return [(base or "target", each[0])]
    return [(f"{base or 'output'} {i}", unit) for i, unit in enumerate(each, start=1)]


@dataclass(frozen=True, eq=False)
class Values:
    """One output of a regression on the N test examples: what was predicted, and what is true, (N,) each."""

    name: str
    unit: str
    """Empty if it is not known."""
    targets: Tensor
    errors: Tensor
    """What the recommended method predicts minus the targets."""
    lower: Tensor
    upper: Tensor
    """The ends of its intervals."""
    in_plain: Tensor
    """Which targets plain conformal intervals would hold."""
    kind: Kind
    """How the intervals depend on the prediction."""

    def text(self, value: float) -> str:
        """Write a number with its unit: "10.2 MPa"."""
        return f"{number(value)} {self.unit}".rstrip()

    @property
    def label(self) -> str:
        """What stands in the brackets of an axis."""
        return self.unit or self.name

    @property
    def inside(self) -> Tensor:
        """Which targets are in their intervals."""
        return (self.targets >= self.lower) & (self.targets <= self.upper)

    @property
    def predictions(self) -> Tensor:
        return self.targets + self.errors

    @property
    def explained(self) -> float:
        """The share of the variance of the targets that is explained; 1 if there is none to explain."""
        variance = float(self.targets.double().var(correction=0))
        return 1 - float(self.errors.double().square().mean()) / variance if variance else 1.0

    def within(self, errors: Tensor) -> str:
        """Write how far 90 % of errors reach."""
        return f"±{self.text(float(errors.double().abs().quantile(0.9)) if len(errors) else math.nan)}"

    def groups(self, found: "Assessment", columns: Mapping[str, Tensor]) -> list[Group]:
        """Return groups of test examples, and which share of each is inside of its intervals."""
        said, inside = torch.full_like(self.targets, LEVEL, dtype=torch.float64), self.inside
        calibrated = len(found.recommended.calibration_losses)
        extra = LEVEL * (1 - LEVEL) / max(1, calibrated)
        groups = fifths_of(self.predictions, inside, calibrated)
        return groups + shared_groups(columns, numbers(found.rows, "flag"), said, inside, extra)


def value_verdict(found: "Assessment", outputs: Sequence[Values], columns: Mapping[str, Tensor]) -> Verdict:
    """Return the sentences of the first screen. `columns` are the inputs of a table, (N,) each."""
    rows, total, ood = found.rows, len(outputs[0].targets), found.case.ood
    worst = [worst_group(each.groups(found, columns)) for each in outputs]
    narrow = any(worst)
    verdict = {
        "headline": f"90 % of true values fall within {_listed(outputs, (o.within(o.errors) for o in outputs))} of the "
        + ("prediction, but its intervals are too narrow for some of them." if narrow else "prediction."),
        "What to do next": next_step(
            found.choice, value_gains(found), marks=any(rows["flag"]), but=DOUBTFUL if narrow else ""
        ),
        "How good is it?": " ".join(_good(each, named=len(outputs) > 1) for each in outputs)
        + f" This was counted on {count(total, 'test example')}.",
        "Can its intervals be believed?": " ".join(
            _believed(found, each, group, named=len(outputs) > 1) for each, group in zip(outputs, worst, strict=True)
        ),
        "When to look twice": _marked(found, outputs),
    }
    if ood is not None:
        verdict["Strange inputs"] = strange_sentence(rows, ood.name)
    if total < FEWEST:
        return Verdict(too_few(total, "test example", 100), is_usable=False)
    if all(each.explained <= 0 for each in outputs):
        return Verdict(verdict | {"headline": GUESS, "What to do next": CHECK}, is_usable=False)
    return Verdict(verdict)


def value_gains(found: "Assessment") -> list[str]:
    """Say what the recommended method does better than the network as it is."""
    if found.choice.is_network:
        return []
    chosen, own = found.choice.recommended.metrics, found.contenders[0].metrics
    named = {"rmse": ("typical errors are", "smaller"), "conformal_width": ("the intervals are", "narrower")}
    less = {key: 1 - chosen[key] / own[key] for key in named if key in chosen and own.get(key)}
    gains = [f"{named[key][0]} {percent(share, 0)} {named[key][1]}" for key, share in less.items() if share >= SMALL]
    if not gains and chosen["nll"] < own["nll"]:
        gains = ["the intervals fit each prediction better"]
    return gains or [no_gain(found.choice, found.contenders[0])]


def _listed(outputs: Sequence[Values], texts: Iterable[str]) -> str:
    """Join a text for each output, with its name if there are several."""
    several = len(outputs) > 1
    return ", ".join(f"{text} ({o.name})" if several else text for o, text in zip(outputs, texts, strict=True))


def _good(output: Values, *, named: bool) -> str:
    """Say how far predictions are off, and how far the mean of the targets would be off."""
    subject, within = "The prediction" + (f" of {output.name}" if named else ""), output.within(output.errors)
    targets = output.targets.double()
    if float(targets.var(correction=0)) == 0:
        return f"{subject} is within {within} in 90 % of cases. All test targets are equal."
    return (
        f"{subject} is off by less than {output.text(float(output.errors.double().abs().median()))} in half of the "
        f"cases, and within {within} in 90 % of them. If the mean of all were the answer, this would be "
        f"{output.within(output.targets - targets.mean())}."
    )


def _believed(found: "Assessment", output: Values, worst: Group | None, *, named: bool) -> str:
    """Say whether intervals hold as many targets as they should, on average and in groups, as far as data can tell."""
    if not bool(output.lower.isfinite().all()):
        return "There are none: too little calibration data."
    total, held = len(output.targets), float(output.inside.double().mean())
    counts, gap = (total, len(found.recommended.calibration_losses)), held - LEVEL
    slack = max(SMALL, DOUBT * sum(LEVEL * (1 - LEVEL) / max(1, each) for each in counts) ** 0.5)
    if abs(gap) > slack:
        word = "No, they are too narrow." if gap < 0 else "Yes, but they are too wide."
    elif worst is not None or abs(gap) < LARGE:
        word = yes(worst)
    else:
        word = f"Yes, as far as {total} examples can tell."
    half, about = (output.upper - output.lower).double() / 2, f" of {output.name}" if named else ""
    narrow, wide = float(half.min()), float(half.max())
    kind = (
        f"Each prediction{about} has an interval of its own, from ±{output.text(narrow)} to ±{output.text(wide)}"
        if wide > 1.02 * narrow
        else f"All predictions{about} have the same interval, ±{output.text(wide)}"
    )
    return (
        f"{word} {kind}. Of 100 true values {of_100(held)} fell into theirs, and {of_100(LEVEL)} should."
        f"{_remedy(output)}{_told_group(worst, output.unit)}"
    )


def _remedy(output: Values) -> str:
    """Say what the intervals do beyond plain ones, and what it gains in the fifth where those are worst."""
    each = [fifths_of(output.predictions, inside) for inside in (output.inside, output.in_plain)]
    if output.kind is Kind.PLAIN or not all(each):
        return ""
    own, plain = (of_100(min(group.held for group in groups)) for groups in each)
    return (
        f" {REMEDIES[output.kind]}: in the worst fifth of the predictions {own} of 100 fell into theirs. With plain "
        f"intervals it would be {plain}."
    )


def _told_group(group: Group | None, unit: str) -> str:
    """Name a group in which intervals are too narrow."""
    if group is None:
        return ""
    return (
        f" They are too narrow {place(group, unit)}: of 100 true values {of_100(group.held)} fell into theirs "
        f"there{give_or_take(group.error)}.{OFFERS.get(group.by, '')}"
    )


def _marked(found: "Assessment", outputs: Sequence[Values]) -> str:
    """Say how much larger the errors are of what is marked."""
    flagged = numbers(found.rows, "flag") > 0
    if not bool(flagged.any()):
        novel = "" if "" in found.rows["novelty"] else ", but would mark inputs unlike the training data"
        follows = any(each.kind is not Kind.PLAIN for each in outputs)
        depends = "Its certainty depends on the size of the prediction alone"
        return (
            f"{depends if follows else 'It is equally certain about all inputs'}, so it does not tell which "
            f"predictions are worse than others. predictions.csv marks none{novel}."
        )
    inside, outside = (_listed(outputs, (o.within(o.errors[some]) for o in outputs)) for some in (flagged, ~flagged))
    return (
        f"predictions.csv marks {of_100(float(flagged.double().mean()))} of 100 predictions (flag = 1). 90 % of true "
        f"values fall within {inside} of those, and within {outside} of the others."
    )


def value_terms(found: "Assessment", outputs: Sequence[Values], spread: Tensor | None) -> dict[str, str]:
    """Return the verdict in the terms of statistics. `spread` is that of the draws of the first output, (N,)."""
    terms, ood = {"Which method": sentence_of_choice(found.choice)}, found.case.ood
    for each in outputs:
        root = each.text(float(each.errors.double().square().mean()) ** 0.5)
        terms["Error" + (f" of {each.name}" if len(outputs) > 1 else "")] = (
            f"The root mean squared error (RMSE) is {root}. It explains {percent(each.explained, 0)} of the variance "
            "of the targets."
        )
    terms["Intervals"] = _conformal(outputs, found.recommended.metrics)
    if spread is not None:
        terms["Setting the uncertain ones aside"] = _rejection(spread, outputs[0])
    if ood is not None:
        known = [(each.metrics["ood_auroc"], each.name) for each in found.contenders if "ood_auroc" in each.metrics]
        value, method = max(known, default=(0.0, ""))
        told = f"By the spread of {method}, of one input of {ood.name} and one test input, the strange one is the more "
        none = f"No method gives inputs of {ood.name} another spread than test inputs."
        told = f"{told}uncertain in {percent(value)}" if known else none
        terms["Strange inputs"] = strange_terms(found.rows, told, "50 % is guessing" if known else "")
    return terms


def _conformal(outputs: Sequence[Values], chosen: Mapping[str, float]) -> str:
    text = f"The 90 % intervals of the predicted distribution hold {percent(chosen['coverage_90'])} of the targets."
    if "conformal_coverage" not in chosen:
        return f"{text} There is too little calibration data for conformal intervals."
    widths = _listed(outputs, (each.text(float((each.upper - each.lower).mean())) for each in outputs))
    kinds, first = dict.fromkeys(each.kind.value for each in outputs), outputs[0]
    shares = ", ".join(percent(group.held, 0) for group in fifths_of(first.predictions, first.inside))
    of_first = f" of {first.name}" if len(outputs) > 1 else ""
    return (
        f"{text} Conformal intervals ({', '.join(kinds)}), which are stretched to fit the calibration data, hold "
        f"{percent(chosen['conformal_coverage'])}. Their mean width is {widths}."
        + (f" In fifths of the predictions{of_first}, from the lowest, they hold {shares}." if shares else "")
    )


def _rejection(spread: Tensor, output: Values) -> str:
    """Say what is gained if the inputs about which the draws disagree most are set aside."""
    errors, kept = output.errors, spread.argsort(stable=True)[: max(1, round((1 - ASIDE) * len(spread)))]
    before, after = (output.text(float(part.square().mean()) ** 0.5) for part in (errors, errors[kept]))
    return (
        f"The uncertainty of a prediction is the standard deviation of its draws. Without the {percent(ASIDE, 0)} "
        f"above {output.text(float(spread[kept].max()))} the RMSE changes from {before} to {after}. The rank "
        f"correlation of this spread and the actual error is {rank_correlation(spread, errors.abs()):.2f} (0: not "
        "related, 1: in the same order)."
    )
