"""What an assessment asks of a method: posteriors to compare, each with its name, its price and how it is used."""

from collections.abc import Callable, Sequence
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
    calibration: Callable[[int], list[tuple[Tensor, Tensor]]]
    """Gives labelled batches with so many held-out examples in all, for tuning."""
    likelihood: TargetLikelihood[Any]
    num_samples: int
    seed: int
    batch_size: int | None = None
    """Batch size of the training, if the training data does not tell."""
    center: str = "running"
    """Where the draws of batch-norm methods scatter around."""
    tuning_samples: int | None = None
    """Draws for tuning, if they are fewer than for prediction."""
    tuning_examples: int = 1000


@dataclass(frozen=True, eq=False)
class TuningCurve:
    """How a parameter of a method was tuned: the loss on calibration data at each value, (G,)."""

    values: Tensor
    losses: Tensor
    best: float
    start: float
    """The value before tuning."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A posterior that is compared with others, and what a report says about it."""

    name: str
    """Short and unique: "MCBN tuned, M = 12.8"."""
    about: str
    """One line for somebody who has never heard of it."""
    posterior: Posterior
    advice: str
    """How it is used: "Average draws at an effective batch size of 12.8"."""
    rank: int = 4
    """The lower, the simpler. Among candidates that are equally good the simplest is recommended."""
    short_name: str | None = None
    """Name of a second candidate that shares the draws and has a temperature too; None if there is no such."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What is noted down about it, as JSON values."""
    curve: TuningCurve | None = None


def find_candidates(methods: Sequence[Method], setting: Setting) -> list[Candidate]:
    """Fit every method, and return what is to be compared, the simplest first."""
    found = []
    for method in methods:
        found += resolve(method.candidates)(method, setting) if method.candidates else [_as_it_is(method, setting)]
    return sorted(found, key=lambda candidate: candidate.rank)


def _as_it_is(method: Method, setting: Setting) -> Candidate:
    posterior = method(setting.model, setting.train)
    return Candidate(method.label, method.about, posterior, f"Average {setting.num_samples} draws")
