"""The verdict on a segmentation: in plain words for the first screen, and then in the terms of statistics."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from batchbayes._common.text import count, number, percent
from batchbayes.metrics import RiskCoverage
from batchbayes.report.compare.compare import Choice
from batchbayes.report.compare.contenders import Contender
from batchbayes.report.compare.honesty import VAGUE, Honesty, Trust, image_honesty, worst_group
from batchbayes.report.compare.pixels import PixelSums
from batchbayes.report.compare.rows import Rows
from batchbayes.report.result import FEWEST
from batchbayes.report.words.classification import (
    CHECK,
    class_sentences,
    guess_sentence,
    shared_terms,
    told_alone,
    told_group,
    yes,
)
from batchbayes.report.words.shared import (
    ASIDE,
    DOUBT,
    Verdict,
    few_errors,
    honest_words,
    numbers,
    of_100,
    said,
    too_few,
)


def image_verdict(
    rows: Rows,
    contenders: Sequence[Contender[Any]],
    choice: Choice,
    limit_count: int,
    class_names: Sequence[str] | None = None,
    nouns: tuple[str, str] = ("image", "pixel"),
) -> Verdict:
    """Return the sentences of the first screen. `nouns` are what an example is called, and what it is made of."""
    whole, part = nouns
    own, chosen = contenders[0], choice.recommended
    found, alone = _honesty(chosen.seen), _honesty(own.seen)
    accuracy, confidence = chosen.metrics["accuracy"], said(chosen.metrics["mean_confidence"])
    totals = chosen.seen.confusion.counts.sum(1).tolist()
    names = class_names or range(len(totals))
    worst = worst_group(chosen.seen.class_groups(names))
    text = {Trust.HONEST: yes(worst), Trust.UNKNOWN: f"Not known: there are too few test {whole}s."}.get(
        found.trust, f"Not quite: it is {honest_words(found)}."
    )
    text += f" It says {confidence} on average, and {of_100(accuracy)} of 100 {part}s are right."
    wrong = chosen.seen.per_image("wrong")
    error = float(wrong.std()) / len(wrong) ** 0.5 if len(wrong) > 1 else 0.5
    good = class_sentences(contenders, choice, accuracy, found, alone, error=error, noun=part, worst=worst)
    good["How good is it?"] += f" This was counted on {count(len(wrong), f'test {whole}')}."
    if DOUBT * error > 2 * VAGUE:
        return Verdict(too_few(len(wrong), f"test {whole}", 20), is_usable=False)
    text += told_group(worst)
    counts = Counter({str(name): total for name, total in zip(names, totals, strict=False) if total})
    guess = guess_sentence(counts, accuracy, error, chosen.metrics["nll"], part)
    sentences = {
        **good,
        **({"headline": guess, "What to do next": CHECK} if guess else {}),
        "Can its percentages be believed?": text + told_alone(choice, own.metrics, found, alone),
        "When to look twice": _marked(rows, limit_count, nouns)
        + pixel_sentence(chosen.seen.entropy.counts().risk_coverage(), part),
    }
    return Verdict(sentences, is_usable=guess is None)


def _honesty(sums: PixelSums) -> Honesty:
    return image_honesty(sums.per_image("confidence"), sums.per_image("wrong"))


def _marked(rows: Rows, limit_count: int, nouns: tuple[str, str]) -> str:
    """Say how many more pixels are wrong in images that are marked."""
    whole, part = nouns
    flagged, wrong = numbers(rows, "flag") > 0, numbers(rows, "error_rate")
    rough = f"The limit is rough: it was set by {count(limit_count, whole)}. " if limit_count < FEWEST else ""
    if not bool(flagged.any()) or bool(flagged.all()):
        return f"predictions.csv marks {'all' if bool(flagged.any()) else 'none'} of these {whole}s. {rough}"
    inside, outside = (of_100(float(wrong[rows].mean())) for rows in (flagged, ~flagged))
    return (
        f"predictions.csv marks {int(flagged.sum())} of {len(flagged)} {whole}s (flag = 1). In those {inside} of 100 "
        f"{part}s are wrong, and in the others {outside}. {rough}"
    )


def pixel_sentence(curve: RiskCoverage, noun: str = "pixel") -> str:
    """Say how many errors are among the least certain pixels."""
    position = int((curve.coverage <= 1 - ASIDE).sum().clamp(min=1)) - 1
    kept, after, before = float(curve.coverage[position]), float(curve.risk[position]), float(curve.risk[-1])
    if before == 0:
        return few_errors(0)
    return (
        f"Of 100 {noun}s take the {of_100(1 - kept)} that it is least sure of: {of_100(1 - kept * after / before)} of "
        f"100 wrong {noun}s are among them."
    )


def image_terms(contenders: Sequence[Contender[Any]], choice: Choice, noun: str = "pixel") -> dict[str, str]:
    """Return the verdict in the terms of statistics."""
    curve = choice.recommended.seen.entropy.counts().risk_coverage()
    position = int((curve.coverage <= 1 - ASIDE).sum().clamp(min=1)) - 1
    limit, before, after = (
        float(values[i]) for values, i in ((curve.thresholds, position), (curve.risk, -1), (curve.risk, position))
    )
    aside = (
        f"The uncertainty of a {noun} is the entropy of its class: 0 nats if one class has probability 1, more if "
        f"several share it. Without the {noun}s above {number(limit)} nats the error rate changes from "
        f"{percent(before)} to {percent(after)}."
    )
    return {**shared_terms(contenders, choice), "Setting the uncertain ones aside": aside}
