"""The verdict on a regression in words."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from batchbayes._common.text import count, number, percent
from batchbayes.assessment.contenders import Contender
from batchbayes.assessment.recommend import Choice, sentence_of_choice
from batchbayes.data.examples import Examples
from batchbayes.metrics import rank_correlation

TOLERATED = 0.03
"""The coverage of 90 % intervals may miss by this much, and by two standard errors, without a remark."""


def value_verdict(
    contenders: Sequence[Contender[Any]],
    choice: Choice,
    spread: Tensor | None,
    errors: Tensor,
    targets: Tensor,
    ood: Examples | None,
) -> dict[str, str]:
    """Return the sentences by their heading, the headline first.

    Args:
        contenders: all that was compared.
        choice: what is recommended.
        spread: how far the draws of the recommended method scatter, (N,); None if it makes no draws.
        errors: the errors of the recommended method, (N,).
        targets: the test targets, (N, ...).
        ood: the strange data.
    """
    chosen = choice.recommended.metrics
    word = width_word(chosen["coverage_90"], len(targets))
    advice = f"Use {choice.name}" if spread is not None else "One spread for all inputs does as well as any other"
    verdict = {
        "headline": f"Typical error {number(chosen['rmse'])}, with intervals that are {word}. {advice}.",
        "How good": f"The root mean squared error (RMSE) on {count(len(targets), 'test example')} is "
        f"{number(chosen['rmse'])}. {_explained(errors, targets)}",
        "How honest": f"The 90 % intervals of {choice.name} hold {percent(chosen['coverage_90'])} of the targets. They "
        f"are {word}. {_conformal(chosen)}",
        "When not to trust it": _rejection(spread, errors),
    }
    if ood is not None:
        verdict["Strange inputs"] = _strange(contenders, ood.name)
    return {**verdict, "Which method": sentence_of_choice(choice)}


def _explained(errors: Tensor, targets: Tensor) -> str:
    """Say how much of the variance of the targets the network explains."""
    variance = float(targets.double().var(correction=0))
    if variance == 0:
        return "All test targets are equal, so there is no variance to explain."
    explained = 1 - float(errors.double().square().mean()) / variance
    if explained < 0:
        return "This is worse than to give the mean of the targets as the answer to all inputs."
    return f"This explains {percent(explained, 0)} of the variance of the targets."


def width_word(coverage: float, examples: int) -> str:
    """Say whether 90 % intervals are too narrow or too wide.

    >>> width_word(0.9, 500), width_word(0.8, 500), width_word(0.99, 500)
    ('about right', 'too narrow', 'too wide')
    """
    slack = TOLERATED + 2 * (0.09 / max(1, examples)) ** 0.5
    if abs(coverage - 0.9) <= slack:
        return "about right"
    return "too narrow" if coverage < 0.9 else "too wide"


def _conformal(chosen: Mapping[str, float]) -> str:
    if "conformal_coverage" not in chosen:
        return "There is too little calibration data for conformal intervals."
    held, width = percent(chosen["conformal_coverage"]), number(chosen["conformal_width"])
    return f"Conformal intervals hold {held}, and their mean width is {width}."


def _rejection(spread: Tensor | None, errors: Tensor, aside: float = 0.1) -> str:
    """Say what is gained if the inputs about which the draws disagree most are set aside."""
    if spread is None:
        return (
            "The recommended method gives all predictions the same spread. So it does not tell which of them are "
            "worse than others."
        )
    correlation = rank_correlation(spread, errors.abs())
    kept = spread.argsort(stable=True)[: max(1, round((1 - aside) * len(spread)))]
    before, after = float(errors.square().mean()) ** 0.5, float(errors[kept].square().mean()) ** 0.5
    strength = "strongly" if correlation > 0.5 else "moderately" if correlation > 0.25 else "only weakly"
    return (
        f"When the standard deviation of the draws is above {number(float(spread[kept].max()))}. Without this least "
        f"certain {percent(aside, 0)} the RMSE changes from {number(before)} to {number(after)}. The spread of the "
        f"draws and the actual error are {strength} related (rank correlation {correlation:.2f})."
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
