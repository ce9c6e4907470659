"""The training loop for one network of any kind, with any data and any objective."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Real
from operator import length_hint
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from batchbayes._common.checks import as_path, as_tensor, whole_number
from batchbayes._common.machine import keep_freed_memory
from batchbayes._common.progress import Progress
from batchbayes._common.rng import GlobalStream
from batchbayes.errors import BatchbayesError
from batchbayes.network.function import call_module, reference_tensor
from batchbayes.network.inputs import describe_batch, pick_inputs
from batchbayes.training.checkpoint import Checkpoint, TrainingState

Loss = Callable[[Tensor, Tensor], Tensor]
"""From the outputs and targets of a batch to a scalar."""
Objective = Callable[[nn.Module, Any], Tensor]
"""From the network and a batch to the scalar that training makes small, for example a negative ELBO."""
TrainingBatches = Iterable[Any] | Callable[[int], Iterable[Any]]
"""An iterable that is read once for each epoch, or a function from the number of the epoch (from 0) to an iterable."""
OptimiserFactory = Callable[..., optim.Optimizer]
"""Called with the parameter groups and `lr=`, as the classes in `torch.optim` are."""

SGD_MOMENTUM = 0.9


@dataclass(frozen=True)
class TrainingConfig:
    """How a network is trained."""

    epochs: int
    batch_size: int
    """For `shuffled` and for stacks of networks. `train` takes batches of any size as they come."""
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    """lambda in the penalty lambda/2 ||W||^2 on weight matrices and kernels; never on biases, gamma or beta."""
    optimiser: Literal["adam", "sgd"] | OptimiserFactory = "adam"
    """"sgd" has a momentum of 0.9. A class such as `torch.optim.RMSprop` is called with parameter groups and `lr=`."""
    seed: int = 0

    def __post_init__(self) -> None:
        whole_number("epochs", self.epochs, 0)
        whole_number("batch_size", self.batch_size)
        whole_number("seed", self.seed, None)
        for name in ("learning_rate", "weight_decay"):
            value = getattr(self, name)
            if not (isinstance(value, Real) and 0 <= float(value) < float("inf")):
                raise BatchbayesError(expected=f"{name} of 0 or more", got=repr(value), fix=f"change {name}")
        if self.optimiser not in ("adam", "sgd") and not callable(self.optimiser):
            fix = "choose one of them"
            raise BatchbayesError('optimiser "adam", "sgd" or a function that makes one', repr(self.optimiser), fix)


@dataclass(frozen=True, eq=False)
class Step:
    """One step of the optimiser, as `after_step` sees it. Gradients are still in the parameters."""

    number: int
    """From 1, through all epochs."""
    epoch: int
    """From 0."""
    objective: float
    network: nn.Module
    optimiser: optim.Optimizer

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of the steps that follow."""
        for group in self.optimiser.param_groups:
            group["lr"] = rate


