"""Scores of single examples, and summaries over examples.

Scores are plain functions that compare predictions with the truth and return one number for each example. The axes are
draws S, examples N, then any others; classes K are last. A score has the dtype of the prediction. Sums over draws and
classes are computed in float64. Summaries are Python floats, and their sums are computed in float64.

`evaluate(predictive, targets)` has the usual ones of a prediction. The others take tensors, arrays or lists:
predictions first, then the truth. `ConfusionMatrix`, `ReliabilityHistogram` and `ScoreHistogram` count data that comes
in pieces. The bins and counts that they return have the summaries as methods.
"""

from batchbayes.metrics.classification import (
    Reliability as Reliability,
    accuracy as accuracy,
    brier as brier,
    categorical_log_likelihood as categorical_log_likelihood,
    classwise_calibration_error as classwise_calibration_error,
    entropy as entropy,
    equal_mass_reliability as equal_mass_reliability,
    equal_width_reliability as equal_width_reliability,
    expected_calibration_error as expected_calibration_error,
    is_misclassified as is_misclassified,
    max_probability as max_probability,
)
from batchbayes.metrics.detection import (
    box_average_precision as box_average_precision,
    box_overlaps as box_overlaps,
    detection_metrics as detection_metrics,
    is_true_detection as is_true_detection,
    matched_overlaps as matched_overlaps,
)
from batchbayes.metrics.evaluation import evaluate as evaluate
from batchbayes.metrics.ranking import (
    RiskCoverage as RiskCoverage,
    ScoreCounts as ScoreCounts,
    area_under_risk_coverage as area_under_risk_coverage,
    area_under_roc as area_under_roc,
    average_precision as average_precision,
    count_by_score as count_by_score,
    false_positive_rate_at_recall as false_positive_rate_at_recall,
    ood_auroc as ood_auroc,
    rank_correlation as rank_correlation,
    risk_coverage as risk_coverage,
)
from batchbayes.metrics.regression import (
    Intervals as Intervals,
    absolute_error as absolute_error,
    best_constant_precision as best_constant_precision,
    gaussian_crps as gaussian_crps,
    gaussian_log_likelihood as gaussian_log_likelihood,
    interval_summary as interval_summary,
    mixture_crps as mixture_crps,
    mixture_log_likelihood as mixture_log_likelihood,
    root_mean_squared_error as root_mean_squared_error,
    sample_crps as sample_crps,
    sharpness as sharpness,
)
from batchbayes.metrics.streaming import (
    ConfusionMatrix as ConfusionMatrix,
    ReliabilityHistogram as ReliabilityHistogram,
    ScoreHistogram as ScoreHistogram,
)
from batchbayes.metrics.summary import (
    calibrated_log_likelihood as calibrated_log_likelihood,
    crps_optimal_std as crps_optimal_std,
    crps_optimum as crps_optimum,
    deep_ensemble_equivalent as deep_ensemble_equivalent,
    log_likelihood_optimal_precision as log_likelihood_optimal_precision,
    log_likelihood_optimum as log_likelihood_optimum,
    mean_score as mean_score,
    negative_log_likelihood as negative_log_likelihood,
    normalised_score as normalised_score,
)
