"""What an assessment asks of a method: posteriors to compare, as records. The words about them are in the report."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from batchbayes._common.rng import fold_numbers
from batchbayes.engines.check import Linearity
from batchbayes.likelihoods import TargetLikelihood
from batchbayes.methods.table import Method, resolve
from batchbayes.posterior import Posterior


@dataclass(frozen=True, eq=False)
class Request:
    """What a method gets from an assessment: the network, the data and the options."""

    model: nn.Module
    train: Any
    """Training batches, with the training-time transforms."""
    calibration: list[tuple[Tensor, Tensor]]
    """Labelled batches for tuning: some of the held-out examples by which methods are chosen."""
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
    folds: int = 5
    """What is tuned is judged on examples that took no part: in this many folds, one after the other."""


@dataclass(frozen=True, eq=False)
class TuningCurve:
    """How a parameter of a method was tuned: the loss on calibration data at each value, (G,)."""

    values: Tensor
    losses: Tensor
    best: float
    start: float
    """The value before tuning."""

    @property
    def at_end(self) -> bool:
        """Whether the best value is the largest that was tried."""
        return self.best >= 0.95 * float(self.values.max())


@dataclass(frozen=True, eq=False)
class Candidate:
    """A posterior that is compared with others. It is a record: the report makes names and sentences from it."""

    method: Method
    """Whose posterior it is."""
    posterior: Posterior
    rank: int = 3
    """The lower, the simpler. Among candidates that are equally good the simplest is recommended."""
    variant: str = ""
    """What tells it from other candidates of the method, in its name: "M = 12.8"."""
    tuned: bool = False
    """Whether calibration data chose the variant."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What the report notes down about it, as JSON values."""
    curve: TuningCurve | None = None
    linearity: Linearity | None = None
    """How far the network is linear, if the tuning takes it so."""
    tuning_gain: Tensor | None = None
    """By how much the loss of each calibration example is lower because it took part in the tuning, (n,)."""
    sizes: tuple[int, ...] = ()
    """The numbers of draws that are compared, ascending. The assessment sets them."""
    views: int = 0
    """How many views a draw averages; 0 without views. The assessment sets it."""


def find_candidates(methods: Sequence[Method], request: Request) -> list[Candidate]:
    """Fit every method, and return what is to be compared, the simplest first."""
    found: list[Candidate] = []
    for method in methods:
        if method.candidates:
            found += resolve(method.candidates)(method, request)
        else:
            found.append(Candidate(method, method(request.model, request.train)))
    return sorted(found, key=lambda candidate: candidate.rank)


def cross_fitted_gain(scores: Tensor, folds: int, seed: int) -> Tensor:
    """Return how much better each example does at the best setting for all than at the best for the other folds.

    If a setting is chosen by the examples that then judge it, it looks too good. This is by how much.

    Args:
        scores: of each example at each setting, (G, n). Higher is better.
        folds: the number of folds. The examples of one fold take no part in the choice of their setting.
        seed: which example is in which fold.

    >>> cross_fitted_gain(torch.tensor([[1.0, 0.0], [0.0, 0.9]]), folds=2, seed=0)
    tensor([1., 0.])
    """
    best, gain = int(scores.mean(1).argmax()), torch.zeros_like(scores[0])
    fold = fold_numbers(scores.shape[1], folds, seed)
    for number in fold.unique():
        rest = fold == number
        chosen = int(scores[:, ~rest].mean(1).argmax()) if not rest.all() else best
        gain[rest] = scores[best, rest] - scores[chosen, rest]
    return gain
