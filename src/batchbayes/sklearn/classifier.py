"""`UncertainClassifier`: classes, with calibrated probabilities."""

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d, validate_data
from torch import Tensor

from batchbayes._common.checks import whole_number
from batchbayes.calibrate import tune_temperature
from batchbayes.errors import BatchbayesError
from batchbayes.likelihoods import categorical
from batchbayes.metrics import mean_score
from batchbayes.predictive import CategoricalPredictive, summarised
from batchbayes.sklearn.estimator import FACTORS, Uncertain
from batchbayes.sklearn.regressor import FEWEST_ROWS


def predictive_of(draws: Tensor, temperature: float) -> CategoricalPredictive:
    """Return the predictive of draws of logits (S, N, K)."""
    return summarised(categorical(temperature=temperature, probabilities=False).summary(), draws)


class UncertainClassifier(ClassifierMixin, Uncertain):
    """Neural classification with probabilities that can be trusted.

    It works as `UncertainRegressor` does, and has the same parameters. The rows that a network has not seen choose a
    temperature instead of observation noise.

    >>> x = np.linspace(-2, 2, 90)[:, None]
    >>> model = UncertainClassifier(num_steps=200, random_state=0).fit(x, np.where(x[:, 0] > 0, "right", "left"))
    >>> model.predict([[-1.5], [1.5]]).tolist()
    ['left', 'right']
    >>> model.predict_proba([[-1.5]]).shape
    (1, 2)
    """

    _loss = "cross_entropy"
    _numbers = ("temperature_", "noise_factor_")

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:  # noqa: N803
        """Train on inputs (N, Q) and classes (N,)."""
        checked: Any = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=FEWEST_ROWS)
        inputs, targets = checked[0], column_or_1d(checked[1], warn=True)
        check_classification_targets(targets)
        rows, copies = self._used_rows(inputs, np.unique(targets, return_inverse=True)[1], sample_weight)
        inputs, targets = inputs[rows], targets[rows]
        self.classes_ = np.unique(targets)
        if len(self.classes_) < 2:
            raise BatchbayesError(
                expected="two classes or more", got=f"{len(self.classes_)} class", fix="check the targets"
            )
        one_hot = (targets[:, None] == self.classes_).astype(np.float32)
        x, y_used, folds = self._train(inputs, one_hot, copies)
        self._calibrate(x, y_used.argmax(1), folds)
        return self

    def _calibrate(self, x: Tensor, labels: Tensor, folds: Tensor) -> None:
        """Choose the scale of the batch-norm noise and the temperature on held-out rows."""
        found = []
        for factor in FACTORS:
            fit = self.networks_.scaled(factor)
            draws = fit.held_out_draws(x, folds)
            temperature = tune_temperature(predictive_of(draws, 1.0), labels)
            loss = -mean_score(predictive_of(draws, temperature).log_prob(labels))
            found.append((loss, factor, fit, temperature))
        _, self.noise_factor_, self.networks_, self.temperature_ = min(found, key=lambda each: each[:2])

    def _predictive(self, X: Any) -> CategoricalPredictive:  # noqa: N803
        inputs = self._inputs(X)
        return predictive_of(self.networks_.draws(inputs), self.temperature_)

    def predict_proba(self, X: Any) -> np.ndarray:  # noqa: N803
        """Return the probability of each class, (N, K), in the order of `classes_`."""
        probs = self._predictive(X).probs.double().numpy()
        return probs / probs.sum(1, keepdims=True)

    def predict(self, X: Any) -> np.ndarray:  # noqa: N803
        """Return the most probable class, (N,)."""
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]

    def _columns(self, X: Any) -> dict[str, np.ndarray]:  # noqa: N803
        probs = self.predict_proba(X)
        named = {f"P({name})": column for name, column in zip(self.classes_, probs.T, strict=True)}
        return {"prediction": self.classes_[probs.argmax(1)], **named}

    def sample(self, X: Any, num_samples: int = 1, random_state: Any = None) -> np.ndarray:  # noqa: N803
        """Return random classes from the prediction, (N, num_samples)."""
        below = self.predict_proba(X).cumsum(1)[:, None]  # (N, 1, K)
        shape = len(below), whole_number("num_samples", num_samples), 1
        uniform = check_random_state(random_state).random_sample(shape)
        return self.classes_[np.minimum((uniform > below).sum(-1), len(self.classes_) - 1)]

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        kind = {"i": int, "u": int, "b": bool, "f": float}.get(self.classes_.dtype.kind, str)
        return {"classes": [kind(each) for each in self.classes_]}, {}

    def _set_state(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.classes_ = np.array(header["classes"])
