"""`UncertainRegressor`: real targets, with standard deviations, quantiles and conformal intervals."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Self, overload

import numpy as np
import torch
from sklearn.base import RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_array, check_is_fitted, column_or_1d
from torch import Tensor

from batchbayes._common.checks import finite_number, require_choice, whole_number
from batchbayes.calibrate import conformal_quantile
from batchbayes.errors import BatchbayesError
from batchbayes_tables.crossfit import JUDGES, of_all
from batchbayes_tables.estimator import FACTORS, MIXES, Uncertain
from batchbayes_tables.forest import grow
from batchbayes_tables.linear import ridge
from batchbayes_tables.spread import Outlook, fit_spread
from batchbayes_tables.targets import (
    CHUNK,
    LEVELS,
    SLACK,
    Name,
    Targets,
    atoms_crps,
    atoms_quantiles,
    atoms_scores,
    choose_transform,
    weights_of_atoms,
)

HEAVY_TAIL = 0.25
"""Candidates for heavy tails are trained with Student's t of four degrees of freedom."""
MIDDLE_LEVELS = (0.5, 0.7, 0.9)
"""Levels at which the gain of averaging is measured."""


def spread_gradient(outputs: Tensor, targets: Tensor) -> Tensor:
    r"""Return the gradient by mean and log spread, outputs (..., 2), for targets (..., 2): a number, and its tail.

    The loss is the negative log density of Student's t with 1 / tail degrees of freedom, or of a Gaussian if the tail
    is zero. The gradient by the mean is multiplied by the spread, so that rows that are known well do not outvote all
    others ($\beta$-NLL with $\beta = 1/2$: Seitzer et al., ICLR 2022).
    """
    mean, spread = outputs[..., :1], outputs[..., 1:].clamp(-6, 3).exp()
    number, tail = targets[..., :1], targets[..., 1:]
    error = (number - mean) / spread
    weight = (1 + tail) / (1 + tail * error.square())
    return torch.cat([-weight * error, 1 - weight * error.square()], -1)


def mean_score(outputs: Tensor, targets: Tensor) -> float:
    """Return the product of mean absolute and root mean squared error of the average mean, for outputs (R, N, 2).

    It grows as a squared error does, and a few outliers do not rule it.
    """
    return _score(outputs[..., 0].mean(0) - targets[:, 0])


def _score(errors: Tensor) -> float:
    return float(errors.abs().mean() * errors.square().mean().sqrt())


class Seen(NamedTuple):
    """What a fitted estimator says about N rows, in the unit of training."""

    middle: np.ndarray
    data: np.ndarray
    """The variance of data noise around it, (N,)."""
    model: np.ndarray
    """The variance of model noise, (N,)."""
    trees: np.ndarray
    """What each tree says, (N, T)."""

    @property
    def spread(self) -> np.ndarray:
        return np.sqrt(self.data + self.model)


