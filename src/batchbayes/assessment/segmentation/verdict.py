"""The verdict on a segmentation: in plain words for the first screen, and then in the terms of statistics."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from batchbayes._common.text import count, number, percent
from batchbayes.assessment.classification.verdict import (
    CHECK,
    class_sentences,
    guess_sentence,
    shared_terms,
    told_alone,
)
from batchbayes.assessment.contenders import Contender
from batchbayes.assessment.recommend import Choice
from batchbayes.assessment.result import FEWEST
from batchbayes.assessment.rows import Rows
from batchbayes.assessment.segmentation.pixels import PixelSums
from batchbayes.assessment.words import ASIDE, DOUBT, UNKNOWN, VAGUE, few_errors, honesty, numbers, of_100, too_few
from batchbayes.metrics import RiskCoverage


def image_verdict(
    rows: Rows,
    contenders: Sequence[Contender[Any]],
    choice: Choice,
    limit_count: int,
    class_names: Sequence[str] | None = None,
) -> dict[str, str]:
    """Return the sentences of the first screen by their heading, the headline first."""
    own, chosen = contenders[0], choice.recommended
    word, alone = image_honesty(chosen.seen), image_honesty(own.seen)
    accuracy, said = chosen.metrics["accuracy"], percent(chosen.metrics["mean_confidence"], 0)
    text = {"honest": "Yes.", UNKNOWN: "Not known: there are too few test images."}.get(
        word, f"Not quite: it is {word}."
    )
    text += f" It says {said} on average, and {of_100(accuracy)} of 100 pixels are right."
    wrong = chosen.seen.per_image("wrong")
    error = float(wrong.std()) / len(wrong) ** 0.5 if len(wrong) > 1 else 0.5
    good = class_sentences(contenders, choice, accuracy, word, alone, error=error, noun="pixel")
    good["How good is it?"] += f" This was counted on {count(len(wrong), 'test image')}."
    if DOUBT * error > 2 * VAGUE:
        return too_few(len(wrong), "test image", 20)
    totals = chosen.seen.confusion.counts.sum(1).tolist()
    names = class_names or range(len(totals))
    counts = Counter({str(name): total for name, total in zip(names, totals, strict=False) if total})
    if guess := guess_sentence(counts, accuracy, error, chosen.metrics["nll"], "pixel"):
        good |= {"headline": guess, "What to do next": CHECK}
    return {
        **good,
        "Can its percentages be believed?": text + told_alone(choice, own.metrics, word, alone),
        "When to look twice": _marked(rows, limit_count) + pixel_sentence(chosen.seen.entropy.counts().risk_coverage()),
    }


def image_honesty(sums: PixelSums) -> str:
    """Say how honest a method is. Pixels of one image depend on each other, so the images are what is counted."""
    gaps = sums.per_image("confidence") - (1 - sums.per_image("wrong"))
    return honesty(float(gaps.mean()), float(gaps.std()) / len(gaps) ** 0.5 if len(gaps) > 1 else 1.0)


def _marked(rows: Rows, limit_count: int) -> str:
    """Say how many more pixels are wrong in images that are marked."""
    flagged, wrong = numbers(rows, "flag") > 0, numbers(rows, "error_rate")
    rough = f"The limit is rough: it was set by {count(limit_count, 'image')}. " if limit_count < FEWEST else ""
    if not bool(flagged.any()) or bool(flagged.all()):
        return f"predictions.csv marks {'all' if bool(flagged.any()) else 'none'} of these images. {rough}"
    inside, outside = (of_100(float(wrong[part].mean())) for part in (flagged, ~flagged))
    return (
        f"predictions.csv marks {int(flagged.sum())} of {len(flagged)} images (flag = 1). In those {inside} of 100 "
        f"pixels are wrong, and in the others {outside}. {rough}"
    )


def pixel_sentence(curve: RiskCoverage) -> str:
    """Say how many errors are among the least certain pixels."""
    position = int((curve.coverage <= 1 - ASIDE).sum().clamp(min=1)) - 1
    kept, after, before = float(curve.coverage[position]), float(curve.risk[position]), float(curve.risk[-1])
    if before == 0:
        return few_errors(0)
    return (
        f"Of 100 pixels take the {of_100(1 - kept)} that it is least sure of: {of_100(1 - kept * after / before)} of "
        "100 wrong pixels are among them."
    )


def image_terms(contenders: Sequence[Contender[Any]], choice: Choice) -> dict[str, str]:
    """Return the verdict in the terms of statistics."""
    curve = choice.recommended.seen.entropy.counts().risk_coverage()
    position = int((curve.coverage <= 1 - ASIDE).sum().clamp(min=1)) - 1
    limit, before, after = (
        float(values[i]) for values, i in ((curve.thresholds, position), (curve.risk, -1), (curve.risk, position))
    )
    aside = (
        "The uncertainty of a pixel is the entropy of its class: 0 nats if one class has probability 1, more if "
        f"several share it. Without the pixels above {number(limit)} nats the error rate changes from "
        f"{percent(before)} to {percent(after)}."
    )
    return {**shared_terms(contenders, choice), "Setting the uncertain ones aside": aside}