def train(
    network: nn.Module,
    batches: TrainingBatches,
    objective: Objective,
    config: TrainingConfig,
    *,
    after_step: Callable[[Step], bool | None] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> list[float]:
    """Train a network in place and leave it in evaluation mode.

    Everything that draws from the global generators (dropout, a DataLoader, `after_step`) follows `config.seed`. The
    generators are left as they were. Several threads can train at once: they take turns, one epoch at a time.

    Args:
        network: the network. Only parameters that require gradients are trained.
        batches: the data, for example a DataLoader or `shuffled(...)`.
        objective: what training makes small, for example `supervised(loss)`.
        config: how to train.
        after_step: called after each step of the optimiser. It may change the network and the optimiser (noise, a
            learning-rate schedule) or copy them (snapshots). Training ends at once when it returns True.
        checkpoint: a file that is written after each epoch. If the file exists, training continues from it, with the
            same bits as without the interruption. An interrupted epoch is repeated from its start. The file cannot
            know the data, the objective or what `after_step` remembers: pass the same ones again, and let
            `after_step` depend on its argument alone. The file stays when training ends.

    Returns:
        The mean objective of each epoch.

    >>> import torch
    >>> from batchbayes.models import MLP
    >>> from batchbayes.training.batches import shuffled
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> config = TrainingConfig(epochs=20, batch_size=16)
    >>> losses = train(MLP(1, [8], 1), shuffled(x, x, 16, seed=0), supervised(nn.functional.mse_loss), config)
    >>> losses[-1] < losses[0]
    True
    """
    if not callable(batches) and not hasattr(batches, "__iter__") and not hasattr(batches, "__getitem__"):
        got = f"a {type(batches).__name__}"
        raise BatchbayesError(expected="batches to train on", got=got, fix="pass a DataLoader or a list of batches")
    keep_freed_memory()
    training = TrainingState(network, _optimiser(network, config), GlobalStream(config.seed))
    file = Checkpoint(as_path(checkpoint), training, vars(config)) if checkpoint else None
    if file:
        file.resume()
    network.train()
    steps_left = (config.epochs - len(training.losses)) * length_hint(batches)
    with Progress("training", steps_left or None) as shown:
        while len(training.losses) < config.epochs and not training.stopped:
            with training.stream:
                mean = _epoch(training, batches, objective, after_step, shown)
            training.losses.append(mean)
            if file:
                file.write()
    network.eval()
    return training.losses


def _epoch(
    training: TrainingState,
    batches: TrainingBatches,
    objective: Objective,
    after_step: Callable[[Step], bool | None] | None,
    shown: Progress,
) -> float:
    """Train for one epoch and return the mean objective."""
    network, optimiser, epoch = training.network, training.optimiser, len(training.losses)
    total, first = 0.0, training.steps
    for batch in batches(epoch) if callable(batches) else batches:
        value = _checked_value(objective(network, batch))
        optimiser.zero_grad()
        value.backward()
        optimiser.step()
        total += (number := float(value.detach()))
        training.steps += 1
        shown.advance()
        if after_step and after_step(Step(training.steps, epoch, number, network, optimiser)):
            training.stopped = True
            break
    return _finite_mean(total, training.steps - first, epoch)


def _checked_value(value: Any) -> Tensor:
    """Refuse an objective that cannot be made small by gradients."""
    if not (isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad):
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        fix = 'use reduction="mean", and neither torch.no_grad() nor .detach() on the way from the parameters'
        raise BatchbayesError("one number with a gradient from the loss or objective", got, fix)
    return value


def supervised(loss: Loss) -> Objective:
    """Return the objective `loss(network(inputs), targets)` for batches of inputs and targets.

    Several inputs are a tuple of tensors, `((x1, x2), targets)`, or a dict. The objective moves each batch to the
    device of the network.
    """
    checked = checked_loss(loss)

    def objective(network: nn.Module, batch: Any) -> Tensor:
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            fix = "let the DataLoader return such pairs, for example by its collate_fn="
            raise BatchbayesError("batches of inputs and targets, (x, y)", describe_batch(batch), fix)
        device, targets = reference_tensor(network).device, batch[1]
        targets = targets if hasattr(targets, "to") else as_tensor(targets, "targets")
        return checked(call_module(network, pick_inputs(batch).to(device)), targets.to(device))

    return objective


def checked_loss(loss: Loss) -> Loss:
    """Return the same loss, which refuses targets that do not fit the outputs.

    The losses in ELEMENT_BY_ELEMENT need targets of the shape of the outputs. With outputs (n, 1) and targets (n,)
    torch would compare each output with every target, and the network would learn the mean of all targets.
    """
    if not callable(loss) or isinstance(loss, type):
        fix = (
            "pass a function of outputs and targets, such as torch.nn.functional.cross_entropy or nn.CrossEntropyLoss()"
        )
        raise BatchbayesError(expected="a loss that can be called", got=repr(loss)[:200], fix=fix)
    same_shape = loss in ELEMENT_BY_ELEMENT or type(loss) in ELEMENT_BY_ELEMENT

    def checked(outputs: Tensor, targets: Tensor) -> Tensor:
        if same_shape and outputs.shape != targets.shape:
            got = str(tuple(targets.shape))
            fix = "reshape the targets, for example with targets[:, None]"
            raise BatchbayesError(f"targets of the shape of the outputs, {tuple(outputs.shape)}", got, fix)
        try:
            return loss(outputs, targets)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            if isinstance(error, BatchbayesError | torch.OutOfMemoryError):
                raise
            shape, told = (tuple(getattr(each, "shape", ())) for each in (outputs, targets))
            got = f"{getattr(targets, 'dtype', type(targets))} of shape {told}, and {error}"[:300]
            fix = "number classes from 0, as int64 of shape (n,), and give the network an output for each"
            raise BatchbayesError(f"labels that fit outputs of shape {shape}", got, fix) from error

    return checked


def half_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of 0.5 (f - y)^2: up to a constant the negative log-likelihood of a Gaussian with unit variance.

    >>> import torch
    >>> half_squared_error(torch.tensor([[1.0], [3.0]]), torch.tensor([[1.0], [1.0]]))
    tensor(1.)
    """
    return 0.5 * (outputs - targets).square().mean()


ELEMENT_BY_ELEMENT: tuple[Any, ...] = (
    half_squared_error,
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss),
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss),
)
"""Losses that compare each output with one target."""


def _optimiser(network: nn.Module, config: TrainingConfig) -> optim.Optimizer:
    """Return the optimiser. Adam and SGD add weight_decay * W to the gradient: that is the penalty lambda/2 ||W||^2."""
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    if not trained:
        got = f"{type(network).__name__}, in which no parameter requires a gradient"
        fix = "call requires_grad_() on those to train"
        raise BatchbayesError("a network with parameters to train", got, fix)
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    if config.optimiser == "adam":
        return optim.Adam(groups, lr=config.learning_rate, fused=_can_fuse(trained))
    if config.optimiser == "sgd":
        return optim.SGD(groups, lr=config.learning_rate, momentum=SGD_MOMENTUM)
    return config.optimiser(groups, lr=config.learning_rate)


def _can_fuse(parameters: list[nn.Parameter]) -> bool:
    """Whether torch has an Adam for these parameters that reads them once. It is several times as fast on a CPU."""
    return all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)


def _finite_mean(total: float, count: int, epoch: int) -> float:
    """Return the mean objective of an epoch. Refuse an epoch that had no batch or that diverged."""
    if not count:
        fix = "pass a list, a DataLoader or a function of the epoch, since an iterator can be read only once"
        raise BatchbayesError("at least one batch in each epoch", f"none in epoch {epoch + 1}", fix)
    if not abs(total / count) < float("inf"):
        fix = "lower the learning rate, or scale inputs and targets to about unit variance"
        raise BatchbayesError("a finite training loss", f"{total / count} in epoch {epoch + 1}", fix)
    return total / count
