"""A stack of networks against each of them trained alone by the plain loop."""

import copy

import pytest
import torch
from batchbayes_tables.stack.stack import stack_networks, unstack
from batchbayes_tables.stack.train import train_stack, train_together
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from batchbayes._common.rng import GlobalStream
from batchbayes.errors import BatchbayesError
from batchbayes.models import MLP
from batchbayes.training.batches import shuffled
from batchbayes.training.loop import TrainingConfig, half_squared_error, supervised, train


def data(count, seed, features=3, dtype=torch.float64):
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(count, features, generator=source, dtype=dtype)
    return x, x.sin().sum(1, keepdim=True) + 0.1 * torch.randn(count, 1, generator=source, dtype=dtype)


def networks(count, norm=True, dropout=0.0, dtype=torch.float64):
    with GlobalStream(5):
        rates = [dropout * (i + 1) / count for i in range(count)]
        return [MLP(3, [7, 5], 1, norm=norm, dropout=rate, epsilon=1e-10).to(dtype) for rate in rates]


def alone(network, examples, config):
    network = copy.deepcopy(network)
    train(network, shuffled(*examples, config.batch_size, config.seed), supervised(half_squared_error), config)
    return network


def assert_same(ours, theirs, **tolerance):
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("norm", "dropout"), [(True, 0.0), (False, 0.5), (False, 0.0), (True, 0.3)])
@pytest.mark.parametrize("batch_size", [8, 1000])
def test_each_network_is_as_if_trained_alone(norm, dropout, batch_size):
    """Own data of uneven length, own weight decay, own seed; all parameters and running statistics."""
    sets = [data(40, 1), data(41, 2), data(40, 3)]
    chosen = [sets[i % 3] for i in range(6)]
    configs = [TrainingConfig(7, batch_size, 1e-2, weight_decay=10.0**-i, seed=i // 2) for i in range(6)]
    stacked = networks(6, norm, dropout)
    expected = [alone(*each) for each in zip(stacked, chosen, configs, strict=True)]
    train_together(stacked, chosen, configs)
    for ours, theirs in zip(stacked, expected, strict=True):
        assert_same(ours, theirs, rtol=1e-6, atol=1e-8)
        assert not ours.training


def test_a_rate_of_zero_draws_as_any_other_rate():
    """Some modules of a network that drop nothing, and a network of which none does."""
    examples, stacked = data(40, 1), networks(3, norm=False, dropout=0.4)
    for network, rates in zip(stacked, [(0.0, 0.4, 0.2), (0.3, 0.0, 0.5), (0.0, 0.0, 0.0)], strict=True):
        dropouts = [module for module in network.modules() if isinstance(module, nn.Dropout)]
        for module, rate in zip(dropouts, rates, strict=True):
            module.p = rate
    configs = [TrainingConfig(7, 8, 1e-2, seed=i) for i in range(3)]
    expected = [alone(network, examples, config) for network, config in zip(stacked, configs, strict=True)]
    train_together(stacked, [examples] * 3, configs)
    for ours, theirs in zip(stacked, expected, strict=True):
        assert_same(ours, theirs, rtol=1e-6, atol=1e-8)


def test_single_precision_agrees_to_its_rounding():
    examples, config = data(64, 1, dtype=torch.float32), TrainingConfig(10, 16, 1e-3, weight_decay=1e-3)
    stacked = networks(4, dtype=torch.float32)
    expected = [alone(network, examples, config) for network in stacked]
    train_together(stacked, [examples] * 4, [config] * 4)
    for ours, theirs in zip(stacked, expected, strict=True):
        assert_same(ours, theirs, rtol=2e-3, atol=2e-4)


def test_weight_decay_has_the_precision_of_the_network():
    examples, config = data(40, 1), TrainingConfig(5, 8, 1e-2, weight_decay=0.1)
    stacked = networks(2)
    expected = [alone(network, examples, config) for network in stacked]
    train_together(stacked, [examples] * 2, [config] * 2)
    for ours, theirs in zip(stacked, expected, strict=True):
        assert_same(ours, theirs, rtol=1e-11, atol=1e-13)


@given(st.lists(st.integers(1, 6), min_size=3, max_size=3), st.sampled_from([0.0, 0.4]))
@settings(max_examples=8, deadline=None)
def test_networks_that_end_early_do_not_disturb_the_others(ends, dropout):
    """Each network as it was when it ended is the network trained alone for as long."""
    sets = [data(20, 1), data(21, 2), data(20, 3)]
    configs = [TrainingConfig(6, 10, 1e-2, seed=i) for i in range(3)]
    stacked = networks(3, norm=not dropout, dropout=dropout)
    until = torch.tensor(ends)
    seen = []

    def observe(epoch, stack, numbers):
        assert len(stack) == len(numbers)
        seen.append((epoch, numbers.tolist()))
        return until[numbers] > epoch

    result = train_stack(stack_networks(stacked), sets, configs, observe=observe, every=1)
    for i in range(3):
        config = TrainingConfig(ends[i], 10, 1e-2, seed=i)
        expected = alone(stacked[i], sets[i], config)
        unstack(result.select([i]), [stacked[i]])
        assert_same(stacked[i], expected, rtol=1e-6, atol=1e-8)
    assert seen == [(epoch, [i for i in range(3) if ends[i] >= epoch]) for epoch in range(1, max(ends) + 1)]


def test_what_cannot_be_stacked_is_refused():
    examples, config = data(20, 1), TrainingConfig(1, 10)
    with pytest.raises(BatchbayesError, match="one shape"):
        train_together([networks(1)[0], MLP(3, [8], 1)], [examples] * 2, [config] * 2)
    with pytest.raises(BatchbayesError, match="perceptrons of one shape"):
        train_together([nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))], [examples], [config])
    with pytest.raises(BatchbayesError, match="Adam"):
        train_together(networks(1), [examples], [TrainingConfig(1, 10, optimiser="sgd")])
    with pytest.raises(BatchbayesError, match="finite"):
        train_together(networks(1), [(examples[0] / 0, examples[1])], [config])


