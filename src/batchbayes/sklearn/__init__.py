"""scikit-learn estimators that say how sure they are: `UncertainRegressor` and `UncertainClassifier`."""

from batchbayes.sklearn.classifier import UncertainClassifier
from batchbayes.sklearn.regressor import UncertainRegressor

__all__ = ["UncertainClassifier", "UncertainRegressor"]
