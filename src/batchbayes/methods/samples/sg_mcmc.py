r"""Stochastic gradient MCMC: weights sampled from the posterior p(w | data) during training.

What is random: all trained parameters. Buffers belong to the step at which weights are kept.
q(w): samples of $p(w\mid D)^{1/T} \propto \exp(-U(w)/T)$ with $U(w) = \sum_n \ell_n(w) + \frac{\delta}{2}\|w\|^2$: the
sum of the losses of all examples, and a Gaussian prior of precision $\delta$. It is the true posterior for T = 1, if
the loss is a negative log-likelihood, up to errors that vanish with the steps (see below).
Cost: one training for each chain; a draw is one forward pass.
References: Welling, Teh, "Bayesian Learning via Stochastic Gradient Langevin Dynamics", ICML 2011; Li et al.,
"Preconditioned Stochastic Gradient Langevin Dynamics", AAAI 2016; Chen, Fox, Guestrin, "Stochastic Gradient Hamiltonian
Monte Carlo", ICML 2014; Zhang et al., ICLR 2020 for cyclical steps.
Where we differ: public code often divides the noise by more than the derivation allows, and so samples a colder
posterior (T = 0.08 or 2e-5). Here the temperature is what it says, and a warning names any other than 1. The
preconditioner stops to adapt when sampling begins, so that its missing derivative causes no bias.

Samplers are optimisers: steps down a noisy gradient, with noise added so that the weights become samples. With N
examples, $U(w) = N\,\bar U(w)$, where $\bar U$ is the mean loss of an example plus 1/N of the negative log prior: it is
what backward passes differentiate. With steps $\eta$ of $\bar U$, Langevin dynamics is
$w \leftarrow w - \eta\nabla\bar U + \sqrt{2\eta T/N}\,\xi$. Its error in the moments is of the order of $\eta$
times the curvature of $\bar U$, and mini-batches add noise of the order of $\eta^2$.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn, optim

from batchbayes._common.progress import progress
from batchbayes._common.signatures import Between, Count, checked
from batchbayes.errors import warn
from batchbayes.methods.samples.members import (
    Data,
    made_members,
    member_seed,
    require_counting,
    require_prior,
    state_of,
    steps_in_epoch,
)
from batchbayes.methods.samples.schedules import Polynomial, StepSchedule, kept_steps
from batchbayes.methods.samples.weight_samples import WeightSamples, stack_states
from batchbayes.network.function import Output, as_network
from batchbayes.training.batches import training_batches, training_size
from batchbayes.training.loop import Loss, Objective, Step, TrainingConfig, supervised, train

Sampler = Literal["sgld", "psgld", "sghmc"]


class Langevin(optim.Optimizer):
    """Stochastic gradient Langevin dynamics, with a diagonal preconditioner if asked.

    Args:
        params: parameters or groups of them.
        lr: eta, the step for the mean loss of an example.
        num_examples: N.
        temperature: T. The group option "temperature" changes it; 0 gives plain gradient steps.
        preconditioned: divide steps by the root of the mean squared gradient, as RMSprop does. The mean is updated
            while the group option "adapts" is True.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        num_examples: int,
        temperature: float = 1.0,
        preconditioned: bool = False,
        smoothing: float = 0.99,
        floor: float = 1e-3,
    ) -> None:
        options = {"lr": lr, "num_examples": num_examples, "temperature": temperature, "adapts": True}
        super().__init__(params, options | {"preconditioned": preconditioned, "smoothing": smoothing, "floor": floor})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            noise = (2 * group["lr"] * group["temperature"] / group["num_examples"]) ** 0.5
            for parameter in (p for p in group["params"] if p.grad is not None):
                scale = self._scale(parameter, group) if group["preconditioned"] else None
                drift = parameter.grad if scale is None else parameter.grad * scale
                parameter.add_(drift, alpha=-group["lr"])
                if noise:
                    random = torch.randn_like(parameter)
                    parameter.add_(random if scale is None else random * scale.sqrt(), alpha=noise)

    def _scale(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Return the factor of the steps of each weight."""
        state = self.state[parameter]
        if not state:
            state["square"] = parameter.grad.square()  # type: ignore[union-attr]
        elif group["adapts"]:
            state["square"].lerp_(parameter.grad.square(), 1 - group["smoothing"])  # type: ignore[union-attr]
        return (state["square"].sqrt() + group["floor"]).reciprocal()


class Hamiltonian(optim.Optimizer):
    r"""Stochastic gradient Hamiltonian Monte Carlo.

    $v \leftarrow (1-\alpha)v - \eta\nabla\bar U + \sqrt{2\alpha\eta T/N}\,\xi$, then $w \leftarrow w + v$.

    Args:
        params: parameters or groups of them.
        lr: eta. One step moves like momentum SGD with this learning rate and momentum $1 - \alpha$.
        num_examples: N.
        temperature: T. The group option "temperature" changes it.
        friction: alpha, between 0 and 1.
    """

    def __init__(
        self, params: Any, lr: float, *, num_examples: int, temperature: float = 1.0, friction: float = 0.1
    ) -> None:
        options = {"lr": lr, "num_examples": num_examples, "temperature": temperature, "friction": friction}
        super().__init__(params, options | {"adapts": True})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, friction = group["lr"], group["friction"]
            noise = (2 * friction * lr * group["temperature"] / group["num_examples"]) ** 0.5
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["velocity"] = torch.zeros_like(parameter)
                velocity = state["velocity"].mul_(1 - friction).add_(parameter.grad, alpha=-lr)
                if noise:
                    velocity.add_(torch.randn_like(parameter), alpha=noise)
                parameter.add_(velocity)


_SAMPLERS: dict[str, Any] = {"sgld": Langevin, "psgld": partial(Langevin, preconditioned=True), "sghmc": Hamiltonian}


@checked
def sg_mcmc(
    make: Callable[[], nn.Module],
    data: Data,
    loss: Loss,
    config: TrainingConfig,
    *,
    sampler: Sampler = "sgld",
    schedule: StepSchedule | None = None,
    prior_precision: float = 1.0,
    temperature: Annotated[float, Between(0, fix="pass 1 for the posterior")] = 1.0,
    num_chains: Count = 1,
    num_samples: Count = 10,
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
    _warn_of_temperature(temperature)
    num_examples = training_size(data, num_examples)
    require_prior(loss, config, prior_precision, "sampler= takes the steps")
    schedule = schedule or Polynomial()
    objective = penalised(supervised(loss), prior_precision / num_examples)
    seeds, runs = [member_seed(config.seed, chain) for chain in range(num_chains)], []
    starts = zip(made_members(make, seeds), seeds, strict=True)
    for network, seed in progress(starts, "chains", num_chains):
        own, batches = replace(config, seed=seed), training_batches(data, config.batch_size, seed)
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
        self, schedule: StepSchedule, config: TrainingConfig, steps_in_epoch: int, count: int, temperature: float
    ) -> None:
        self._schedule, self._rate, self._temperature = schedule, config.learning_rate, temperature
        self.steps = config.epochs * steps_in_epoch
        self._kept = set(kept_steps(schedule, self.steps, count))
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


def _warn_of_temperature(temperature: float) -> None:
    if temperature != 1:
        kind = "colder, that is, more certain" if temperature < 1 else "warmer, that is, less certain"
        warn(f"temperature={temperature:g} samples a {kind} distribution than the posterior")
