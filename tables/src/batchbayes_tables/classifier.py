"""`UncertainClassifier`: classes, with calibrated probabilities and sets of classes that hold the truth."""

from collections.abc import Mapping
from typing import Any, Literal, Self

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils import check_random_state, compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_y, column_or_1d  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

from batchbayes._common.checks import finite_number, whole_number
from batchbayes._common.tune import tune
from batchbayes.calibrate import conformal_quantile, set_scores
from batchbayes.errors import BatchbayesError
from batchbayes.metrics import equal_width_reliability
from batchbayes_tables.crossfit import JUDGES
from batchbayes_tables.estimator import FACTORS, Uncertain
from batchbayes_tables.forest import boost
from batchbayes_tables.linear import logistic, pool_weights, pooled

COLDEST, HOTTEST = 0.5, 10.0
"""Temperatures that are tried."""
SMALLEST = 1e-12
"""Probabilities are at least this, in logarithms."""


def log_score(outputs: Tensor, targets: Tensor) -> float:
    """Return the negative log probability of classes, averaged over networks and then rows, for outputs (R, N, K)."""
    return _log_loss(outputs.softmax(-1).mean(0), targets)


def _log_loss(probs: Tensor, targets: Tensor) -> float:
    return float(-(targets * probs.clamp_min(SMALLEST).log()).sum(-1).mean())


