"""Does the data have inputs that the network has not seen? A detector of novelty, fitted to the training data."""

from batchbayes._common.rng import GlobalStream
from batchbayes.assessment.load import Case
from batchbayes.detection.novelty import Novelty, novelty
from batchbayes.errors import BatchbayesError

LEVEL = 0.01
"""Inputs are called novel if fewer ordinary ones than this share are as unusual."""


def fit_novelty(case: Case) -> tuple[Novelty | None, str]:
    """Return the detector, and an empty text; or None, and why there is none.

    Its p-values are calibrated on the calibration data, which the network was not trained on.
    """
    try:
        with GlobalStream(case.settings.seed):  # data sets may draw random numbers
            found = novelty(
                case.network,
                case.train.plain,
                calibration=case.calibration,
                logits=False if case.task == "regression" else None,
                seed=case.settings.seed,
            )
    except BatchbayesError as error:
        return None, f"Novelty could not be measured: expected {error.expected}; got {error.got}."
    return found, ""


def novelty_level(found: Novelty | None) -> float:
    """Return the level below which an input is called novel: at least the smallest p-value that there is."""
    return LEVEL if found is None else max(LEVEL, found.least_level)
