"""What all verdicts share. The first screen of a report is for people who are no statisticians."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from batchbayes._common.text import count, number, percent
from batchbayes.metrics import ood_auroc
from batchbayes.report.compare.groups import SURE, By, Group, Trust
from batchbayes.report.compare.tuning import DOUBT, paired_difference
from batchbayes.report.words.methods import short_name
from batchbayes.report.words.say import say

if TYPE_CHECKING:
    from batchbayes.report.compare.choice import Choice
    from batchbayes.report.compare.contenders import Contender
    from batchbayes.report.compare.rows import Rows

ASIDE = 0.1
"""Share of the answers that are set aside, the least certain ones, to see what this gains."""
FEWEST = 20
"""With fewer test examples nothing is said about where 90 % of true values are. A limit for marks from fewer is called
rough."""
FEW = 5
"""With fewer errors nothing is said about when a network is wrong."""


@dataclass(frozen=True)
class Verdict:
    """The first screen."""

    sentences: dict[str, str]
    """By their heading, the headline first."""
    is_usable: bool = True
    """Whether the network can be used. Then the call that predicts new data stands below what to do next."""


def column(rows: "Rows", key: str, source: str = "test") -> list[Any]:
    """Return the cells of a column that belong to one source."""
    return [cell for cell, own in zip(rows[key], rows["source"], strict=True) if own == source]


def numbers(rows: "Rows", key: str, source: str = "test") -> Tensor:
    """Return the numbers of a column that belong to one source, (N,)."""
    return torch.tensor([float(cell) for cell in column(rows, key, source)], dtype=torch.float64)


def too_few(examples: int, noun: str, wanted: int) -> dict[str, str]:
    """Return the headline and what to do next if there are too few examples.

    >>> too_few(1, "test image", 20)["headline"]
    '1 test image is too few to say how good it is.'
    """
    told = f"{count(examples, noun)} {'is' if examples == 1 else 'are'}"
    return {"headline": say("few", told=told), "What to do next": say("few_next", wanted=wanted, noun=noun)}


def guessing(verdict: dict[str, str], headline: str, check: str) -> Verdict:
    """Return the verdict on a network that is no better than a guess: one thought, without praise for its honesty."""
    told = {"headline": headline, "What to do next": say(check), "When to look twice": ""}
    told |= {heading: say("believed_guess") for heading in verdict if heading.endswith("be believed?")}
    return Verdict({heading: text for heading, text in (verdict | told).items() if text}, is_usable=False)


def yes(worst: Group | None) -> str:
    """Say that what is right on average can be believed, unless it is not in a group."""
    return say("believed_on_average" if worst else "believed")


def honest_words(group: Group) -> str:
    """Write how honest the percentages of all or of the surest answers are, after "it is".

    >>> honest_words(Group(By.SUREST, "", 0.9, 1.0, 40, 0.95, 0.93, 0.001))
    'a little too sure of itself where it is at least 90 % sure'
    """
    text = {Trust.TOO_SURE: "too sure of itself", Trust.TOO_UNSURE: "too unsure of itself"}.get(group.trust, "honest")
    text = f"a little {text}" if group.is_little else text
    return f"{text} where it is at least {percent(SURE, 0)} sure" if group.by is By.SUREST else text


def place(group: Group, unit: str = "") -> str:
    """Say which examples a group has, after "it is too sure of itself".

    >>> place(Group(By.COLUMN, "age", 18, 25, 40, 0.9, 0.7, 0.05))
    'where age is from 18.0 to 25.0'
    >>> place(Group(By.CONFIDENCE, "", 0.101, 0.104, 40, 0.1, 0.02, 0.05))
    'where it says 10 %'
    """
    span = number(group.low) if group.low == group.high else f"from {number(group.low)} to {number(group.high)}"
    span += f" {unit}" if unit and group.by is By.PREDICTION else ""
    several = group.by is By.CONFIDENCE and percent(group.low, 0) != percent(group.high, 0)
    template = "at_confidences" if several else f"at_{group.by.value}"
    return say(template, name=group.name, low=group.low, high=group.high, span=span)


def marked_sentence(flagged: Tensor, wrong: Tensor) -> str:
    """Say whether the answers that are marked, (N,) bool, are wrong, (N,) bool, more often than others."""
    if int(wrong.sum()) < FEW:
        return few_errors(int(wrong.sum()))
    marks = say("marks", share=_mean(flagged))
    if not bool(flagged.any()) or bool(flagged.all()):
        return say("marks_useless", marks=marks)
    inside, outside = wrong[flagged], wrong[~flagged]
    spread = [_mean(part) * (1 - _mean(part)) / len(part) for part in (inside, outside)]
    helps = _mean(inside) - _mean(outside) > DOUBT * sum(spread) ** 0.5
    found = float(inside.sum()) / float(wrong.sum())
    told = say("marks_find", marks=marks, found=found, right=1 - _mean(outside))
    return told if helps else told + say("marks_little")


def few_errors(errors: int) -> str:
    """Say that there is nothing to learn from so few errors."""
    return say("errors", made=count(errors, "error") if errors else "no error")


def strange_sentence(rows: "Rows", name: str) -> str:
    """Say how many inputs from elsewhere are marked."""
    strange, usual = (_mean(numbers(rows, "flag", source)) for source in ("ood", "test"))
    missed = say("strange_missed" if strange > usual + 0.1 else "strange_not_noticed")
    return say("strange", name=name, strange=strange, usual=usual, quality="" if strange > 0.8 else missed)


def novelty_terms(rows: "Rows") -> str:
    """Say how well novelty tells inputs from elsewhere from test inputs."""
    if "" in rows["novelty"]:
        return say("novelty_unknown")
    return say("novelty_tells", auroc=ood_auroc(-numbers(rows, "novelty"), -numbers(rows, "novelty", "ood")))


def next_step(choice: "Choice", gains: Sequence[str], *, marks: bool, cheap: str = "", but: str = "") -> str:
    """Say in two or three sentences what to do next. The call stands below them.

    Args:
        choice: what is recommended.
        gains: what it does better than the network as it is: "94 of 100 answers are right instead of 92"; at least
            one, unless the network itself is recommended.
        marks: whether some answers are marked.
        cheap: what is almost as good and takes less time, as a sentence; empty if there is nothing.
        but: what the headline calls wrong, and the recommended method does not correct; empty if there is nothing.
    """
    passes, in_file = choice.recommended.passes, choice.recommended.file_passes
    use = (
        say("use_network")
        if choice.is_network
        else say(
            "use_method",
            name=plain_name(choice),
            gains=", and ".join(gains),
            price=say("price", passes=passes) if passes >= 1.5 else "",
            in_file=say("price_in_file", passes=in_file) if in_file > 1.25 * passes else "",
        )
    )
    use, beside = say("next_but", use=use, but=but) if but else use, "next_marks" if marks else "next_intervals"
    return say("next", use=use, cheap=f"{cheap} " if cheap else "", beside=say(beside))


def no_gain(choice: "Choice", network: "Contender") -> str:
    """Say what there is to say for a method that is no better than the network as it is on the test data."""
    fits = choice.recommended.calibration_loss < network.calibration_loss
    return say("no_gain_calibration" if fits else "no_gain")


def plain_name(choice: "Choice") -> str:
    """Return the name of the recommended method without its parameters."""
    chosen = choice.recommended
    is_bare = chosen.has_temperature or chosen.candidate.views
    return chosen.name if is_bare or not chosen.candidate.variant else short_name(chosen.candidate)


def sentence_of_choice(choice: "Choice") -> str:
    """Say which method to use, why, and how."""
    chosen, best, beyond = choice.recommended, choice.best, choice.beyond
    difference, error = paired_difference(chosen.calibration_losses, best.calibration_losses)
    why = "choice_lowest" if chosen is best else "choice_cheaper" if difference > DOUBT * error else "choice_simpler"
    why = "choice_asked" if choice.asked else why
    return say(
        "choice",
        choice=choice,
        why=say(why, best=best, low=best.calibration_loss, own=chosen.calibration_loss),
        test=say("choice_test", loss=chosen.mean_loss),
        beyond=say("choice_beyond", beyond=beyond) if beyond else "",
        advice=chosen.advice,
    )


def _mean(values: Tensor) -> float:
    return float(values.double().mean())
