"""Which networks can be stacked, and that no others are."""

import pytest
import torch
from batchbayes_tables.stack.stack import stack_networks, unstack
from torch import nn

from batchbayes.errors import BatchbayesError
from batchbayes.models import MLP, SeededDropout


def frozen():
    network = MLP(4, [8], 1)
    network.output.bias.requires_grad_(False)
    return network


class Other(MLP):
    """A perceptron that does something else."""

    def forward(self, inputs):
        return super().forward(inputs).relu()


def tied():
    network = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    network[2].weight = network[0].weight
    return network


def shared():
    relu = nn.ReLU()
    return nn.Sequential(nn.Linear(4, 8), relu, nn.Linear(8, 8), relu, nn.Dropout(0.1), nn.Linear(8, 1))


ODD = {
    "frozen": frozen,
    "tied": tied,
    "another class": lambda: Other(4, [8], 1),
    "a layer alone": lambda: nn.Linear(4, 1),
    "another shape": lambda: MLP(4, [9], 1),
    "plain dropout": shared,
    "ReLU before norm": lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 1)),
    "norm before all": lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 8), nn.Linear(8, 1)),
    "two norms": lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.BatchNorm1d(8), nn.Linear(8, 1)),
    "norm without statistics": lambda: nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 1)
    ),
    "ReLU at the end": lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1), nn.ReLU()),
    "another function": lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)),
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_what_a_stack_would_train_otherwise_is_refused(odd):
    for networks in ([MLP(4, [8], 1), odd()], [odd(), odd()]):
        if odd is not ODD["another shape"] or networks[0].output.weight.shape != networks[1].output.weight.shape:
            with pytest.raises(BatchbayesError, match=r"perceptrons of one shape .* got another one at position [01]"):
                stack_networks(networks)


def test_networks_of_two_precisions_are_refused():
    with pytest.raises(BatchbayesError, match=r"one shape and precision.* got another one at position 1"):
        stack_networks([MLP(4, [8], 1), MLP(4, [8], 1).double()])


def test_a_sequential_perceptron_is_taken():
    layers = [nn.Identity(), nn.Linear(4, 8), nn.ReLU(inplace=True), SeededDropout(0.3), nn.Linear(8, 2)]
    stack = stack_networks([nn.Sequential(*layers, nn.BatchNorm1d(2))])
    assert [(layer.linear, layer.dropout, layer.norm, layer.rectified) for layer in stack.layers] == [
        ("1", None, None, True),
        ("4", "3", "5", False),
    ]


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
