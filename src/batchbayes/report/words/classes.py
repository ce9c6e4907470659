"""The verdict on classes, of examples or of their pixels or tokens: in plain words, and in the terms of statistics."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from batchbayes._common.text import count, percent
from batchbayes.report.compare import groups as by
from batchbayes.report.compare.groups import By, Group, Trust
from batchbayes.report.words import shared
from batchbayes.report.words.say import give_or_take, of_100, say
from batchbayes.report.words.shared import ASIDE, DOUBT, Verdict, column, honest_words, numbers

if TYPE_CHECKING:
    from batchbayes.report.compare.rows import Rows
    from batchbayes.report.result import Assessment

SURE_LEVELS = (0.9, 0.8, 0.7, 0.6, 0.5)


@dataclass(frozen=True)
class Answers:
    """What the recommended method answered to the test data, counted."""

    noun: str
    """What is counted, in the singular: an answer, or a pixel."""
    examples: str
    """What the test data has, in the singular."""
    total: int
    wanted: int
    """How many examples are enough."""
    accuracy: float
    error: float
    """The standard error of the accuracy."""
    every: Group
    """All answers, or the surest ones if only these are off."""
    alone: Group
    """The answers of the network as it is."""
    worst: Group | None
    """A group in which percentages are too high."""
    classes: Counter[Any]
    """How often each class is the true one."""
    gain_error: float
    """The standard error of the gain of the accuracy over that of the most common class."""


def class_verdict(found: "Assessment") -> Verdict:
    """Return the sentences of the first screen for a classifier."""
    rows, own = found.rows, found.contenders[0].metrics
    targets, confidence = column(rows, "target"), numbers(rows, "confidence")
    right = torch.tensor([a == b for a, b in zip(column(rows, "prediction"), targets, strict=True)])
    accuracy, classes = float(right.double().mean()), Counter(targets)
    told = Answers(
        noun="answer",
        examples="test example",
        total=len(right),
        wanted=100,
        accuracy=accuracy,
        error=by.share_error(accuracy, len(right)),
        every=by.of_classes(confidence, right),
        alone=by.everything(own["mean_confidence"], own["accuracy"], by.share_error(own["accuracy"], len(right))),
        worst=by.worst_group(class_groups(rows, confidence, right, by.columns_of(found.case.test))),
        classes=classes,
        gain_error=_gain_error(targets, right, classes),
    )
    marked = shared.marked_sentence(numbers(rows, "flag") > 0, ~right)
    return _verdict(found, told, example_of(confidence, right, told.every), marked)


def _gain_error(targets: list[Any], right: Tensor, classes: Counter[Any]) -> float:
    common = classes.most_common(1)[0][0]
    gain = right.double() - torch.tensor([float(target == common) for target in targets])
    return float(gain.std()) / len(gain) ** 0.5


def image_verdict(found: "Assessment", limit_count: int) -> Verdict:
    """Return the sentences of the first screen for a segmentation. `limit_count` images have set the limit."""
    (whole, part), sums, alone = found.case.nouns, found.recommended.seen.test, found.contenders[0].seen.test
    chosen, wrong = found.recommended.metrics, sums.per_image("wrong")
    totals = sums.confusion.counts.sum(1).tolist()
    names = found.case.class_names or range(len(totals))
    error = float(wrong.std()) / len(wrong) ** 0.5 if len(wrong) > 1 else 0.5
    told = Answers(
        noun=part,
        examples=f"test {whole}",
        total=len(wrong),
        wanted=20,
        accuracy=chosen["accuracy"],
        error=error,
        every=by.of_images(sums.per_image("confidence"), wrong),
        alone=by.of_images(alone.per_image("confidence"), alone.per_image("wrong")),
        worst=by.worst_group(sums.class_groups(names)),
        classes=Counter({str(name): total for name, total in zip(names, totals, strict=False) if total}),
        gain_error=error,
    )
    example = say("says_of_pixels", confidence=chosen["mean_confidence"], told=told)
    marked = _marked_images(found.rows, limit_count, whole, part) + _least_certain(sums, part)
    return _verdict(found, told, example, marked)


def _verdict(found: "Assessment", told: Answers, example: str, marked: str) -> Verdict:
    """Put the sentences together. `example` says what percentages mean, and `marked` what the marks find."""
    own, ood, how, trust = found.contenders[0].metrics, found.case.ood, honest_words(told.every), told.every.trust
    good, before = say("good", told=told), of_100(own["accuracy"])
    headline, believed = "trust_off", say("believed_off", how=how)
    if trust is Trust.HONEST:
        headline, believed = "trust_honest_on_average" if told.worst else "trust_honest", shared.yes(told.worst)
    elif trust is Trust.UNKNOWN:
        headline, believed = "trust_unknown", say("believed_unknown", told=told)
    verdict = {
        "headline": f"{good}, {say(headline, how=how)}.",
        "What to do next": shared.next_step(
            found.choice, _gains(found, told), marks=True, cheap=cheaper(found), but=_still_off(found, told.every)
        ),
        "How good is it?": f"{good}{give_or_take(told.error)}."
        + ("" if before == of_100(told.accuracy) else say("good_alone", before=before))
        + say("counted", total=count(told.total, told.examples)),
        "Can its percentages be believed?": believed + example + _told_alone(found, told) + told_group(told.worst),
        "When to look twice": marked,
    }
    if ood is not None and told.noun == "answer":
        verdict["Strange inputs"] = shared.strange_sentence(found.rows, ood.name)
    if DOUBT * told.error > 2 * by.VAGUE:
        right = {"How good is it?": f"Right answers: {round(told.accuracy * told.total)} of {told.total}."}
        few = shared.too_few(told.total, told.examples, told.wanted) | (right if told.noun == "answer" else {})
        return Verdict(few, is_usable=False)
    if guess := guess_sentence(told, found.recommended.metrics["nll"]):
        return shared.guessing(verdict, guess, "check")
    return Verdict(verdict)


def _gains(found: "Assessment", told: Answers) -> list[str]:
    """Say what the recommended method does better than the network as it is."""
    own, chosen, choice = found.contenders[0].metrics, found.recommended.metrics, found.choice
    now, before, gains = of_100(told.accuracy), of_100(own["accuracy"]), []
    if told.accuracy > own["accuracy"] and before != now:
        gains.append(say("gain_right", now=now, told=told, before=before))
    if told.alone.is_off and told.every.trust is Trust.HONEST:
        gains.append(say("gain_honest"))
    elif told.every.is_little and not told.alone.is_little and told.alone.trust is not Trust.UNKNOWN:
        gains.append(say("gain_closer"))
    if not (choice.is_network or gains):
        gains.append(_truth(own["nll"], chosen["nll"]) or shared.no_gain(choice, found.contenders[0]))
    return gains


def _still_off(found: "Assessment", every: Group) -> str:
    """Say what to make of percentages that the recommended method does not correct."""
    if not every.is_off:
        return ""
    low = "lower" if every.trust is Trust.TOO_SURE else "higher"
    return say("off_network" if found.choice.is_network else "off_method", low=low, how=honest_words(every))


def cheaper(found: "Assessment") -> str:
    """Name what takes the time of the network alone, if it is almost as good as a recommended method that takes longer.

    Almost as good: right answers, and how probable the true classes are, differ by shares that matter to nobody.
    """
    if found.choice.is_network or found.recommended.passes < 1.5:
        return ""
    fast = min((each for each in found.contenders if each.passes <= 1), key=lambda each: each.calibration_loss)
    other, chosen = fast.metrics, found.recommended.metrics
    lost = math.exp(-chosen["nll"]) - math.exp(-other["nll"]), chosen["accuracy"] - other["accuracy"]
    name = "the network as it is" if fast is found.contenders[0] else f"“{fast.name}”"
    return "" if max(lost) >= by.SMALL else say("cheaper", name=name)


def _truth(before: float, after: float) -> str:
    """Say what a lower NLL means: how probable the true classes are, in the (geometric) mean. Empty if it is not lower.

    >>> _truth(0.4, 0.2)
    'the true classes are 82 % probable on average instead of 67 %'
    """
    if after >= before:
        return ""
    old, new = (percent(math.exp(-nll), 0) for nll in (before, after))
    return say("gain_truth" if old != new else "gain_truth_little", after=new, before=old)


def example_of(confidence: Tensor, right: Tensor, every: Group) -> str:
    """Say how many answers are right of those with high confidences (N,)."""
    says = say("says", confidence=float(confidence.mean())) if every.is_off else ""
    level = next((level for level in SURE_LEVELS if float((confidence >= level).double().mean()) >= 0.2), None)
    if level is None:
        return says
    sure = confidence >= level
    share = say("sure_all" if bool(sure.all()) else "sure_share", share=float(sure.double().mean()))
    return say("sure_right", says=says, level=level, right=float(right[sure].double().mean()), share=share)


def class_groups(rows: "Rows", confidence: Tensor, right: Tensor, columns: Mapping[str, Tensor]) -> list[Group]:
    """Return groups of test examples: by confidence, by predicted class, by each column, and those that are marked."""
    groups = list(by.groups_by(By.CONFIDENCE, confidence, confidence, right))
    predicted = column(rows, "prediction")
    for name in dict.fromkeys(predicted):
        some = torch.tensor([each == name for each in predicted])
        same = torch.zeros(int(some.sum()))
        groups += by.groups_by(By.CLASS, same, confidence[some], right[some], name=str(name))
    return groups + by.shared_groups(columns, numbers(rows, "flag"), confidence, right)


def told_group(group: Group | None) -> str:
    """Name a group in which percentages are too high."""
    return "" if group is None else say("worst_class", place=shared.place(group), group=group)


def _told_alone(found: "Assessment", told: Answers) -> str:
    """Say how honest the network alone is, if this differs."""
    how, own = honest_words(told.alone), found.contenders[0].metrics["mean_confidence"]
    if found.choice.is_network or not told.alone.is_off or how == honest_words(told.every):
        return ""
    return say("alone", how=how, confidence=own)


def guess_sentence(told: Answers, nll: float) -> str:
    """Say that the most common class for everything would do as well; empty if the network is better than that.

    `nll` is the mean negative log-likelihood of the truth, in nats.
    """
    shares = torch.tensor([n / told.classes.total() for n in told.classes.values()], dtype=torch.float64)
    common, best = told.classes.most_common(1)[0][0], float(shares.max())
    is_better = told.accuracy - best > DOUBT * told.gain_error
    if len(shares) < 2 or is_better or nll < 0.98 * float(-(shares * shares.log()).sum()):
        return ""
    what = "inputs" if told.noun == "answer" else f"{told.noun}s"
    return say("guess", told=told, best=best, common=common, what=what)


def _marked_images(rows: "Rows", limit_count: int, whole: str, part: str) -> str:
    """Say how many more pixels are wrong in images that are marked."""
    flagged, wrong = numbers(rows, "flag") > 0, numbers(rows, "error_rate")
    rough = say("marks_rough", images=count(limit_count, whole)) if limit_count < shared.FEWEST else ""
    named = {"whole": whole, "part": part, "rough": rough}
    if not bool(flagged.any()) or bool(flagged.all()):
        return say("marks_images", which="all" if bool(flagged.any()) else "none", **named)
    inside, outside = (float(wrong[some].mean()) for some in (flagged, ~flagged))
    counts = {"marked": int(flagged.sum()), "total": len(flagged)}
    return say("marks_images_find", inside=inside, outside=outside, **counts, **named)


def _least_certain(sums: Any, part: str) -> str:
    """Say how many errors are among the least certain pixels."""
    kept, _, before, after = sums.without_uncertain(ASIDE)
    if before == 0:
        return shared.few_errors(0)
    return say("least_certain", part=part, aside=1 - kept, found=1 - kept * after / before)


def class_terms(found: "Assessment", wrong: Tensor) -> dict[str, str]:
    """Return the verdict in the terms of statistics. `wrong` says which answers of the recommended method are wrong."""
    uncertainty, ood = found.recommended.seen.test.entropy, found.case.ood
    kept = uncertainty.argsort(stable=True)[: max(1, round((1 - ASIDE) * len(uncertainty)))]
    before, after = (float(some.double().mean()) for some in (wrong, wrong[kept]))
    limit = float(uncertainty[kept].max())
    terms = _terms(found, say("aside_classes", aside=ASIDE, limit=limit, before=before, after=after))
    if ood is not None:
        told = say("strange_classes", name=ood.name, auroc=found.recommended.metrics["ood_auroc"])
        terms["Strange inputs"] = told + shared.novelty_terms(found.rows)
    return terms


def image_terms(found: "Assessment") -> dict[str, str]:
    """Return the verdict on a segmentation in the terms of statistics."""
    _, limit, before, after = found.recommended.seen.test.without_uncertain(ASIDE)
    part = found.case.nouns[1]
    return _terms(found, say("aside_pixels", part=part, limit=limit, before=before, after=after))


def _terms(found: "Assessment", aside: str) -> dict[str, str]:
    own, metrics, choice = found.contenders[0].metrics, found.recommended.metrics, found.choice
    chosen = "" if choice.is_network else say("calibration_chosen", metrics=metrics, name=choice.name)
    return {
        "Which method": shared.sentence_of_choice(choice),
        "Calibration": say("calibration", own=own, metrics=metrics, chosen=chosen),
        "Setting the uncertain ones aside": aside,
    }
