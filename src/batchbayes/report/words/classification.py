"""The verdict on a classifier: in plain words for the first screen, and then in the terms of statistics."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from batchbayes._common.text import count, number, percent
from batchbayes.report.compare.compare import Choice
from batchbayes.report.compare.contenders import Contender
from batchbayes.report.compare.honesty import (
    SMALL,
    VAGUE,
    By,
    Group,
    Honesty,
    Trust,
    class_honesty,
    columns_of,
    groups_by,
    honesty,
    share_error,
    shared_groups,
    worst_group,
)
from batchbayes.report.compare.rows import Rows
from batchbayes.report.read.case import Case
from batchbayes.report.words.shared import (
    ASIDE,
    DOUBT,
    Verdict,
    column,
    give_or_take,
    honest_words,
    marked_sentence,
    next_step,
    no_gain,
    novelty_terms,
    numbers,
    of_100,
    place,
    said,
    sentence_of_choice,
    strange_sentence,
    too_few,
)

SURE_LEVELS = (0.9, 0.8, 0.7, 0.6, 0.5)
CHECK = (
    "Do not use it yet. Check that the data is prepared as in training (scaling, channels, the order of the classes), "
    "and that these are the right weights."
)


def class_verdict(rows: Rows, contenders: Sequence[Contender[Any]], choice: Choice, case: Case) -> Verdict:
    """Return the sentences of the first screen."""
    targets, confidence = column(rows, "target"), numbers(rows, "confidence")
    right = torch.tensor([a == b for a, b in zip(column(rows, "prediction"), targets, strict=True)])
    accuracy, found, own = float(right.double().mean()), class_honesty(confidence, right), contenders[0].metrics
    alone = honesty(own["mean_confidence"] - own["accuracy"], share_error(own["accuracy"], len(right)))
    worst = worst_group(class_groups(rows, confidence, right, columns_of(case.test)))
    verdict = {
        **class_sentences(
            contenders,
            choice,
            accuracy,
            found,
            alone,
            error=share_error(accuracy, len(right)),
            noun="answer",
            worst=worst,
        ),
        "Can its percentages be believed?": believed(confidence, right, found, worst)
        + told_alone(choice, own, found, alone)
        + told_group(worst),
        "When to look twice": marked_sentence(numbers(rows, "flag") > 0, ~right),
    }
    verdict["How good is it?"] += f" This was counted on {count(len(right), 'test example')}."
    if case.ood is not None:
        verdict["Strange inputs"] = strange_sentence(rows, case.ood.name)
    if DOUBT * share_error(accuracy, len(right)) > 2 * VAGUE:
        told = {"How good is it?": f"Right answers: {int(right.sum())} of {len(right)}."}
        return Verdict(too_few(len(right), "test example", 100) | told, is_usable=False)
    if guess := no_better_than_guessing(targets, right, choice.recommended.metrics["nll"]):
        return Verdict(verdict | {"headline": guess, "What to do next": CHECK}, is_usable=False)
    return Verdict(verdict)


def class_sentences(
    contenders: Sequence[Contender[Any]],
    choice: Choice,
    accuracy: float,
    found: Honesty,
    alone: Honesty,
    *,
    error: float,
    noun: str,
    worst: Group | None = None,
) -> dict[str, str]:
    """Return the headline, what to do next, and how good it is.

    Args:
        contenders: all that was compared, the network as it is first.
        choice: what is recommended.
        accuracy: its share of right answers.
        found: how honest the recommended method is.
        alone: how honest the network is as it is.
        error: the standard error of the accuracy.
        noun: what is counted, in the singular.
        worst: a group in which percentages are too high.
    """
    own = contenders[0].metrics
    trust = {
        Trust.HONEST: "and its percentages can be believed" + (" on average" if worst else ""),
        Trust.UNKNOWN: "but there are too few test examples to know whether its percentages can be believed",
    }.get(found.trust, f"but it is {honest_words(found)}")
    good = f"Of 100 {noun}s like these {of_100(accuracy)} are right"
    network, gains = of_100(own["accuracy"]), []
    if accuracy > own["accuracy"] and network != of_100(accuracy):
        gains.append(f"{of_100(accuracy)} of 100 {noun}s are right instead of {network}")
    if alone.is_off and found.trust is Trust.HONEST:
        gains.append("its percentages can be believed")
    elif found.is_off and found.is_little and not alone.is_little and alone.trust is not Trust.UNKNOWN:
        gains.append("its percentages are closer to the truth")
    if not (choice.is_network or gains):
        gains.append(_truth(own["nll"], choice.recommended.metrics["nll"]) or no_gain(choice, contenders[0]))
    return {
        "headline": f"{good}, {trust}.",
        "What to do next": next_step(
            choice, gains, marks=True, cheap=cheaper(contenders, choice), but=_still_off(choice, found)
        ),
        "How good is it?": f"{good}{give_or_take(error)}."
        + ("" if network == of_100(accuracy) else f" For the network alone it is {network}."),
    }


def _still_off(choice: Choice, found: Honesty) -> str:
    """Say what to make of percentages that the recommended method does not correct."""
    if not found.is_off:
        return ""
    low = "lower" if found.trust is Trust.TOO_SURE else "higher"
    if choice.is_network:
        return f"take its percentages to be {low} than it says: more calibration data would tell by how much"
    return f"it is still {honest_words(found)}: take its percentages to be {low} than it says"


def cheaper(contenders: Sequence[Contender[Any]], choice: Choice) -> str:
    """Name what takes the time of the network alone, if it is almost as good as a recommended method that takes longer.

    Almost as good: right answers, and how probable the true classes are, differ by shares that matter to nobody.
    """
    if choice.is_network or choice.recommended.passes < 1.5:
        return ""
    fast = min((each for each in contenders if each.passes <= 1), key=lambda each: each.calibration_loss)
    other, chosen = fast.metrics, choice.recommended.metrics
    lost = math.exp(-chosen["nll"]) - math.exp(-other["nll"]), chosen["accuracy"] - other["accuracy"]
    name = "the network as it is" if fast is contenders[0] else f"“{fast.name}”"
    return "" if max(lost) >= SMALL else f"In the time of the network alone {name} is almost as good (--budget 1)."


def _truth(before: float, after: float) -> str:
    """Say what a lower NLL means: how probable the true classes are, in the (geometric) mean. Empty if it is not lower.

    >>> _truth(0.4, 0.2)
    'the true classes are 82 % probable on average instead of 67 %'
    """
    old, new = (percent(math.exp(-nll), 0) for nll in (before, after))
    if after >= before:
        return ""
    return f"the true classes are {new} probable on average" + (
        f" instead of {old}" if old != new else ", a little more"
    )


def believed(confidence: Tensor, right: Tensor, found: Honesty, worst: Group | None = None) -> str:
    """Say whether confidences (N,) can be taken at their word, also in the worst group, with an example."""
    level = next((level for level in SURE_LEVELS if float((confidence >= level).double().mean()) >= 0.2), None)
    text = {Trust.HONEST: yes(worst), Trust.UNKNOWN: "Not known: the test examples are too few."}.get(
        found.trust, f"Not quite: it is {honest_words(found)}."
    )
    if found.is_off:
        text += f" It says {said(float(confidence.mean()))} on average."
    if level is not None:
        sure = confidence >= level
        text += (
            f" Of 100 answers that it is at least {percent(level, 0)} sure of, "
            f"{of_100(float(right[sure].double().mean()))} are right. "
            + (
                "These are all answers."
                if bool(sure.all())
                else f"These are {of_100(float(sure.double().mean()))} of 100 answers."
            )
        )
    return text


def class_groups(rows: Rows, confidence: Tensor, right: Tensor, columns: Mapping[str, Tensor]) -> list[Group]:
    """Return groups of test examples: by confidence, by predicted class, by each column, and those that are marked."""
    groups = list(groups_by(By.CONFIDENCE, confidence, confidence, right))
    predicted = column(rows, "prediction")
    for name in dict.fromkeys(predicted):
        some = torch.tensor([each == name for each in predicted])
        same = torch.zeros(int(some.sum()))
        groups += groups_by(By.CLASS, same, confidence[some], right[some], name=str(name))
    return groups + shared_groups(columns, numbers(rows, "flag"), confidence, right)


def yes(worst: Group | None) -> str:
    """Say that percentages can be believed, unless they are too high in a group."""
    return "On average, but not everywhere." if worst else "Yes."


def told_group(group: Group | None) -> str:
    """Name a group in which percentages are too high."""
    if group is None:
        return ""
    return (
        f" It is too sure of itself {place(group)}: it says {said(group.said)} there on average, and "
        f"{of_100(group.held)} of 100 are right{give_or_take(group.error)}."
    )


def told_alone(choice: Choice, own: Any, found: Honesty, alone: Honesty) -> str:
    """Say how honest the network alone is, if this differs."""
    if choice.is_network or not alone.is_off or alone == found:
        return ""
    return f" The network alone is {honest_words(alone)}: it says {said(own['mean_confidence'])} on average."


def no_better_than_guessing(targets: Sequence[Any], right: Tensor, nll: float) -> str | None:
    """Say that one answer to all inputs would do as well; None if the network is better than that."""
    counts = Counter(targets)
    common = counts.most_common(1)[0][0]
    gain = right.double() - torch.tensor([float(target == common) for target in targets])
    return guess_sentence(counts, float(right.double().mean()), float(gain.std()) / len(gain) ** 0.5, nll)


def guess_sentence(counts: Counter[Any], accuracy: float, error: float, nll: float, noun: str = "answer") -> str | None:
    """Say that the most common class for everything would do as well; None if the network is better than that.

    Args:
        counts: how often each class is the true one.
        accuracy: share of the answers that are right.
        error: standard error of the gain of the accuracy over that of the most common class.
        nll: mean negative log-likelihood of the truth, in nats.
        noun: what an answer is called.
    """
    shares = torch.tensor([value / counts.total() for value in counts.values()], dtype=torch.float64)
    common, best = counts.most_common(1)[0][0], float(shares.max())
    if len(counts) < 2 or accuracy - best > DOUBT * error or nll < 0.98 * float(-(shares * shares.log()).sum()):
        return None
    return (
        f"It is no better than guessing: of 100 {noun}s {of_100(accuracy)} are right, and {of_100(best)} would be if "
        f"“{common}” were the answer to all {'inputs' if noun == 'answer' else f'{noun}s'}."
    )


def class_terms(
    rows: Rows, contenders: Sequence[Contender[Any]], choice: Choice, wrong: Tensor, case: Case
) -> dict[str, str]:
    """Return the verdict in the terms of statistics. `wrong` says which answers of the recommended method are wrong."""
    terms = shared_terms(contenders, choice)
    terms["Setting the uncertain ones aside"] = rejection_sentence(choice.recommended.seen.test.entropy, wrong)
    if case.ood is not None:
        terms["Strange inputs"] = strange_terms(rows, choice, case.ood.name)
    return terms


def shared_terms(contenders: Sequence[Contender[Any]], choice: Choice) -> dict[str, str]:
    """Return the choice of the method, and its calibration."""
    own, chosen = contenders[0].metrics, choice.recommended.metrics
    gap = f"is {percent(own['ece'])} for the network as it is"
    gap += "" if choice.is_network else f" and {percent(chosen['ece'])} for {choice.name}"
    return {
        "Which method": sentence_of_choice(choice),
        "Calibration": f"Confidence is the probability of the most likely class. The mean gap between confidence and "
        f"accuracy over all confidences (expected calibration error, ECE) {gap}. Mean confidence "
        f"{percent(chosen['mean_confidence'])}, accuracy {percent(chosen['accuracy'])}.",
    }


def rejection_sentence(uncertainty: Tensor, wrong: Tensor) -> str:
    """Say what is gained if the least certain answers are set aside."""
    order = uncertainty.argsort(stable=True)
    kept = order[: max(1, round((1 - ASIDE) * len(order)))]
    before, after = float(wrong.double().mean()), float(wrong[kept].double().mean())
    return (
        "The uncertainty of an answer is its entropy: 0 nats if one class has probability 1, more if several share it. "
        f"Without the {percent(ASIDE, 0)} of the answers whose entropy is above "
        f"{number(float(uncertainty[kept].max()))} nats, the error rate changes from {percent(before)} to "
        f"{percent(after)}."
    )


def strange_terms(rows: Rows, choice: Choice, name: str) -> str:
    """Say how well inputs from elsewhere are noticed."""
    share = percent(choice.recommended.metrics["ood_auroc"])
    return (
        f"Of one input of {name} and one test input, the strange one has the higher entropy in {share} of all pairs "
        f"(AUROC; 50 % is guessing). {novelty_terms(rows)}"
    )
