"""`UncertainRegressor`: real targets, with their standard deviation and conformal intervals."""

from collections.abc import Mapping
from typing import Any, Literal, Self, overload

import numpy as np
import torch
from sklearn.base import RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from batchbayes._common.checks import finite_number, whole_number
from batchbayes.calibrate import conformal_quantile, tune_precision
from batchbayes.errors import BatchbayesError
from batchbayes.likelihoods import gaussian
from batchbayes.metrics import mean_score, mixture_crps
from batchbayes.predictive import GaussianPredictive, summarised
from batchbayes.sklearn.estimator import FACTORS, Uncertain, mean_and_unit

FEWEST_ROWS = 5
"""Fewer rows cannot be split into folds with two rows or more for batch normalisation."""


def predictive_of(draws: Tensor, precision: float) -> GaussianPredictive:
    """Return the predictive of draws (S, N, 1), with observation noise."""
    return summarised(gaussian(precision).summary(), draws)


class UncertainRegressor(RegressorMixin, Uncertain):
    """Neural regression that says how sure it is.

    Small networks with batch normalisation are trained side by side. Each of them leaves out one fold of the rows, and
    predicts it: this chooses the weight decay, the scale of the batch-norm noise and the observation noise, and gives
    the errors that conformal intervals are made of. Each seed has folds of its own. A prediction averages draws of all
    networks.

    Args:
        hidden_widths: the widths of the hidden layers.
        weight_decays: those that are tried with the first seed. The best one is kept, for all folds and seeds.
        num_folds: how many parts the rows are split into.
        num_seeds: the number of networks for each fold.
        num_steps: the number of training steps; the last quarter has a tenth of the learning rate.
        batch_size: examples in a step; four times as many if there are more than 20,000 rows.
        learning_rate: that of Adam.
        num_draws: draws of the batch statistics in each network.
        num_bins: each column is also given as this many bins, so that steps are learnt as well as by trees; 0 for none.
        random_state: seed of everything that is random.
        verbose: whether to show progress.

    The result does not depend on the order of the rows. Sample weights are repetitions of rows: a weight of two counts
    as two observations, also for the calibration. Weights that are not whole numbers count as importances: copies of a
    row then stay in one fold.

    >>> x = np.linspace(-2, 2, 80)[:, None]
    >>> model = UncertainRegressor(num_steps=200, random_state=0).fit(x, np.sin(2 * x[:, 0]))
    >>> mean, std = model.predict(x, return_std=True)
    >>> lower, upper = model.predict_interval(x, 0.9)
    >>> mean.shape, bool((lower < upper).all())
    ((80,), True)
    """

    _loss = "half_squared_error"
    _numbers = ("target_mean_", "target_std_", "precision_", "noise_factor_")

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:  # noqa: N803
        """Train on inputs (N, Q) and targets (N,)."""
        checked: Any = validate_data(self, X, y, dtype=np.float64, y_numeric=True, ensure_min_samples=FEWEST_ROWS)
        inputs, targets = checked[0], np.asarray(checked[1], dtype=np.float64)
        rows, copies = self._used_rows(inputs, targets, sample_weight)
        inputs, targets = inputs[rows], targets[rows]
        self.target_mean_, self.target_std_ = map(float, mean_and_unit(targets))
        scaled = (targets - self.target_mean_) / self.target_std_
        x, y_used, folds = self._train(inputs, scaled[:, None], copies)
        self._calibrate(x, y_used, folds)
        return self

    def _calibrate(self, x: Tensor, y: Tensor, folds: Tensor) -> None:
        """Choose the scale of the batch-norm noise and the observation noise, and keep the held-out errors."""
        found = []
        for factor in FACTORS:
            fit = self.networks_.scaled(factor)
            draws = fit.held_out_draws(x, folds)
            held_out = predictive_of(draws, 1.0)
            error = float((held_out.mean - y).abs().max())
            precision = tune_precision(held_out, y) if error > 0 else 1e12
            found.append((mean_score(mixture_crps(draws, precision, y)), factor, fit, draws, precision))
        _, self.noise_factor_, self.networks_, draws, self.precision_ = min(found, key=lambda each: each[:2])
        each = draws[..., 0].double().unflatten(0, (self.networks_.num_seeds, -1)).mean(1)  # (R, N)
        self.held_out_errors_ = ((each - y[:, 0]) / self._spread(draws, 1)).numpy()

    def _spread(self, draws: Tensor, num_folds: int) -> Tensor:
        """Return the standard deviation that intervals are made of, (N,), for draws of R * F networks.

        A held-out row has draws of one network for each seed, F = 1. For a new row, the variance of such draws is
        averaged over the F folds, so that both mean the same. The variance of all draws is larger.
        """
        grouped = draws[..., 0].double().unflatten(0, (self.networks_.num_seeds, num_folds, -1))  # (R, F, S, N)
        return (grouped.var((0, 2), correction=0).mean(0) + 1 / self.precision_).sqrt()

    def _width(self, level: float) -> float:
        r"""Return the half width of intervals, in units of `_spread`.

        It is a conformal quantile of held-out errors, $q_R$, less what averaging gains: R networks predict a held-out
        row, and G = R F a new one. If $q_m^2$, the squared quantile for the average of m networks, is $a + b / m$, then
        $q_1$ and $q_R$ tell $a$ and $b$, and these $q_G$.
        """
        networks = torch.from_numpy(self.held_out_errors_)  # (R, N)
        count, total = len(networks), len(self.networks_.stack)
        average = conformal_quantile(networks.mean(0).abs(), level)
        if count == 1 or not np.isfinite(average):
            return average
        single = conformal_quantile(networks.abs(), level)
        gain = (single**2 - average**2) * (1 / count - 1 / total) / (1 - 1 / count)
        return max(average**2 - max(0.0, gain), average**2 * count / total) ** 0.5

    def _predictive(self, X: Any) -> GaussianPredictive:  # noqa: N803
        """Return the predictive in standardised units."""
        inputs = self._inputs(X)
        return predictive_of(self.networks_.draws(inputs), self.precision_)

    @overload
    def predict(self, X: Any) -> np.ndarray: ...  # noqa: N803

    @overload
    def predict(self, X: Any, return_std: Literal[True]) -> tuple[np.ndarray, np.ndarray]: ...  # noqa: N803

    def predict(self, X: Any, return_std: bool = False) -> np.ndarray | tuple[np.ndarray, np.ndarray]:  # noqa: N803
        """Return the mean of each target, (N,), and with `return_std` its standard deviation."""
        seen = self._predictive(X)
        mean = self._in_units(seen.mean[:, 0].double())
        return (mean, self.target_std_ * seen.std[:, 0].double().numpy()) if return_std else mean

    def predict_interval(self, X: Any, level: float = 0.9) -> tuple[np.ndarray, np.ndarray]:  # noqa: N803
        """Return the ends of intervals that hold a share `level` of new targets, (N,) each, even if the model is wrong.

        The width is a quantile of the errors on rows that the networks had not seen, in standard deviations
        (cross-conformal prediction), corrected for the number of networks that average a row (`_width`). The level
        holds on average over rows like those of training, not for each row, and as measured, not by a theorem: with the
        correction, no finite number of rows guarantees it. MAPIE around this estimator has such guarantees.
        """
        finite_number("a level", level, above=0, below=1, fix="pass 0.9 for 90 %")
        check_is_fitted(self)
        width = self._width(float(level))
        if not np.isfinite(width):
            raise BatchbayesError(
                expected=f"more training rows for a level of {level:g}",
                got=f"{self.held_out_errors_.shape[1]}",
                fix="lower the level",
            )
        seen = self._predictive(X)
        mean, half = seen.mean[:, 0].double(), width * self._spread(seen.draws, self.networks_.num_folds)
        return self._in_units(mean - half), self._in_units(mean + half)

    def _in_units(self, values: Tensor) -> np.ndarray:
        return self.target_mean_ + self.target_std_ * values.numpy()

    def _columns(self, X: Any) -> dict[str, np.ndarray]:  # noqa: N803
        mean, std = self.predict(X, return_std=True)
        lower, upper = self.predict_interval(X)
        return {"prediction": mean, "std": std, "lower": lower, "upper": upper}

    def sample(self, X: Any, num_samples: int = 1, random_state: Any = None) -> np.ndarray:  # noqa: N803
        """Return random targets from the prediction, (N, num_samples)."""
        seen = self._predictive(X)
        random = check_random_state(random_state)
        rows = random.randint(len(seen.draws), size=whole_number("num_samples", num_samples))
        chosen = seen.draws[rows, :, 0].double().numpy().T  # (N, num_samples)
        noise = random.standard_normal(chosen.shape) * self.precision_**-0.5
        return self.target_mean_ + self.target_std_ * (chosen + noise)

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {}, {"errors": torch.from_numpy(self.held_out_errors_)}

    def _set_state(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.held_out_errors_ = tensors["errors"].numpy()
