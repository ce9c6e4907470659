"""Schedules: how long steps are, and when weights are samples."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from batchbayes.errors import BatchbayesError


class StepSchedule(ABC):
    """What a training does at each of its steps, which are counted from 0."""

    @abstractmethod
    def factor(self, step: int, steps: int) -> float:
        """Return what the learning rate is multiplied by."""

    @abstractmethod
    def samples(self, step: int, steps: int) -> bool:
        """Return whether the weights after this step may be kept."""

    def noise(self, step: int, steps: int) -> bool:
        """Return whether noise is added."""
        return self.samples(step, steps)


@dataclass(frozen=True)
class Polynomial(StepSchedule):
    r"""Steps that become shorter: $(1 + t/b)^{-\gamma}$. An exponent of 0 keeps them constant.

    >>> Polynomial(delay=100, exponent=0.5).factor(300, 1000)
    0.5
    """

    delay: float = 1000.0
    """b, in steps."""
    exponent: float = 0.0
    """gamma. Between 0.5 and 1 the error of Langevin dynamics vanishes in the long run."""
    burn_in: float = 0.5
    """The share of all steps before the first sample."""

    def __post_init__(self) -> None:
        if not 0 <= self.burn_in < 1:
            raise BatchbayesError("burn_in from 0 to below 1", repr(self.burn_in), "it is a share of all steps")
        if not (self.delay > 0 and 0 <= self.exponent <= 1):
            raise BatchbayesError(
                expected="delay above 0 and an exponent between 0 and 1", got=repr(self), fix="try 1000 and 0.55"
            )

    def factor(self, step: int, steps: int) -> float:
        return (1 + step / self.delay) ** -self.exponent

    def samples(self, step: int, steps: int) -> bool:
        return step >= self.burn_in * steps

    def noise(self, step: int, steps: int) -> bool:
        return True


@dataclass(frozen=True)
class Cyclical(StepSchedule):
    r"""Cosine cycles: $\frac12(\cos(\pi r) + 1)$, where r goes from 0 to 1 in each cycle.

    Long steps first explore without noise, then short steps sample. Reference: Zhang et al., "Cyclical Stochastic
    Gradient MCMC for Bayesian Deep Learning", ICLR 2020.

    >>> schedule = Cyclical(cycles=2, exploring=0.5)
    >>> [schedule.samples(step, 8) for step in range(8)]
    [False, False, True, True, False, False, True, True]
    """

    cycles: int = 4
    exploring: float = 0.8
    """The share of each cycle without noise and without samples. The last step of a cycle is always a sample."""

    def __post_init__(self) -> None:
        if not 0 <= self.exploring <= 1:
            raise BatchbayesError("exploring from 0 to 1", repr(self.exploring), "it is a share of a cycle")
        if self.cycles < 1:
            raise BatchbayesError(expected="one cycle or more", got=str(self.cycles), fix="raise cycles")

    def factor(self, step: int, steps: int) -> float:
        return 0.5 * (math.cos(math.pi * _place(self.cycles, step, steps)) + 1)

    def samples(self, step: int, steps: int) -> bool:
        is_last = _place(self.cycles, step + 1, steps) <= _place(self.cycles, step, steps)
        return is_last or _place(self.cycles, step, steps) >= self.exploring


@dataclass(frozen=True)
class Triangular(StepSchedule):
    """Short cycles around a trained network: from 1 down to `lowest` and back. Weights are kept where it is lowest.

    >>> [round(Triangular(cycles=1, lowest=0.2).factor(step, 4), 2) for step in range(4)]
    [1.0, 0.6, 0.2, 0.6]
    """

    cycles: int = 5
    lowest: float = 0.01

    def factor(self, step: int, steps: int) -> float:
        return self.lowest + (1 - self.lowest) * abs(1 - 2 * _place(self.cycles, step, steps))

    def samples(self, step: int, steps: int) -> bool:
        return _place(self.cycles, step, steps) < 0.5 <= _place(self.cycles, step + 1, steps)


def kept_steps(schedule: StepSchedule, steps: int, count: int) -> list[int]:
    """Return the steps after which weights are kept: `count` of those that are samples, spread evenly up to the last.

    >>> kept_steps(Polynomial(burn_in=0.5), steps=10, count=2)
    [6, 9]
    """
    eligible = [step for step in range(steps) if schedule.samples(step, steps)]
    if not 1 <= count <= len(eligible):
        raise BatchbayesError(
            expected=f"between 1 and {len(eligible)} samples out of {steps} steps under {schedule}",
            got=f"{count}",
            fix="train for more epochs, or keep fewer samples",
        )
    return [eligible[(number + 1) * len(eligible) // count - 1] for number in range(count)]


def _place(cycles: int, step: int, steps: int) -> float:
    """Return the share of the present cycle that is done before a step."""
    return step * cycles % steps / steps  # in whole numbers, so that the end of a cycle is found
