"""The figures of a segmentation."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from batchbayes import plots
from batchbayes.assess.candidates import Fitted, drawing
from batchbayes.assess.classification.figures import batch_size
from batchbayes.assess.job import Job, Loaded
from batchbayes.assess.segmentation.pixels import kept_pixels
from batchbayes.assess.thumbnails import displayable
from batchbayes.data.examples import Examples
from batchbayes.likelihoods import categorical
from batchbayes.metrics import risk_coverage
from batchbayes.predictive import CategoricalPredictive

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from batchbayes.assess.segmentation.compare import Contender


def pixel_figures(
    job: Job, loaded: Loaded, contenders: "Sequence[Contender]", chosen: "Contender", fitted: Fitted
) -> "dict[str, tuple[Figure, str]]":
    """Figures by file name, each with its caption."""
    curves = {}
    for contender in contenders:
        curve = risk_coverage(contender.sums.entropy.counts())
        curves[contender.name] = curve.coverage, curve.risk
    return {
        "segmentation": (
            _triptychs(job, loaded, chosen),
            f"The most, a middling and the least certain test image by mean entropy of {chosen.name}.",
        ),
        "reliability": (
            plots.reliability_figure({c.name: c.sums.reliability.reliability() for c in contenders}),
            "Accuracy of pixels against confidence. Below the diagonal the method is too sure of itself.",
        ),
        "risk-coverage": (
            plots.risk_coverage_figure(curves, risk="error of the pixels kept"),
            "Error rate of the pixels that are kept when the least certain (by entropy) are set aside.",
        ),
        "batch-size": batch_size(fitted),
    }


def _triptychs(job: Job, loaded: Loaded, chosen: "Contender") -> "Figure":
    order = chosen.sums.per_image("entropy").argsort()
    picked = list(dict.fromkeys(int(order[i]) for i in (0, len(order) // 2, len(order) - 1)))
    found = {row: (image, labels) for row, image, labels in loaded.test.find(picked)}
    images, labels = (torch.stack(parts) for parts in zip(*(found[row] for row in picked), strict=True))
    shown = displayable(images)
    pictures = shown if shown is not None else images[:, :1].expand(-1, 3, -1, -1)
    panels = []

    def add(predictives: tuple[CategoricalPredictive, ...], _: Tensor, truth: Tensor) -> None:
        predicted = predictives[0].log_probs[0].argmax(-1)
        wrong = (predicted != truth[0]) & kept_pixels(truth[0], job.ignored_label)
        picture = pictures[len(panels)].permute(1, 2, 0)
        panels.append(plots.Triptych(picture, predicted, predictives[0].entropy[0], wrong))

    some = Examples("some", [(images, labels)])
    drawing(job).stream(chosen.posterior, some, [categorical(temperature=chosen.temperature)], add)
    return plots.segmentation_figure(panels, num_classes=loaded.num_outputs, names=loaded.class_names)
