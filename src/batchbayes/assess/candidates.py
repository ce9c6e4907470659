"""What is compared: the network by itself, and each method at the batch size of training and at a tuned one."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from batchbayes.assess.engine import Drawing
from batchbayes.assess.job import Job, Loaded
from batchbayes.data.examples import Examples
from batchbayes.engines.linear import measure_linearity
from batchbayes.errors import BatchbayesError, BatchbayesWarning, warn
from batchbayes.likelihoods import TargetLikelihood
from batchbayes.methods.batchnorm.mcbn import mcbn
from batchbayes.methods.batchnorm.posterior import BatchNormPosterior
from batchbayes.methods.batchnorm.stochastic_bn import stochastic_bn
from batchbayes.methods.batchnorm.tuning.batch_size import TunedBatchSize, tune_batch_size
from batchbayes.methods.point import deterministic

METHODS: Mapping[str, tuple[str, Callable[..., BatchNormPosterior]]] = {
    "mcbn": ("MCBN", mcbn),
    "stochastic-bn": ("Stochastic BN", partial(stochastic_bn, covariance="factorised")),
    "correlated-bn": ("Correlated BN", partial(stochastic_bn, covariance="correlated")),
}
"""By the name in --method: the name in the report, and how it is fitted."""

TUNING_EXAMPLES = 1000
"""Enough to place one minimum of one curve."""


@dataclass(frozen=True, eq=False)
class Fitted:
    """A method, as trained and tuned."""

    label: str
    trained: BatchNormPosterior
    tuned: TunedBatchSize

    @property
    def trained_name(self) -> str:
        return f"{self.label}, M = {self.trained.batch_size:g}"

    @property
    def tuned_name(self) -> str:
        return f"{self.label} tuned, M = {self.tuned.batch_size:.3g}"


@dataclass(frozen=True)
class Way:
    """A way to use the network."""

    name: str
    about: str
    rank: int
    """The lower, the simpler: among equals the simplest is recommended."""
    warm: bool = False
    """Whether it has a temperature of its own."""


@dataclass(frozen=True, eq=False)
class Entry:
    """A posterior, and the ways of using it that share its draws."""

    posterior: BatchNormPosterior
    ways: tuple[Way, ...]

    @property
    def settings(self) -> dict[str, Any]:
        """What is noted down about it."""
        network = self.posterior.method == "deterministic"
        return {"network": network, "batch_size": None if network else self.posterior.batch_size}


def class_entries(job: Job, loaded: Loaded, fitted: Sequence[Fitted]) -> list[Entry]:
    """What is compared where the outputs are classes."""
    warmed = Way(
        "temperature scaling", "the network, its logits divided by one number tuned on calibration data", 1, warm=True
    )
    entries = [Entry(own_network(loaded), (Way("deterministic", "the network as it is", 0), warmed))]
    draws = f"mean of {job.num_samples} draws, with the noise of the batch size"
    for method in fitted:
        best = f"{draws} that suits calibration data best"
        both = Way(f"{method.label} tuned + temperature", f"{best}, and one temperature", 3, warm=True)
        entries.append(Entry(method.tuned.posterior, (Way(method.tuned_name, best, 2), both)))
        entries.append(Entry(method.trained, (Way(method.trained_name, f"{draws} of training", 4),)))
    return entries


def own_network(loaded: Loaded) -> BatchNormPosterior:
    """The network as it predicts by itself."""
    return deterministic(loaded.network)


def drawing(job: Job) -> Drawing:
    """How all draws of a job are made."""
    return Drawing(job.num_samples, job.seed, job.engine)


def notes_for_new_data(
    job: Job, answering: Mapping[str, Any], drawn: Mapping[str, Any], threshold: float
) -> dict[str, Any]:
    """What to know of the chosen method and of the draws, by their settings, to predict new data in the same way."""
    return {
        "answer": "network" if answering["network"] else "posterior",
        "threshold": threshold,
        "seed": job.seed,
        "num_samples": job.num_samples,
        "engine": "linear" if str(drawn["engine"]).startswith("linear") else "sample",  # what "auto" came to
    }


def fit_all(
    job: Job,
    loaded: Loaded,
    likelihood: TargetLikelihood[Any],
    *,
    num_samples: int | None = None,
    num_examples: int = TUNING_EXAMPLES,
) -> list[Fitted]:
    """Fit every method that was asked for, and tune its batch size on the first calibration examples."""
    fitted = []
    for name in job.methods:
        if name not in METHODS:
            raise BatchbayesError(
                expected=f"methods among {', '.join(METHODS)}", got=repr(name), fix="name one of them in --method"
            )
        label, fit = METHODS[name]
        options: dict[str, Any] = {"num_samples": job.num_samples, "seed": job.seed, "center": job.center}
        if loaded.batch_size is not None:
            options["batch_size"] = loaded.batch_size
        posterior = fit(loaded.network, loaded.train, **options)
        some = list(first_examples(loaded.calibration, num_examples))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BatchbayesWarning)  # said below, in words that fit here
            tuned = tune_batch_size(
                posterior, some, likelihood, num_samples=num_samples or job.num_samples, seed=job.seed
            )
        _warn_of_tuning(label, tuned.posterior, torch.cat([inputs for inputs, _ in some]))
        fitted.append(Fitted(label, posterior, tuned))
    return fitted


@torch.no_grad()
def _warn_of_tuning(label: str, tuned: BatchNormPosterior, inputs: Tensor) -> None:
    """The batch size is tuned as if the network were linear in its statistics: say so if it is not."""
    found = measure_linearity(tuned, inputs, num_draws=8, max_examples=32, seed=0)
    if not found.trusted:
        warn(
            f"The batch size of {label} was tuned as if the network were linear in its batch statistics, which holds "
            f"only roughly here ({found}): the tuned batch size is rough too. The engine "
            "by which each method predicted is named at the end of the report."
        )


def first_examples(data: Examples, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Labelled batches with `count` examples in all, or fewer if there are no more."""
    for inputs, targets in islice(data, count):
        assert targets is not None, "checked when the data was loaded"
        yield inputs[:count], targets[:count]
        count -= len(inputs)
        if count <= 0:
            return
