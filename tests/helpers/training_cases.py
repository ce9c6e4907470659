"""Trainings that use every kind of randomness, for tests of interruptions.

As a script, `python -m helpers.training_cases OPTIMISER DATA CHECKPOINT` trains slowly and prints a line for each step.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from batchbayes.training.batches import shuffled
from batchbayes.training.loop import Objective, Step, TrainingBatches, TrainingConfig, supervised, train

EPOCHS, STEPS_IN_EPOCH = 5, 4


@dataclass
class Case:
    """The arguments of one training."""

    network: nn.Module
    batches: TrainingBatches
    objective: Objective
    config: TrainingConfig
    after_step: Callable[[Step], bool | None]

    def train(self, checkpoint: Any = None) -> list[float]:
        return train(
            self.network, self.batches, self.objective, self.config, after_step=self.after_step, checkpoint=checkpoint
        )


class Noisy(torch.optim.SGD):
    """Langevin dynamics, with a sum of squares in double precision as its own state."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                squares = state.setdefault("squares", torch.zeros_like(parameter, dtype=torch.float64))
                squares += parameter.grad.double().square()
                state["calls"] = state.get("calls", 0) + 1
                with torch.no_grad():
                    parameter += 1e-3 * torch.randn_like(parameter) / (1 + squares.sqrt())


class Convolutional(nn.Module):
    """Batch norm, dropout, a tied parameter, and a buffer that `state_dict` leaves out."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Dropout(0.3)
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)
        self.second.weight = self.first.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        self.calls += self.training
        hidden = self.drop(self.norm(self.conv(images)).relu().mean((2, 3)))
        return self.last(self.second(self.first(hidden).relu()).relu()) * (1 + self.calls / 100)


def schedule_and_noise(step: Step) -> None:
    """A learning rate that falls with the steps, and noise from the global generator."""
    for group in step.optimiser.param_groups:
        group["lr"] = 0.01 / step.number**0.5
    with torch.no_grad():
        for parameter in step.network.parameters():
            parameter += 1e-4 * torch.randn_like(parameter)


OPTIMISERS: dict[str, Any] = {"adam": "adam", "sgd": "sgd", "noisy": Noisy}
DATA = ("shuffled", "loader", "list")


def build(optimiser: str, data: str, start: int = 0, **options: Any) -> Case:
    """A training of 5 epochs with 4 steps each. `start` seeds the first weights."""
    torch.manual_seed(start)
    network = Convolutional().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    source = torch.Generator().manual_seed(9)
    images = torch.randn(33, 2, 4, 4, generator=source)
    targets = images.mean((1, 2, 3))[:, None].sin()
    batches = {
        "shuffled": lambda: shuffled(images, targets, 8, seed=2),
        "loader": lambda: DataLoader(TensorDataset(images, targets), batch_size=8, shuffle=True, drop_last=True),
        "list": lambda: list(zip(images[:32].split(8), targets[:32].split(8), strict=True)),
    }[data]()
    config = TrainingConfig(**({"epochs": EPOCHS, "batch_size": 8, "learning_rate": 0.01, "weight_decay": 0.01,
                                "optimiser": OPTIMISERS[optimiser], "seed": 2} | options))  # fmt: skip
    return Case(network, batches, supervised(mse_loss), config, schedule_and_noise)


if __name__ == "__main__":
    torch.set_num_threads(1)
    # The file must bring back all weights, so the start is another one once the file exists.
    case = build(sys.argv[1], sys.argv[2], start=int(Path(sys.argv[3]).exists()))

    def slow(step: Step) -> None:
        schedule_and_noise(step)
        print(step.number, flush=True)
        time.sleep(0.02)

    case.after_step = slow
    case.train(sys.argv[3])
