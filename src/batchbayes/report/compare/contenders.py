"""What is compared: the network as it is and what each method offers, without and with views.

A method offers a candidate, which is a posterior. A contender is a candidate as it would be used, with its number of
draws and all that is tuned. It first sees the calibration data, and then, if it is shown, the test data. The choice
(`choice.py`) says which contender to use.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from batchbayes.engines.linear import Drawn
from batchbayes.methods.candidates import Candidate, Request, find_candidates
from batchbayes.methods.deterministic import deterministic
from batchbayes.methods.samples.weight_samples import weight_samples
from batchbayes.methods.table import METHODS
from batchbayes.methods.views.with_views import with_views
from batchbayes.network.source import spread_evenly
from batchbayes.posterior import Posterior, num_draws
from batchbayes.predict import Predicted, predict_stream
from batchbayes.report.compare.groups import Trust
from batchbayes.report.compare.intervals import Intervals
from batchbayes.report.compare.tuning import FOLDS, TemperatureCurve
from batchbayes.report.read.case import Case
from batchbayes.report.read.views import num_views, words
from batchbayes.report.words.methods import described, is_network, name_of

TUNING_EXAMPLES = 1000
"""This many examples are enough to find the minimum of one smooth curve."""
DRAWS, EXACT_DRAWS = 64, 16
"""Numbers of draws, unless the user says how many: by the linear approximation, where they cost nothing, and exact
ones."""
FEW_EXACT = f"sample: {EXACT_DRAWS} exact draws"
MOST_VIEWS, AVERAGED = 16, 4
"""More views are no better, and a draw averages the logits of AVERAGED of them (docs/results/views.md)."""


@dataclass(frozen=True, eq=False)
class Seen:
    """What one contender predicted for each part of the data: predictives, or sums over pixels."""

    test: Any
    calibration: Any = None
    ood: Any = None
    intervals: Intervals | None = None
    """Those of a regression."""


@dataclass(frozen=True, eq=False)
class Contender:
    """A candidate as it would be used, and how it did on the calibration data, and then on the test data."""

    candidate: Candidate
    num_samples: int
    tuned: dict[str, Any]
    """The temperature, or the precision of the observation noise: fitted to all calibration data."""
    calibration_losses: Tensor
    """The loss of each calibration example with what was tuned on others, (N,). Lower is better."""
    drawn: Drawn = Drawn.EXACT
    engine: str = "sample"
    """How its draws were made, in words."""
    has_temperature: bool = False
    """Whether the outputs are divided by a tuned temperature."""
    trust: Trust = Trust.UNKNOWN
    """Which way its percentages are off on the calibration data, before a temperature."""
    passes: float = 1.0
    """What a prediction costs, in forward passes."""
    file_passes: float = 0.0
    """The same in an exported file, if it costs more there."""
    draws: Tensor | None = None
    """Its draws of the calibration data, and perhaps more of them, (S, N, ...). None if they were not kept."""
    seen: Seen = field(default_factory=lambda: Seen(None))
    """What it predicted. Nothing before it has seen the test data."""
    metrics: dict[str, float] = field(default_factory=dict)
    losses: Tensor = field(default_factory=lambda: torch.empty(0))
    """The loss of each test example or image, (N,)."""

    @classmethod
    def judged(
        cls, candidate: Candidate, num_samples: int, tuned: dict[str, Any], losses: Tensor, **more: Any
    ) -> "Contender":
        """Return a contender. Its losses (N,) get what its tuning has gained on the examples that took part in it."""
        gain = candidate.tuning_gain
        return cls(candidate, num_samples, tuned, losses if gain is None else losses.double() + gain, **more)

    def with_temperature(self, curve: TemperatureCurve, best: float, seed: int) -> "Contender":
        """Return it with its best temperature. The temperatures of its losses were tuned on other folds."""
        losses = self.judged(self.candidate, self.num_samples, {}, curve.cross_fitted(seed)).calibration_losses
        return replace(self, tuned={"temperature": best}, calibration_losses=losses, has_temperature=True)

    def drawing(self, case: Case) -> dict[str, Any]:
        """Return the arguments of `predict` that say how its draws are made."""
        engine = case.settings.engine if self.drawn is Drawn.LINEAR else "sample"
        return {"num_samples": self.num_samples, "seed": case.settings.seed, "engine": engine}

    @property
    def name(self) -> str:
        """Its name in tables and figures."""
        return name_of(self.candidate, self.num_samples, temperature=self.has_temperature)

    @property
    def about(self) -> str:
        """What it is, in words."""
        return described("about", self.candidate, self.num_samples, self.tuned, temperature=self.has_temperature)

    @property
    def advice(self) -> str:
        """How it is used, in words without a full stop."""
        return described("advice", self.candidate, self.num_samples, self.tuned, temperature=self.has_temperature)

    @property
    def is_network(self) -> bool:
        """Whether it is the network as it is, without views and without a temperature."""
        return is_network(self.candidate) and not (self.candidate.views or self.has_temperature)

    @property
    def simplicity(self) -> tuple[float, ...]:
        """The lower, the simpler."""
        views = self.candidate.views
        return self.candidate.rank, float(views > 0), float(self.num_samples * views), float(self.has_temperature)

    @property
    def cost(self) -> float:
        """What a prediction costs, in forward passes, in Python or in a file."""
        return max(self.passes, self.file_passes)

    @property
    def posterior(self) -> Posterior:
        return self.candidate.posterior

    @property
    def has_draws(self) -> bool:
        """Whether several draws were made, so that it is known how far they differ."""
        return self.num_samples > 1

    @property
    def calibration_loss(self) -> float:
        """The mean loss on the calibration data."""
        return float(self.calibration_losses.double().mean())

    @property
    def mean_loss(self) -> float:
        """The mean loss on the test data."""
        return float(self.losses.double().mean())

    @property
    def settings(self) -> dict[str, Any]:
        """What the report notes down about it."""
        known = {"draws": self.num_samples} | {key: getattr(self, key) for key in ("passes", "file_passes", "engine")}
        return {**self.candidate.settings, **self.tuned, **known, "calibration_nll": self.calibration_loss}


def by_candidate(contenders: Iterable[Contender]) -> dict[Candidate, list[Contender]]:
    """Return the contenders of each candidate. They share its draws."""
    found: dict[Candidate, list[Contender]] = {}
    for contender in contenders:
        found.setdefault(contender.candidate, []).append(contender)
    return found


def compared_candidates(
    case: Case,
    likelihood: Any,
    *,
    tuning_samples: int | None = None,
    tuning_examples: int = TUNING_EXAMPLES,
    averaged: int = AVERAGED,
) -> list[Candidate]:
    """Fit all methods. Return the network as it is, what methods offer, and all of them with views.

    Methods are tuned by the likelihood, on `tuning_examples` of the calibration data, by `tuning_samples` draws (by
    default as many as for prediction). With views, a draw is the mean of `averaged` of them.
    """
    settings, total = case.settings, len(case.calibration.rows())
    rows = spread_evenly(total, tuning_examples)  # data is often in the order of classes, or of time
    some = case.calibration if len(rows) == total else case.calibration.some(rows.tolist())
    draws = settings.draws or DRAWS
    request = Request(
        model=case.network,
        train=case.train.batches,
        calibration=[(inputs, targets) for inputs, targets in some if targets is not None],
        likelihood=likelihood,
        num_samples=draws,
        tuning_samples=tuning_samples or draws,
        seed=settings.seed,
        batch_size=settings.batch_size,
        center=settings.center,
        folds=FOLDS,
    )
    tuned = [_with_gains_of_all(each, rows, total) for each in find_candidates(case.methods, request)]
    network = Candidate(METHODS["deterministic"], deterministic(case.network), rank=0)
    alone = [network, *_ensemble(case), *tuned]
    alone = [replace(each, sizes=(num_draws(each.posterior, draws),)) for each in alone]
    return alone + [seen for each in alone if (seen := _with_views(each, case, averaged)) is not None]


def _ensemble(case: Case) -> list[Candidate]:
    """Return the networks with all weights that were given, if there are several."""
    if not case.members:
        return []
    posterior = weight_samples(case.network, [case.network.state_dict(), *case.members])
    return [Candidate(METHODS["weight_samples"], posterior, rank=1)]


def _with_gains_of_all(candidate: Candidate, rows: Tensor, total: int) -> Candidate:
    """Return the candidate with the gain of each of all calibration examples; tuning used some rows of them."""
    if candidate.tuning_gain is None:
        return candidate
    gains = candidate.tuning_gain.new_zeros(total).index_copy(0, rows, candidate.tuning_gain)
    return replace(candidate, tuning_gain=gains)


def _with_views(base: Candidate, case: Case, averaged: int) -> Candidate | None:
    """Return a candidate that sees random views of its inputs; None if there are none, or too few to pay for."""
    most, transform = min(MOST_VIEWS, case.settings.budget or MOST_VIEWS), case.views
    if transform is None or most < 2:
        return None
    count = num_views(transform, most) if base.posterior.is_point else most
    average = min(averaged, count)
    draws = count // average
    sizes = sorted({max(1, AVERAGED // average), draws} if base.posterior.is_point else {draws})
    return replace(
        base,
        posterior=with_views(base.posterior, transform, average=average),
        settings={**base.settings, "views": words(transform), "average": average},
        curve=None,
        sizes=tuple(size for size in sizes if size <= draws),
        views=average,
    )


def with_exact_draws(case: Case) -> Case:
    """Return the case with the exact engine."""
    return replace(case, settings=replace(case.settings, engine="sample"))


def calibration_draws(case: Case, candidate: Candidate) -> tuple[Tensor, dict[str, Any]]:
    """Return the draws of a candidate on the calibration data, (S, N, ...), and how they were made."""
    most, likelihoods = candidate.sizes[-1], [case.likelihood]
    draws, size, how = predict_calibration(
        case, candidate, most, likelihoods, lambda predicted: predicted.predictives[0].draws, keep_draws=True
    )
    return torch.cat(draws, 1), how if size == most else how | {"engine": FEW_EXACT}


def predict_calibration(
    case: Case,
    candidate: Candidate,
    size: int,
    likelihoods: Sequence[Any],
    keep: Callable[[Predicted], Tensor],
    **options: Any,
) -> tuple[list[Tensor], int, dict[str, Any]]:
    """Predict the calibration data. Return what is kept of each batch, the number of draws, and how they were made.

    There are `size` draws; but if they are meant for the linear approximation, and it does not hold, a few exact
    ones. What the linear engine cannot draw, such as views, is always drawn exactly.
    """
    posterior, engine = candidate.posterior, case.settings.engine
    is_ensemble = posterior.num_functions and posterior.linear is None
    is_fixed = candidate.views or posterior.is_point or is_ensemble or case.settings.draws
    if engine == "linear" and posterior.linear is None and not posterior.is_point:
        engine = "sample"
    how: Any = {"num_samples": size, "seed": case.settings.seed, "engine": engine, **options}
    batches = case.calibration.one_by_one() if case.task == "segmentation" else case.calibration
    found, told = [], {}
    for predicted in predict_stream(posterior, batches, likelihoods, **how):
        told = {"drawn": predicted.predictives[0].drawn, "engine": predicted.predictives[0].engine}
        if size > EXACT_DRAWS and not (is_fixed or told["drawn"] is Drawn.LINEAR):
            return predict_calibration(with_exact_draws(case), candidate, EXACT_DRAWS, likelihoods, keep, **options)
        found.append(keep(predicted))
    return found, size, told


def affordable(candidate: Candidate, count: int, drawn: Drawn, budget: int | None) -> list[int]:
    """Return the numbers of draws to compare, of `count` that were made: the budget limits exact ones."""
    if candidate.views:
        return [size for size in candidate.sizes if size <= count]
    return [count if drawn is Drawn.LINEAR or budget is None else min(count, budget)]
