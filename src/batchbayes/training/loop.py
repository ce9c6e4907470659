"""The plain training loop for one network of any kind."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn, optim

from batchbayes._common.progress import Progress
from batchbayes._common.rng import GlobalStream, generator
from batchbayes.batches import require_finite
from batchbayes.errors import BatchbayesError
from batchbayes.network import reference_tensor

Loss = Callable[[Tensor, Tensor], Tensor]
"""From (outputs, targets) of a batch to a scalar."""

SGD_MOMENTUM = 0.9


def half_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """0.5 (f - y)^2, averaged: the negative log-likelihood of a Gaussian of unit variance, but for a constant.

    >>> half_squared_error(torch.tensor([[1.0], [3.0]]), torch.tensor([[1.0], [1.0]]))
    tensor(1.)
    """
    return 0.5 * (outputs - targets).square().mean()


@dataclass(frozen=True)
class TrainingConfig:
    """How a network is trained."""

    epochs: int
    batch_size: int
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    """lambda in the penalty lambda/2 ||W||^2 on weight matrices and kernels; never on biases, gamma or beta."""
    optimiser: Literal["adam", "sgd"] = "adam"
    """"sgd" has a momentum of 0.9."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("epochs", 0), ("batch_size", 1), ("learning_rate", 0.0), ("weight_decay", 0.0)):
            if not least <= getattr(self, name) < float("inf"):
                raise BatchbayesError(
                    expected=f"{name} of {least} or more", got=str(getattr(self, name)), fix=f"change {name}"
                )
        if self.optimiser not in ("adam", "sgd"):
            raise BatchbayesError(
                expected='optimiser "adam" or "sgd"', got=repr(self.optimiser), fix="choose one of them"
            )


def train(network: nn.Module, inputs: Tensor, targets: Tensor, loss: Loss, config: TrainingConfig) -> list[float]:
    """Train in place and leave the network in evaluation mode; returns the mean loss of each epoch.

    An epoch is a shuffled pass; a batch that would be left over at its end is discarded, and if there are fewer
    examples than `batch_size` they are one batch, both as in the MCBN paper. The order of the data and any dropout
    follow `config.seed`; the global generators are left as they were.

    >>> from batchbayes.models.mlp import MLP
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> losses = train(MLP(1, [8], 1), x, x, nn.functional.mse_loss, TrainingConfig(epochs=20, batch_size=16))
    >>> losses[-1] < losses[0]
    True
    """
    require_data(inputs, targets)
    stepper, device, losses = _optimiser(network, config), reference_tensor(network).device, []
    steps = config.epochs * max(1, len(inputs) // config.batch_size)
    network.train()
    with GlobalStream(config.seed), Progress("training", steps) as shown:
        for epoch in range(config.epochs):
            total = count = 0.0
            for rows in shuffled_batches(len(inputs), config.batch_size, config.seed, epoch):
                value = loss(network(inputs[rows].to(device)), targets[rows].to(device))
                stepper.zero_grad()
                value.backward()
                stepper.step()
                total, count = total + float(value.detach()), count + 1
                shown.advance()
            losses.append(_require_converging(total / count, epoch))
    network.eval()
    return losses


def shuffled_batches(num_examples: int, batch_size: int, seed: int, epoch: int) -> Iterator[Tensor]:
    """Row numbers of each batch of an epoch; what is left over at its end is discarded.

    >>> [len(rows) for rows in shuffled_batches(10, 4, seed=0, epoch=0)]
    [4, 4]
    """
    order, size = torch.randperm(num_examples, generator=generator(seed, "epoch", epoch)), min(batch_size, num_examples)
    for start in range(0, num_examples - size + 1, size):
        yield order[start : start + size]


@contextmanager
def one_thread() -> Iterator[None]:
    """Networks as small as ours run slower on several threads than on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _optimiser(network: nn.Module, config: TrainingConfig) -> optim.Optimizer:
    """Both add weight_decay * W to the gradient: exactly that of the penalty lambda/2 ||W||^2."""
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    if config.optimiser == "adam":
        return optim.Adam(groups, lr=config.learning_rate)
    return optim.SGD(groups, lr=config.learning_rate, momentum=SGD_MOMENTUM)


def require_data(inputs: Tensor, targets: Tensor) -> None:
    """Refuse what cannot be trained on."""
    if len(inputs) != len(targets) or not len(inputs):
        raise BatchbayesError(
            expected="as many targets as inputs, at least one",
            got=f"{len(inputs)} inputs and {len(targets)} targets",
            fix="check how the data was selected",
        )
    require_finite(inputs, "the training inputs")
    require_finite(targets, "the training targets")


def _require_converging(mean_loss: float, epoch: int) -> float:
    if not abs(mean_loss) < float("inf"):
        raise BatchbayesError(
            expected="a finite training loss",
            got=f"{mean_loss} in epoch {epoch + 1}",
            fix="lower the learning rate, or scale inputs and targets to about unit variance",
        )
    return mean_loss
