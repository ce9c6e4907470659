"""The figures of a regression."""

from collections.abc import Sequence

from torch import Tensor

from batchbayes import plots
from batchbayes.assessment.contenders import ValueContender
from batchbayes.assessment.figures import most_telling
from batchbayes.assessment.result import Figures
from batchbayes.assessment.rows import first_output
from batchbayes.metrics import best_constant_precision, interval_summary

LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


def value_figures(
    contenders: Sequence[ValueContender],
    chosen: ValueContender,
    targets: Tensor,
    held_out: Tensor,
    unit: str,
) -> Figures:
    """Draw the figures of a regression. Those of one method show the recommended one."""
    shaped = targets.reshape(chosen.seen.test.mean.shape)
    coverages = {}
    for contender in most_telling(contenders, chosen):
        ends = [contender.seen.test.interval(level) for level in LEVELS]
        coverages[contender.name] = [interval_summary(low, high, shaped).coverage for low, high in ends]
    figures: Figures = {
        "interval-coverage": (
            plots.interval_coverage_figure(LEVELS, coverages),
            "How often intervals hold the target, against how often they should. Below the diagonal they are too "
            "narrow.",
        ),
    }
    if not chosen.has_draws:
        return figures
    mean = chosen.seen.calibration.mean
    constant = best_constant_precision(mean, held_out.reshape(mean.shape), "log_likelihood")
    scatter = plots.uncertainty_error_figure(
        first_output(chosen.seen.test.std),
        first_output(chosen.seen.test.mean - shaped),
        constant_std=constant**-0.5,
        unit=unit,
    )
    caption = (
        f"Errors in the order of the predicted spread ({chosen.name}). If the spread tells large errors from small "
        "ones, the dots and their running mean rise to the right with the bands."
    )
    return {"uncertainty-error": (scatter, caption), **figures}
