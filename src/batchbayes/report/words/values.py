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
from batchbayes.report.words import shared
from batchbayes.report.words.say import say
from batchbayes.report.words.shared import ASIDE, DOUBT, FEWEST, Verdict, numbers

if TYPE_CHECKING:
    from batchbayes.report.result import Assessment

UNIT = re.compile(r"(.*\S)\s*[(\[]([^()\[\]]+)[)\]]\s*")
"""A name with a unit in brackets at its end: "strength (MPa)", "time [s]"."""


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
    rows, total, ood, named = found.rows, len(outputs[0].targets), found.case.ood, len(outputs) > 1
    worst = [worst_group(each.groups(found, columns)) for each in outputs]
    headline = say(
        "within_narrow" if any(worst) else "within", within=_listed(outputs, (o.within(o.errors) for o in outputs))
    )
    doubt = say("doubtful") if any(worst) else ""
    believed = [_believed(found, each, group, named=named) for each, group in zip(outputs, worst, strict=True)]
    good = [_good(each, named=named) for each in outputs]
    verdict = {
        "headline": headline,
        "What to do next": shared.next_step(found.choice, value_gains(found), marks=any(rows["flag"]), but=doubt),
        "How good is it?": " ".join(good) + say("counted", total=count(total, "test example")),
        "Can its intervals be believed?": " ".join(believed),
        "When to look twice": _marked(found, outputs),
    }
    if ood is not None:
        verdict["Strange inputs"] = shared.strange_sentence(rows, ood.name)
    if total < FEWEST:
        return Verdict(shared.too_few(total, "test example", 100), is_usable=False)
    if all(each.explained <= 0 for each in outputs):
        return shared.guessing(verdict, say("guess_values"), "check_values")
    return Verdict(verdict)


def value_gains(found: "Assessment") -> list[str]:
    """Say what the recommended method does better than the network as it is."""
    if found.choice.is_network:
        return []
    chosen, own = found.choice.recommended.metrics, found.contenders[0].metrics
    known = [key for key in ("rmse", "conformal_width") if key in chosen and own.get(key)]
    less = {key: 1 - chosen[key] / own[key] for key in known}
    gains = [say(f"gain_{key}", less=share) for key, share in less.items() if share >= SMALL]
    if not gains and chosen["nll"] < own["nll"]:
        gains = [say("gain_intervals")]
    return gains or [shared.no_gain(found.choice, found.contenders[0])]


def _listed(outputs: Sequence[Values], texts: Iterable[str]) -> str:
    """Join a text for each output, with its name if there are several."""
    several = len(outputs) > 1
    return ", ".join(f"{text} ({o.name})" if several else text for o, text in zip(outputs, texts, strict=True))


def _good(output: Values, *, named: bool) -> str:
    """Say how far predictions are off, and how far the mean of the targets would be off."""
    of, targets = f" of {output.name}" if named else "", output.targets.double()
    within, half = output.within(output.errors), output.text(float(output.errors.double().abs().median()))
    is_equal, guess = float(targets.var(correction=0)) == 0, output.within(output.targets - targets.mean())
    return say("off_by_equal" if is_equal else "off_by", of=of, within=within, half=half, guess=guess)


def _believed(found: "Assessment", output: Values, worst: Group | None, *, named: bool) -> str:
    """Say whether intervals hold as many targets as they should, on average and in groups, as far as data can tell."""
    if not bool(output.lower.isfinite().all()):
        return say("no_intervals")
    total, held = len(output.targets), float(output.inside.double().mean())
    counts, gap = (total, len(found.recommended.calibration_losses)), held - LEVEL
    slack = max(SMALL, DOUBT * sum(LEVEL * (1 - LEVEL) / max(1, each) for each in counts) ** 0.5)
    if abs(gap) > slack:
        word = say("intervals_narrow" if gap < 0 else "intervals_wide")
    elif worst is not None or abs(gap) < LARGE:
        word = shared.yes(worst)
    else:
        word = say("intervals_about", total=total)
    half, of = (output.upper - output.lower).double() / 2, f" of {output.name}" if named else ""
    narrow, wide = float(half.min()), float(half.max())
    kind = "intervals_differ" if wide > 1.02 * narrow else "intervals_same"
    return say(
        "intervals",
        word=word,
        kind=say(kind, of=of, narrow=output.text(narrow), wide=output.text(wide)),
        held=held,
        level=LEVEL,
        remedy=_remedy(output),
        worst=_told_group(worst, output.unit),
    )


