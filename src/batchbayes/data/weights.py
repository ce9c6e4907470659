"""The weights of a network from a file. Only tensors are read, and no code in a file is executed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from batchbayes.errors import BatchbayesError

CHECKPOINTS = {".pt", ".pth", ".ckpt"}
NESTED = ("state_dict", "model", "model_state_dict")
"""The keys under which training scripts keep weights, beside the state of the optimiser and others."""
PREFIXES = ("module.", "_orig_mod.")
"""What DataParallel and torch.compile put before the name of each tensor."""


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read a state dict from a .safetensors, .pt, .pth or .ckpt file.

    Checkpoints are read with `weights_only=True`, so a file that contains more than tensors and plain values is
    refused. The weights may be under one of the keys `state_dict`, `model` and `model_state_dict`.
    """
    suffix = path.suffix.lower()
    if not path.is_file():
        raise BatchbayesError(expected="a file of weights", got=f"nothing at {path}", fix="check the path")
    if suffix != ".safetensors" and suffix not in CHECKPOINTS:
        raise _refused(path, "a file of another kind", "give a .safetensors, .pt, .pth or .ckpt file")
    try:
        content = load_file(path) if suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except Exception as error:  # a damaged file raises errors of many types
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise _refused(
            path, f"a file that cannot be read without running code in it, or that is damaged ({reason})"
        ) from error
    return _without_prefix(_state_dict(path, content))


def _state_dict(path: Path, content: Any) -> dict[str, Tensor]:
    """Return the only dict of tensors in a checkpoint."""
    if not isinstance(content, Mapping):
        raise _refused(path, f"a {type(content).__name__}")
    nested = [key for key in NESTED if isinstance(content.get(key), Mapping)]
    if len(nested) > 1:
        raise _refused(path, f"weights under more than one key: {', '.join(nested)}")
    weights = content[nested[0]] if nested else content
    others = [key for key, value in weights.items() if not isinstance(key, str) or not isinstance(value, Tensor)]
    if others or not weights:
        raise _refused(path, f"{others[0]!r}, which is no tensor" if others else "no tensors")
    return dict(weights)


def _without_prefix(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    for prefix in PREFIXES:
        if all(key.startswith(prefix) for key in weights):
            return _without_prefix({key.removeprefix(prefix): tensor for key, tensor in weights.items()})
    return weights


def _refused(path: Path, got: str, fix: str | None = None) -> BatchbayesError:
    return BatchbayesError(
        expected=f"a state dict, names and tensors, in {path.name}",
        got=got,
        fix=fix or "save network.state_dict() with torch.save or safetensors.torch.save_file, and give that file",
    )
