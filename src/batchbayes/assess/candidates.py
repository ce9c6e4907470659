"""What is compared: the network by itself, and each method at the batch size of training and at a tuned one."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from torch import Tensor

from batchbayes.assess.engine import Drawing
from batchbayes.assess.job import Job, Loaded
from batchbayes.data.examples import Examples
from batchbayes.errors import BatchbayesError
from batchbayes.likelihoods import Likelihood
from batchbayes.methods.batchnorm.baselines import deterministic
from batchbayes.methods.batchnorm.batch_size import TunedBatchSize, tune_batch_size
from batchbayes.methods.batchnorm.mcbn import mcbn
from batchbayes.methods.batchnorm.posterior import BatchNormPosterior
from batchbayes.methods.batchnorm.stochastic_bn import stochastic_bn

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


def own_network(loaded: Loaded) -> BatchNormPosterior:
    """The network as it predicts by itself."""
    return deterministic(loaded.network)


def drawing(job: Job) -> Drawing:
    """How all draws of a job are made."""
    return Drawing(job.num_samples, job.seed, job.engine)


def fit_all(
    job: Job,
    loaded: Loaded,
    likelihood: Likelihood[Any],
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
        tuned = tune_batch_size(posterior, some, likelihood, num_samples=num_samples or job.num_samples, seed=job.seed)
        fitted.append(Fitted(label, posterior, tuned))
    return fitted


def first_examples(data: Examples, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Labelled batches with `count` examples in all, or fewer if there are no more."""
    for inputs, targets in islice(data, count):
        assert targets is not None, "checked when the data was loaded"
        yield inputs[:count], targets[:count]
        count -= len(inputs)
        if count <= 0:
            return
