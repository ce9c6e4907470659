"""Which networks can be stacked, and that no others are."""

import copy

import pytest
import torch
from batchbayes_tables.stack.stack import stack_networks, unstack
from torch import nn
from torch.nn import functional as F

from batchbayes.errors import BatchbayesError
from batchbayes.models import MLP, SeededDropout


class Custom(nn.Module):
    """Two hidden layers whose order of calls is given as a function of (self, inputs)."""

    def __init__(self, calls, rate=0.2):
        super().__init__()
        self.first, self.relu = nn.Linear(4, 4), nn.ReLU()
        self.dropout, self.second = SeededDropout(rate), nn.Linear(4, 4)
        self.last_relu, self.last = nn.ReLU(), nn.Linear(4, 1)
        self.calls = calls

    def forward(self, inputs):
        return self.calls(self, inputs)


def in_order(net, x):
    return net.last(net.last_relu(net.second(net.dropout(net.relu(net.first(x))))))


def tied():
    network = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    network[2].weight = network[0].weight
    return network


def frozen():
    network = MLP(4, [8], 1)
    network.output.bias.requires_grad_(False)
    return network


def with_own_parameter():
    network = Custom(lambda net, x: in_order(net, x) * net.scale)
    network.scale = nn.Parameter(torch.ones(()))
    return network


BY_MODULES = {
    "plain dropout": lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1)),
    "ReLU before norm": lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 1)),
    "dropout before norm": lambda: nn.Sequential(
        nn.Linear(4, 8), SeededDropout(0.2), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)
    ),
    "norm before all": lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)),
    "two norms": lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.BatchNorm1d(8), nn.Linear(8, 1)),
    "two dropouts": lambda: nn.Sequential(SeededDropout(0.1), SeededDropout(0.1), nn.Linear(4, 1)),
    "norm without statistics": lambda: nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.ReLU(), nn.Linear(8, 1)
    ),
    "norm without parameters": lambda: nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8, affine=False), nn.ReLU(), nn.Linear(8, 1)
    ),
}
BY_PARAMETERS = {
    "frozen": (frozen, r"output\.bias"),
    "tied": (tied, r"2\.weight"),
    "own": (with_own_parameter, "scale"),
}
BY_TRIAL = {
    "functional ReLU": lambda net, x: in_order(net, x).relu(),
    "functional ReLU at the start": lambda net, x: in_order(net, x.relu()),
    "functional dropout": lambda net, x: in_order(net, F.dropout(x, 0.5, net.training)),
    "ReLU called twice": lambda net, x: in_order(net, net.relu(x)),
    "dropout called twice": lambda net, x: in_order(net, net.dropout(x)),
    "dropout called elsewhere": lambda net, x: net.last(net.dropout(net.last_relu(net.second(net.relu(net.first(x)))))),
    "linear called twice": lambda net, x: in_order(net, net.first(x)),
    "another order": lambda net, x: net.last(net.last_relu(net.first(net.dropout(net.relu(net.second(x)))))),
    "not called": lambda net, x: net.last(net.second(net.dropout(net.relu(net.first(x))))),
    "residual": lambda net, x: in_order(net, x) + x[:, :1],
    "another shape": lambda net, x: in_order(net, x).squeeze(-1),
    "a tuple": lambda net, x: (in_order(net, x),),
}


@pytest.mark.parametrize("make", BY_MODULES.values(), ids=BY_MODULES)
def test_layers_that_are_unknown_or_out_of_order_are_refused(make):
    with pytest.raises(BatchbayesError, match=r"a chain of .* out of place"):
        stack_networks([make() for _ in range(2)])


@pytest.mark.parametrize("end", [nn.ReLU(), SeededDropout(0.1)])
def test_the_last_layer_is_linear(end):
    with pytest.raises(BatchbayesError, match="ends in a linear layer"):
        stack_networks([nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1), end)])


@pytest.mark.parametrize(("make", "name"), BY_PARAMETERS.values(), ids=BY_PARAMETERS)
def test_parameters_that_a_stack_would_train_otherwise_are_refused(make, name):
    with pytest.raises(BatchbayesError, match=f"{name} in network 0: frozen, shared"):
        stack_networks([make(), make()])


def test_one_frozen_network_among_others_is_named():
    with pytest.raises(BatchbayesError, match="in network 1: frozen"):
        stack_networks([MLP(4, [8], 1), frozen()])


@pytest.mark.parametrize("calls", BY_TRIAL.values(), ids=BY_TRIAL)
def test_what_is_not_seen_in_the_modules_is_found_by_a_trial(calls):
    """In any network of the stack, at weights of zero and dropout rates of zero as well."""
    networks = [Custom(in_order, rate=0.0), Custom(in_order, rate=0.0), Custom(calls, rate=0.0)]
    for network in networks:
        nn.init.zeros_(network.last.weight)
    assert len(stack_networks(networks[:2])) == 2
    with pytest.raises(BatchbayesError, match="network 2, Custom, which does something else"):
        stack_networks(networks)


def test_modules_that_are_shared_or_do_not_follow_each_other_are_refused():
    relu = nn.ReLU()
    shared = nn.Sequential(nn.Linear(4, 8), relu, nn.Linear(8, 8), relu, nn.Linear(8, 1))
    side_by_side = nn.ModuleList([nn.Linear(4, 8), nn.Linear(4, 8)])
    for network in (shared, side_by_side):
        with pytest.raises(BatchbayesError, match="call each of their modules once"):
            stack_networks([network])


def test_networks_of_two_precisions_are_refused():
    with pytest.raises(BatchbayesError, match="one shape and precision; got another one at position 1"):
        stack_networks([MLP(4, [8], 1), MLP(4, [8], 1).double()])


def test_what_comes_to_the_same_is_taken():
    """Dropout before its ReLU, a second ReLU, modules that do nothing, batch norm at the end."""
    layers = [nn.Identity(), nn.Linear(4, 8), SeededDropout(0.3), nn.ReLU(inplace=True), nn.ReLU(), nn.Linear(8, 2)]
    stack = stack_networks([nn.Sequential(*layers, nn.BatchNorm1d(2))])
    assert [(layer.linear, layer.dropout, layer.norm, layer.rectified) for layer in stack.layers] == [
        ("1", None, None, True),
        ("5", "2", "6", False),
    ]


def test_the_trial_leaves_networks_and_generators_as_they_were():
    networks = [MLP(4, [8], 1, dropout=rate) for rate in (0.1, 0.2)]
    networks[0].eval()
    before, state = copy.deepcopy(networks), torch.get_rng_state()
    stack = stack_networks(networks)
    assert torch.equal(torch.get_rng_state(), state)
    assert stack.dropout_rates["dropout"].tolist() == [0.1, 0.2]
    for network, old in zip(networks, before, strict=True):
        assert [module.training for module in network.modules()] == [module.training for module in old.modules()]
        assert repr(network) == repr(old)
        pairs = zip(network.state_dict().values(), old.state_dict().values(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


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
