import random
from copy import deepcopy
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from batchbayes import BatchbayesError
from batchbayes.models.mlp import MLP
from batchbayes.training.loop import SGD_MOMENTUM, TrainingConfig, shuffled_batches, train


def problem(count: int = 50) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(count, 3, dtype=torch.float64)
    y = x.sin().sum(1, keepdim=True) + 0.1 * torch.randn(count, 1, dtype=torch.float64)
    return MLP(3, [6, 5], 1).double(), x, y


def naive_training(network: nn.Module, x: Tensor, y: Tensor, config: TrainingConfig) -> None:
    """The textbook: gradient of loss + lambda/2 ||W||^2 by hand, updates written out."""
    network.train()
    parameters = dict(network.named_parameters())
    first = {name: torch.zeros_like(p) for name, p in parameters.items()}
    second = {name: torch.zeros_like(p) for name, p in parameters.items()}
    step = 0
    for epoch in range(config.epochs):
        for rows in shuffled_batches(len(x), config.batch_size, config.seed, epoch):
            step += 1
            penalty = sum(p.square().sum() for name, p in parameters.items() if p.ndim == 2)
            total = mse_loss(network(x[rows]), y[rows]) + config.weight_decay / 2 * penalty
            gradients = torch.autograd.grad(total, list(parameters.values()))
            with torch.no_grad():
                for (name, p), gradient in zip(parameters.items(), gradients, strict=True):
                    if config.optimiser == "sgd":
                        first[name] = SGD_MOMENTUM * first[name] + gradient
                        p -= config.learning_rate * first[name]
                    else:
                        first[name] = 0.9 * first[name] + 0.1 * gradient
                        second[name] = 0.999 * second[name] + 0.001 * gradient.square()
                        mean, square = first[name] / (1 - 0.9**step), second[name] / (1 - 0.999**step)
                        p -= config.learning_rate * mean / (square.sqrt() + 1e-8)


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_equals_a_naive_loop(optimiser: Literal["adam", "sgd"], weight_decay: float) -> None:
    network, x, y = problem()
    reference = deepcopy(network)
    config = TrainingConfig(6, 16, learning_rate=0.01, weight_decay=weight_decay, optimiser=optimiser, seed=4)
    train(network, x, y, mse_loss, config)
    naive_training(reference, x, y, config)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(network.state_dict()[name], value, rtol=1e-8, atol=1e-8, msg=name)


def test_weight_decay_spares_biases_gamma_and_beta() -> None:
    network, x, y = problem()
    before = deepcopy(network.state_dict())
    config = TrainingConfig(1, 50, learning_rate=0.1, weight_decay=1.0, optimiser="sgd")
    train(network, x, y, lambda outputs, _: 0.0 * outputs.sum(), config)  # nothing but the penalty pulls
    for name, parameter in network.named_parameters():
        expected = 0.9 * before[name] if parameter.ndim == 2 else before[name]
        torch.testing.assert_close(parameter.detach(), expected, msg=name)


def test_an_epoch_is_a_shuffled_pass_without_the_left_over_batch() -> None:
    epochs = [torch.cat(list(shuffled_batches(50, 16, seed=0, epoch=epoch))) for epoch in range(2)]
    for rows in epochs:
        assert len(rows) == 48
        assert len(rows.unique()) == 48
    assert not torch.equal(*epochs)


def test_fewer_examples_than_a_batch_are_one_batch() -> None:
    assert [len(rows) for rows in shuffled_batches(10, 16, seed=0, epoch=0)] == [10]
    assert [len(rows) for rows in shuffled_batches(16, 16, seed=0, epoch=0)] == [16]


def test_global_generators_are_left_alone_and_dropout_follows_the_seed() -> None:
    _, x, y = problem()
    start = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    trained = []
    for seed in (0, 0, 1):
        network = deepcopy(start)
        states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # type: ignore[index]
        train(network, x, y, mse_loss, TrainingConfig(3, 50, seed=seed))
        assert torch.equal(torch.get_rng_state(), states[0])
        assert (np.random.get_state()[1] == states[1]).all()  # type: ignore[index]
        assert random.getstate() == states[2]
        torch.rand(3)  # what the user does in between must not matter
        trained.append(network(x))
    assert torch.equal(trained[0], trained[1])
    assert not torch.equal(trained[0], trained[2])


def test_loss_falls_and_the_network_ends_in_evaluation_mode() -> None:
    network, x, y = problem()
    losses = train(network, x, y, mse_loss, TrainingConfig(40, 16, learning_rate=0.01))
    assert len(losses) == 40
    assert losses[-1] < 0.3 * losses[0]
    assert not any(module.training for module in network.modules())


def test_frozen_parameters_stay() -> None:
    network, x, y = problem()
    frozen = next(network.parameters())
    frozen.requires_grad_(False)
    before = frozen.clone()
    train(network, x, y, mse_loss, TrainingConfig(2, 16, weight_decay=0.1))
    assert torch.equal(frozen, before)


def test_bad_data_is_refused_before_training() -> None:
    network, x, y = problem()
    config = TrainingConfig(1, 16)
    with pytest.raises(BatchbayesError, match="50 inputs and 49 targets"):
        train(network, x, y[1:], mse_loss, config)
    with pytest.raises(BatchbayesError, match="the training targets"):
        train(network, x, torch.where(y == y.max(), torch.nan, y), mse_loss, config)


def test_divergence_is_reported() -> None:
    network, x, y = problem()
    with pytest.raises(BatchbayesError, match="lower the learning rate"):
        train(network, x, y, lambda outputs, targets: mse_loss(outputs, targets) * torch.inf, TrainingConfig(2, 16))


@pytest.mark.parametrize(
    ("option", "value"),
    [("epochs", -1), ("batch_size", 0), ("learning_rate", float("nan")), ("weight_decay", -0.1), ("optimiser", "lion")],
)
def test_bad_options_are_refused_by_name(option: str, value: object) -> None:
    options = {"epochs": 1, "batch_size": 8, option: value}
    with pytest.raises(BatchbayesError, match=option):
        TrainingConfig(**options)  # type: ignore[arg-type]
