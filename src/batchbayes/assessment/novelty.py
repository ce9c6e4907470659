"""Does the data have inputs that the network has not seen? A detector of novelty, fitted to the training data."""

from typing import Any

import torch
from torch.utils.data import DataLoader, Subset

from batchbayes._common.rng import GlobalStream
from batchbayes.assessment.load import Case
from batchbayes.data.examples import Examples
from batchbayes.detection.novelty import Novelty, novelty
from batchbayes.engines.linear_check import spread_evenly
from batchbayes.errors import BatchbayesError

LEVEL = 0.01
"""Inputs are called novel if fewer ordinary ones than this share are as unusual."""
EXAMPLES = 8000
"""Training examples that are read."""


def fit_novelty(case: Case) -> tuple[Novelty | None, str]:
    """Return the detector, and an empty text; or None, and why there is none.

    Its p-values are calibrated on the calibration data, which the network was not trained on.
    """
    try:
        with GlobalStream(case.settings.seed):  # data sets may draw random numbers
            found = novelty(
                case.network,
                _some(case.reference),
                calibration=case.calibration,
                num_examples=EXAMPLES,
                logits=False if case.task == "regression" else None,
                seed=case.settings.seed,
            )
    except BatchbayesError as error:
        return None, f"Novelty could not be measured: expected {error.expected}; got {error.got}."
    return found, ""


def novelty_level(found: Novelty | None) -> float:
    """Return the level below which an input is called novel: at least the smallest p-value that there is."""
    return LEVEL if found is None else max(LEVEL, found.least_level)


def _some(reference: Any) -> Any:
    """Return examples that are spread evenly over a data set: files are often in the order of classes."""
    if isinstance(reference, torch.Tensor):
        return reference[spread_evenly(len(reference), EXAMPLES)]
    loader = reference.batches if isinstance(reference, Examples) else None
    if isinstance(loader, DataLoader) and hasattr(loader.dataset, "__len__") and loader.batch_size:
        rows = spread_evenly(len(loader.dataset), EXAMPLES).tolist()  # type: ignore[arg-type]
        few = DataLoader(Subset(loader.dataset, rows), loader.batch_size, collate_fn=loader.collate_fn)
        return Examples(reference.name, few, preprocessing=reference.preprocessing, input_dtype=reference.input_dtype)
    return reference
