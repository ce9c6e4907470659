"""Snapshots, fast geometric ensembles and SWAG against trainings by hand."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers.cases import vectors
from helpers.references import left_alone
from torch import nn
from torch.optim.swa_utils import update_bn

import batchbayes as bb
from batchbayes.methods.samples.schedules import Cyclical, Triangular
from batchbayes.methods.samples.swag import _Trajectory
from batchbayes.training.batches import shuffled
from batchbayes.training.loop import TrainingConfig

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
CONFIG = TrainingConfig(epochs=6, batch_size=10, learning_rate=0.1, optimiser="sgd", seed=3)


def start():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def by_hand(network, factor, config=CONFIG):
    """SGD with momentum, written out: the weights after each of the steps, 24 by default."""
    velocity, states, step = {}, [], 0
    steps = config.epochs * (len(X) // config.batch_size)
    for epoch in range(config.epochs):
        for inputs, targets in shuffled(X, Y, config.batch_size, config.seed)(epoch):
            network.zero_grad()
            F.cross_entropy(network(inputs), targets).backward()
            with torch.no_grad():
                for name, parameter in network.named_parameters():
                    velocity[name] = 0.9 * velocity.get(name, 0.0) + parameter.grad
                    parameter -= config.learning_rate * factor(step, steps) * velocity[name]
            step += 1
            states.append(copy.deepcopy(network.state_dict()))
    return states


def require_same(samples, states):
    assert len(samples) == len(states)
    for number, state in enumerate(states):
        for name, tensor in samples.tensors(number).items():
            torch.testing.assert_close(tensor, state[name], rtol=1e-4, atol=1e-6)


def test_snapshots_are_the_ends_of_cosine_cycles():
    states = by_hand(start(), Cyclical(3).factor)
    require_same(bb.snapshots(start, (X, Y), F.cross_entropy, CONFIG, num_members=3), [states[i] for i in (7, 15, 23)])


def test_each_snapshot_ends_a_cycle_of_its_own_if_cycles_differ_in_length():
    config = replace(CONFIG, epochs=11, batch_size=20)  # 22 steps for 3 cycles
    states = by_hand(start(), Cyclical(3).factor, config)
    require_same(bb.snapshots(start, (X, Y), F.cross_entropy, config, num_members=3), [states[i] for i in (7, 14, 21)])


def test_fast_geometric_members_are_the_lowest_points_of_cycles():
    states, model = by_hand(start(), Triangular(3).factor), start()
    with left_alone(model):
        samples = bb.fast_geometric(model, (X, Y), F.cross_entropy, CONFIG, num_members=3)
    require_same(samples, [states[i] for i in (3, 11, 19)])


def test_swag_draws_have_the_moments_of_the_trajectory():
    states = by_hand(start(), lambda step, steps: 1.0)[3::4]  # after each epoch
    flat = torch.stack([torch.cat([t.flatten() for t in state.values()]) for state in states]).double()
    running = flat.cumsum(0) / torch.arange(1, 7)[:, None]
    deviations = (flat - running)[-4:]  # rank 4
    expected = 0.5 * (flat.var(0, correction=0).diag() + deviations.T @ deviations / 3)
    samples = bb.swag(start(), (X, Y), F.cross_entropy, CONFIG, num_members=500, rank=4)
    drawn = torch.cat([t.flatten(1) for t in samples.weights.values()], 1).double()
    spread = expected.diagonal().sqrt()
    assert ((drawn.mean(0) - flat.mean(0)).abs() / spread < 5 / 500**0.5).all()
    error = (drawn.T.cov() - expected).abs() / spread.outer(spread)
    assert error.max() < 6 * (2 / 500) ** 0.5


def test_swag_renews_batch_statistics():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    samples = bb.swag(model, (X, Y), F.cross_entropy, CONFIG, num_members=2, statistics=list(X.split(20)))
    twin = samples.member(1)
    before = {name: tensor.clone() for name, tensor in twin.named_buffers()}
    update_bn(X.split(20), twin)
    for name, tensor in twin.named_buffers():
        if "running" in name:
            torch.testing.assert_close(tensor, before[name])


BAD = {
    "no statistics": (lambda: bb.swag(vectors(), (X, Y), F.cross_entropy, CONFIG), "statistics="),
    "one epoch": (
        lambda: bb.swag(start(), (X, Y), F.cross_entropy, TrainingConfig(1, 10)), "two epochs or more",
    ),
    "rank": (lambda: bb.swag(start(), (X, Y), F.cross_entropy, CONFIG, rank=1), "rank as a whole number of at least 2"),
    "scale": (lambda: bb.swag(start(), (X, Y), F.cross_entropy, CONFIG, scale=0.0), "all the same"),
    "cycles": (lambda: bb.snapshots(start, (X, Y), F.cross_entropy, CONFIG, num_members=0), "num_members as a whole"),
    "too many": (lambda: bb.snapshots(start, (X, Y), F.cross_entropy, CONFIG, num_members=100), "between 1 and"),
    "no length": (lambda: bb.snapshots(start, lambda epoch: [], F.cross_entropy, CONFIG), "batches with a length"),
}  # fmt: skip


@pytest.mark.parametrize(("fit", "words"), BAD.values(), ids=BAD)
def test_bad_input_is_refused(fit, words):
    with pytest.raises(bb.BatchbayesError, match=words):
        fit()


def test_moments_are_those_of_the_states():
    found, values = _Trajectory(rank=2), torch.randn(5, 3, generator=torch.Generator().manual_seed(1)).double()
    for row in values:
        found.add({"w": row})
    torch.testing.assert_close(found.mean["w"], values.mean(0))
    torch.testing.assert_close(found.square["w"], values.square().mean(0))
    assert len(found.deviations) == 2


@pytest.mark.parametrize("steps", [7, 10, 99])
def test_every_cycle_ends_with_a_sample(steps):
    for cycles in range(1, 8):
        found = [step for step in range(steps) if Cyclical(cycles, exploring=0.999).samples(step, steps)]
        assert len(found) == cycles
        assert found[-1] == steps - 1