class UncertainClassifier(ClassifierMixin, Uncertain):
    """Neural classification with probabilities that can be trusted.

    It works as `UncertainRegressor` does, and has the same parameters. The rows that a network has not seen choose a
    temperature, and the weights of the networks, of a logistic regression and of boosted trees, instead of the spread.
    None of them moves the shares of classes. Bins are for the logistic regression alone.

    Args:
        class_weight: weights of classes by name, or "balanced" for weights such that all classes count the same.
            Probabilities are then those of data with such shares of classes.

    The other parameters are those of `UncertainRegressor`.

    >>> x = np.linspace(-2, 2, 90)[:, None]
    >>> model = UncertainClassifier(num_steps=200, random_state=0).fit(x, np.where(x[:, 0] > 0, "right", "left"))
    >>> model.predict([[-1.5], [1.5]]).tolist()
    ['left', 'right']
    >>> model.predict_proba([[-1.5]]).shape
    (1, 2)
    """

    _loss = "cross_entropy"
    _score = staticmethod(log_score)
    class_weight: Mapping[Any, float] | Literal["balanced"] | None

    def __init__(
        self,
        hidden_widths: tuple[int, ...] = (64, 64),
        weight_decays: tuple[float, ...] = (1e-2, 1e-1, 1.0),
        num_folds: int = 5,
        num_seeds: int = 3,
        num_steps: int = 4500,
        batch_size: int = 32,
        learning_rate: float = 1e-2,
        num_draws: int = 4,
        num_bins: int = 16,
        random_state: int | np.random.RandomState | None = None,
        verbose: bool = False,
        class_weight: Mapping[Any, float] | Literal["balanced"] | None = None,
        warm_start: bool = False,
        num_levels: int = 32,
    ) -> None:
        self._keep(locals())

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:  # noqa: N803
        """Train on inputs (N, Q) and classes (N,)."""
        if y is None:
            raise ValueError("This UncertainClassifier estimator requires y to be passed, but the target y is None")
        targets = column_or_1d(_check_y(y, estimator=self), warn=True)
        check_classification_targets(targets)
        if self.class_weight is not None:
            own = compute_sample_weight(self.class_weight, targets)
            sample_weight = own if sample_weight is None else own * np.asarray(sample_weight)
        x, rows, copies = self._learn_columns(X, np.unique(targets, return_inverse=True)[1], sample_weight)
        present = np.unique(targets if self.class_weight is not None else targets[rows])
        if len(present) < 2:
            raise BatchbayesError(expected="two classes or more", got=f"{len(present)} class", fix="check the targets")
        if self._continues and len(new := np.setdiff1d(present, self.classes_)):
            got = f"also {new.tolist()}"
            raise BatchbayesError(f"the classes of the fit before, {self.classes_}", got, "pass warm_start=False")
        self.classes_, targets = self.classes_ if self._continues else present, targets[rows]
        one_hot = torch.from_numpy((targets[:, None] == self.classes_).astype(np.float32))
        folds, seed = self._folds(copies, x, one_hot.argmax(1).numpy())
        self._train(self._for_networks(x), one_hot, folds, seed)
        self._calibrate(x, one_hot.double(), folds, seed)
        return self

    def _for_networks(self, x: Tensor) -> Tensor:
        return self._without_bins(x)  # networks learn noise from bins, and the other models learn steps

    def _calibrate(self, x: Tensor, one_hot: Tensor, folds: Tensor, seed: int) -> None:
        """Choose the scale of the batch-norm noise and the temperature, fit the other models, and weigh all of them."""
        some, inputs = torch.linspace(0, len(x) - 1, min(JUDGES, len(x))).long(), self._for_networks(x)
        found = []
        for factor in FACTORS:
            fit = self.networks_.scaled(factor)
            draws = fit.held_out_draws(inputs[some], folds[:, some])
            found.append((*_best_temperature(draws, one_hot[some]), factor, fit))
        _, self.temperature_, self.noise_factor_, self.networks_ = min(found, key=lambda each: (each[0], each[2]))
        self.linear_ = logistic(x, one_hot, folds, torch.from_numpy(self.columns_.is_bin))
        self.boosting_, self.num_rows_ = boost(self._without_bins(x), one_hot, folds[0], seed), len(x)
        models = self._models(
            self.networks_.held_out_draws(inputs, folds),
            self.linear_.held_out(x, folds),
            self.boosting_.held_out(self._without_bins(x), folds[0])[None],
        )
        self.weights_ = pool_weights(models, one_hot)
        self.held_out_labels_ = one_hot.argmax(1).numpy()
        self.held_out_scores_ = self._set_scores(self._together(models))[np.arange(len(x)), self.held_out_labels_]

    def _models(self, draws: Tensor, linear: Tensor, boosted: Tensor) -> Tensor:
        """Return the log probabilities of networks, logistic regression and boosting, (3, N, K), from their logits."""
        probs = self._tempered(draws), linear.softmax(-1).mean(0), boosted.softmax(-1).mean(0)
        return torch.stack([self._humble(each).log() for each in probs])

    def _together(self, models: Tensor) -> np.ndarray:
        """Return the probabilities of all models together, (N, K)."""
        return self._humble(pooled(models, self.weights_).exp()).numpy()

    def _tempered(self, draws: Tensor) -> Tensor:
        """Return mean probabilities (N, K) of draws of logits (G, S, N, K)."""
        return (draws / self.temperature_).softmax(-1).mean((0, 1))

    def _humble(self, probs: Tensor) -> Tensor:
        """Return probabilities (N, K) as if one more row, of all classes, had been seen: N rows cannot rule out 1 / N.

        Where held-out rows are all right, nothing else keeps probabilities from 0 and 1.
        """
        rows = self.num_rows_
        return (rows * probs / probs.sum(1, keepdim=True) + 1 / probs.shape[1]) / (rows + 1)

    def predict_proba(self, X: Any) -> np.ndarray:  # noqa: N803
        """Return the probability of each class, (N, K), in the order of `classes_`."""
        inputs = self._inputs(X)
        plain = self._without_bins(inputs)
        return self._together(self._models(self.networks_.draws(plain), self.linear_(inputs), self.boosting_(plain)))

    def predict(self, X: Any) -> np.ndarray:  # noqa: N803
        """Return the most probable class, (N,)."""
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]

    def predict_set(self, X: Any, level: float = 0.9, by_class: bool = False) -> np.ndarray:  # noqa: N803
        """Return sets of classes that hold the truth for a share `level` of new rows: bool (N, K), never empty.

        Classes are added from the most probable one on (adaptive prediction sets), up to a quantile of what held-out
        rows need. The level holds on average over rows like those of training. With `by_class` each class has its own
        quantile, so that it holds for rows of each class; sets are then larger.
        """
        finite_number("a level", level, above=0, below=1, fix="pass 0.9 for 90 %")
        probs = self.predict_proba(X)
        scores, own = torch.from_numpy(self.held_out_scores_), torch.from_numpy(self.held_out_labels_)
        if by_class:
            parts = [scores[own == label] for label in range(len(self.classes_))]
            limits = [conformal_quantile(part, float(level)) if len(part) else float("inf") for part in parts]
        else:
            limits = conformal_quantile(scores, float(level))
        best = probs == probs.max(1, keepdims=True)
        return (self._set_scores(probs) <= limits) | best

    @staticmethod
    def _set_scores(probs: np.ndarray) -> np.ndarray:
        return set_scores(torch.from_numpy(probs), "aps").numpy()

    def plot(self, X: Any, y: Any) -> Any:  # noqa: N803
        """Draw how often classes are right against how probable they are said to be. Return the figure."""
        from batchbayes.plots import reliability_figure

        probs = self.predict_proba(X)
        correct = self.classes_[probs.argmax(1)] == np.asarray(y)
        return reliability_figure({type(self).__name__: equal_width_reliability(probs.max(1), correct, num_bins=10)})

    def _columns(self, X: Any, level: float) -> dict[str, np.ndarray]:  # noqa: N803
        probs = self.predict_proba(X)
        named = {f"P({name})": column for name, column in zip(self.classes_, probs.T, strict=True)}
        return {"prediction": self.classes_[probs.argmax(1)], **named}

    def sample(self, X: Any, num_samples: int = 1, random_state: Any = None) -> np.ndarray:  # noqa: N803
        """Return random classes from the prediction, (N, num_samples)."""
        below = self.predict_proba(X).cumsum(1)[:, None]  # (N, 1, K)
        shape = len(below), whole_number("num_samples", num_samples), 1
        uniform = check_random_state(random_state).random_sample(shape)
        return self.classes_[np.minimum((uniform > below).sum(-1), len(self.classes_) - 1)]


def _best_temperature(draws: Tensor, one_hot: Tensor) -> tuple[float, float]:
    """Return the lowest loss of held-out rows, and its temperature, for draws of logits (R, S, N, K)."""

    def loss(log_temperature: float) -> float:
        return _log_loss((draws / np.exp(log_temperature)).softmax(-1).mean((0, 1)), one_hot)

    best, lowest = tune(loss, float(np.log(COLDEST)), float(np.log(HOTTEST)), grid=9, steps=12)
    return lowest, float(np.exp(best))