def _remedy(output: Values) -> str:
    """Say what the intervals do beyond plain ones, and what it gains in the fifth where those are worst."""
    each = [fifths_of(output.predictions, inside) for inside in (output.inside, output.in_plain)]
    if output.kind is Kind.PLAIN or not all(each):
        return ""
    own, plain = (min(group.held for group in groups) for groups in each)
    return say("remedy", how=say(f"remedy_{output.kind.value}"), own=own, plain=plain)


def _told_group(group: Group | None, unit: str) -> str:
    """Name a group in which intervals are too narrow, and what helps."""
    if group is None:
        return ""
    offer = say(f"offer_{group.by.value}") if group.by in (By.PREDICTION, By.COLUMN) else ""
    return say("worst_value", place=shared.place(group, unit), group=group, offer=offer)


def _marked(found: "Assessment", outputs: Sequence[Values]) -> str:
    """Say how much larger the errors are of what is marked."""
    flagged = numbers(found.rows, "flag") > 0
    if not bool(flagged.any()):
        follows = any(each.kind is not Kind.PLAIN for each in outputs)
        novel = "" if "" in found.rows["novelty"] else say("marks_novel")
        return say("marks_no_values", certain=say("marks_by_size" if follows else "marks_alike"), novel=novel)
    inside, outside = (_listed(outputs, (o.within(o.errors[some]) for o in outputs)) for some in (flagged, ~flagged))
    return say("marks_values", share=float(flagged.double().mean()), inside=inside, outside=outside)


def value_terms(found: "Assessment", outputs: Sequence[Values], spread: Tensor | None) -> dict[str, str]:
    """Return the verdict in the terms of statistics. `spread` is that of the draws of the first output, (N,)."""
    terms, ood = {"Which method": shared.sentence_of_choice(found.choice)}, found.case.ood
    for each in outputs:
        root = each.text(float(each.errors.double().square().mean()) ** 0.5)
        name = f" of {each.name}" if len(outputs) > 1 else ""
        terms[f"Error{name}"] = say("error", root=root, explained=each.explained)
    metrics = found.recommended.metrics
    conformal = _conformal(outputs, metrics) if "conformal_coverage" in metrics else say("conformal_none")
    terms["Intervals"] = say("predicted_intervals", metrics=metrics, conformal=conformal)
    if spread is not None:
        terms["Setting the uncertain ones aside"] = _rejection(spread, outputs[0])
    if ood is not None:
        known = [(each.metrics["ood_auroc"], each.name) for each in found.contenders if "ood_auroc" in each.metrics]
        auroc, method = max(known, default=(0.0, ""))
        told = say("strange_values" if known else "strange_values_none", name=ood.name, auroc=auroc, method=method)
        terms["Strange inputs"] = told + shared.novelty_terms(found.rows)
    return terms


def _conformal(outputs: Sequence[Values], metrics: Mapping[str, float]) -> str:
    widths = _listed(outputs, (each.text(float((each.upper - each.lower).mean())) for each in outputs))
    kinds, first = ", ".join(dict.fromkeys(each.kind.value for each in outputs)), outputs[0]
    shares = ", ".join(percent(group.held, 0) for group in fifths_of(first.predictions, first.inside))
    of = f" of {first.name}" if len(outputs) > 1 else ""
    fifths = say("conformal_fifths", of=of, shares=shares) if shares else ""
    return say("conformal", kinds=kinds, metrics=metrics, widths=widths, fifths=fifths)


def _rejection(spread: Tensor, output: Values) -> str:
    """Say what is gained if the inputs about which the draws disagree most are set aside."""
    errors, kept = output.errors, spread.argsort(stable=True)[: max(1, round((1 - ASIDE) * len(spread)))]
    before, after = (output.text(float(part.square().mean()) ** 0.5) for part in (errors, errors[kept]))
    limit, correlation = output.text(float(spread[kept].max())), rank_correlation(spread, errors.abs())
    return say("aside_values", aside=ASIDE, limit=limit, before=before, after=after, correlation=correlation)
