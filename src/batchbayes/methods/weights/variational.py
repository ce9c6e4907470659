"""Training of random weights by the evidence lower bound (ELBO)."""

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import CheckpointError

from batchbayes._common.checks import whole_number
from batchbayes.errors import BatchbayesError
from batchbayes.likelihoods import Categorical, TargetLikelihood, categorical, require_likelihood
from batchbayes.methods.candidates import Candidate, Request
from batchbayes.methods.table import Method
from batchbayes.methods.weights.family import Family
from batchbayes.methods.weights.mean_field import MeanField
from batchbayes.methods.weights.noisy import Estimator, Noisy, noisy, unfit_for_local_noise
from batchbayes.methods.weights.posterior import WeightsPosterior
from batchbayes.network.function import Output
from batchbayes.network.inputs import pick_inputs
from batchbayes.network.replicas import one_call
from batchbayes.network.source import Source
from batchbayes.training.batches import training_batches, training_size
from batchbayes.training.loop import Objective, Step, TrainingBatches, TrainingConfig, train

NO_LABEL = -(2**62)
"""A number that is no label. Cross-entropy leaves out the labels of one value, -100 by default."""


@dataclass(frozen=True)
class Schedule:
    """How the weight of the KL and the learning rate change, in epochs.

    The first step of an epoch still has the numbers of the epoch before.
    """

    kl_from: float = 0.0
    """The weight of the KL is zero before this epoch."""
    kl_full: float = 0.0
    """It rises linearly and is `temperature` from this epoch on."""
    temperature: float = 1.0
    """The weight of the KL in the end. Below one the posterior is colder, that is narrower, than the Bayesian one."""
    decay_from: float | None = None
    """From this epoch on the learning rate falls linearly, to zero after the last epoch."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            is_number = isinstance(value, Real) and not math.isnan(value)
            is_number = is_number and (name != "temperature" or 0 <= float(value) < math.inf)
            if not is_number and (name, value) != ("decay_from", None):
                expected = "numbers of epochs, and a finite temperature of 0 or more"
                raise BatchbayesError(expected, f"{name}={value!r}", "change the schedule")

    def kl_weight(self, epoch: float) -> float:
        """Return the weight of the KL in an epoch, counted from 0.

        >>> [Schedule(kl_from=5, kl_full=20).kl_weight(epoch) for epoch in (4, 5, 8, 20, 50)]
        [0.0, 0.0, 0.2, 1.0, 1.0]
        """
        if epoch < self.kl_from:
            return 0.0
        if epoch >= self.kl_full:
            return self.temperature
        return self.temperature * ((epoch - self.kl_from) / (self.kl_full - self.kl_from))

    def learning_rate(self, epoch: float, config: TrainingConfig) -> float:
        """Return the learning rate in an epoch, counted from 0."""
        if self.decay_from is None or epoch <= self.decay_from:
            return config.learning_rate
        return config.learning_rate * (config.epochs - epoch) / (config.epochs - self.decay_from)


def negative_elbo(likelihood: TargetLikelihood[Any], num_examples: int) -> Objective:
    r"""Return the objective $-N/n \sum_i \log p(y_i | f(x_i)) + \beta KL(q || prior)$ of a batch of n examples.

    N is `num_examples`, and beta is the network's `kl_weight`, which `fit_noisy` sets by its schedule.
    """
    whole_number("num_examples", num_examples)
    is_first = True

    def objective(network: nn.Module, batch: Any) -> Tensor:
        nonlocal is_first
        assert isinstance(network, Noisy)
        inputs, targets = pick_inputs(batch), targets_of(batch)
        if not len(inputs):
            raise BatchbayesError("batches with examples in them", "an empty batch", "leave empty batches out")
        outputs, divergence = network.outputs_and_divergence(inputs.to(network.kl_weight.device))
        surprise = negative_log_probability(likelihood, outputs, targets, check_outputs=is_first)
        is_first = False
        return torch.add(network.kl_weight * divergence, surprise, alpha=num_examples / len(inputs))

    return objective


def targets_of(batch: Any) -> Tensor:
    """Return the targets of a labelled batch (x, y)."""
    if isinstance(batch, list | tuple) and len(batch) > 1 and isinstance(batch[1], Tensor):
        return batch[1]
    raise BatchbayesError(
        expected="labelled batches (x, y), to train random weights",
        got=f"a batch that is a {type(batch).__name__} without targets",
        fix="pass a DataLoader of inputs and targets, or [(x, y)]",
    )


def negative_log_probability(
    likelihood: TargetLikelihood[Any], outputs: Tensor, targets: Tensor, *, check_outputs: bool = True
) -> Tensor:
    """Return -log p of all targets of a batch together. Targets that do not fit are refused.

    Args:
        likelihood: p(y | f).
        outputs: those of the network, (N, ...).
        targets: y for each example.
        check_outputs: whether to look if the outputs are logits, too. A network needs that once.
    """
    if isinstance(likelihood, Categorical) and _are_class_numbers(targets, outputs, likelihood):
        if check_outputs:
            likelihood.check_outputs(outputs.detach())
        logits = outputs if likelihood.temperature == 1 else outputs / likelihood.temperature
        try:  # torch itself finds numbers that are no class
            return cross_entropy(logits, targets, ignore_index=NO_LABEL, reduction="sum")
        except IndexError:
            pass  # what follows says so in words
    draws = outputs[None]  # likelihoods take outputs of several draws (S, N, ...)
    fitting = likelihood.fitting(draws.detach(), targets).to(outputs.device)
    if isinstance(likelihood, Categorical):  # one operation, where a distribution takes six and their gradients
        ignored = NO_LABEL if likelihood.ignore_index is None else likelihood.ignore_index
        logits = likelihood.logits(draws).flatten(0, -2)  # (all labels, K)
        return cross_entropy(logits, fitting.flatten(), ignore_index=ignored, reduction="sum")
    return -likelihood(draws).log_prob(fitting).sum()


def _are_class_numbers(targets: Tensor, outputs: Tensor, likelihood: Categorical) -> bool:
    """Whether targets have the form that cross-entropy asks for. It checks their values on the CPU only."""
    return (
        likelihood.class_axis == 1
        and likelihood.ignore_index is None
        and not likelihood.probabilities
        and targets.dtype == torch.int64
        and targets.device.type == outputs.device.type == "cpu"
        and targets.shape == outputs.shape[:1] + outputs.shape[2:]
    )


def fit_noisy(
    network: Noisy,
    batches: TrainingBatches,
    likelihood: TargetLikelihood[Any],
    config: TrainingConfig,
    *,
    num_examples: int | None = None,
    schedule: Schedule = Schedule(),
    after_step: Callable[[Step], bool | None] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> list[float]:
    """Train random weights in place, and return the mean negative ELBO of each epoch, in nats.

    Args:
        network: what `noisy` returned.
        batches: labelled batches (x, y), for example a DataLoader or `shuffled(...)`; see `train`.
        likelihood: p(y | f), for example `bb.categorical()`.
        config: how to train.
        num_examples: the number N of training examples, which weighs the data against the KL, if batches do not tell.
        schedule: the weight of the KL and the learning rate by epoch.
        after_step: called after each step, as in `train`.
        checkpoint: a file to continue from after an interruption, as in `train`.

    >>> network = noisy(nn.Linear(2, 3), MeanField())
    >>> data = [(torch.randn(16, 2), torch.randint(0, 3, (16,)))]
    >>> losses = fit_noisy(network, data, categorical(), TrainingConfig(2, 16), num_examples=16)
    >>> network.posterior()
    WeightsPosterior(mean-field on Linear: 6 weights in 1 layer)
    """
    require_likelihood(likelihood)
    if config.weight_decay:
        raise BatchbayesError(
            expected="no weight decay: random weights have a prior instead, and their spreads would decay too",
            got=f"weight_decay={config.weight_decay!r}",
            fix="leave weight_decay out",
        )

    def following(step: Step) -> bool | None:
        _require_finite(step)
        network.kl_weight.fill_(schedule.kl_weight(step.epoch))
        step.set_learning_rate(schedule.learning_rate(step.epoch, config))
        return after_step(step) if after_step else None

    network.kl_weight.fill_(schedule.kl_weight(0))
    objective = negative_elbo(likelihood, training_size(batches, num_examples))
    try:
        return train(network, batches, objective, config, after_step=following, checkpoint=checkpoint)
    except CheckpointError as error:  # the backward pass has run a layer again, without noise
        raise unfit_for_local_noise("activation checkpoints in the forward pass") from error


def _require_finite(step: Step) -> None:
    if not math.isfinite(step.objective):
        raise BatchbayesError(
            expected="a finite ELBO",
            got=f"{step.objective} in step {step.number}, epoch {step.epoch + 1}: the training has diverged",
            fix="lower the learning rate, start with less noise (initial_std=), or let the KL rise slowly by "
            "schedule=Schedule(kl_from=5, kl_full=20)",
        )


def variational(
    model: nn.Module,
    batches: TrainingBatches,
    family: Family = MeanField(),  # noqa: B008
    *,
    likelihood: TargetLikelihood[Any] = categorical(),  # noqa: B008
    epochs: int = 10,
    batch_size: int = 128,
    learning_rate: float = 1e-3,
    num_examples: int | None = None,
    layers: Iterable[str] | None = None,
    start: Literal["means", "fresh"] = "means",
    estimator: Estimator = "local",
    schedule: Schedule = Schedule(),
    output: Output = None,
    seed: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
) -> WeightsPosterior:
    """Make a network Bayesian: train random weights from where the network is, and return the posterior.

    This is `noisy`, `fit_noisy` and `Noisy.posterior` in one call. The network is copied and not changed.

    Args:
        model: the network.
        batches: two tensors (x, y) or a Dataset, which are read in a new order in each epoch; or labelled batches, such
            as a DataLoader.
        family: the distribution of the weights, such as `MeanField()` or `SparseVD()`.
        likelihood: p(y | f).
        epochs: how often the data is read.
        batch_size: of the batches of two tensors or a Dataset.
        learning_rate: of Adam.
        num_examples: the size of the training set. By default it is counted, if the batches tell it.
        layers: the names of the layers whose weights are random; by default all linear, convolutional and recurrent
            ones.
        start: whether training starts from the weights of the network ("means") or from new ones ("fresh").
        estimator: where the noise is drawn: "local" or "weights".
        schedule: the weight of the KL and the learning rate by epoch.
        output: which output counts, if the network returns several.
        seed: of the noise, of new weights, and of what else is random.
        checkpoint: a file to continue from after an interruption, as in `train`.

    >>> import torch
    >>> network = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> data = [(torch.randn(16, 2), torch.randint(0, 3, (16,)))]
    >>> variational(network, data, epochs=2)
    WeightsPosterior(mean-field on Sequential: 40 weights in 2 layers)
    """
    random = noisy(model, family, layers=layers, start=start, estimator=estimator, output=output, seed=seed)
    config = TrainingConfig(epochs, batch_size, learning_rate=learning_rate, seed=seed)
    data = training_batches(batches, batch_size, seed)
    read = cast("TrainingBatches", data if callable(data) else Source(data).read())
    with one_call(random.network.module):  # a copy that the user's code does not know
        fit_noisy(random, read, likelihood, config, num_examples=num_examples, schedule=schedule, checkpoint=checkpoint)
    return random.posterior()


def variational_candidates(method: Method, request: Request) -> list[Candidate]:
    """Return what an assessment compares: the network after ten epochs with mean-field weights."""
    size = getattr(request.train, "size", None)  # data that an assessment has read tells it so
    options = {"num_examples": size} if isinstance(size, int) else {}
    fitted = method(request.model, request.train, likelihood=request.likelihood, seed=request.seed, **options)
    return [Candidate(method, fitted)]
