import random
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from itertools import pairwise
from threading import Barrier
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from batchbayes import BatchbayesError
from batchbayes.models import MLP
from batchbayes.training.batches import shuffled, shuffled_batches
from batchbayes.training.loop import SGD_MOMENTUM, Loss, Step, TrainingConfig, half_squared_error, supervised, train


def problem(count: int = 50) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(count, 3, dtype=torch.float64)
    y = x.sin().sum(1, keepdim=True) + 0.1 * torch.randn(count, 1, dtype=torch.float64)
    return MLP(3, [6, 5], 1).double(), x, y


def train_tensors(
    network: nn.Module, x: Tensor, y: Tensor, loss: Loss, config: TrainingConfig, **options
) -> list[float]:
    return train(network, shuffled(x, y, config.batch_size, config.seed), supervised(loss), config, **options)


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


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
    train_tensors(network, x, y, mse_loss, config)
    naive_training(reference, x, y, config)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(network.state_dict()[name], value, rtol=1e-8, atol=1e-8, msg=name)


def test_weight_decay_spares_biases_gamma_and_beta() -> None:
    network, x, y = problem()
    before = deepcopy(network.state_dict())
    config = TrainingConfig(1, 50, learning_rate=0.1, weight_decay=1.0, optimiser="sgd")
    train_tensors(network, x, y, lambda outputs, _: 0.0 * outputs.sum(), config)  # nothing but the penalty pulls
    for name, parameter in network.named_parameters():
        expected = 0.9 * before[name] if parameter.ndim == 2 else before[name]
        torch.testing.assert_close(parameter.detach(), expected, msg=name)


def test_global_generators_are_left_alone_and_dropout_follows_the_seed() -> None:
    _, x, y = problem()
    start = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    trained = []
    for seed in (0, 0, 1):
        network = deepcopy(start)
        states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # type: ignore[index]
        train_tensors(network, x, y, mse_loss, TrainingConfig(3, 50, seed=seed))
        assert torch.equal(torch.get_rng_state(), states[0])
        assert (np.random.get_state()[1] == states[1]).all()  # type: ignore[index]
        assert random.getstate() == states[2]
        torch.rand(3)  # what the user does in between must not matter
        trained.append(network(x))
    assert torch.equal(trained[0], trained[1])
    assert not torch.equal(trained[0], trained[2])


def test_loss_falls_and_the_network_ends_in_evaluation_mode() -> None:
    network, x, y = problem()
    losses = train_tensors(network, x, y, mse_loss, TrainingConfig(40, 16, learning_rate=0.01))
    assert len(losses) == 40
    assert losses[-1] < 0.3 * losses[0]
    assert not any(module.training for module in network.modules())


def test_frozen_parameters_stay() -> None:
    network, x, y = problem()
    frozen = next(network.parameters())
    frozen.requires_grad_(False)
    before = frozen.clone()
    train_tensors(network, x, y, mse_loss, TrainingConfig(2, 16, weight_decay=0.1))
    assert torch.equal(frozen, before)


def test_divergence_is_reported() -> None:
    network, x, y = problem()
    with pytest.raises(BatchbayesError, match="lower the learning rate"):
        train_tensors(
            network, x, y, lambda outputs, targets: mse_loss(outputs, targets) * torch.inf, TrainingConfig(2, 16)
        )


@pytest.mark.parametrize(
    ("option", "value"),
    [("epochs", -1), ("batch_size", 0), ("learning_rate", float("nan")), ("weight_decay", -0.1), ("optimiser", "lion"),
     ("seed", "a")],
)  # fmt: skip
def test_bad_options_are_refused_by_name(option: str, value: object) -> None:
    options = {"epochs": 1, "batch_size": 8, option: value}
    with pytest.raises(BatchbayesError, match=option):
        TrainingConfig(**options)  # type: ignore[arg-type]


def test_a_list_a_loader_and_a_function_of_the_epoch_come_to_the_same() -> None:
    start, x, y = problem()
    config = TrainingConfig(3, 10)
    loader = DataLoader(TensorDataset(x, y), batch_size=10)
    pairs = list(zip(x.split(10), y.split(10), strict=True))
    epochs = []

    def of_epoch(epoch: int):
        epochs.append(epoch)
        return iter(pairs)

    networks = [deepcopy(start) for _ in range(3)]
    losses = [
        train(network, batches, supervised(mse_loss), config)
        for network, batches in zip(networks, (pairs, loader, of_epoch), strict=True)
    ]
    assert losses[0] == losses[1] == losses[2]
    assert epochs == [0, 1, 2]
    assert_same(networks[1], networks[0])
    assert_same(networks[2], networks[0])


