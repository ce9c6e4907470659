"""The figures of a regression."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from batchbayes import plots
from batchbayes.assess.candidates import Fitted
from batchbayes.assess.classification.figures import batch_size
from batchbayes.metrics import best_constant_precision, interval_summary
from batchbayes.predictive import GaussianPredictive

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from batchbayes.assess.regression.compare import Contender

LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


def first_output(values: Tensor) -> Tensor:
    """The first output of each example, (N,)."""
    return values.reshape(len(values), -1)[:, 0]


def central(predictive: GaussianPredictive, level: float) -> tuple[Tensor, Tensor]:
    """The ends of the central interval of the mixture."""
    return predictive.quantile((1 - level) / 2), predictive.quantile((1 + level) / 2)


def value_figures(
    contenders: "Sequence[Contender]",
    drawn: "Contender",
    targets: Tensor,
    held_out: Tensor,
    fitted: Fitted,
    unit: str,
) -> "dict[str, tuple[Figure, str]]":
    """Figures by file name, each with its caption."""
    shaped = targets.reshape(drawn.test.mean.shape)
    constant = best_constant_precision(
        drawn.calibration.mean, held_out.reshape(drawn.calibration.mean.shape), "log_likelihood"
    )
    coverages = {}
    for contender in contenders:
        ends = [central(contender.test, level) for level in LEVELS]
        coverages[contender.name] = [interval_summary(low, high, shaped).coverage for low, high in ends]
    return {
        "uncertainty-error": (
            plots.uncertainty_error_figure(
                first_output(drawn.test.std),
                first_output(drawn.test.mean - shaped),
                constant_std=constant**-0.5,
                unit=unit,
            ),
            f"Errors of {drawn.name} in the order of its predicted spread. If the spread knows anything, the dots and "
            "their running mean rise to the right with the bands.",
        ),
        "interval-coverage": (
            plots.interval_coverage_figure(LEVELS, coverages),
            "How often intervals hold the target, against how often they should. Below the diagonal: too narrow.",
        ),
        "batch-size": batch_size(fitted),
    }
