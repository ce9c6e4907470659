"""What an assessment asks of a method: posteriors to compare, each with the words that a report needs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from batchbayes.likelihoods import TargetLikelihood
from batchbayes.methods import Method, resolve
from batchbayes.posterior import Posterior


@dataclass(frozen=True, eq=False)
class Setting:
    """The network, the data and the options of an assessment."""

    model: nn.Module
    train: Any
    """Training batches, with the training-time transforms."""
    calibration: list[tuple[Tensor, Tensor]]
    """Labelled batches for tuning: some held-out examples that are not used for the comparison."""
    likelihood: TargetLikelihood[Any]
    num_samples: int
    """Number of draws for prediction."""
    tuning_samples: int
    """Number of draws for tuning."""
    seed: int
    batch_size: int | None = None
    """Batch size of the training, if the training data does not tell."""
    center: str = "running"
    """Where the draws of batch-norm methods scatter around."""


@dataclass(frozen=True, eq=False)
class TuningCurve:
    """How a parameter of a method was tuned: the loss on calibration data at each value, (G,)."""

    values: Tensor
    losses: Tensor
    best: float
    start: float
    """The value before tuning."""
    caption: str
    """What the curve shows, as a sentence."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A posterior that is compared with others, and what a report says about it."""

    name: str
    """Short and unique: "MCBN tuned, M = 12.8"."""
    about: str
    """What it is, for somebody who has never heard of it: "mean of 64 draws, with ..."."""
    posterior: Posterior
    advice: str
    """How it is used, without a full stop: "Average draws at an effective batch size of 12.8"."""
    rank: int = 4
    """The lower, the simpler. Among candidates that are equally good the simplest is recommended."""
    short_name: str | None = None
    """If given, the same draws with a temperature are compared too, under the name "SHORT_NAME + temperature"."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What the report notes down about it, as JSON values."""
    curve: TuningCurve | None = None


def find_candidates(methods: Sequence[Method], setting: Setting) -> list[Candidate]:
    """Fit every method, and return what is to be compared, the simplest first."""
    found = []
    for method in methods:
        found += resolve(method.candidates)(method, setting) if method.candidates else [_as_it_is(method, setting)]
    return sorted(found, key=lambda candidate: candidate.rank)


def _as_it_is(method: Method, setting: Setting) -> Candidate:
    posterior = method(setting.model, setting.train)
    return Candidate(method.label, method.about, posterior, f"Average {setting.num_samples} draws of {method.label}")