def test_a_loader_that_shuffles_follows_the_seed() -> None:
    start, x, y = problem()
    loader = DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True)
    results = []
    for seed in (0, 0, 1):
        network = deepcopy(start)
        results.append(train(network, loader, supervised(mse_loss), TrainingConfig(2, 10, seed=seed)))
        torch.rand(3)
    assert results[0] == results[1] != results[2]


def test_any_objective_of_any_batch() -> None:
    """The mean of dictionaries of numbers with different lengths, and a penalty that is no function of the outputs."""
    network = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(network.weight)

    def objective(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (module.weight - batch["value"]).square().mean() + module.weight.square().sum()  # type: ignore[operator]

    batches = [{"value": torch.tensor([1.0, 3.0])}, {"value": torch.tensor([2.0])}]
    losses = train(network, batches, objective, TrainingConfig(200, 1, 0.02, optimiser="sgd"))
    assert losses[0] > losses[-1]
    assert float(network.weight.detach()) == pytest.approx(1.0, abs=0.01)  # the minimum of (w - 2)^2 + w^2


def test_an_optimiser_of_ones_own_gets_groups_and_learning_rate() -> None:
    network, x, y = problem()
    reference, seen = deepcopy(network), []

    def make(groups: list[dict], lr: float) -> torch.optim.Optimizer:
        seen.append(([(len(group["params"]), group["weight_decay"]) for group in groups], lr))
        return torch.optim.SGD(groups, lr, momentum=SGD_MOMENTUM)

    train_tensors(network, x, y, mse_loss, TrainingConfig(2, 16, 0.05, 0.1, make))
    train_tensors(reference, x, y, mse_loss, TrainingConfig(2, 16, 0.05, 0.1, "sgd"))
    assert seen == [([(3, 0.1), (5, 0.0)], 0.05)]
    assert_same(network, reference)


def test_after_step_sees_each_step_and_its_changes_count() -> None:
    network, x, y = problem()
    seen: list[tuple[int, int]] = []
    objectives: list[float] = []

    def after_step(step: Step) -> None:
        seen.append((step.number, step.epoch))
        objectives.append(step.objective)
        assert step.network is network
        assert step.network.training
        assert all(parameter.grad is not None for parameter in network.parameters())
        for group in step.optimiser.param_groups:
            group["lr"] = 0.0

    before = deepcopy(network.state_dict())
    losses = train_tensors(network, x, y, mse_loss, TrainingConfig(3, 16, 0.1), after_step=after_step)
    assert seen == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1), (6, 1), (7, 2), (8, 2), (9, 2)]
    assert losses == pytest.approx([sum(objectives[i : i + 3]) / 3 for i in (0, 3, 6)], rel=1e-12)
    moved = (network.state_dict()["output.weight"] - before["output.weight"]).abs()
    assert 0 < float(moved.max()) < 0.11  # one step of Adam moves by the learning rate, the others by nothing


def test_noise_in_after_step_follows_the_seed() -> None:
    def noise(step: Step) -> None:
        with torch.no_grad():
            for parameter in step.network.parameters():
                parameter += 0.01 * torch.randn_like(parameter)

    start, x, y = problem()
    first, second = deepcopy(start), deepcopy(start)
    for network in (first, second):
        train_tensors(network, x, y, mse_loss, TrainingConfig(2, 16, 0.0), after_step=noise)
        torch.randn(5)
    assert_same(first, second)
    assert not torch.equal(first.output.weight, start.output.weight)  # type: ignore[union-attr]


def test_training_ends_at_once_when_after_step_returns_true() -> None:
    network, x, y = problem()
    reference, seen = deepcopy(network), []

    def until_five(step: Step) -> bool:
        seen.append(step.objective)
        return step.number == 5

    losses = train_tensors(network, x, y, mse_loss, TrainingConfig(9, 16), after_step=until_five)
    assert len(seen) == 5
    assert losses == pytest.approx([sum(seen[:3]) / 3, sum(seen[3:]) / 2], rel=1e-12)
    assert not network.training
    rows = [rows for epoch in range(2) for rows in shuffled_batches(50, 16, 0, epoch)][:5]
    train(reference, [(x[chosen], y[chosen]) for chosen in rows], supervised(mse_loss), TrainingConfig(1, 16))
    assert_same(network, reference)


def test_an_epoch_without_batches_is_refused() -> None:
    network, x, y = problem()
    with pytest.raises(BatchbayesError, match="at least one batch in each epoch; got none in epoch 2"):
        train(network, iter([(x, y)]), supervised(mse_loss), TrainingConfig(2, 50))
    with pytest.raises(BatchbayesError, match="none in epoch 1"):
        train(network, [], supervised(mse_loss), TrainingConfig(2, 50))


