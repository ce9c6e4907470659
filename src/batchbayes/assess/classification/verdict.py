"""The verdict in words: how good, how honest, when not to trust it, which method to use."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from batchbayes._common.text import count, number, percent
from batchbayes.assess.choice import Choice, sentence_of_choice
from batchbayes.assess.job import Loaded, Scored
from batchbayes.metrics import RiskCoverage
from batchbayes.scores import is_misclassified

HONEST, ROUGH = 0.02, 0.05
"""Gaps between confidence and accuracy up to which a network is honest, and nearly so."""


def class_verdict(
    scored: Sequence[Scored], choice: Choice, contenders: Sequence[Any], labels: Tensor, loaded: Loaded
) -> dict[str, str]:
    """For a classifier."""
    chosen = next(c for c in contenders if c.name == choice.recommended)
    wrong = is_misclassified(chosen.test.probs, labels)
    verdict = class_sentences(scored, choice, count(len(labels), "test example"))
    more = {"When not to trust it": rejection_sentence(chosen.test.entropy, wrong)}
    if loaded.ood is not None:
        more["Strange inputs"] = strange_sentence(scored, choice, loaded.ood.name)
    method = verdict.pop("Which method")
    return {**verdict, **more, "Which method": method}


def class_sentences(scored: Sequence[Scored], choice: Choice, examples: str) -> dict[str, str]:
    """The headline, how good, how honest, and which method."""
    by_name = {method.name: method.metrics for method in scored}
    own, chosen = by_name["deterministic"], by_name[choice.recommended]
    gap = own["mean_confidence"] - own["accuracy"]
    word = honesty(own["ece"], gap)
    good = percent(own["accuracy"])
    means = {method.name: float(method.losses.double().mean()) for method in scored}
    honest = (
        f"By itself the network is {word}: its mean confidence is {percent(own['mean_confidence'])}, its accuracy "
        f"{good}, and the mean gap between the two over all confidences (ECE) {percent(own['ece'])}."
    )
    if choice.recommended != "deterministic":
        honest += f" With {choice.recommended} that gap is {percent(chosen['ece'])}."
    return {
        "headline": f"Right in {good} of cases, and {word}. {capital(advice_in_short(choice))}.",
        "How good": f"The network gets {good} of {examples} right.",
        "How honest": honest,
        "Which method": sentence_of_choice(choice.recommended, choice.best, means, "NLL", class_advice(scored)),
    }


def honesty(error: float, gap: float) -> str:
    """
    >>> honesty(0.01, 0.01), honesty(0.04, 0.04), honesty(0.2, -0.2)
    ('honest about it', 'a little too sure of itself', 'too unsure of itself')
    """
    if error < HONEST:
        return "honest about it"
    return ("a little too " if error < ROUGH else "too ") + ("sure of itself" if gap > 0 else "unsure of itself")


def advice_in_short(choice: Choice) -> str:
    """What to do, in a few words."""
    if choice.recommended == "deterministic":
        return "its own probabilities can be used as they are"
    return f"use {choice.recommended}"


def class_advice(scored: Sequence[Scored]) -> dict[str, str]:
    """How each method is used."""
    advice = {}
    for method in scored:
        temperature, size = method.settings.get("temperature"), method.settings.get("batch_size")
        warm = temperature is not None and temperature != 1
        if method.name == "deterministic":
            advice[method.name] = "Nothing needs to be done."
        elif method.settings.get("network"):
            advice[method.name] = (
                f"Divide the logits by {number(float(str(temperature)))}: no draws are needed for the probabilities. "
                "The posterior still tells what the draws disagree about."
            )
        else:
            how = f"Average draws at an effective batch size of {number(float(str(size)))}"
            advice[method.name] = how + (f", logits divided by {number(float(str(temperature)))}." if warm else ".")
    return advice


def rejection_sentence(uncertainty: Tensor, wrong: Tensor, aside: float = 0.1) -> str:
    """What is gained by setting the least certain answers aside."""
    if not bool(wrong.any()):
        return "It made no error on the test data, so nothing can be said about when it errs."
    order = uncertainty.argsort(stable=True)
    kept = order[: max(1, round((1 - aside) * len(order)))]
    before, after = float(wrong.double().mean()), float(wrong[kept].double().mean())
    held = 1 - float(wrong[kept].sum()) / float(wrong.sum())
    threshold = float(uncertainty[kept].max())
    return (
        f"When its entropy is above {number(threshold)} nats. That is the least certain {percent(aside, 0)} of "
        f"answers, which hold {percent(held, 0)} of the errors: without them the error rate falls from "
        f"{percent(before)} to {percent(after)}."
    )


def pixel_rejection(curve: RiskCoverage, aside: float = 0.1) -> str:
    """The same for pixels, from sums."""
    position = int((curve.coverage <= 1 - aside).sum().clamp(min=1)) - 1
    kept, after, before = float(curve.coverage[position]), float(curve.risk[position]), float(curve.risk[-1])
    if before == 0:
        return "It made no error on the test data, so nothing can be said about when it errs."
    return (
        f"At pixels whose entropy is above {number(float(curve.thresholds[position]))} nats. They are "
        f"{percent(1 - kept, 0)} of all and hold {percent(1 - kept * after / before, 0)} of the errors: without them "
        f"the error rate falls from {percent(before)} to {percent(after)}."
    )


def strange_sentence(scored: Sequence[Scored], choice: Choice, name: str) -> str:
    """How well inputs from elsewhere are noticed."""
    found: list[tuple[float, str, str]] = []
    for method in scored:
        for key, score in (("ood_auroc", "entropy"), ("ood_auroc_mi", "mutual information")):
            if key in method.metrics:
                found.append((method.metrics[key], method.name, score))
    best = max(found)
    own = next(value for value, method, score in found if method == choice.recommended and score == "entropy")
    quality = "well" if own >= 0.9 else "moderately well" if own >= 0.75 else "badly"
    text = (
        f"By its entropy, {choice.recommended} tells inputs of {name} from test inputs {quality}: a strange input is "
        f"the more uncertain of two in {percent(own)} of pairs (50 % is guessing)."
    )
    if best[0] > own + 0.005:
        text += f" The {best[2]} of {best[1]} does better: {percent(best[0])}."
    return text


def capital(text: str) -> str:
    """
    >>> capital("use MCBN")
    'Use MCBN'
    """
    return text[:1].upper() + text[1:]
