r"""Fast geometric ensembles: the weights along short cycles after training.

What is random: which of the kept sets of weights predicts, with its buffers.
q(w): $\frac1S\sum_s\delta(w - w_s)$, where $w_s$ are the weights in the middle of cycle s, where the
learning rate is lowest.
Cost: some epochs more of training. A draw is one forward pass.
Reference: Garipov et al., "Loss Surfaces, Mode Connectivity, and Fast Ensembling of DNNs", NeurIPS 2018.
Where we differ: nothing is known.
"""

import copy
from typing import Annotated

from torch import nn

from batchbayes._common.signatures import Least, checked
from batchbayes.methods.samples.members import Data, weights_along
from batchbayes.methods.samples.schedules import Triangular
from batchbayes.methods.samples.weight_samples import WeightSamples, stack_states
from batchbayes.network.function import Output, as_network
from batchbayes.training.loop import Loss, TrainingConfig


@checked
def fast_geometric(
    model: nn.Module,
    data: Data,
    loss: Loss,
    config: TrainingConfig,
    *,
    num_members: Annotated[int, Least(2)] = 5,
    output: Output = None,
) -> WeightSamples:
    """Go on training a trained network in short cycles, and keep its weights where the learning rate is lowest.

    In each cycle the learning rate falls from `config.learning_rate` to a hundredth of it, and rises again.

    Args:
        model: a trained network. It is not changed.
        data, loss, output: as for `snapshots`.
        config: the epochs of all cycles together, and the highest learning rate.
        num_members: the number of cycles.
    """
    network = copy.deepcopy(model)
    kept = weights_along(network, data, loss, config, Triangular(num_members), num_members)
    return stack_states(as_network(network, output), kept, "fast_geometric")
