"""The verdict in words for a regression."""

from collections.abc import Sequence

from torch import Tensor

from batchbayes._common.text import count, number, percent
from batchbayes.assess.choice import Choice, sentence_of_choice
from batchbayes.assess.classification.verdict import advice_in_short, capital
from batchbayes.assess.job import Scored
from batchbayes.data.examples import Examples
from batchbayes.metrics import rank_correlation

TOLERATED = 0.03
"""By how much the coverage of 90 % intervals may miss without a remark, besides two standard errors."""


def value_verdict(
    scored: Sequence[Scored],
    choice: Choice,
    spread: Tensor,
    errors: Tensor,
    targets: Tensor,
    ood: Examples | None,
) -> dict[str, str]:
    """How good, how honest, when not to trust it, which method."""
    metrics = {method.name: method.metrics for method in scored}
    chosen = metrics[choice.recommended]
    explained = 1 - float(errors.square().mean()) / float(targets.double().var(correction=0))
    word = width_word(chosen["coverage_90"], len(targets))
    means = {method.name: float(method.losses.double().mean()) for method in scored}
    own = choice.recommended == "deterministic"
    name = "the network with one spread for all" if own else choice.recommended
    verdict = {
        "headline": f"Typical error {number(chosen['rmse'])}, with intervals that are {word}. "
        f"{capital(_short(choice))}.",
        "How good": f"The root mean squared error on {count(len(targets), 'test example')} is "
        f"{number(chosen['rmse'])}, which explains {percent(explained, 0)} of the variance of the targets.",
        "How honest": f"90 % intervals of {name} hold {percent(chosen['coverage_90'])} of the targets: "
        f"they are {word}." + _conformal(chosen),
        "When not to trust it": _rejection(spread, errors),
        "Which method": sentence_of_choice(choice.recommended, choice.best, means, "NLL", _advice(scored)),
    }
    method = verdict.pop("Which method")
    strange = {} if ood is None else {"Strange inputs": _strange(scored, ood.name)}
    return {**verdict, **strange, "Which method": method}


def _short(choice: Choice) -> str:
    if choice.recommended == "deterministic":
        return "one spread for all inputs does as well as any other"
    return advice_in_short(choice)


def width_word(coverage: float, examples: int) -> str:
    """
    >>> width_word(0.9, 500), width_word(0.8, 500), width_word(0.99, 500)
    ('about right', 'too narrow', 'too wide')
    """
    slack = TOLERATED + 2 * (0.09 / max(1, examples)) ** 0.5
    if abs(coverage - 0.9) <= slack:
        return "about right"
    return "too narrow" if coverage < 0.9 else "too wide"


def _conformal(chosen) -> str:
    if "conformal_coverage" not in chosen:
        return " There is too little calibration data for conformal intervals."
    held, width = percent(chosen["conformal_coverage"]), number(chosen["conformal_width"])
    return f" Conformal intervals hold {held}, at a mean width of {width}."


def _rejection(spread: Tensor, errors: Tensor, aside: float = 0.1) -> str:
    """What is gained by setting aside the inputs about which the draws disagree most."""
    correlation = rank_correlation(spread, errors.abs())
    kept = spread.argsort(stable=True)[: max(1, round((1 - aside) * len(spread)))]
    before, after = float(errors.square().mean()) ** 0.5, float(errors[kept].square().mean()) ** 0.5
    strength = "strongly" if correlation > 0.5 else "moderately" if correlation > 0.25 else "only weakly"
    return (
        f"When the draws scatter by more than {number(float(spread[kept].max()))} (std). Without that least certain "
        f"{percent(aside, 0)} the RMSE goes from {number(before)} to {number(after)}. Scatter and actual error are "
        f"{strength} related (rank correlation {correlation:.2f})."
    )


def _advice(scored: Sequence[Scored]) -> dict[str, str]:
    advice = {}
    for method in scored:
        spread = number(float(str(method.settings["precision"])) ** -0.5)
        if method.settings["network"]:
            advice[method.name] = f"Give every prediction a standard deviation of {spread}."
        else:
            size = number(float(str(method.settings["batch_size"])))
            advice[method.name] = (
                f"Average draws at an effective batch size of {size}, with noise of std {spread} added."
            )
    return advice


def _strange(scored: Sequence[Scored], name: str) -> str:
    found = [(method.metrics["ood_auroc"], method.name) for method in scored if "ood_auroc" in method.metrics]
    if not found:
        return f"No method gives inputs of {name} another spread than test inputs."
    value, method = max(found)
    return (
        f"By the spread of {method}, an input of {name} is the more uncertain of two in {percent(value)} of pairs "
        "(50 % is guessing)."
    )
