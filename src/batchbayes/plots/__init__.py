"""Figures: each function draws arrays into a matplotlib Figure that is readable in print and by the colour-blind.

Each takes `ax=` to draw into axes of your own, and then returns their figure. Several panels take the place of these
axes.
"""

from batchbayes.plots.classification import (
    boxes_figure as boxes_figure,
    certainty_figure as certainty_figure,
    novelty_figure as novelty_figure,
    reliability_figure as reliability_figure,
    risk_coverage_figure as risk_coverage_figure,
    shift_figure as shift_figure,
)
from batchbayes.plots.lines import batch_size_figure as batch_size_figure, price_figure as price_figure
from batchbayes.plots.regression import (
    Band as Band,
    band_figure as band_figure,
    interval_coverage_figure as interval_coverage_figure,
    table_figure as table_figure,
    uncertainty_error_figure as uncertainty_error_figure,
)
from batchbayes.plots.segmentation import Triptych as Triptych, segmentation_figure as segmentation_figure
from batchbayes.plots.style import save_figure as save_figure
