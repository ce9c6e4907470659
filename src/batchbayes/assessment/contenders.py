"""What is compared: the network as it is, what each method offers, and for classes the same with a temperature."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from torch import Tensor

from batchbayes._common.text import number
from batchbayes.assessment.load import Case
from batchbayes.assessment.options import AssessOptions
from batchbayes.data.examples import Examples
from batchbayes.likelihoods import TargetLikelihood
from batchbayes.methods.candidates import Candidate, Setting, find_candidates
from batchbayes.methods.point import deterministic
from batchbayes.posterior import Posterior
from batchbayes.predictive import CategoricalPredictive, GaussianPredictive

P = TypeVar("P")
S = TypeVar("S")

TUNING_EXAMPLES = 1000
"""This many examples are enough to find the minimum of one smooth curve."""


@dataclass(frozen=True, eq=False)
class Seen(Generic[P]):
    """The predictives of one contender for each part of the data."""

    calibration: P
    test: P
    ood: P | None


@dataclass(frozen=True, eq=False)
class Contender(Generic[S]):
    """A candidate, the number that was tuned for its likelihood, and how it did on the test data."""

    candidate: Candidate
    tuned: dict[str, float]
    """The temperature, or the precision of the observation noise."""
    advice: str
    """How it is used, as a sentence."""
    engine: str
    """How its draws were made."""
    seen: S
    """What it predicted: `Seen` predictives, or sums over pixels."""
    metrics: Mapping[str, float]
    losses: Tensor
    """The loss that it is judged by, for each example or image, (N,). Lower is better."""
    num_samples: int

    @property
    def name(self) -> str:
        return self.candidate.name

    @property
    def posterior(self) -> Posterior:
        return self.candidate.posterior

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
        return {**self.candidate.settings, **self.tuned, "draws": self.num_samples, "engine": self.engine}


ClassContender = Contender[Seen[CategoricalPredictive]]
ValueContender = Contender[Seen[GaussianPredictive]]


def drawing(options: AssessOptions) -> dict[str, Any]:
    """Return the arguments of `predict` that say how draws are made."""
    return {"num_samples": options.draws, "seed": options.seed, "engine": options.engine}


def compared_candidates(
    options: AssessOptions,
    case: Case,
    likelihood: TargetLikelihood[Any],
    *,
    tuning_samples: int | None = None,
    tuning_examples: int = TUNING_EXAMPLES,
) -> list[Candidate]:
    """Return the network as it is, and then the candidates of all methods, the simplest first."""
    setting = Setting(
        model=case.network,
        train=case.train,
        calibration=list(first_examples(case.calibration, tuning_examples)),
        likelihood=likelihood,
        num_samples=options.draws,
        tuning_samples=tuning_samples or options.draws,
        seed=options.seed,
        batch_size=options.batch_size,
        center=options.center,
    )
    own = deterministic(case.network)
    network = Candidate("deterministic", "the network as it is", own, "Take its own output", rank=0)
    return [network, *find_candidates(case.methods, setting)]


def with_temperatures(candidates: Sequence[Candidate]) -> list[list[Candidate]]:
    """Return each candidate, the network first, together with its version that has a temperature, if there is one."""
    network, *others = candidates
    about = "the network, its logits divided by one number tuned on calibration data"
    groups = [[network, replace(network, name="temperature scaling", about=about, rank=1)]]
    for plain in others:
        groups.append([plain])
        if plain.short_name is not None:
            name, about = f"{plain.short_name} + temperature", f"{plain.about}, and one temperature"
            groups[-1].append(replace(plain, name=name, about=about, rank=3, curve=None))
    return groups


def advice_for_classes(candidate: Candidate, temperature: float) -> str:
    """Say how a candidate is used with a temperature."""
    return candidate.advice + ("." if temperature == 1 else f", and divide the logits by {number(temperature)}.")


def first_examples(data: Examples, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield labelled batches with `count` examples in all, or fewer if there are no more."""
    for inputs, targets in data:
        assert targets is not None, "this was checked when the data was loaded"
        yield inputs[:count], targets[:count]
        count -= len(inputs)
        if count <= 0:
            return


def notes_for_prediction(
    options: AssessOptions, case: Case, chosen: Contender[Any], threshold: float, **more: Any
) -> dict[str, Any]:
    """Return what one has to know to predict new data with the recommended posterior."""
    return {
        "task": case.task,
        **chosen.tuned,
        "threshold": threshold,
        "seed": options.seed,
        "draws": options.draws,
        "engine": "linear" if chosen.engine.startswith("linear") else "sample",  # what "auto" has chosen
        "reading": case.reading.to_json(),
        **more,
    }
