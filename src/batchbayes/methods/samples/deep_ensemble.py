r"""Deep ensembles: the same network trained several times, from different random starts and in different orders.

What is random: which of the trained networks predicts.
q(w): $\frac1S\sum_s\delta(w - w_s)$, where $w_s$ is the result of one training.
Cost: S trainings; a draw is one forward pass.
Reference: Lakshminarayanan, Pritzel, Blundell, "Simple and Scalable Predictive Uncertainty Estimation using Deep
Ensembles", NeurIPS 2017. Where we differ: no adversarial training.
"""

import os
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from batchbayes._common.atomic import words_for_disk_errors
from batchbayes._common.checks import as_path, finite_number, whole_number
from batchbayes._common.progress import progress
from batchbayes._common.rng import GlobalStream, stream_seed
from batchbayes.errors import BatchbayesError
from batchbayes.methods.samples.weight_samples import WeightSamples, stack_states, state_of
from batchbayes.network import Output, as_network
from batchbayes.training.batches import training_batches, two_tensors
from batchbayes.training.loop import Loss, TrainingBatches, TrainingConfig, half_squared_error, supervised, train
from batchbayes.training.stack.train import train_together

Data = tuple[Tensor, Tensor] | TrainingBatches
"""Inputs and targets as two tensors, or batches as `training.loop.train` takes them."""


def deep_ensemble(
    make: Callable[[], nn.Module],
    data: Data,
    loss: Loss,
    config: TrainingConfig,
    *,
    num_members: int = 5,
    together: bool = False,
    workers: Executor | None = None,
    checkpoints: str | os.PathLike[str] | None = None,
    output: Output = None,
) -> WeightSamples:
    """Train a network several times, each time from another start.

    Args:
        make: returns a new network with random weights. It is called once for each member.
        data: two tensors (inputs, targets), which every member sees in its own order, or any batches for `train`.
        loss: what training makes small, such as `torch.nn.functional.cross_entropy`.
        config: how to train. Member s has its own seed, which depends on `config.seed` and s alone.
        num_members: the number of networks.
        together: train all members at once as a stack: for small perceptrons with `half_squared_error` and Adam.
        workers: an executor that trains members side by side, with the same result: for example
            `ProcessPoolExecutor(4, get_context("spawn"))`, if the network, the data and the loss can be sent to
            processes.
        checkpoints: a folder for one file of each member. A training that was killed goes on from there.
        output: which output counts, if the network returns several.

    >>> import torch
    >>> from batchbayes.models.mlp import MLP
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> config = TrainingConfig(epochs=20, batch_size=16)
    >>> deep_ensemble(lambda: MLP(1, [8], 1), (x, x), half_squared_error, config, num_members=3)
    WeightSamples(deep_ensemble on MLP: 3 members)
    """
    seeds = [member_seed(config.seed, number) for number in range(whole_number("num_members", num_members, 2))]
    networks = [made(make, seed) for seed in seeds]
    as_network(networks[0], output)  # refuses what is no network
    if together:
        _train_together(networks, data, loss, config, seeds, {"workers": workers, "checkpoints": checkpoints})
    else:
        networks = _trained(networks, data, loss, [replace(config, seed=seed) for seed in seeds], workers, checkpoints)
    return stack_states(as_network(networks[0], output), [state_of(n) for n in networks], "deep_ensemble")


def _trained(
    networks: list[nn.Module],
    data: Data,
    loss: Loss,
    configs: list[TrainingConfig],
    workers: Executor | None,
    checkpoints: str | os.PathLike[str] | None,
) -> list[nn.Module]:
    """Train each network, one after the other or by workers, and return them."""
    if workers is not None and not isinstance(workers, Executor):
        raise BatchbayesError(
            expected="workers as an executor of concurrent.futures",
            got=repr(workers),
            fix='pass ProcessPoolExecutor(4, get_context("spawn")), for example',
        )
    files: list[Path | None] = [None] * len(networks)
    if checkpoints:
        folder = as_path(checkpoints)
        with words_for_disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        files = [folder / f"member-{number}.safetensors" for number in range(len(networks))]
    apply = workers.map if workers else map
    done = apply(partial(_trained_member, data, loss), networks, configs, files)
    return list(progress(done, "training members", len(networks)))


