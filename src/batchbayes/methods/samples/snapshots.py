r"""Snapshots: the weights at the ends of the cosine cycles of one training.

What is random: which of the kept sets of weights predicts, with its buffers.
q(w): $\frac1S\sum_s\delta(w - w_s)$, where $w_s$ are the weights at the end of cycle s, where the
learning rate is lowest.
Cost: one training. A draw is one forward pass.
Reference: Huang et al., "Snapshot Ensembles: Train 1, get M for free", ICLR 2017.
Where we differ: nothing is known.
"""

from collections.abc import Callable
from typing import Annotated

from torch import nn

from batchbayes._common.signatures import Least, checked
from batchbayes.methods.samples.members import Data, made, member_seed, weights_along
from batchbayes.methods.samples.schedules import Cyclical
from batchbayes.methods.samples.weight_samples import WeightSamples, stack_states
from batchbayes.network.function import Output, as_network
from batchbayes.training.loop import Loss, TrainingConfig


@checked
def snapshots(
    make: Callable[[], nn.Module],
    data: Data,
    loss: Loss,
    config: TrainingConfig,
    *,
    num_members: Annotated[int, Least(2)] = 5,
    output: Output = None,
) -> WeightSamples:
    """Train one network in cosine cycles, and keep its weights at the end of each cycle.

    Args:
        make: returns a new network with random weights.
        data: two tensors (inputs, targets), or any batches for `train`.
        loss: what training makes small, such as `torch.nn.functional.cross_entropy`.
        config: how to train; its epochs are shared out to the cycles.
        num_members: the number of cycles.
        output: which output counts, if the network returns several.

    >>> import torch
    >>> from batchbayes.training.loop import half_squared_error
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> snapshots(lambda: nn.Linear(1, 1), (x, x), half_squared_error, TrainingConfig(10, 16, 0.1))
    WeightSamples(snapshots on Linear: 5 members)
    """
    network = made(make, member_seed(config.seed, 0))
    kept = weights_along(network, data, loss, config, Cyclical(num_members, exploring=1.0), num_members)
    return stack_states(as_network(network, output), kept, "snapshots")
