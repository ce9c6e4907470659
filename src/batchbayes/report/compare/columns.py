"""The columns of the tables of metrics, for each task."""

from dataclasses import dataclass
from typing import Literal

RANKING, STRANGE = "Does the uncertainty find errors?", "Does the uncertainty find strange inputs?"
INTERVALS = "Do intervals hold the target?"
"""Titles of tables."""


@dataclass(frozen=True)
class MetricColumn:
    """A column of the tables of metrics: its label, which way is better, how it is written, what it means."""

    key: str
    label: str
    better: Literal["lower", "higher", "target"]
    digits: int
    meaning: str
    percent: bool = False
    target: float | None = None
    group: str = "How good and how honest"
    """Title of the table that the column is in."""


BRIER = MetricColumn("brier", "Brier", "lower", 3, "squared distance of the probabilities from the truth, 0 to 2")
ECE = MetricColumn("ece", "ECE", "lower", 1, "mean gap between confidence and accuracy, 15 equal-width bins", True)
PASSES = MetricColumn(
    "passes", "Passes", "lower", 0, "what a prediction costs, in forward passes; novelty takes one more"
)
BY_MI = MetricColumn("error_auroc_mi", "AUROC by MI", "higher", 3, "how well mutual information does", group=RANKING)
AURC = MetricColumn("aurc", "AURC", "lower", 4, "mean error rate as the least certain are set aside", group=RANKING)
"""Columns of more than one task."""

CLASSES = (
    MetricColumn("accuracy", "Accuracy", "higher", 1, "share of right answers", percent=True),
    MetricColumn("nll", "NLL", "lower", 3, "negative log-likelihood: the surprise at the truth, in nats"),
    MetricColumn("cll", "CLL", "higher", 3, "log-likelihood at the best temperature, tuned on other test data"),
    BRIER,
    ECE,
    MetricColumn("ece_equal_mass", "ECE, equal mass", "lower", 1, "the same with bins of equal size", percent=True),
    MetricColumn("ece_classwise", "ECE, classwise", "lower", 2, "the same for each class, averaged", percent=True),
    MetricColumn(
        "set_size", "Set size", "lower", 2, "mean size of conformal sets that hold the truth in 90 % of cases"
    ),
    PASSES,
    MetricColumn(
        "error_auroc", "AUROC", "higher", 3, "how well entropy tells wrong answers from right ones", group=RANKING
    ),
    BY_MI,
    AURC,
)
STRANGE_CLASSES = (
    MetricColumn("ood_auroc", "AUROC", "higher", 3, "how well entropy tells strange from test inputs", group=STRANGE),
    MetricColumn("ood_auroc_mi", "AUROC by MI", "higher", 3, "how well mutual information does", group=STRANGE),
    MetricColumn("ood_aupr", "AUPR", "higher", 3, "area under precision and recall, by entropy", group=STRANGE),
    MetricColumn(
        "ood_fpr95", "FPR95", "lower", 1, "false alarms when 95 % of strange inputs are found", True, group=STRANGE
    ),
)
PIXELS = (
    MetricColumn("accuracy", "Pixel accuracy", "higher", 1, "share of pixels with the right class", percent=True),
    MetricColumn(
        "mean_iou",
        "Mean IoU",
        "higher",
        1,
        "overlap of predicted and true regions, mean over classes",
        percent=True,
    ),
    MetricColumn(
        "nll", "NLL", "lower", 3, "negative log-likelihood: the surprise at the truth, in nats for each pixel"
    ),
    BRIER,
    ECE,
    PASSES,
    MetricColumn(
        "error_auroc", "AUROC", "higher", 3, "how well entropy tells wrong pixels from right ones", group=RANKING
    ),
    BY_MI,
    AURC,
)
VALUES = (
    MetricColumn("rmse", "RMSE", "lower", 3, "root of the mean squared error, in units of the target"),
    MetricColumn("nll", "NLL", "lower", 3, "negative log-likelihood: the surprise at the truth, in nats"),
    MetricColumn("crps", "CRPS", "lower", 3, "distance of the prediction from the truth, in units of the target"),
    MetricColumn("crps_normalised", "CRPS, 0 to 100", "higher", 1, "0: best constant spread, 100: best at each point"),
    MetricColumn("nll_normalised", "PLL, 0 to 100", "higher", 1, "the same scale for the log-likelihood"),
    MetricColumn("sharpness", "Sharpness", "lower", 3, "root of the mean predicted variance: compare with the RMSE"),
    MetricColumn("rank_correlation", "Rank correlation", "higher", 3, "of predicted spread and absolute error"),
    PASSES,
    MetricColumn(
        "coverage_90", "90 % hold", "target", 1, "share of targets in 90 % intervals",
        percent=True, target=0.9, group=INTERVALS,
    ),
    MetricColumn("width_90", "Width", "lower", 3, "mean width of the 90 % intervals", group=INTERVALS),
    MetricColumn(
        "conformal_coverage", "Conformal hold", "target", 1, "share of targets in conformal 90 % intervals",
        percent=True, target=0.9, group=INTERVALS,
    ),
    MetricColumn(
        "worst_fifth", "Worst fifth", "higher", 1, "the same in the fifth of the predictions where it is lowest",
        percent=True, group=INTERVALS,
    ),
    MetricColumn("conformal_width", "Width", "lower", 3, "mean width of conformal 90 % intervals", group=INTERVALS),
)  # fmt: skip
STRANGE_VALUES = (
    MetricColumn(
        "ood_auroc", "AUROC", "higher", 3, "how well the spread tells strange from test inputs", group=STRANGE
    ),
)
JOINT = MetricColumn("joint_nll", "Joint NLL", "lower", 3, "of all outputs of an example together, in nats")
"""Shown for several outputs."""
