"""A training on disk: everything that a killed training needs to continue with the same bits.

The file is safetensors with a JSON header, never pickle. The tensors are the parameters and buffers of the network and
the state of the optimiser. The header holds the random state, the mean objective of each epoch and a description of the
training. A file that has another description is refused.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn, optim

from batchbayes._common.files import UNREADABLE, read_json, write_tensors
from batchbayes._common.rng import GlobalStream
from batchbayes.errors import BatchbayesError

FORMAT = 1
SHOWN_DIFFERENCES = 3


@dataclass(eq=False)
class TrainingState:
    """Everything that changes while a network trains."""

    network: nn.Module
    optimiser: optim.Optimizer
    stream: GlobalStream
    losses: list[float] = field(default_factory=list)
    """The mean objective of each finished epoch."""
    steps: int = 0
    stopped: bool = False
    """Whether `after_step` has ended the training early."""


class Checkpoint:
    """The file of one training. Create this object before the first step: it describes the training at its start."""

    def __init__(self, path: Path, training: TrainingState, settings: Mapping[str, object]) -> None:
        if not path.parent.is_dir():
            got = f"nothing at {path.parent}"
            raise BatchbayesError(expected="a folder for the checkpoint", got=got, fix="create the folder first")
        require_tensors_only(training.network)
        self._path, self._training = path, training
        self._layout = _layout(training.network)
        self._description = {
            **{name: str(value) for name, value in settings.items()},
            "network": type(training.network).__name__,
            **self._layout,
            **_settings(training.optimiser),
        }

    def resume(self) -> None:
        """Bring the training to the state in the file. Do nothing if there is no file."""
        if not self._path.exists():
            return
        header, tensors = _read(self._path)
        self._require_same(header["description"])
        training = self._training
        with torch.no_grad():
            for name, own in _tensors(training.network).items():
                own.copy_(tensors[name])
        _restore_optimiser(training.optimiser, header, tensors)
        training.stream.restore(_unpacked(header["random"], tensors))
        training.losses, training.steps, training.stopped = (header[name] for name in ("losses", "steps", "stopped"))

    def write(self) -> None:
        """Write the training as it is now. The former file stays until the new one is complete."""
        training = self._training
        if _layout(training.network) != self._layout:
            raise BatchbayesError(
                expected="a network that has the same parameters and buffers before and after an epoch",
                got="a network in which a name, a shape or a precision has changed",
                fix="create all parameters and buffers before training, or train without a checkpoint",
            )
        tensors = _tensors(training.network)
        optimiser = training.optimiser.state_dict()
        header = {
            "format": FORMAT,
            "description": self._description,
            "state": [[key, _packed(values, tensors)] for key, values in optimiser["state"].items()],
            "groups": [_packed(group, tensors) for group in optimiser["param_groups"]],
            "random": _packed(training.stream.state(), tensors),
            "losses": training.losses,
            "steps": training.steps,
            "stopped": training.stopped,
        }
        write_tensors(self._path, tensors, {"training": json.dumps(header)})

    def _require_same(self, saved: Mapping[str, str]) -> None:
        own = self._description
        names = [name for name in {**saved, **own} if own.get(name) != saved.get(name)]
        if names:
            shown = [
                f"{name}: {saved.get(name, 'absent')} in the file, {own.get(name, 'absent')} now" for name in names
            ]
            rest = len(names) - SHOWN_DIFFERENCES
            got = "; ".join(shown[:SHOWN_DIFFERENCES]) + (f"; and {rest} more differences" if rest > 0 else "")
            fix = "use the same configuration and network, or another checkpoint file"
            raise BatchbayesError(f"the training that wrote {self._path}", got, fix)


def _tensors(network: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers. `state_dict` would leave out the buffers that are not persistent."""
    parameters = {f"parameter {name}": tensor for name, tensor in network.named_parameters()}
    return parameters | {f"buffer {name}": tensor for name, tensor in network.named_buffers()}


def _layout(network: nn.Module) -> dict[str, str]:
    return {name: f"{tensor.dtype} {tuple(tensor.shape)}" for name, tensor in _tensors(network).items()}


def _settings(optimiser: optim.Optimizer) -> dict[str, str]:
    groups = [{**group, "params": len(group["params"])} for group in optimiser.param_groups]
    settings = {f"{key} in group {i}": str(value) for i, group in enumerate(groups) for key, value in group.items()}
    return {"optimiser": type(optimiser).__name__, **settings}


def _restore_optimiser(optimiser: optim.Optimizer, header: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Restore the state exactly. `load_state_dict` would cast it to the precision of the parameters."""
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    for key, values in header["state"]:
        optimiser.state[parameters[key]] = _unpacked(values, tensors, parameters[key])
    for group, saved in zip(optimiser.param_groups, header["groups"], strict=True):
        group.update({**_unpacked(saved, tensors), "params": group["params"]})


def _packed(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return a value as JSON that `_unpacked` reads, and add its tensors to `tensors`.

    >>> _packed({"betas": (0.9, 0.999)}, {})
    {'dict': [['betas', {'tuple': [0.9, 0.999]}]]}
    """
    if isinstance(value, Tensor):
        name = f"state {len(tensors)}"
        tensors[name] = value
        return {"tensor": [name, value.device.type]}
    if isinstance(value, dict):
        return {"dict": [[key, _packed(part, tensors)] for key, part in value.items()]}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_packed(part, tensors) for part in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    got = f"a {type(value).__name__}"
    fix = "use another optimiser, or train without a checkpoint"
    raise BatchbayesError("an optimiser that keeps tensors, numbers and text, to write a checkpoint", got, fix)


def _unpacked(value: Any, tensors: Mapping[str, Tensor], like: Tensor | None = None) -> Any:
    """Return what was packed. Put tensors where the parameter `like` is, unless they were on the CPU."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        saved = tensors[content[0]]
        if like is None or (content[1] == "cpu" and like.device.type != "cpu"):
            return saved
        if saved.shape == like.shape:  # in the memory format of the parameter: optimisers are slow if it differs
            return torch.empty_like(like, dtype=saved.dtype).copy_(saved)
        return saved.to(like.device)
    if kind == "dict":
        return {key: _unpacked(part, tensors, like) for key, part in content}
    parts = [_unpacked(part, tensors, like) for part in content]
    return tuple(parts) if kind == "tuple" else parts


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        header, tensors = read_json(path, "training"), load_file(path)
    except UNREADABLE as error:
        got = f"something else, or a damaged file ({error})"
        fix = "choose another path, or delete the file to train from the start"
        raise BatchbayesError(f"a checkpoint of a training at {path}", got, fix) from error
    if header["format"] != FORMAT:
        fix = "update batchbayes, or delete the file to train from the start"
        raise BatchbayesError(f"checkpoint format {FORMAT}", f"format {header['format']} at {path}", fix)
    return header, tensors


def require_tensors_only(network: nn.Module) -> None:
    """Refuse modules with `get_extra_state`: it can return any object, and a file holds tensors alone."""
    odd = [name for name, value in network.state_dict().items() if not isinstance(value, Tensor)]
    if odd:
        got = f"something else in {', '.join(odd)}"
        fix = "keep it in buffers, or do without the file"
        raise BatchbayesError("a network whose whole state is tensors, to write it to a file", got, fix)