@pytest.mark.parametrize("bad", [0, 1])
def test_data_of_each_network_is_looked_at_though_inputs_are_shared(bad):
    x, y = data(20, 1)
    broken = y.clone()
    broken[3] = torch.nan
    cases = {
        "finite": (x, broken),
        "20 inputs and 15 targets": (x, y[:15]),
        "20 inputs and 40 targets": (x, torch.cat([y, y])),
        rf"targets \(20, 1\); got .* \(20,\) for network {bad}": (x, y[:, 0]),
        rf"\(20, 2\) for network {bad}": (x, torch.cat([y, y], 1)),
        rf"inputs \(20, 3\) .* \(20, 2\) and \(20, 1\) for network {bad}": (x[:, :2], y),
    }
    for message, examples in cases.items():
        chosen = [(x, y), (x, y)]
        chosen[bad] = examples
        with pytest.raises(BatchbayesError, match=message):
            train_together(networks(2), chosen, [TrainingConfig(1, 10)] * 2)


def test_batch_norm_needs_two_examples():
    with pytest.raises(BatchbayesError, match="batch of one for network 1"):
        train_together(networks(2), [data(9, 1), data(1, 2)], [TrainingConfig(1, 4)] * 2)
    with pytest.raises(BatchbayesError, match="batch of one for network 0"):
        train_together(networks(2), [data(9, 1), data(9, 2)], [TrainingConfig(1, 1)] * 2)
    single, examples, config = networks(1, norm=False), data(9, 1), TrainingConfig(2, 1)
    expected = alone(single[0], examples, config)
    train_together(single, [examples], [config])
    assert_same(single[0], expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("norm", [True, False])
def test_divergence_is_reported_with_the_networks_that_diverged(norm):
    x, y = data(20, 1, dtype=torch.float32)
    sets, stacked = [(x, y), (x, y * 1e30), (x, y)], networks(3, norm=norm, dtype=torch.float32)
    with pytest.raises(BatchbayesError, match="finite training loss"):  # as the loop does
        alone(stacked[1], sets[1], TrainingConfig(1, 10))
    with pytest.raises(BatchbayesError, match=r"finite training loss.* epoch 3 .*networks \[1\]"):
        train_together(stacked, sets, [TrainingConfig(3, 10)] * 3)
    seen = []
    with pytest.raises(BatchbayesError, match=r"epoch 2 .*networks \[1\]"):
        train_stack(
            stack_networks(stacked), sets, [TrainingConfig(6, 10)] * 3, observe=lambda *look: seen.append(look), every=2
        )
    assert not seen


def test_weights_that_are_not_finite_are_reported():
    stacked = networks(2, norm=False)
    with torch.no_grad():
        stacked[0].hidden[0].linear.weight[0] = torch.nan
    with pytest.raises(BatchbayesError, match=r"networks \[0\]"):
        train_together(stacked, [data(20, 1)] * 2, [TrainingConfig(1, 10)] * 2)
