"""Model factories, data functions and methods that are named as `pkg.module:name`. Their modules are executed.

The weights of a network from a file. Only tensors are read, and no code in a file is executed.
"""

import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from batchbayes._common.checks import require_type
from batchbayes.errors import BatchbayesError, unknown_name
from batchbayes.methods.table import Method, applicable, compared_names, find_method

NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def is_name(text: str) -> bool:
    """Return whether a text reads as pkg.module:name.

    >>> is_name("models.mine:build"), is_name("C:/data.npz"), is_name("data.npz")
    (True, False, False)
    """
    return NAME.fullmatch(text) is not None


def call_named(name: str, what: str) -> Any:
    """Import a module and call one of its functions without arguments."""
    if not is_name(name):
        raise BatchbayesError(
            expected=f"{what} as pkg.module:function", got=repr(name), fix="write the module, a colon, the function"
        )
    module_name, _, function_name = name.partition(":")
    module = _imported(module_name, name, what)
    if not hasattr(module, function_name):
        raise BatchbayesError(
            expected=f"a function {function_name} in {module_name}", got="no such name", fix="check its name"
        )
    try:
        return getattr(module, function_name)()
    except BatchbayesError:
        raise
    except (Exception, SystemExit) as error:  # whoever calls sys.exit(0) has made nothing
        raise _failed(name, what, error) from error


def named_methods(names: Sequence[str] | None, network: nn.Module) -> list[Method]:
    """Return the methods of these names, or those that apply to the network; none for the name "none"."""
    if names is None:
        return applicable(network)
    return [] if tuple(names) == ("none",) else [named_method(name) for name in names]


def named_method(name: str) -> Method:
    """Return the method of a name. For pkg.module:name, import the module first, which registers the method."""
    if is_name(name):
        module_name, _, key = name.partition(":")
        _imported(module_name, name, "a method")
    else:
        key = name
    method = find_method(key)
    if not method.is_compared:
        raise unknown_name("a method", key, compared_names())
    return method


def _imported(module_name: str, name: str, what: str) -> ModuleType:
    """Import a module, from the current folder too."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(module_name)
    except ImportError as error:
        raise BatchbayesError(
            expected=f"a module {module_name} for {what}",
            got=_one_line(error),
            fix=f"leave out .py, as in {module_name.removesuffix('.py')}:{name.partition(':')[2]}"
            if module_name.endswith(".py")
            else "run in the folder that holds it, or set PYTHONPATH",
        ) from error
    except (Exception, SystemExit) as error:
        raise _failed(name, what, error) from error


def _failed(name: str, what: str, error: BaseException) -> BatchbayesError:
    return BatchbayesError(
        expected=f"{what} from {name}",
        got=f"{type(error).__name__}: {_one_line(error)}",
        fix="call it in Python until it works, or pass --debug to see where it fails",
    )


def _one_line(error: BaseException) -> str:
    """Return the message of an error as one line.

    >>> _one_line(ValueError("first.\\n  second"))
    'first. second'
    """
    return " ".join(str(error).split())[:300].rstrip(". ") or type(error).__name__


def build_network(name: str, weights: Sequence[Path] | None, device: str) -> nn.Module:
    """Return the network that a factory makes, with the first of its weights, in evaluation mode."""
    network = call_named(name, "a model factory")
    fix = "let the factory return the network itself"
    require_type(network, nn.Module, expected=f"a torch.nn.Module from {name}", fix=fix)
    if weights:
        network.load_state_dict(fitting_weights(network, weights[0]), strict=False)
    try:
        network = network.to(torch.device(device))
    except (RuntimeError, AssertionError) as error:
        raise BatchbayesError(
            expected="a device that torch can use here, as cpu or cuda:0",
            got=f"{device}: {_one_line(error)}",
            fix="use --device cpu",
        ) from error
    for parameter in network.parameters():
        parameter.requires_grad_(False)
    return network.eval()


def fitting_weights(network: nn.Module, path: Path) -> dict[str, Tensor]:
    """Read weights for a network. Raise an error that says which of them do not fit."""
    tensors = read_weights(path)
    own = network.state_dict()
    counters = {key for key in own if key.endswith("num_batches_tracked")}
    parts = [f"no {key}" for key in sorted(own.keys() - tensors.keys() - counters)[:2]]
    parts += [f"an unknown {key}" for key in sorted(tensors.keys() - own.keys())[:2]]
    parts += [
        f"{key} of shape {tuple(tensors[key].shape)} instead of {tuple(own[key].shape)}"
        for key in sorted(own.keys() & tensors.keys())
        if own[key].shape != tensors[key].shape
    ][:2]
    if parts:
        raise BatchbayesError(
            expected=f"weights that fit {type(network).__name__}",
            got=f"{path.name} with {'; '.join(parts)}",
            fix="build the network that was trained, with the same options",
        )
    return tensors


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
