"""Figures: each function draws arrays into a matplotlib Figure that is readable in print and by the colour-blind.

Each takes `ax=` to draw into axes of your own, and then returns their figure. Several panels take the place of these
axes.
"""

from batchbayes.plots.band import Band, band_figure
from batchbayes.plots.batch_size import batch_size_figure
from batchbayes.plots.certainty import certainty_figure
from batchbayes.plots.classification import reliability_figure, risk_coverage_figure
from batchbayes.plots.collapse import BatchSizeSweep, collapse_figure
from batchbayes.plots.normality import StatisticSweep, normality_sweep_figure
from batchbayes.plots.novelty import novelty_figure
from batchbayes.plots.price import price_figure
from batchbayes.plots.regression import interval_coverage_figure, uncertainty_error_figure, uncertainty_error_grid
from batchbayes.plots.seeds import seeds_figure
from batchbayes.plots.segmentation import Triptych, segmentation_figure
from batchbayes.plots.shift import shift_figure
from batchbayes.plots.statistics import correlation_figure, marginals_figure, normality_figure
from batchbayes.plots.style import save_figure

__all__ = [
    "Band",
    "BatchSizeSweep",
    "StatisticSweep",
    "Triptych",
    "band_figure",
    "batch_size_figure",
    "certainty_figure",
    "collapse_figure",
    "correlation_figure",
    "interval_coverage_figure",
    "marginals_figure",
    "normality_figure",
    "normality_sweep_figure",
    "novelty_figure",
    "price_figure",
    "reliability_figure",
    "risk_coverage_figure",
    "save_figure",
    "seeds_figure",
    "segmentation_figure",
    "shift_figure",
    "uncertainty_error_figure",
    "uncertainty_error_grid",
]