def _trained_member(data: Data, loss: Loss, network: nn.Module, config: TrainingConfig, file: Path | None) -> nn.Module:
    train(network, training_batches(data, config.batch_size, config.seed), supervised(loss), config, checkpoint=file)
    return network


def member_seed(seed: int, number: int) -> int:
    """Return the seed of one member."""
    return stream_seed(seed, "member", number)


def steps_in_epoch(batches: Any) -> int:
    """Return the number of batches, which schedules need to know."""
    if not hasattr(batches, "__len__"):
        raise BatchbayesError(
            expected="batches with a length, because schedules need the number of steps",
            got=f"a {type(batches).__name__}",
            fix="pass two tensors, a list of batches or a DataLoader",
        )
    return len(batches)


def made(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Make a network whose random start depends on a seed alone."""
    if isinstance(make, nn.Module):
        raise BatchbayesError(
            expected="make as a function that returns a new network",
            got=f"a network, {type(make).__name__}",
            fix="pass a function, for example lambda: build_my_network()",
        )
    with GlobalStream(stream_seed(seed, "start")):
        return make()


def require_prior(loss: Loss, config: TrainingConfig, prior_precision: float, steps: str) -> None:
    """Refuse a prior that is not positive or that stands beside a weight decay, and an optimiser that nobody would use.

    Also refuse a loss that is known not to be a mean over the batch: it is multiplied by the number of examples.
    `steps` says what takes the steps in place of an optimiser.
    """
    finite_number("a prior precision", prior_precision, above=0, fix="pass 1, for example")
    if config.weight_decay:
        raise BatchbayesError(
            expected="no weight decay beside the prior",
            got=f"weight_decay={config.weight_decay}",
            fix="pass prior_precision = weight decay times the number of examples instead",
        )
    if config.optimiser != "adam":
        raise BatchbayesError(
            expected=f"a config without optimiser=, because {steps}",
            got=f"optimiser={config.optimiser!r}",
            fix="drop it",
        )
    reduction = getattr(loss, "keywords", {}).get("reduction", getattr(loss, "reduction", "mean"))
    if reduction != "mean":
        raise BatchbayesError(
            expected="a loss that is the mean over a batch, because it is multiplied by the number of examples",
            got=f"reduction={reduction!r}",
            fix='use reduction="mean"',
        )


def require_counting(targets: Any) -> None:
    """Refuse labels that a loss leaves out, such as -100: the mean over the others is multiplied by all examples."""
    if isinstance(targets, Tensor) and not targets.is_floating_point() and targets.numel() and int(targets.min()) < 0:
        raise BatchbayesError(
            expected="labels from 0, because each example counts in the posterior",
            got=f"a label of {int(targets.min())}",
            fix="leave out the examples that have no label",
        )


def _train_together(
    networks: list[nn.Module], data: Any, loss: Loss, config: TrainingConfig, seeds: list[int], others: dict[str, Any]
) -> None:
    if loss is not half_squared_error or not isinstance(data, tuple):
        raise BatchbayesError(
            expected="two tensors and the loss half_squared_error, to train members together",
            got=f"{type(data).__name__} and {getattr(loss, '__name__', loss)}",
            fix="leave together=True out",
        )
    if used := [name for name, value in others.items() if value is not None]:
        raise BatchbayesError(
            expected="one process without checkpoints, to train members together",
            got=f"{' and '.join(used)} too",
            fix=f"leave out together=True, or {' and '.join(used)}",
        )
    train_together(networks, [two_tensors(data)] * len(networks), [replace(config, seed=seed) for seed in seeds])