@pytest.mark.parametrize("loss", [mse_loss, nn.L1Loss(), half_squared_error])
def test_targets_that_would_be_broadcast_are_refused(loss) -> None:
    network, x, y = problem()
    with pytest.raises(BatchbayesError, match=r"the shape of the outputs, \(10, 1\); got \(10,\)"):
        train_tensors(network, x, y[:, 0], loss, TrainingConfig(2, 10))


BAD_BATCHES = {
    "dicts": (lambda x, y: [{"image": x, "label": y}], r"got a dict with keys \['image', 'label'\]"),
    "triples": (lambda x, y: [(x, y, y)], r"inputs and targets, \(x, y\)"),
    "inputs alone": (lambda x, y: [x], "got a tensor of shape"),
    "no data": (lambda x, y: None, "batches to train on; got a NoneType"),
    "another precision": (lambda x, y: [(x.float(), y)], "convert the inputs to float64, the dtype of the weights"),
    "a batch of one": (lambda x, y: [(x[:1], y[:1])], "drop_last=True"),
}


@pytest.mark.parametrize(("batches", "words"), BAD_BATCHES.values(), ids=BAD_BATCHES)
def test_batches_that_cannot_be_trained_on_are_refused_in_words(batches, words) -> None:
    network, x, y = problem()
    with pytest.raises(BatchbayesError, match=words):
        train(network, batches(x, y), supervised(mse_loss), TrainingConfig(1, 50))


def test_losses_that_cannot_be_used_are_refused_in_words() -> None:
    network, x, y = problem()
    for loss, words in (
        (nn.MSELoss(reduction="none"), "one number with a gradient"),
        ("mse", "loss that can be called"),
        (nn.CrossEntropyLoss, r"or nn\.CrossEntropyLoss\(\)"),
    ):
        with pytest.raises(BatchbayesError, match=words):
            train(network, [(x, y)], supervised(loss), TrainingConfig(1, 50))  # type: ignore[arg-type]
    for labels in (torch.zeros(50).int(), torch.zeros(50, 1).long()):
        with pytest.raises(
            BatchbayesError, match=rf"got {labels.dtype} of shape \({', '.join(map(str, labels.shape))}"
        ):
            train(network, [(x, labels)], supervised(cross_entropy), TrainingConfig(1, 50))
    for odd in ({"epochs": 1.5}, {"batch_size": 2.5}, {"learning_rate": "0.1"}, {"weight_decay": -1}):
        with pytest.raises(BatchbayesError, match=next(iter(odd))):
            TrainingConfig(**{"epochs": 1, "batch_size": 8, **odd})  # type: ignore[arg-type]


def test_a_network_may_take_several_inputs() -> None:
    network = nn.Bilinear(2, 3, 1)
    batch = (torch.randn(8, 2), torch.randn(8, 3)), torch.randn(8, 1)
    assert len(train(network, [batch], supervised(mse_loss), TrainingConfig(2, 8))) == 2


def test_a_network_with_nothing_to_train_is_refused() -> None:
    network, x, y = problem()
    for nothing in (network.requires_grad_(False), nn.Identity()):
        with pytest.raises(BatchbayesError, match="a network with parameters to train"):
            train_tensors(nothing, x, y, mse_loss, TrainingConfig(2, 50))


def test_threads_that_train_at_once_take_turns_and_give_the_same_bits() -> None:
    _, x, y = problem()
    loader = DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True)
    starts = []
    for seed in range(3):
        torch.manual_seed(seed)
        starts.append(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)).double())
    configs = [TrainingConfig(40, 10, seed=seed) for seed in (0, 1, 0)]
    alone, together = deepcopy(starts), deepcopy(starts)
    losses = [train(n, loader, supervised(mse_loss), c) for n, c in zip(alone, configs, strict=True)]
    barrier, order = Barrier(3), []

    def run(number: int) -> list[float]:
        def note(step: Step) -> None:
            order.append(number)

        barrier.wait()
        return train(together[number], loader, supervised(mse_loss), configs[number], after_step=note)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run, range(3))) == losses
    for ours, theirs in zip(together, alone, strict=True):
        assert_same(ours, theirs)
    turns = [order[i : i + 5] for i in range(0, len(order), 5)]
    assert all(len(set(turn)) == 1 for turn in turns)  # one thread for a whole epoch
    assert sum(a != b for a, b in pairwise(turns)) > 2  # and not one training after the other
