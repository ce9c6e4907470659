r"""Stochastic gradient MCMC: weights sampled from the posterior p(w | data) during training.

What is random: all trained parameters. Buffers belong to the step at which weights are kept.
q(w): samples of $p(w\mid D)^{1/T} \propto \exp(-U(w)/T)$ with $U(w) = \sum_n \ell_n(w) + \frac{\delta}{2}\|w\|^2$: the
sum of the losses of all examples, and a Gaussian prior of precision $\delta$. It is the true posterior for T = 1, if
the loss is a negative log-likelihood, up to errors that vanish with the steps (see `samplers.py`).
Cost: one training for each chain; a draw is one forward pass.
References: those in `samplers.py`, and Zhang et al., ICLR 2020 for cyclical steps.
Where we differ: public code often divides the noise by more than the derivation allows, and so samples a colder
posterior (T = 0.08 or 2e-5). Here the temperature is what it says, and a warning names any other than 1.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from batchbayes._common.checks import finite_number, whole_number
from batchbayes._common.progress import progress
from batchbayes.errors import BatchbayesError, unknown_name, warn
from batchbayes.methods.samples.deep_ensemble import (
    Data,
    made,
    member_seed,
    require_counting,
    require_prior,
    steps_in_epoch,
)
from batchbayes.methods.samples.samplers import Hamiltonian, Langevin
from batchbayes.methods.samples.schedules import Polynomial, Schedule, kept_steps
from batchbayes.methods.samples.weight_samples import WeightSamples, stack_states, state_of
from batchbayes.network import Output, as_network
from batchbayes.training.batches import known_size, training_batches
from batchbayes.training.loop import Loss, Objective, Step, TrainingConfig, supervised, train

Sampler = Literal["sgld", "psgld", "sghmc"]
_SAMPLERS: dict[str, Any] = {"sgld": Langevin, "psgld": partial(Langevin, preconditioned=True), "sghmc": Hamiltonian}


def sg_mcmc(
    make: Callable[[], nn.Module],
    data: Data,
    loss: Loss,
    config: TrainingConfig,
    *,
    sampler: Sampler = "sgld",
    schedule: Schedule | None = None,
    prior_precision: float = 1.0,
    temperature: float = 1.0,
    num_chains: int = 1,
    num_samples: int = 10,
    num_examples: int | None = None,
    output: Output = None,
) -> WeightSamples:
    """Sample the weights of a network by stochastic gradient MCMC.

    Args:
        make: returns a new network with random weights, the start of a chain.
        data: two tensors (inputs, targets), or any batches for `train`.
        loss: the **mean** over a batch of the negative log-likelihood of an example, such as
            `torch.nn.functional.cross_entropy`; for a regression with noise precision tau, tau times
            `half_squared_error`.
        config: epochs, batch size, learning rate and seed. The learning rate is that of the mean loss, as for SGD. The
            weight decay must be 0, because the prior has its place, and `optimiser` must not be set, because the
            sampler has its place.
        sampler: "sgld", "psgld" (preconditioned), or "sghmc" (with momentum).
        schedule: `Polynomial(...)`, by default with constant steps and half of them as burn-in, or `Cyclical(...)`.
        prior_precision: the precision of the Gaussian prior of each weight.
        temperature: 1 samples the posterior. Less samples a colder one, and a warning says so.
        num_chains: how many chains are run, each from its own start.
        num_samples: how many sets of weights each chain keeps, spread evenly over its samples.
        num_examples: the size of the training set, if it is not known from the data.
        output: which output counts, if the network returns several.

    Returns:
        The samples, chain by chain, with the mean log posterior around each of them. `chain_diagnostics` says how well
        the chains agree.

    >>> from batchbayes.training.loop import half_squared_error
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> config = TrainingConfig(epochs=50, batch_size=16, learning_rate=0.01)
    >>> sg_mcmc(lambda: nn.Linear(1, 1), (x, x), half_squared_error, config, num_chains=2)
    WeightSamples(sgld on Linear: 20 members in 2 chains)
    """
    num_examples = _require_options(sampler, temperature, num_examples, data)
    require_prior(loss, config, prior_precision, "sampler= takes the steps")
    schedule = schedule or Polynomial()
    objective = penalised(supervised(loss), prior_precision / num_examples)
    runs = []
    for chain in progress(range(whole_number("num_chains", num_chains)), "chains", num_chains):
        own = replace(config, seed=member_seed(config.seed, chain))
        network, batches = made(make, own.seed), training_batches(data, own.batch_size, own.seed)
        run = _Chain(schedule, own, steps_in_epoch(batches), num_samples, temperature)
        first = temperature if schedule.noise(0, run.steps) else 0.0
        optimiser = partial(_SAMPLERS[sampler], num_examples=num_examples, temperature=first)
        train(network, batches, objective, replace(own, optimiser=optimiser), after_step=run)
        runs.append((network, run))
    samples = stack_states(as_network(runs[0][0], output), [state for _, run in runs for state in run.states], sampler)
    trace = -num_examples * torch.tensor([run.means for _, run in runs]).flatten()
    return replace(samples, num_chains=num_chains, log_posterior=trace)


class _Chain:
    """What happens after each step of a chain: the schedule sets the next step, and some weights are kept."""

    def __init__(
        self, schedule: Schedule, config: TrainingConfig, steps_in_epoch: int, count: int, temperature: float
    ) -> None:
        self._schedule, self._rate, self._temperature = schedule, config.learning_rate, temperature
        self.steps = config.epochs * steps_in_epoch
        self._kept = set(kept_steps(schedule, self.steps, whole_number("num_samples", count)))
        self._recent: list[float] = []
        self.states: list[dict[str, Tensor]] = []
        self.means: list[float] = []
        """The mean objective of the steps since the sample before."""

    def __call__(self, step: Step) -> None:
        self._recent.append(step.objective)
        if step.number - 1 in self._kept:
            self.states.append(copy.deepcopy(state_of(step.network)))
            self.means.append(sum(self._recent) / len(self._recent))
            self._recent = []
        following = step.number  # steps count from 1 here, and from 0 in schedules
        for group in step.optimiser.param_groups:
            group["lr"] = self._rate * self._schedule.factor(following, self.steps)
            group["temperature"] = self._temperature if self._schedule.noise(following, self.steps) else 0.0
            group["adapts"] = not self._schedule.samples(following, self.steps)


def penalised(objective: Objective, precision: float) -> Objective:
    r"""Add $\frac{\delta}{2}\|w\|^2$ over all trained parameters to an objective."""

    def total(network: nn.Module, batch: Any) -> Tensor:
        fit = objective(network, batch)
        require_counting(batch[1])
        squares = [p.square().sum() for p in network.parameters() if p.requires_grad]
        return fit + 0.5 * precision * torch.stack(squares).sum()

    return total


def _require_options(sampler: str, temperature: float, num_examples: int | None, data: Any) -> int:
    """Check the options, and return the number of training examples."""
    if sampler not in _SAMPLERS:
        raise unknown_name("a sampler", str(sampler), _SAMPLERS)
    finite_number("a temperature", temperature, above=0, fix="pass 1 for the posterior")
    if temperature != 1:
        kind = "colder, that is, more certain" if temperature < 1 else "warmer, that is, less certain"
        warn(f"temperature={temperature:g} samples a {kind} distribution than the posterior")
    if num_examples is not None:
        return whole_number("num_examples", num_examples)
    if (known := known_size(data)) is None:
        raise BatchbayesError(
            expected="num_examples=, the size of the training set",
            got=f"none, and a {type(data).__name__} that does not tell",
            fix="pass the number of training examples: the likelihood is scaled by it",
        )
    return known
