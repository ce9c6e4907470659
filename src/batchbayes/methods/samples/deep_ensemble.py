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
from typing import Annotated, Any

from torch import nn

from batchbayes._common.checks import as_path, moved, require_type
from batchbayes._common.files import words_for_disk_errors
from batchbayes._common.progress import progress
from batchbayes._common.signatures import Least, checked
from batchbayes.errors import BatchbayesError
from batchbayes.methods.samples.members import Data, made_members, member_seed, state_of
from batchbayes.methods.samples.weight_samples import WeightSamples, stack_states
from batchbayes.network.function import Output, as_network
from batchbayes.training.batches import training_batches, two_tensors
from batchbayes.training.loop import Loss, TrainingConfig, half_squared_error, supervised, train


@checked
def deep_ensemble(
    make: Callable[[], nn.Module],
    data: Data,
    loss: Loss,
    config: TrainingConfig,
    *,
    num_members: Annotated[int, Least(2)] = 5,
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
        together: train all members at once as a stack: for small perceptrons with `half_squared_error` and Adam. This
            needs the package batchbayes-tables.
        workers: an executor that trains members side by side, with the same result: for example
            `ProcessPoolExecutor(4, get_context("spawn"))`, if the network, the data and the loss can be sent to
            processes.
        checkpoints: a folder for one file of each member. A training that was killed goes on from there.
        output: which output counts, if the network returns several.

    >>> import torch
    >>> from batchbayes.models import MLP
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> config = TrainingConfig(epochs=20, batch_size=16)
    >>> deep_ensemble(lambda: MLP(1, [8], 1), (x, x), half_squared_error, config, num_members=3)
    WeightSamples(deep_ensemble on MLP: 3 members)
    """
    seeds = [member_seed(config.seed, number) for number in range(num_members)]
    networks = made_members(make, seeds)
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
    example = 'pass ProcessPoolExecutor(4, get_context("spawn")), for example'
    require_type(workers, Executor | None, expected="workers as an executor of concurrent.futures", fix=example)
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
    train_together = moved("batchbayes_tables.stack.train:train_together")
    train_together(networks, [two_tensors(data)] * len(networks), [replace(config, seed=seed) for seed in seeds])
