"""scikit-learn estimators that say how sure they are: `UncertainRegressor` and `UncertainClassifier`.

`UncertainOutputs` is for several targets, and `pipeline` for steps before an estimator. With the library installed, the
same names are in `batchbayes.sklearn`.
"""

from batchbayes_tables.around import UncertainOutputs, UncertainPipeline, pipeline
from batchbayes_tables.classifier import UncertainClassifier
from batchbayes_tables.regressor import UncertainRegressor

__all__ = ["UncertainClassifier", "UncertainOutputs", "UncertainPipeline", "UncertainRegressor", "pipeline"]

__version__ = "0.3.0"
