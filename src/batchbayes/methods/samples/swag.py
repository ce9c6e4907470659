r"""SWAG: a Gaussian fitted to the weights along a training at a constant rate.

What is random: all parameters. Buffers are computed anew for each member, because averaged weights need others.
q(w): a Gaussian with the mean, the variances and a low-rank covariance of the weights after each epoch.
Cost: some epochs more of training, and a pass over `statistics` for each member. A draw is one forward pass.
Reference: Maddox et al., "A Simple Baseline for Bayesian Uncertainty in Deep Learning", NeurIPS 2019.
Where we differ: the draws are made at the fit, so that their batch statistics are computed once.
"""

import copy
from collections import deque
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import nn

from batchbayes._common.rng import generator
from batchbayes._common.signatures import Least, checked
from batchbayes.errors import BatchbayesError
from batchbayes.methods.samples.members import Data, State, state_of, steps_in_epoch
from batchbayes.methods.samples.weight_samples import WeightSamples, stack_states
from batchbayes.network.function import Output, as_network
from batchbayes.network.source import Batches
from batchbayes.training.batches import training_batches
from batchbayes.training.loop import Loss, Step, TrainingConfig, supervised, train


@checked
def swag(
    model: nn.Module,
    data: Data,
    loss: Loss,
    config: TrainingConfig,
    *,
    num_members: Annotated[int, Least(2)] = 20,
    rank: Annotated[int, Least(2)] = 20,
    scale: float = 1.0,
    statistics: Batches | None = None,
    output: Output = None,
) -> WeightSamples:
    r"""Go on training a trained network at a constant rate, fit a Gaussian to its weights, and draw members from it.

    With the mean and variances of the weights after each epoch and the last `rank` deviations D from the running mean,
    a member is $\bar w + s\left(\sigma \odot z_1 / \sqrt 2 + D z_2 / \sqrt{2 (K - 1)}\right)$.

    Args:
        model: a trained network. It is not changed.
        data, loss, output: as for `snapshots`.
        config: the epochs, one state of each, and the constant learning rate.
        num_members: how many members are drawn.
        rank: K, the number of deviations that are kept.
        scale: s, a factor of the deviations: 1 is the paper's formula. The authors' code has another unit, c in
            $s = \sqrt{2 c}$: its 0.5 is 1 here, and its 1 is 1.41. 0 gives equal members, which is refused.
        statistics: training inputs to compute the running statistics of batch norm from, for each member. It is needed
            if the network has batch norm.
    """
    _require_what_swag_needs(model, config, statistics)
    network, found = copy.deepcopy(model), _Trajectory(rank=rank)
    batches = training_batches(data, config.batch_size, config.seed)
    each_epoch = steps_in_epoch(batches)

    # Masks of attention are infinite. They have no moments, and stay as they are.
    fixed = {name: tensor for name, tensor in state_of(network).items() if bool(tensor.isinf().any())}

    def after_step(step: Step) -> None:
        if step.number % each_epoch == 0:
            state = state_of(step.network)
            kept = {name: tensor for name, tensor in state.items() if name not in fixed}
            found.add({name: tensor.to("cpu", torch.float64, copy=True) for name, tensor in kept.items()})

    train(network, batches, supervised(loss), config, after_step=after_step)
    members = [{**fixed, **found.draw(scale, config.seed, number)} for number in range(num_members)]
    samples = stack_states(as_network(network, output), members, "swag")
    return samples if statistics is None else samples.with_statistics(statistics)


def _require_what_swag_needs(model: nn.Module, config: TrainingConfig, statistics: Batches | None) -> None:
    if config.epochs < 2:
        raise BatchbayesError(
            expected="two epochs or more, to see how weights vary", got=f"{config.epochs}", fix="raise epochs"
        )
    if statistics is None and any(name.endswith("running_var") for name, _ in model.named_buffers()):
        raise BatchbayesError(
            expected="statistics=, because averaged weights need other batch statistics",
            got="a network with batch norm and none",
            fix="pass training inputs as statistics=",
        )


@dataclass(eq=False)
class _Trajectory:
    """Mean, mean square and last deviations of the weights along a training, in float64."""

    rank: int
    count: int = 0
    mean: State = field(default_factory=dict)
    square: State = field(default_factory=dict)
    deviations: deque[State] = field(default_factory=deque)

    def add(self, state: State) -> None:
        self.count += 1
        for name, value in state.items():
            self.mean[name] = self.mean.get(name, 0.0) + (value - self.mean.get(name, 0.0)) / self.count
            old = self.square.get(name, 0.0)
            self.square[name] = old + (value.square() - old) / self.count
        self.deviations.append({name: value - self.mean[name] for name, value in state.items()})
        if len(self.deviations) > self.rank:
            self.deviations.popleft()

    def draw(self, scale: float, seed: int, number: int) -> State:
        """Return member `number`."""
        random, count = generator(seed, "swag", number), len(self.deviations)
        shared = torch.randn(count, generator=random, dtype=torch.float64) / (2 * (count - 1)) ** 0.5
        drawn = {}
        for name, mean in self.mean.items():
            std = (self.square[name] - mean.square()).clamp_min(0).sqrt()
            own = std * torch.randn(mean.shape, generator=random, dtype=torch.float64) / 2**0.5
            low_rank = torch.einsum("k,k...->...", shared, torch.stack([d[name] for d in self.deviations]))
            drawn[name] = mean + scale * (own + low_rank)
        return drawn
