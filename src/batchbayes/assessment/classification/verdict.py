"""The verdict on a classifier in words: how good, how honest, when not to trust it, which method to use."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from batchbayes._common.text import count, number, percent
from batchbayes.assessment.contenders import Contender
from batchbayes.assessment.load import Case
from batchbayes.assessment.recommend import Choice, sentence_of_choice

HONEST, ROUGH = 0.02, 0.05
"""A network is honest if the gap between confidence and accuracy is below the first, nearly so below the second."""
NO_ERROR = "It made no error on the test data, so nothing can be said about when it is wrong."


def class_verdict(contenders: Sequence[Contender[Any]], choice: Choice, wrong: Tensor, case: Case) -> dict[str, str]:
    """Return the sentences by their heading. `wrong` says which answers of the recommended method are wrong."""
    verdict = class_sentences(contenders, choice, count(len(wrong), "test example"))
    verdict["When not to trust it"] = rejection_sentence(choice.recommended.seen.test.entropy, wrong)
    if case.ood is not None:
        verdict["Strange inputs"] = strange_sentence(contenders, choice, case.ood.name)
    return {**verdict, "Which method": sentence_of_choice(choice)}


def class_sentences(contenders: Sequence[Contender[Any]], choice: Choice, examples: str) -> dict[str, str]:
    """Return the headline, how good and how honest."""
    own, chosen = contenders[0].metrics, choice.recommended.metrics
    word = honesty(own["ece"], own["mean_confidence"] - own["accuracy"])
    good = percent(own["accuracy"])
    honest = (
        f"By itself the network is {word}. Its mean confidence is {percent(own['mean_confidence'])}, and its accuracy "
        f"is {good}. The mean gap between the two over all confidences (ECE) is {percent(own['ece'])}."
    )
    advice = "No other method is clearly better on this data, so use the network as it is."
    if not choice.is_network:
        honest += f" With {choice.name} this gap is {percent(chosen['ece'])}."
        advice = f"Use {choice.name}."
    return {
        "headline": f"Right in {good} of cases, and {word}. {advice}",
        "How good": f"The network gets {good} of {examples} right.",
        "How honest": honest,
    }


def honesty(error: float, gap: float) -> str:
    """Say how honest a network is, by its calibration error and by how far its confidence is above its accuracy.

    >>> honesty(0.01, 0.01), honesty(0.04, 0.04), honesty(0.2, -0.2)
    ('honest about its uncertainty', 'a little too sure of itself', 'too unsure of itself')
    """
    if error < HONEST:
        return "honest about its uncertainty"
    return ("a little too " if error < ROUGH else "too ") + ("sure of itself" if gap > 0 else "unsure of itself")


def rejection_sentence(uncertainty: Tensor, wrong: Tensor, aside: float = 0.1) -> str:
    """Say what is gained if the least certain answers are set aside."""
    if not bool(wrong.any()):
        return NO_ERROR
    order = uncertainty.argsort(stable=True)
    kept = order[: max(1, round((1 - aside) * len(order)))]
    before, after = float(wrong.double().mean()), float(wrong[kept].double().mean())
    held = 1 - float(wrong[kept].sum()) / float(wrong.sum())
    threshold = float(uncertainty[kept].max())
    return (
        f"When its entropy is above {number(threshold)} nats. These are the least certain {percent(aside, 0)} of the "
        f"answers, and {percent(held, 0)} of the errors are among them. Without them the error rate changes from "
        f"{percent(before)} to {percent(after)}."
    )


def strange_sentence(contenders: Sequence[Contender[Any]], choice: Choice, name: str) -> str:
    """Say how well inputs from elsewhere are noticed."""
    own = choice.recommended.metrics["ood_auroc"]
    quality = "well" if own >= 0.9 else "moderately well" if own >= 0.75 else "badly"
    text = (
        f"The entropy of {choice.name} tells inputs of {name} from test inputs {quality}: of one strange input and one "
        f"test input, the strange one is the more uncertain in {percent(own)} of all pairs (50 % is guessing)."
    )
    scores = {"ood_auroc": "entropy", "ood_auroc_mi": "mutual information"}
    found = [(c.metrics[key], c.name, score) for c in contenders for key, score in scores.items() if key in c.metrics]
    value, method, score = max(found)
    return text + (f" The {score} of {method} does better: {percent(value)}." if value > own + 0.005 else "")
