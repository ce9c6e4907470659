"""The figures of a classifier."""

from collections.abc import Sequence

import torch
from torch import Tensor

from batchbayes import plots
from batchbayes.assessment.contenders import ClassContender
from batchbayes.assessment.figures import most_telling
from batchbayes.assessment.load import Case
from batchbayes.assessment.result import Figures
from batchbayes.assessment.thumbnails import displayable
from batchbayes.metrics import equal_width_reliability, risk_coverage
from batchbayes.plots.style import Figure
from batchbayes.scores import is_misclassified, max_probability


def class_figures(case: Case, contenders: Sequence[ClassContender], chosen: ClassContender, labels: Tensor) -> Figures:
    """Draw the figures of a classifier. Those of one method show the recommended one."""
    bins, curves = {}, {}
    for contender in most_telling(contenders, chosen):
        test = contender.seen.test
        wrong = is_misclassified(test.probs, labels)
        bins[contender.name] = equal_width_reliability(max_probability(test.probs), ~wrong)
        curve = risk_coverage(test.entropy, wrong)
        curves[contender.name] = curve.coverage, curve.risk
    figures = {
        "reliability": (
            plots.reliability_figure(bins),
            "Accuracy against confidence. Dots on the diagonal are honest. Below it a method is too sure of itself.",
        ),
        "risk-coverage": (
            plots.risk_coverage_figure(curves),
            "Error rate of the answers that are kept when the least certain ones (by entropy) are set aside.",
        ),
    }
    test, ood = chosen.seen.test, chosen.seen.ood
    if case.ood is not None and ood is not None:
        scores = {"entropy (nats)": (test.entropy, ood.entropy)}
        if chosen.has_draws:
            scores["mutual information (nats)"] = test.mutual_information, ood.mutual_information
        figures["out-of-distribution"] = (
            plots.shift_figure(scores),
            f"Uncertainty about the test data and about {case.ood.name} ({chosen.name}).",
        )
    if (picture := _certainty(case, chosen, labels)) is not None:
        why = "on which the draws agree most and least" if chosen.has_draws else "with the lowest and highest entropy"
        figures["most-and-least-certain"] = picture, f"Test images {why} ({chosen.name})."
    return figures


def _certainty(case: Case, chosen: ClassContender, labels: Tensor) -> Figure | None:
    test = chosen.seen.test
    order = (test.mutual_information if chosen.has_draws else test.entropy).argsort(stable=True)
    shown = torch.cat([order[:8], order[-8:]]) if len(order) >= 16 else order
    images = displayable(case.test.raw().take(shown.tolist()))
    if images is None:
        return None
    return plots.certainty_figure(
        images,
        labels[shown],
        test.log_probs.argmax(-1)[shown],
        entropy=test.entropy[shown],
        mutual_information=test.mutual_information[shown],
        count=min(8, len(order) // 2),
        names=case.class_names,
    )