class UncertainRegressor(RegressorMixin, Uncertain):
    """Neural regression that says how sure it is.

    Small networks with batch normalisation learn a mean and a spread, side by side. Each of them leaves out one fold of
    the rows, and predicts it: this chooses the weight decay, heavy tails or not, when to stop, the scale of the
    batch-norm noise and the shares of a linear part and of randomised trees, learns how the spread follows the inputs,
    and calibrates intervals. Each seed has folds of its own. A prediction averages draws of all networks and trees.

    Args:
        hidden_widths: the widths of the hidden layers.
        weight_decays: those that are tried. The best one is kept, for all folds and seeds.
        num_folds: how many parts the rows are split into.
        num_seeds: the number of networks for each fold.
        num_steps: the most training steps. They come in rounds of about 300, 600, 1,200, ..., and training ends after
            a round that does not help.
        batch_size: examples in a step; twice as many above 2,000 rows, and again above 8,000.
        learning_rate: that of Adam, at the start of a round.
        num_draws: draws of the batch statistics in each network.
        num_bins: each number is also given as this many bins, so that steps are learnt as well as by trees; 0 for none.
        random_state: seed of everything that is random.
        verbose: whether to show progress.
        target_transform: "none", "sqrt" or "log" of targets that are never negative; "auto" chooses on held-out rows.
        warm_start: whether another `fit`, for example with more rows, goes on with the networks that there are: one
            short round instead of all, with columns, transform and weight decay as they were. Rows keep their folds.
        num_levels: the most categories of a column that are told apart; a warning tells if there are more.

    A table is an array, or a frame of pandas or polars with numbers, booleans, words, categories, dates and missing
    values. If no target is negative, nothing below zero is predicted; if all are whole numbers, so are the ends of
    intervals. The result does not depend on the order of the rows. Sample weights are repetitions of rows: a weight of
    two counts twice, also for the calibration. Copies of a row stay in one fold. Weights that are not whole numbers
    count by their ratios.

    >>> x = np.linspace(-2, 2, 80)[:, None]
    >>> model = UncertainRegressor(num_steps=200, random_state=0).fit(x, np.sin(2 * x[:, 0]))
    >>> mean, std = model.predict(x, return_std=True)
    >>> lower, upper = model.predict_interval(x, 0.9)
    >>> mean.shape, bool((lower < upper).all())
    ((80,), True)
    """

    _loss = staticmethod(spread_gradient)
    _score = staticmethod(mean_score)
    target_transform: Literal["auto"] | Name

    def __init__(
        self,
        hidden_widths: tuple[int, ...] = (64, 64),
        weight_decays: tuple[float, ...] = (1e-3, 1e-2),
        num_folds: int = 5,
        num_seeds: int = 3,
        num_steps: int = 4500,
        batch_size: int = 32,
        learning_rate: float = 1e-2,
        num_draws: int = 4,
        num_bins: int = 16,
        random_state: int | np.random.RandomState | None = None,
        verbose: bool = False,
        target_transform: Literal["auto"] | Name = "auto",
        warm_start: bool = False,
        num_levels: int = 32,
    ) -> None:
        self._keep(locals())

    def fit(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> Self:  # noqa: N803
        """Train on inputs (N, Q) and targets (N,). `groups` are labels of rows (N,), for intervals of each group."""
        targets = _checked_targets(y, self)
        require_choice("target_transform", self.target_transform, ("auto", "none", "sqrt", "log"))
        x, rows, copies = self._learn_columns(X, targets, sample_weight)
        self.rows_, targets, (folds, seed) = rows, targets[rows], self._folds(copies, x, targets[rows])
        self.targets_ = self.targets_ if self._continues else self._transform(targets, x, folds)
        if targets.min() < self.targets_.lowest or (self.targets_.is_whole and (targets != np.round(targets)).any()):
            limits = "whole numbers" if self.targets_.is_whole else "targets of zero or more"
            raise BatchbayesError(f"{limits}, as in the fit before", "others", "pass warm_start=False")
        z = torch.from_numpy(self.targets_.forward(targets))
        self._train(x, torch.stack([z, torch.zeros_like(z)], 1).float(), folds, seed, (HEAVY_TAIL,))
        held_out = self._calibrate(x, z, folds)
        self._add_trees(x, z, targets, folds, seed, *held_out)
        self.groups_ = None if groups is None else column_or_1d(groups)[rows]
        return self

    def _transform(self, targets: np.ndarray, x: Tensor, folds: Tensor) -> Targets:
        if self.target_transform == "auto":
            return choose_transform(targets, x, folds)
        if self.target_transform != "none" and targets.min() < 0:
            raise BatchbayesError(
                expected=f'targets of zero or more for target_transform="{self.target_transform}"',
                got=f"{targets.min():g}",
                fix='pass target_transform="none"',
            )
        return Targets.learn(self.target_transform, targets)

    def _calibrate(self, x: Tensor, z: Tensor, folds: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Choose the scale of the batch-norm noise and the share of the linear part, and learn the spread.

        Return the mean and the spread of each row, (N,), by networks that have not seen it.
        """
        some = torch.linspace(0, len(x) - 1, min(JUDGES, len(x))).long()
        scaled = {factor: self.networks_.scaled(factor) for factor in FACTORS}
        errors = {
            factor: _score(fit.held_out_draws(x[some], folds[:, some])[..., 0].mean((0, 1)) - z[some])
            for factor, fit in scaled.items()
        }
        self.noise_factor_ = min(FACTORS, key=lambda factor: (errors[factor], factor))
        self.networks_ = scaled[self.noise_factor_]
        draws = self.networks_.held_out_draws(x, folds)  # (R, S, N, 2)
        self.linear_, _ = ridge(x, z[:, None], folds)
        straight = self.linear_.held_out(x, folds)[..., 0]  # (R, N)
        mean, other = draws[..., 0].mean((0, 1)), straight.mean(0)
        self.mix_ = min(MIXES, key=lambda mix: _score((1 - mix) * mean + mix * other - z))
        draws[..., 0] = (1 - self.mix_) * draws[..., 0] + self.mix_ * straight[:, None]
        outlook = _outlook(draws[:, None])
        self.spread_, std = fit_spread(z - outlook.mean, outlook, self._bounded(x), folds[0])
        each = (z - draws[..., 0].mean(1)) / std  # (R, N)
        self.held_out_errors_ = (each.mean(0) * _gain_of_averages(each, len(self.networks_.stack))).numpy()
        return outlook.mean.numpy(), std.numpy()

    def _add_trees(
        self, x: Tensor, z: Tensor, targets: np.ndarray, folds: Tensor, seed: int, middle: np.ndarray, std: np.ndarray
    ) -> None:
        """Grow trees, choose their share, and keep how far each held-out target is from the median of its row."""
        errors = (z.numpy() - middle) / std
        forest, trees = grow(self._without_bins(x), z, folds, seed)

        def atoms(rows: np.ndarray, used: np.ndarray) -> np.ndarray:
            return self.targets_.atoms(middle[rows], std[rows], errors, used[rows])

        some = np.linspace(0, len(x) - 1, min(JUDGES, len(x))).astype(int)
        judged, weights = atoms(some, trees), partial(weights_of_atoms, num_trees=trees.shape[1])
        self.share_ = min(MIXES, key=lambda share: atoms_crps(judged, weights(share), targets[some]))
        self.forest_ = forest if self.share_ else None
        parts = np.array_split(np.arange(len(x)), -(-len(x) // CHUNK))

        def scores(used: np.ndarray) -> np.ndarray:
            own = weights_of_atoms(self.share_, used.shape[1])
            return np.concatenate([atoms_scores(atoms(rows, used), own, targets[rows]) for rows in parts])

        self.held_out_scores_ = scores(trees)
        each_seed = np.split(trees, len(folds), 1) if self.share_ else []
        self.scores_of_seeds_ = np.array([scores(own) for own in each_seed]).reshape(-1, len(x))

    def _bounded(self, x: Tensor) -> Tensor:
        return x[:, torch.from_numpy(self.columns_.is_bounded)]

    def _seen(self, X: Any) -> Seen:  # noqa: N803
        """Return what networks and trees say about a table."""
        inputs = self._inputs(X)
        draws = self.networks_.draws(inputs)  # (G, S, N, 2)
        draws[..., 0] = (1 - self.mix_) * draws[..., 0] + self.mix_ * self.linear_(inputs)[:, None, :, 0]
        outlook = _outlook(draws.unflatten(0, (self.networks_.num_seeds, -1)))
        data, model = self.spread_.parts(outlook, self._bounded(inputs))
        trees = self.forest_(self._without_bins(inputs)) if self.forest_ else torch.empty(len(inputs), 0)
        return Seen(outlook.mean.numpy(), data.numpy(), model.numpy(), trees.double().numpy())

    @overload
    def predict(self, X: Any) -> np.ndarray: ...  # noqa: N803

    @overload
    def predict(self, X: Any, return_std: Literal[True]) -> tuple[np.ndarray, np.ndarray]: ...  # noqa: N803

    @overload
    def predict(
        self,
        X: Any,  # noqa: N803
        return_std: Literal[True],
        return_parts: Literal[True],
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]: ...

    def predict(self, X: Any, return_std: bool = False, return_parts: bool = False) -> Any:  # noqa: N803
        """Return the mean of each target, (N,), and with `return_std` its standard deviation.

        With `return_parts` also those of data noise and of model noise. Their squares add up to that of the whole. Data
        noise stays however many rows there are; model noise is what networks and draws disagree about.
        """
        seen = self._seen(X)
        mean, std = self._moments(seen)
        if not return_std:
            return mean
        parts = [std * np.sqrt(part) / seen.spread for part in (seen.data, seen.model)]
        return (mean, std, *parts) if return_parts else (mean, std)

    def _moments(self, seen: Seen) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean and the standard deviation in the unit of the targets: those of networks and trees."""
        errors = self.held_out_errors_
        if self.targets_.name == "none":
            mean, std = self.targets_.back(seen.middle), self.targets_.unit * np.sqrt(np.square(errors).mean())
            std = std * seen.spread
        else:
            found = self.targets_.back(seen.middle[:, None] + seen.spread[:, None] * np.quantile(errors, LEVELS))
            mean, std = found.mean(1), found.std(1)
        if not self.share_:
            return mean, std
        trees = self.targets_.back(seen.trees)
        both = (1 - self.share_) * mean + self.share_ * trees.mean(1)
        own, other = (np.square(part.T - both).T for part in (mean, trees))
        return both, np.sqrt((1 - self.share_) * (np.square(std) + own) + self.share_ * other.mean(1))

    def _quantiles(self, X: Any, levels: np.ndarray) -> np.ndarray:  # noqa: N803
        """Return quantiles of the distribution of each row, (N, L), for levels (L,) or (N, L)."""
        seen = self._seen(X)
        atoms = self.targets_.atoms(seen.middle, seen.spread, self.held_out_errors_, seen.trees)
        return atoms_quantiles(atoms, weights_of_atoms(self.share_, seen.trees.shape[1]), levels)

    def predict_quantiles(self, X: Any, levels: float | Sequence[float] = (0.05, 0.5, 0.95)) -> np.ndarray:  # noqa: N803
        """Return quantiles of each target, (N, number of levels): of networks, with errors of held-out rows in spreads
        of the row, and of trees."""
        each_level = np.atleast_1d(levels).tolist()
        checked = [finite_number("a level", each, above=0, below=1, fix="pass 0.9 for 90 %") for each in each_level]
        return self._quantiles(X, np.array(checked))

    def predict_interval(self, X: Any, level: float = 0.9, groups: Any = None) -> tuple[np.ndarray, np.ndarray]:  # noqa: N803
        """Return the ends of intervals that hold a share `level` of new targets, (N,) each, even if the model is wrong.

        Their ends are quantiles of the predicted distribution. The levels of these are such that the share of rows
        inside is right for rows that the networks and trees had not seen (cross-conformal prediction), corrected for
        the number of networks that average a row. The level holds on average over rows like those of training, and as
        measured, not by a theorem: with the correction, no finite number of rows guarantees it. MAPIE around this
        estimator has such guarantees.

        With `groups`, labels of rows (N,) as those that `fit` got, the levels are those of the row's own group
        (Mondrian), so that the level holds in each group.
        """
        finite_number("a level", level, above=0, below=1, fix="pass 0.9 for 90 %")
        check_is_fitted(self)
        reach = self._reach(float(level), groups, len(X))
        lower, upper = self._quantiles(X, np.stack([0.5 - reach, 0.5 + reach + SLACK], 1)).T  # both ends are inside
        return lower, upper

    def _reach(self, level: float, groups: Any, rows: int) -> np.ndarray:
        """Return how far the interval of each row goes on both sides of its median, as a share of the distribution."""
        if groups is None:
            return np.full(rows, self._quantile(level, slice(None), ""))
        labels, own = column_or_1d(groups), self.groups_
        if own is None or len(labels) != rows:
            raise BatchbayesError(
                expected="groups of the training rows in fit, and one group for each row here",
                got="a fit without groups" if own is None else f"{len(labels)} groups for {rows} rows",
                fix="call fit(X, y, groups=...) and predict_interval(X, level, groups=...)",
            )
        reach = {label: self._quantile(level, own == label, f" in group {label}") for label in np.unique(labels)}
        return np.array([reach[label] for label in labels])

    def _quantile(self, level: float, chosen: Any, where: str) -> float:
        """Return the quantile of the scores of some training rows, as if they had as many trees as new rows have.

        With more trees fewer targets are beyond all of them. The trees of single seeds tell how much that matters.
        """
        together, *alone = torch.from_numpy(np.stack([self.held_out_scores_, *self.scores_of_seeds_])[:, chosen])
        found = conformal_quantile(together, level) if len(together) else float("inf")
        if not np.isfinite(found):
            fix = "lower the level" if len(together) else "pass a group that fit had"
            raise BatchbayesError(f"more training rows for a level of {level:g}{where}", f"{len(together)}", fix)
        if alone:
            single = float(np.mean([conformal_quantile(each, level) for each in alone]))
            found = min(found, of_all(single, found, len(alone), len(self.networks_.stack)))
        return max(found, 0.0)  # whole targets: the median alone may hold more than a low level

    def plot(self, X: Any, y: Any, level: float = 0.9) -> Any:  # noqa: N803
        """Draw intervals of new rows by width, their coverage by fifths, and the PIT. Return the figure."""
        from batchbayes.plots import table_figure

        targets = _checked_targets(y, self)
        lower, upper = self.predict_interval(X, level)
        quantiles = self.predict_quantiles(X, LEVELS.tolist())
        below, equal = (quantiles < targets[:, None]).mean(1), (quantiles == targets[:, None]).mean(1)
        return table_figure(lower, upper, targets, below + equal / 2, level=level)

    def _columns(self, X: Any, level: float) -> dict[str, np.ndarray]:  # noqa: N803
        mean, std = self.predict(X, return_std=True)
        lower, upper = self.predict_interval(X, level)
        return {"prediction": mean, "std": std, "lower": lower, "upper": upper}

    def sample(self, X: Any, num_samples: int = 1, random_state: Any = None) -> np.ndarray:  # noqa: N803
        """Return random targets from the prediction, (N, num_samples)."""
        seen, random = self._seen(X), check_random_state(random_state)
        shape = len(seen.middle), whole_number("num_samples", num_samples)
        found = seen.middle[:, None] + seen.spread[:, None] * random.choice(self.held_out_errors_, shape)
        if self.share_:
            by_tree = np.take_along_axis(seen.trees, random.randint(0, seen.trees.shape[1], shape), 1)
            found = np.where(random.random_sample(shape) < self.share_, by_tree, found)
        found = self.targets_.back(found)
        return np.round(found) if self.targets_.is_whole else found


def _checked_targets(y: Any, estimator: Any) -> np.ndarray:
    """Return targets (N,) of finite numbers."""
    if y is None:
        raise ValueError("This UncertainRegressor estimator requires y to be passed, but the target y is None")
    found: Any = check_array(y, ensure_2d=False, dtype="numeric", input_name="y", estimator=estimator)
    if found.dtype.kind in "mM":
        raise BatchbayesError("targets that are numbers", "times", "pass numbers, for example days since a date")
    if found.ndim == 2 and found.shape[1] > 1:
        raise ValueError(
            f"y should be a 1d array, got an array of shape {found.shape} instead. For several targets use "
            "UncertainOutputs(UncertainRegressor())"
        )
    return column_or_1d(found, warn=True).astype(np.float64)


def _outlook(draws: Tensor) -> Outlook:
    """Return what draws (R, F, S, N, 2) say together.

    A held-out row has draws of one network for each seed, F = 1. For a new row, the variance of such draws is averaged
    over the F folds, so that both mean the same. The variance of all draws is larger.
    """
    mean, log_spread = draws.double().unbind(-1)
    return Outlook(mean.mean((0, 1, 2)), log_spread.mean((0, 1, 2)), mean.var((0, 2), correction=0).mean(0))


def _gain_of_averages(errors: Tensor, total: int) -> float:
    """Return how much smaller errors of new rows are than held-out ones, by squared quantiles of errors (R, N)."""
    average, single = (
        float(np.square(np.quantile(each.abs().numpy(), MIDDLE_LEVELS, axis=-1)).mean())
        for each in (errors.mean(0), errors)
    )
    return (of_all(single, average, len(errors), total) / average) ** 0.5 if average > 0 else 1.0
