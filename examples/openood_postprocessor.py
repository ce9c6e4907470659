"""Novelty as a postprocessor of OpenOOD (https://github.com/Jingkang50/OpenOOD), beside its KNN, ViM and the others.

Put this file into `openood/postprocessors`, or pass the class to the evaluator:

    evaluator = Evaluator(net, id_name="cifar10", postprocessor=NoveltyPostprocessor(None))

OpenOOD's confidence is high for known inputs, so it is the negated score of novelty.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import batchbayes as bb

try:
    from openood.postprocessors import BasePostprocessor  # pyright: ignore[reportMissingImports]
except ImportError:  # so that the class can be read, and tested, without OpenOOD

    class BasePostprocessor:
        """The part of OpenOOD's base class that is used here."""

        def __init__(self, config: Any) -> None:
            self.config = config


class NoveltyPostprocessor(BasePostprocessor):  # pyright: ignore[reportGeneralTypeIssues]
    """Fits `bb.novelty` to the training images, and calibrates it on the validation images if there are any."""

    APS_mode = False
    """There is nothing to tune on other data."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.detector: bb.Novelty | None = None

    def setup(self, net: nn.Module, id_loader_dict: Mapping[str, Iterable[Any]], ood_loader_dict: Any = None) -> None:
        """Fit once. OpenOOD's batches are dicts with the images under "data"."""
        if self.detector is None:
            validation = id_loader_dict.get("val")
            self.detector = bb.novelty(net, id_loader_dict["train"], calibration=validation, inputs="data")

    @torch.no_grad()
    def postprocess(self, net: nn.Module, data: Tensor) -> tuple[Tensor, Tensor]:
        """Return predicted classes and confidences, (N,) each."""
        if self.detector is None:
            raise bb.BatchbayesError("a detector that was fitted", "none", "call setup() first")
        score = self.detector.score(data, whole=False)  # a batch of strange images is no surprise here
        return net(data).argmax(1), -score.to(data.device)
