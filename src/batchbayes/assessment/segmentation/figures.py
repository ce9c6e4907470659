"""The figures of a segmentation."""

from collections.abc import Sequence

import torch

from batchbayes import plots
from batchbayes.assessment.contenders import Contender, drawing
from batchbayes.assessment.figures import most_telling
from batchbayes.assessment.load import Case
from batchbayes.assessment.result import Figures
from batchbayes.assessment.rows import single_images
from batchbayes.assessment.segmentation.pixels import PixelSums, kept_pixels
from batchbayes.assessment.thumbnails import displayable
from batchbayes.data.examples import Examples
from batchbayes.plots.style import Figure
from batchbayes.prediction import predict_stream


def image_figures(case: Case, contenders: Sequence[Contender[PixelSums]], chosen: Contender[PixelSums]) -> Figures:
    """Draw the figures of a segmentation. Those of one method show the recommended one."""
    curves, shown = {}, most_telling(contenders, chosen)
    for contender in shown:
        curve = contender.seen.entropy.counts().risk_coverage()
        curves[contender.name] = curve.coverage, curve.risk
    return {
        "segmentation": (
            _triptychs(case, chosen),
            "The most certain test image, one in the middle and the least certain one, by their mean entropy "
            f"({chosen.name}).",
        ),
        "reliability": (
            plots.reliability_figure({c.name: c.seen.reliability.reliability() for c in shown}),
            "Accuracy of pixels against confidence. Below the diagonal a method is too sure of itself.",
        ),
        "risk-coverage": (
            plots.risk_coverage_figure(curves, risk="error of the pixels kept"),
            "Error rate of the pixels that are kept when the least certain ones (by entropy) are set aside.",
        ),
    }


def _triptychs(case: Case, chosen: Contender[PixelSums]) -> Figure:
    order = chosen.seen.mean_entropy().argsort()
    picked = list(dict.fromkeys(int(order[i]) for i in (0, len(order) // 2, len(order) - 1)))
    found = {row: (image, labels) for row, image, labels in case.test.find(picked)}
    images, labels = (torch.stack(parts) for parts in zip(*(found[row] for row in picked), strict=True))
    shown = displayable(images)
    pictures = shown if shown is not None else images[:, :1].expand(-1, 3, -1, -1)
    some = single_images(Examples("some", [(images, labels)]))
    likelihoods = [case.at(chosen.trial.tuned["temperature"])]
    panels = []
    for picture, predicted in zip(
        pictures, predict_stream(chosen.posterior, some, likelihoods, **drawing(case, chosen.trial)), strict=True
    ):
        seen, truth = predicted.predictives[0], predicted.batch[1][0]
        classes = seen.log_probs[0].argmax(-1)
        wrong = (classes != truth) & kept_pixels(truth, case.settings.ignore_label)
        panels.append(plots.Triptych(picture.permute(1, 2, 0), classes, seen.entropy[0], wrong))
    return plots.segmentation_figure(panels, num_classes=case.num_outputs, names=case.class_names)
