"""One part after the other, and what all states of online learning need: checks and files."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from batchbayes import BatchbayesError, TrainingConfig
from batchbayes.tools import (
    UNREADABLE,
    Progress,
    TensorFile,
    as_path,
    progress,
    read_json,
    require_data,
    shuffled_batches,
    write_tensors,
)

DataPart = tuple[Tensor, Tensor]
"""Inputs and targets of one part of the data."""


def learn_parts(
    state: Any, parts: Iterable[DataPart], *arguments: Any, checkpoint: str | os.PathLike[str] | None = None
) -> Any:
    """Learn one part after the other, in one pass, and return the last state.

    Args:
        state: what `start(...)` of a class here returns, or an `update` of it.
        parts: inputs (or features) and targets of each part that comes after this state. Each part is read once.
        arguments: what `state.update` needs beside a part: a `TrainingConfig` for `OnlineMeanField` and
            `StructuredLaplace`, and nothing for the others.
        checkpoint: a file that is written after each part. If it exists, learning goes on after the parts in it, which
            are passed over.
    """
    first, number = state.num_parts, 0
    if checkpoint is not None and as_path(checkpoint).exists():
        state = state.restored(checkpoint)
    done = state.num_parts - first
    if done >= 0:
        for number, part in enumerate(progress(parts, "parts"), 1):
            if number > done:
                state = state.update(part, *arguments)
                if checkpoint is not None:
                    state.save(checkpoint)
    if not 0 <= done <= number:
        raise BatchbayesError(
            expected=f"the {state.num_parts} parts that {checkpoint} has learned, and perhaps more",
            got=f"{number} parts for a state that has learned {first}",
            fix="pass the first state and all parts again, or choose another file",
        )
    return state


def require_finite_weights(tensors: Iterable[Tensor], num_parts: int) -> None:
    """Refuse a part that diverged."""
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
        raise BatchbayesError(
            expected="a finite loss and finite weights",
            got=f"NaN or infinity in part {num_parts + 1}",
            fix="lower the learning rate, or scale inputs and targets to about unit variance",
        )


def require_plain(part: DataPart, config: TrainingConfig) -> DataPart:
    """Refuse a part without examples, and weight decay."""
    require_data(*part)
    if config.weight_decay:
        raise BatchbayesError(
            expected="no weight decay beside the prior", got=f"weight_decay={config.weight_decay}", fix="set it to 0"
        )
    return part


def training_steps(optimiser: Optimizer, num_examples: int, config: TrainingConfig) -> Iterator[Tensor]:
    """Yield the rows of each mini-batch. The learning rate falls to zero, epoch by epoch."""
    with Progress("learning a part", config.epochs) as shown:
        for epoch in range(config.epochs):
            yield from shuffled_batches(num_examples, config.batch_size, config.seed, epoch)
            optimiser.param_groups[0]["lr"] = config.learning_rate * (1 - (epoch + 1) / config.epochs)
            shown.advance()


def write_state(path: str | os.PathLike[str], header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write tensors and a few numbers."""
    write_tensors(path, tensors, {"online": json.dumps(dict(header))})


def read_state(
    path: str | os.PathLike[str], own: Mapping[str, Tensor] | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the numbers and the tensors that `write_state` wrote. Refuse tensors of other shapes than `own` has."""
    path = as_path(path)
    try:
        header, saved = read_json(path, "online"), dict(TensorFile(path))
    except UNREADABLE as error:
        raise BatchbayesError(
            expected=f"a state of online learning at {path}",
            got=f"something else, or a damaged file ({error})",
            fix="choose another path, or delete the file to learn from the first part",
        ) from error
    if own is not None and {n: t.shape for n, t in own.items()} != {n: t.shape for n, t in saved.items()}:
        raise BatchbayesError(
            expected=f"the network whose state is in {path}",
            got="weights of other names or shapes",
            fix="build the same network, or choose another file",
        )
    return header, {name: tensor if own is None else tensor.to(own[name].device) for name, tensor in saved.items()}


def write_features(path: str | os.PathLike[str], kind: str, values: Mapping[str, Any]) -> None:
    """Write the tensors and numbers that features of one kind consist of."""
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    numbers = {name: value for name, value in values.items() if name not in tensors}
    write_state(path, {"kind": kind, **numbers}, tensors)


def read_features(path: str | os.PathLike[str], kind: str) -> dict[str, Any]:
    """Return what `write_features` wrote."""
    header, tensors = read_state(path)
    if header.pop("kind", None) != kind:
        raise BatchbayesError(f"{kind} at {path}", "something else", "choose the file that was written by `save`")
    return header | tensors
