"""The verdict on a segmentation in words."""

from collections.abc import Sequence
from typing import Any

from batchbayes._common.text import count, number, percent
from batchbayes.assessment.classification.verdict import NO_ERROR, class_sentences
from batchbayes.assessment.contenders import Contender
from batchbayes.assessment.recommend import Choice, sentence_of_choice
from batchbayes.metrics import RiskCoverage, risk_coverage


def image_verdict(contenders: Sequence[Contender[Any]], choice: Choice) -> dict[str, str]:
    """Return the sentences by their heading, the headline first."""
    sums = choice.recommended.seen
    pixels = count(int(sums.confusion.counts.sum()), "pixel")
    return {
        **class_sentences(contenders, choice, f"{pixels} in {count(len(sums.cells), 'test image')}"),
        "When not to trust it": pixel_rejection(risk_coverage(sums.entropy.counts())),
        "Which method": sentence_of_choice(choice),
    }


def pixel_rejection(curve: RiskCoverage, aside: float = 0.1) -> str:
    """Say what is gained if the least certain pixels are set aside."""
    position = int((curve.coverage <= 1 - aside).sum().clamp(min=1)) - 1
    kept, after, before = float(curve.coverage[position]), float(curve.risk[position]), float(curve.risk[-1])
    if before == 0:
        return NO_ERROR
    return (
        f"At pixels whose entropy is above {number(float(curve.thresholds[position]))} nats. These are "
        f"{percent(1 - kept, 0)} of all pixels, and {percent(1 - kept * after / before, 0)} of the errors are among "
        f"them. Without them the error rate changes from {percent(before)} to {percent(after)}."
    )
