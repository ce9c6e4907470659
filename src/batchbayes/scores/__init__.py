"""Scores: plain functions that compare predictions with the truth and return one number for each example.

The axes are draws S, examples N, then any others; classes K are last. A score has the dtype of the prediction. Sums
over draws and classes are computed in float64. `batchbayes.metrics` summarises scores.
"""

from batchbayes.scores.classification import (
    brier as brier,
    categorical_log_likelihood as categorical_log_likelihood,
    entropy as entropy,
    is_misclassified as is_misclassified,
    max_probability as max_probability,
)
from batchbayes.scores.optima import (
    crps_optimal_std as crps_optimal_std,
    crps_optimum as crps_optimum,
    log_likelihood_optimal_precision as log_likelihood_optimal_precision,
    log_likelihood_optimum as log_likelihood_optimum,
)
from batchbayes.scores.regression import (
    absolute_error as absolute_error,
    gaussian_crps as gaussian_crps,
    gaussian_log_likelihood as gaussian_log_likelihood,
    mixture_crps as mixture_crps,
    mixture_log_likelihood as mixture_log_likelihood,
    sample_crps as sample_crps,
)
