"""Scores: plain functions that compare predictions with the truth and return one number for each example.

The axes are draws S, examples N, then any others; classes K are last. A score has the dtype of the prediction. Sums
over draws and classes are computed in float64. `batchbayes.metrics` summarises scores.
"""

from batchbayes.scores.classification import (
    brier,
    categorical_log_likelihood,
    entropy,
    is_misclassified,
    max_probability,
)
from batchbayes.scores.optima import (
    crps_optimal_std,
    crps_optimum,
    log_likelihood_optimal_precision,
    log_likelihood_optimum,
)
from batchbayes.scores.regression import (
    absolute_error,
    gaussian_crps,
    gaussian_log_likelihood,
    mixture_crps,
    mixture_log_likelihood,
    sample_crps,
)

__all__ = [
    "absolute_error",
    "brier",
    "categorical_log_likelihood",
    "crps_optimal_std",
    "crps_optimum",
    "entropy",
    "gaussian_crps",
    "gaussian_log_likelihood",
    "is_misclassified",
    "log_likelihood_optimal_precision",
    "log_likelihood_optimum",
    "max_probability",
    "mixture_crps",
    "mixture_log_likelihood",
    "sample_crps",
]
