"""Summaries of scores over examples. They are Python floats, and their sums are computed in float64.

Some summaries need counts first. `count_by_score` and the reliability functions count tensors in memory. The classes in
`batchbayes.metrics.streaming` count data that comes in pieces, and return the same objects for the summaries.
"""

from batchbayes.metrics.calibrated import calibrated_log_likelihood, deep_ensemble_equivalent
from batchbayes.metrics.classification import (
    Reliability,
    accuracy,
    classwise_calibration_error,
    equal_mass_reliability,
    equal_width_reliability,
    expected_calibration_error,
)
from batchbayes.metrics.ranking import (
    RiskCoverage,
    ScoreCounts,
    area_under_risk_coverage,
    area_under_roc,
    average_precision,
    count_by_score,
    false_positive_rate_at_recall,
    rank_correlation,
    risk_coverage,
)
from batchbayes.metrics.regression import (
    Intervals,
    best_constant_precision,
    interval_summary,
    root_mean_squared_error,
    sharpness,
)
from batchbayes.metrics.significance import TTest, one_sample_t_test, stars, student_t_two_sided
from batchbayes.metrics.streaming import ConfusionMatrix, ReliabilityHistogram, ScoreHistogram
from batchbayes.metrics.summary import mean_score, negative_log_likelihood, normalised_score

__all__ = [
    "ConfusionMatrix",
    "Intervals",
    "Reliability",
    "ReliabilityHistogram",
    "RiskCoverage",
    "ScoreCounts",
    "ScoreHistogram",
    "TTest",
    "accuracy",
    "area_under_risk_coverage",
    "area_under_roc",
    "average_precision",
    "best_constant_precision",
    "calibrated_log_likelihood",
    "classwise_calibration_error",
    "count_by_score",
    "deep_ensemble_equivalent",
    "equal_mass_reliability",
    "equal_width_reliability",
    "expected_calibration_error",
    "false_positive_rate_at_recall",
    "interval_summary",
    "mean_score",
    "negative_log_likelihood",
    "normalised_score",
    "one_sample_t_test",
    "rank_correlation",
    "risk_coverage",
    "root_mean_squared_error",
    "sharpness",
    "stars",
    "student_t_two_sided",
]
