"""The verdict on classes, of examples or of their pixels or tokens: in plain words, and in the terms of statistics."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from batchbayes._common.text import count, number, percent
from batchbayes.report.compare.groups import (
    SMALL,
    VAGUE,
    By,
    Group,
    Trust,
    columns_of,
    everything,
    groups_by,
    of_classes,
    of_images,
    share_error,
    shared_groups,
    worst_group,
)
from batchbayes.report.words.shared import (
    ASIDE,
    DOUBT,
    FEWEST,
    Verdict,
    column,
    few_errors,
    give_or_take,
    honest_words,
    marked_sentence,
    next_step,
    no_gain,
    numbers,
    of_100,
    place,
    said,
    sentence_of_choice,
    strange_sentence,
    strange_terms,
    too_few,
    yes,
)

if TYPE_CHECKING:
    from batchbayes.report.compare.rows import Rows
    from batchbayes.report.result import Assessment

SURE_LEVELS = (0.9, 0.8, 0.7, 0.6, 0.5)
CHECK = (
    "Do not use it yet. Check that the data is prepared as in training (scaling, channels, the order of the classes), "
    "and that these are the right weights."
)


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
        error=share_error(accuracy, len(right)),
        every=of_classes(confidence, right),
        alone=everything(own["mean_confidence"], own["accuracy"], share_error(own["accuracy"], len(right))),
        worst=worst_group(class_groups(rows, confidence, right, columns_of(found.case.test))),
        classes=classes,
        gain_error=_gain_error(targets, right, classes),
    )
    marked = marked_sentence(numbers(rows, "flag") > 0, ~right)
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
        every=of_images(sums.per_image("confidence"), wrong),
        alone=of_images(alone.per_image("confidence"), alone.per_image("wrong")),
        worst=worst_group(sums.class_groups(names)),
        classes=Counter({str(name): total for name, total in zip(names, totals, strict=False) if total}),
        gain_error=error,
    )
    example = f" It says {said(chosen['mean_confidence'])} on average, and {of_100(told.accuracy)} of 100 {part}s "
    marked = _marked_images(found.rows, limit_count, whole, part) + _least_certain(sums, part)
    return _verdict(found, told, f"{example}are right.", marked)


def _verdict(found: "Assessment", told: Answers, example: str, marked: str) -> Verdict:
    """Put the sentences together. `example` says what percentages mean, and `marked` what the marks find."""
    own, ood = found.contenders[0].metrics, found.case.ood
    good = f"Of 100 {told.noun}s like these {of_100(told.accuracy)} are right"
    network = of_100(own["accuracy"])
    trust = {
        Trust.HONEST: "and its percentages can be believed" + (" on average" if told.worst else ""),
        Trust.UNKNOWN: "but there are too few test examples to know whether its percentages can be believed",
    }.get(told.every.trust, f"but it is {honest_words(told.every)}")
    believed = {Trust.HONEST: yes(told.worst), Trust.UNKNOWN: f"Not known: the {told.examples}s are too few."}.get(
        told.every.trust, f"Not quite: it is {honest_words(told.every)}."
    )
    verdict = {
        "headline": f"{good}, {trust}.",
        "What to do next": next_step(
            found.choice, _gains(found, told), marks=True, cheap=cheaper(found), but=_still_off(found, told.every)
        ),
        "How good is it?": f"{good}{give_or_take(told.error)}."
        + ("" if network == of_100(told.accuracy) else f" For the network alone it is {network}.")
        + f" This was counted on {count(told.total, told.examples)}.",
        "Can its percentages be believed?": believed + example + _told_alone(found, told) + told_group(told.worst),
        "When to look twice": marked,
    }
    if ood is not None and told.noun == "answer":
        verdict["Strange inputs"] = strange_sentence(found.rows, ood.name)
    if DOUBT * told.error > 2 * VAGUE:
        right = {"How good is it?": f"Right answers: {round(told.accuracy * told.total)} of {told.total}."}
        few = too_few(told.total, told.examples, told.wanted) | (right if told.noun == "answer" else {})
        return Verdict(few, is_usable=False)
    if guess := guess_sentence(told, found.recommended.metrics["nll"]):
        return Verdict(verdict | {"headline": guess, "What to do next": CHECK}, is_usable=False)
    return Verdict(verdict)


def _gains(found: "Assessment", told: Answers) -> list[str]:
    """Say what the recommended method does better than the network as it is."""
    own, chosen, choice = found.contenders[0].metrics, found.recommended.metrics, found.choice
    now, before, gains = of_100(told.accuracy), of_100(own["accuracy"]), []
    if told.accuracy > own["accuracy"] and before != now:
        gains.append(f"{now} of 100 {told.noun}s are right instead of {before}")
    if told.alone.is_off and told.every.trust is Trust.HONEST:
        gains.append("its percentages can be believed")
    elif told.every.is_little and not told.alone.is_little and told.alone.trust is not Trust.UNKNOWN:
        gains.append("its percentages are closer to the truth")
    if not (choice.is_network or gains):
        gains.append(_truth(own["nll"], chosen["nll"]) or no_gain(choice, found.contenders[0]))
    return gains


def _still_off(found: "Assessment", every: Group) -> str:
    """Say what to make of percentages that the recommended method does not correct."""
    if not every.is_off:
        return ""
    low = "lower" if every.trust is Trust.TOO_SURE else "higher"
    if found.choice.is_network:
        return f"take its percentages to be {low} than it says: more calibration data would tell by how much"
    return f"it is still {honest_words(every)}: take its percentages to be {low} than it says"


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
    return "" if max(lost) >= SMALL else f"In the time of the network alone {name} is almost as good (--budget 1)."


def _truth(before: float, after: float) -> str:
    """Say what a lower NLL means: how probable the true classes are, in the (geometric) mean. Empty if it is not lower.

    >>> _truth(0.4, 0.2)
    'the true classes are 82 % probable on average instead of 67 %'
    """
    if after >= before:
        return ""
    old, new = (percent(math.exp(-nll), 0) for nll in (before, after))
    return f"the true classes are {new} probable on average" + (
        f" instead of {old}" if old != new else ", a little more"
    )


def example_of(confidence: Tensor, right: Tensor, every: Group) -> str:
    """Say how many answers are right of those with high confidences (N,)."""
    text = f" It says {said(float(confidence.mean()))} on average." if every.is_off else ""
    level = next((level for level in SURE_LEVELS if float((confidence >= level).double().mean()) >= 0.2), None)
    if level is None:
        return text
    sure = confidence >= level
    share = of_100(float(sure.double().mean()))
    return (
        f"{text} Of 100 answers that it is at least {percent(level, 0)} sure of, "
        f"{of_100(float(right[sure].double().mean()))} are right. "
        + ("These are all answers." if bool(sure.all()) else f"These are {share} of 100 answers.")
    )


def class_groups(rows: "Rows", confidence: Tensor, right: Tensor, columns: Mapping[str, Tensor]) -> list[Group]:
    """Return groups of test examples: by confidence, by predicted class, by each column, and those that are marked."""
    groups = list(groups_by(By.CONFIDENCE, confidence, confidence, right))
    predicted = column(rows, "prediction")
    for name in dict.fromkeys(predicted):
        some = torch.tensor([each == name for each in predicted])
        same = torch.zeros(int(some.sum()))
        groups += groups_by(By.CLASS, same, confidence[some], right[some], name=str(name))
    return groups + shared_groups(columns, numbers(rows, "flag"), confidence, right)


def told_group(group: Group | None) -> str:
    """Name a group in which percentages are too high."""
    if group is None:
        return ""
    return (
        f" It is too sure of itself {place(group)}: it says {said(group.said)} there on average, and "
        f"{of_100(group.held)} of 100 are right{give_or_take(group.error)}."
    )


def _told_alone(found: "Assessment", told: Answers) -> str:
    """Say how honest the network alone is, if this differs."""
    words, own = honest_words(told.alone), found.contenders[0].metrics["mean_confidence"]
    if found.choice.is_network or not told.alone.is_off or words == honest_words(told.every):
        return ""
    return f" The network alone is {words}: it says {said(own)} on average."


def guess_sentence(told: Answers, nll: float) -> str:
    """Say that the most common class for everything would do as well; empty if the network is better than that.

    `nll` is the mean negative log-likelihood of the truth, in nats.
    """
    counts, noun = told.classes, told.noun
    shares = torch.tensor([value / counts.total() for value in counts.values()], dtype=torch.float64)
    common, best = counts.most_common(1)[0][0], float(shares.max())
    is_better = told.accuracy - best > DOUBT * told.gain_error
    if len(counts) < 2 or is_better or nll < 0.98 * float(-(shares * shares.log()).sum()):
        return ""
    return (
        f"It is no better than guessing: of 100 {noun}s {of_100(told.accuracy)} are right, and {of_100(best)} would be "
        f"if “{common}” were the answer to all {'inputs' if noun == 'answer' else f'{noun}s'}."
    )


def _marked_images(rows: "Rows", limit_count: int, whole: str, part: str) -> str:
    """Say how many more pixels are wrong in images that are marked."""
    flagged, wrong = numbers(rows, "flag") > 0, numbers(rows, "error_rate")
    rough = f"The limit is rough: it was set by {count(limit_count, whole)}. " if limit_count < FEWEST else ""
    if not bool(flagged.any()) or bool(flagged.all()):
        return f"predictions.csv marks {'all' if bool(flagged.any()) else 'none'} of these {whole}s. {rough}"
    inside, outside = (of_100(float(wrong[some].mean())) for some in (flagged, ~flagged))
    return (
        f"predictions.csv marks {int(flagged.sum())} of {len(flagged)} {whole}s (flag = 1). In those {inside} of 100 "
        f"{part}s are wrong, and in the others {outside}. {rough}"
    )


def _least_certain(sums: Any, noun: str) -> str:
    """Say how many errors are among the least certain pixels."""
    kept, _, before, after = sums.without_uncertain(ASIDE)
    if before == 0:
        return few_errors(0)
    return (
        f"Of 100 {noun}s take the {of_100(1 - kept)} that it is least sure of: {of_100(1 - kept * after / before)} of "
        f"100 wrong {noun}s are among them."
    )


def class_terms(found: "Assessment", wrong: Tensor) -> dict[str, str]:
    """Return the verdict in the terms of statistics. `wrong` says which answers of the recommended method are wrong."""
    uncertainty, ood = found.recommended.seen.test.entropy, found.case.ood
    kept = uncertainty.argsort(stable=True)[: max(1, round((1 - ASIDE) * len(uncertainty)))]
    terms = _terms(
        found,
        "The uncertainty of an answer is its entropy",
        f"the {percent(ASIDE, 0)} of the answers whose entropy is above {number(float(uncertainty[kept].max()))} nats,",
        float(wrong.double().mean()),
        float(wrong[kept].double().mean()),
    )
    if ood is not None:
        share = percent(found.recommended.metrics["ood_auroc"])
        told = f"Of one input of {ood.name} and one test input, the strange one has the higher entropy in {share}"
        terms["Strange inputs"] = strange_terms(found.rows, told, "AUROC; 50 % is guessing")
    return terms


def image_terms(found: "Assessment") -> dict[str, str]:
    """Return the verdict on a segmentation in the terms of statistics."""
    _, limit, before, after = found.recommended.seen.test.without_uncertain(ASIDE)
    part = found.case.nouns[1]
    uncertainty = f"The uncertainty of a {part} is the entropy of its class"
    return _terms(found, uncertainty, f"the {part}s above {number(limit)} nats", before, after)


def _terms(found: "Assessment", uncertainty: str, aside: str, before: float, after: float) -> dict[str, str]:
    own, chosen = found.contenders[0].metrics, found.recommended.metrics
    gap = f"is {percent(own['ece'])} for the network as it is"
    gap += "" if found.choice.is_network else f" and {percent(chosen['ece'])} for {found.choice.name}"
    return {
        "Which method": sentence_of_choice(found.choice),
        "Calibration": f"Confidence is the probability of the most likely class. The mean gap between confidence and "
        f"accuracy over all confidences (expected calibration error, ECE) {gap}. Mean confidence "
        f"{percent(chosen['mean_confidence'])}, accuracy {percent(chosen['accuracy'])}.",
        "Setting the uncertain ones aside": f"{uncertainty}: 0 nats if one class has probability 1, more if several "
        f"share it. Without {aside} the error rate changes from {percent(before)} to {percent(after)}.",
    }
