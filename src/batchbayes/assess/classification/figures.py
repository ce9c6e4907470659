"""The figures of a classifier."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from batchbayes import plots
from batchbayes.assess.candidates import Fitted
from batchbayes.assess.job import Loaded
from batchbayes.assess.thumbnails import displayable
from batchbayes.metrics import count_by_score, equal_width_reliability, risk_coverage
from batchbayes.scores import is_misclassified, max_probability

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from batchbayes.assess.classification.compare import Contender


def class_figures(
    loaded: Loaded,
    contenders: "Sequence[Contender]",
    chosen: "Contender",
    drawn: "Contender",
    labels: Tensor,
    fitted: Fitted,
) -> "dict[str, tuple[Figure, str]]":
    """Figures by file name, each with its caption."""
    bins, curves = {}, {}
    for contender in contenders:
        wrong = is_misclassified(contender.test.probs, labels)
        bins[contender.name] = equal_width_reliability(max_probability(contender.test.probs), ~wrong)
        curve = risk_coverage(count_by_score(contender.test.entropy, wrong))
        curves[contender.name] = curve.coverage, curve.risk
    figures = {
        "reliability": (
            plots.reliability_figure(bins),
            "Accuracy against confidence. Dots on the diagonal are honest; below it the method is too sure of itself.",
        ),
        "risk-coverage": (
            plots.risk_coverage_figure(curves),
            "Error rate of the answers that are kept when the least certain (by entropy) are set aside.",
        ),
        "batch-size": batch_size(fitted),
    }
    if chosen.ood is not None and drawn.ood is not None:
        scores = {
            "entropy (nats)": (chosen.test.entropy, chosen.ood.entropy),
            "mutual information (nats)": (drawn.test.mutual_information, drawn.ood.mutual_information),
        }
        figures["out-of-distribution"] = (
            plots.shift_figure(scores),
            f"Uncertainty about test data and about {loaded.ood.name if loaded.ood else ''}: entropy of "
            f"{chosen.name}, mutual information of {drawn.name}.",
        )
    if (picture := _certainty(loaded, drawn, labels)) is not None:
        figures["most-and-least-certain"] = (
            picture,
            f"Test images on which the draws of {drawn.name} agree most, and least.",
        )
    return figures


def batch_size(fitted: Fitted) -> "tuple[Figure, str]":
    """The curve that the batch size was tuned by."""
    curve = fitted.tuned.curve
    figure = plots.batch_size_figure(
        curve.batch_sizes,
        -curve.values,
        best=fitted.tuned.batch_size,
        trained_with=fitted.trained.batch_size,
        score="NLL on calibration data",
    )
    return figure, f"How much noise suits {fitted.label}: the score on calibration data at each effective batch size."


def _certainty(loaded: Loaded, drawn: "Contender", labels: Tensor) -> "Figure | None":
    order = drawn.test.mutual_information.argsort(stable=True)
    chosen = torch.cat([order[:8], order[-8:]]) if len(order) >= 16 else order
    images = displayable(loaded.test.take(chosen.tolist()))
    if images is None:
        return None
    return plots.certainty_figure(
        images,
        labels[chosen],
        drawn.test.log_probs.argmax(-1)[chosen],
        entropy=drawn.test.entropy[chosen],
        mutual_information=drawn.test.mutual_information[chosen],
        count=min(8, len(order) // 2),
        names=loaded.class_names,
    )
