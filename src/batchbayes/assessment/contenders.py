"""Contenders: a posterior with all that is tuned, and how it did on calibration data and on test data."""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from batchbayes.assessment.load import Case
from batchbayes.assessment.novelty import novelty_level
from batchbayes.detection.novelty import Novelty
from batchbayes.engines.choose import EXACT_TOO
from batchbayes.methods.candidates import Candidate
from batchbayes.posterior import Posterior
from batchbayes.predictive import CategoricalPredictive, GaussianPredictive

P = TypeVar("P")
S = TypeVar("S")


@dataclass(frozen=True, eq=False)
class Trial:
    """A candidate with all that is tuned, and how it did on calibration data."""

    candidate: Candidate
    num_samples: int
    simplicity: tuple[float, ...]
    """The lower, the simpler."""
    tuned: dict[str, Any]
    """The temperature, or the precision of the observation noise: fitted to all calibration data."""
    losses: Tensor
    """The loss of each calibration example with what was tuned on others, (N,)."""
    engine: str
    """How its draws were made."""
    passes: float = 1.0
    """What a prediction costs, in forward passes."""

    @property
    def name(self) -> str:
        return self.candidate.name

    @property
    def mean_loss(self) -> float:
        return float(self.losses.double().mean())


@dataclass(frozen=True, eq=False)
class Seen(Generic[P]):
    """The predictives of one contender for each part of the data."""

    calibration: P
    test: P
    ood: P | None = None

    @property
    def engines(self) -> list[str]:
        """The engines that drew what was seen of the test data and of strange data."""
        return [part.engine for part in (self.test, self.ood) if part is not None]  # type: ignore[attr-defined]


@dataclass(frozen=True, eq=False)
class Contender(Generic[S]):
    """What was tried on calibration data, and how it did on the test data."""

    trial: Trial
    seen: S
    """What it predicted: `Seen` predictives, or sums over pixels."""
    metrics: dict[str, float]
    losses: Tensor
    """The loss of each test example or image, (N,). Lower is better."""

    @property
    def name(self) -> str:
        return self.trial.name

    @property
    def posterior(self) -> Posterior:
        return self.trial.candidate.posterior

    @property
    def num_samples(self) -> int:
        return self.trial.num_samples

    @property
    def passes(self) -> float:
        return self.trial.passes

    @property
    def has_draws(self) -> bool:
        """Whether several draws were made, so that it is known how far they differ."""
        return self.num_samples > 1

    @property
    def mean_loss(self) -> float:
        return float(self.losses.double().mean())

    @property
    def settings(self) -> dict[str, Any]:
        """What the report notes down about it."""
        trial = self.trial
        known = {"draws": trial.num_samples, "passes": trial.passes, "engine": trial.engine}
        return {**trial.candidate.settings, **trial.tuned, **known, "calibration_nll": trial.mean_loss}


ClassContender = Contender[Seen[CategoricalPredictive]]
ValueContender = Contender[Seen[GaussianPredictive]]


def drawing(case: Case, trial: Trial) -> dict[str, Any]:
    """Return the arguments of `predict` that say how the draws of a contender are made."""
    engine = case.settings.engine if is_linear(trial.engine) else "sample"
    return {"num_samples": trial.num_samples, "seed": case.settings.seed, "engine": engine}


def is_linear(engine: str) -> bool:
    """Return whether an engine of this name made all draws by the linear approximation."""
    return engine.startswith("linear") and EXACT_TOO not in engine


def notes_for_prediction(
    case: Case, chosen: Contender[Any], threshold: float | list[float], novelty: Novelty | None, **more: Any
) -> dict[str, Any]:
    """Return what one has to know to predict new data with the recommended posterior."""
    return {
        "task": case.task,
        **chosen.trial.tuned,
        "threshold": threshold,
        "seed": case.settings.seed,
        "draws": chosen.num_samples,
        "engine": "linear" if is_linear(chosen.trial.engine) else "sample",  # what "auto" has chosen
        "reading": case.reading.to_json(),
        "novelty_level": novelty_level(novelty),
        **more,
    }
