"""What all verdicts share. The first screen of a report is for people who are no statisticians."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from batchbayes._common.text import count, number, percent
from batchbayes.metrics import ood_auroc
from batchbayes.report.compare.groups import SURE, By, Group, Trust
from batchbayes.report.compare.tuning import DOUBT
from batchbayes.report.words.methods import advice_of, short_name

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


def of_100(share: float) -> str:
    """Write a share as a number out of 100.

    >>> of_100(0.934), of_100(0.9997), of_100(0.0002), of_100(1.0), of_100(0.0)
    ('93', 'more than 99', 'fewer than 1', 'all', 'none')
    """
    if share in (0.0, 1.0):
        return "all" if share else "none"
    rounded = round(100 * share)
    return "more than 99" if rounded == 100 else "fewer than 1" if rounded == 0 else str(rounded)


def said(confidence: float) -> str:
    """Write a mean confidence as a percentage. Only certainty is called 100 %.

    >>> said(0.934), said(0.9956), said(1.0)
    ('93 %', 'more than 99 %', '100 %')
    """
    return "more than 99 %" if round(100 * confidence) == 100 and confidence < 1 else percent(confidence, 0)


def give_or_take(error: float) -> str:
    """Say how far the true share may be from one that was counted with this standard error.

    >>> give_or_take(0.0245), give_or_take(0.001)
    (', give or take 5', '')
    """
    points = round(100 * DOUBT * error)
    return f", give or take {points}" if points else ""


def too_few(examples: int, noun: str, wanted: int) -> dict[str, str]:
    """Return the headline and what to do next if there are too few examples.

    >>> too_few(1, "test image", 20)["headline"]
    '1 test image is too few to say how good it is.'
    """
    told = f"{count(examples, noun)} {'is' if examples == 1 else 'are'} too few to say how good it is."
    return {"headline": told, "What to do next": f"Assess again with at least {wanted} {noun}s."}


def yes(worst: Group | None) -> str:
    """Say that what is right on average can be believed, unless it is not in a group."""
    return "On average, but not everywhere." if worst else "Yes."


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
    low, high = percent(group.low, 0), percent(group.high, 0)
    span = number(group.low) if group.low == group.high else f"from {number(group.low)} to {number(group.high)}"
    return {
        By.PREDICTION: f"where it predicts {span} {unit}".rstrip(),
        By.CONFIDENCE: f"where it says {low}" + ("" if low == high else f" to {high}"),
        By.CLASS: f"where it says “{group.name}”",
        By.COLUMN: f"where {group.name} is {span}",
        By.FLAG: "among answers that are marked (flag = 1)",
    }[group.by]


def marked_sentence(flagged: Tensor, wrong: Tensor) -> str:
    """Say whether the answers that are marked, (N,) bool, are wrong, (N,) bool, more often than others."""
    if int(wrong.sum()) < FEW:
        return few_errors(int(wrong.sum()))
    marked = f"predictions.csv marks {of_100(_mean(flagged))} of 100 answers (flag = 1)"
    if not bool(flagged.any()) or bool(flagged.all()):
        return f"{marked}, so the marks do not tell answers apart."
    inside, outside = wrong[flagged], wrong[~flagged]
    spread = [_mean(part) * (1 - _mean(part)) / len(part) for part in (inside, outside)]
    helps = _mean(inside) - _mean(outside) > DOUBT * sum(spread) ** 0.5
    found = float(inside.sum()) / float(wrong.sum())
    return (
        f"{marked}. Of 100 errors {of_100(found)} are among them. Of 100 answers that are not marked, "
        f"{of_100(1 - _mean(outside))} are right."
        + ("" if helps else " This is no clear gain: its certainty hardly tells wrong answers from right ones.")
    )


def few_errors(errors: int) -> str:
    """Say that there is nothing to learn from so few errors."""
    made = count(errors, "error") if errors else "no error"
    return f"It made {made} on the test data: too few to know when it is wrong."


def strange_sentence(rows: "Rows", name: str) -> str:
    """Say how many inputs from elsewhere are marked."""
    strange, usual = (_mean(numbers(rows, "flag", source)) for source in ("ood", "test"))
    quality = "" if strange > 0.8 else " Many are missed." if strange > usual + 0.1 else " They are not noticed."
    return f"Of 100 inputs of {name} {of_100(strange)} are marked, and of 100 test inputs {of_100(usual)}.{quality}"


def strange_terms(rows: "Rows", told: str, guess: str) -> str:
    """Say how well inputs from elsewhere are noticed: by their uncertainty (`told`, `guess`), and by novelty."""
    told += f" of all pairs ({guess})." if guess else ""
    if "" in rows["novelty"]:
        return f"{told} Novelty is not known here."
    found = percent(ood_auroc(-numbers(rows, "novelty"), -numbers(rows, "novelty", "ood")))
    return f"{told} Novelty, the statistics of the input inside the network, tells them apart in {found} of all pairs."


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
    if choice.is_network:
        use = "Use the network as it is: nothing else that was tried is clearly better"
    else:
        passes, in_file = choice.recommended.passes, choice.recommended.file_passes
        price = f", for {passes:.0f} times the computing time" if passes >= 1.5 else ""
        price += f" ({in_file:.0f} times in an exported file)" if in_file > 1.25 * passes else ""
        use = f"Use “{plain_name(choice)}”: with it {', and '.join(gains)}{price}"
    use += f". But {but}." if but else "."
    beside = "marks the answers that somebody should look at" if marks else "writes an interval beside each answer"
    return f"{use} {cheap}{' ' if cheap else ''}This call predicts new data, and {beside}:"


def no_gain(choice: "Choice", network: "Contender") -> str:
    """Say what there is to say for a method that is no better than the network as it is on the test data."""
    if choice.recommended.calibration_loss < network.calibration_loss:
        return "the predictions fitted the calibration data better, though they do not fit the test data better"
    return "the predictions fit neither the calibration data nor the test data better"


def plain_name(choice: "Choice") -> str:
    """Return the name of the recommended method without its parameters."""
    chosen = choice.recommended
    is_bare = chosen.has_temperature or chosen.candidate.views
    return chosen.name if is_bare or not chosen.candidate.variant else short_name(chosen.candidate)


def sentence_of_choice(choice: "Choice") -> str:
    """Say which method to use, why, and how."""
    chosen, best = choice.recommended, choice.best
    low, own = number(best.calibration_loss), number(chosen.calibration_loss)
    if choice.asked:
        why = f"It was asked for. Its NLL on the calibration data is {own}; the lowest, of {best.name}, is {low}."
    elif chosen is best:
        why = f"It has the lowest NLL on the calibration data, {low}."
    else:
        why = (
            f"It is simpler than {best.name}, which has the lowest NLL on the calibration data, {low}. Its own NLL "
            f"there is {own}: the data cannot tell them apart."
        )
    told = f"On the test data, which took no part in the choice, its NLL is {number(chosen.mean_loss)}."
    more = ""
    if (beyond := choice.beyond) is not None:
        more = (
            f" {beyond.name} is better ({number(beyond.calibration_loss)} on the calibration data), but costs "
            f"{max(beyond.passes, beyond.file_passes):g} forward passes, which is beyond the budget."
        )
    advice = advice_of(chosen.candidate, chosen.num_samples, chosen.tuned, temperature=chosen.has_temperature)
    return f"Use {choice.name}. {why} {told}{more} {advice}."


def _mean(values: Tensor) -> float:
    return float(values.double().mean())
