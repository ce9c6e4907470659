"""Which networks can be stacked, and that no others are."""

import pytest
import torch
from batchbayes_tables.stack.stack import stack_networks, unstack
from torch import nn

from batchbayes.errors import BatchbayesError
from batchbayes.models import MLP


def frozen():
    network = MLP(4, [8], 1)
    network.output.bias.requires_grad_(False)
    return network


class Other(MLP):
    """A perceptron that does something else."""

    def forward(self, inputs):
        return super().forward(inputs).relu()


@pytest.mark.parametrize("odd", [frozen, lambda: Other(4, [8], 1), lambda: nn.Linear(4, 1), lambda: MLP(4, [9], 1)])
def test_what_a_stack_would_train_otherwise_is_refused(odd):
    with pytest.raises(BatchbayesError, match=r"perceptrons MLP of one shape .* got another one at position 1"):
        stack_networks([MLP(4, [8], 1), odd()])


def test_networks_of_two_precisions_are_refused():
    with pytest.raises(BatchbayesError, match=r"one shape and precision.* got another one at position 1"):
        stack_networks([MLP(4, [8], 1), MLP(4, [8], 1).double()])


def test_dropout_rates_may_differ():
    stack = stack_networks([MLP(4, [8], 1, dropout=rate) for rate in (0.1, 0.2)])
    assert stack.dropout_rates["dropout"].tolist() == [0.1, 0.2]


def test_everything_comes_back_from_the_stack():
    networks, others = [MLP(4, [8], 1) for _ in range(3)], [MLP(4, [8], 1) for _ in range(3)]
    for count, network in enumerate(networks):
        for _ in range(count):
            network(torch.randn(5, 4))
    unstack(stack_networks(networks), others)
    assert [int(other.hidden[0].norm.num_batches_tracked) for other in others] == [0, 1, 2]
    for network, other in zip(networks, others, strict=True):
        for name, tensor in network.state_dict().items():
            assert torch.equal(other.state_dict()[name], tensor), name
