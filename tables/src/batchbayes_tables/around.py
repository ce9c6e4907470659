"""Around the estimators: several outputs with their covariance, and pipelines that keep what Pipeline hides."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, RegressorMixin, clone
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.utils import check_array, check_random_state
from sklearn.utils.validation import check_is_fitted

from batchbayes._common.checks import whole_number
from batchbayes_tables.regressor import UncertainRegressor

REACHABLE = {"novelty", "plot", "predict_covariance", "predict_frame", "predict_interval", "predict_quantiles"} | {
    "predict_set", "sample"
}  # fmt: skip
"""Methods of estimators that take a table first, and that scikit-learn does not know."""


class UncertainOutputs(RegressorMixin, BaseEstimator):
    """Several outputs: an `UncertainRegressor` for each of them, and how their errors depend on each other.

    The dependence is that of the ranks of held-out errors (a copula), the same for all rows. `estimator` has the
    parameters of each regressor.

    >>> x = np.linspace(-2, 2, 60)[:, None]
    >>> model = UncertainOutputs(UncertainRegressor(num_steps=50, random_state=0)).fit(x, np.hstack([x, x**2]))
    >>> model.predict(x).shape, model.predict_covariance(x).shape, model.sample(x, 5).shape
    ((60, 2), (60, 2, 2), (60, 5, 2))
    """

    def __init__(self, estimator: UncertainRegressor | None = None) -> None:
        self.estimator = estimator

    def fit(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> Self:  # noqa: N803
        """Train on inputs (N, Q) and targets (N, D). `groups` are labels of rows (N,), for intervals of each group."""
        columns = np.asarray(check_array(y, dtype="numeric", input_name="y", estimator=self)).T
        copies: list[Any] = [clone(self.estimator or UncertainRegressor()) for _ in columns]
        self.estimators_ = [each.fit(X, own, sample_weight, groups) for each, own in zip(copies, columns, strict=True)]
        errors = np.full(columns.shape, np.nan)
        for output, each in zip(errors, self.estimators_, strict=True):
            output[each.rows_] = each.held_out_errors_
        kept = errors[:, ~np.isnan(errors).any(0)]  # rows with a weight of zero have no errors
        self.ranks_ = ((kept.argsort(1).argsort(1) + 0.5) / kept.shape[1]).T  # (N, D)
        scores = torch.distributions.Normal(0.0, 1.0).icdf(torch.from_numpy(self.ranks_)).numpy()
        self.correlation_ = np.atleast_2d(np.corrcoef(scores.T))
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:  # noqa: N803
        """Return the mean of each target, (N, D), and with `return_std` its standard deviation."""
        check_is_fitted(self)
        mean, std = np.stack([each.predict(X, return_std=True) for each in self.estimators_], -1)
        return (mean, std) if return_std else mean

    def predict_covariance(self, X: Any) -> np.ndarray:  # noqa: N803
        """Return the covariance of the targets of each row, (N, D, D)."""
        _, std = self.predict(X, return_std=True)
        return std[:, :, None] * self.correlation_ * std[:, None]

    def predict_interval(self, X: Any, level: float = 0.9, groups: Any = None) -> tuple[np.ndarray, np.ndarray]:  # noqa: N803
        """Return the ends of an interval for each target, (N, D) each. The level holds for each target by itself."""
        check_is_fitted(self)
        lower, upper = np.stack([each.predict_interval(X, level, groups) for each in self.estimators_], -1)
        return lower, upper

    def predict_quantiles(self, X: Any, levels: float | Sequence[float] = (0.05, 0.5, 0.95)) -> np.ndarray:  # noqa: N803
        """Return quantiles of each target, (N, number of levels, D)."""
        check_is_fitted(self)
        return np.stack([each.predict_quantiles(X, levels) for each in self.estimators_], -1)

    def sample(self, X: Any, num_samples: int = 1, random_state: Any = None) -> np.ndarray:  # noqa: N803
        """Return random targets that depend on each other as held-out errors do, (N, num_samples, D)."""
        check_is_fitted(self)
        shape = len(X), whole_number("num_samples", num_samples)
        ranks = self.ranks_[check_random_state(random_state).randint(0, len(self.ranks_), shape)]
        parts = [each._quantiles(X, ranks[..., k]) for k, each in enumerate(self.estimators_)]
        return np.stack(parts, -1)


class UncertainPipeline(Pipeline):
    """A scikit-learn pipeline through which `predict_interval` and the other methods of its last step are reached."""

    def __getattr__(self, name: str) -> Any:
        steps = vars(self).get("steps")
        if name not in REACHABLE or not steps or not hasattr(steps[-1][1], name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")
        return partial(self._of_last, name)

    def _of_last(self, name: str, X: Any, *args: Any, **options: Any) -> Any:  # noqa: N803
        inputs = self[:-1].transform(X) if len(self.steps) > 1 else X
        return getattr(self[-1], name)(inputs, *args, **options)


def pipeline(*steps: Any) -> UncertainPipeline:
    """Return a pipeline of steps, as `make_pipeline` of scikit-learn does, that keeps the methods of the last one.

    >>> from sklearn.preprocessing import StandardScaler
    >>> x = np.linspace(-2, 2, 60)[:, None]
    >>> model = pipeline(StandardScaler(), UncertainRegressor(num_steps=50, random_state=0)).fit(x, x[:, 0])
    >>> lower, upper = model.predict_interval(x, 0.9)
    """
    return UncertainPipeline(make_pipeline(*steps).steps)
