"""Trained networks with batch norm, dropout and a linear end: every method can be fitted to them."""

from functools import cache

from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from batchbayes._common.rng import GlobalStream
from batchbayes.training.batches import shuffled
from batchbayes.training.loop import TrainingConfig, supervised, train
from helpers import assess_cases


def _table(outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(2, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 8), nn.BatchNorm1d(8),
        nn.Tanh(), nn.Linear(8, outputs),
    )  # fmt: skip


def _maps() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.2),
        nn.Conv2d(8, 3, 3, padding=1),
    )  # fmt: skip


def _heights(count: int, seed: int) -> tuple[Tensor, Tensor]:
    x, y = assess_cases.wave(count, seed)
    return x, y[:, None]


def _pixels(outputs: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(outputs, labels, ignore_index=255)


def _yes_or_no(outputs: Tensor, labels: Tensor) -> Tensor:
    return assess_cases.binary_loss(outputs[:, 0], labels.float())


TASKS = {
    "classification": (lambda: _table(3), assess_cases.blobs, cross_entropy),
    "binary": (lambda: _table(1), assess_cases.halves, _yes_or_no),
    "regression": (lambda: _table(1), _heights, mse_loss),
    "two_outputs": (lambda: _table(2), assess_cases.two_waves, mse_loss),
    "segmentation": (_maps, assess_cases.scenes, _pixels),
}


@cache
def _weights(task: str, seed: int) -> dict[str, Tensor]:
    build, data, loss = TASKS[task]
    with GlobalStream(seed):
        network = build()
    count = 48 if task == "segmentation" else 400
    train(network, shuffled(*data(count, 0), 16, seed=seed), supervised(loss), TrainingConfig(8, 16, 0.01))
    return network.state_dict()


def trained(task: str, seed: int = 0) -> nn.Module:
    """Return the network of a task."""
    network = TASKS[task][0]()
    network.load_state_dict(_weights(task, seed))
    return network.eval()


def data(task: str, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a task."""
    return TASKS[task][1](count, seed)


def classification() -> nn.Module:
    return trained("classification")


def binary() -> nn.Module:
    return trained("binary")


def regression() -> nn.Module:
    return trained("regression")


def two_outputs() -> nn.Module:
    return trained("two_outputs")


def segmentation() -> nn.Module:
    return trained("segmentation")
