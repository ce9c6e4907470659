"""Copies of a module tree that share its tensors, and what they can still reach of the original."""

import copy
import gc
import weakref
from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from batchbayes.errors import BatchbayesError

SHARED = (Tensor, np.ndarray)
"""What a copy shares with the original."""
TENSORS = frozenset({"_parameters", "_buffers"})
"""Where a module keeps its tensors."""
TORCH = frozenset(vars(nn.Module()))
"""What torch itself keeps in a module: its tensors, its children, its mode and its hooks."""
_HOOKS = TORCH - {"training", "_modules", *TENSORS}
_MOST_OBJECTS = 50_000
"""If attributes lead to more objects than this, the search stops and the network is not copied."""


def copy_modules(module: nn.Module) -> dict[int, nn.Module]:
    """Copy all modules of a network, but not its tensors and arrays; the keys are the identities of the originals."""
    for name, m in module.named_modules():
        if isinstance(m, torch.jit.ScriptModule):
            raise _unfit(f"a scripted module {name!r}", "pass the network in Python that was scripted")
    try:
        memo: dict[int, Any] = {id(value): value for value in reachable([module]) if isinstance(value, SHARED)}
        return _copied_modules(module, memo)
    except Exception as error:
        got = f"a {type(module).__name__} that does not: {type(error).__name__}: {error}"[:300]
        raise _unfit(got, "see what copy.deepcopy(network) says, and change the attribute that it names") from error


def _copied_modules(module: nn.Module, memo: dict[int, Any]) -> dict[int, nn.Module]:
    plain = [m for m in module.modules() if not is_wrapper(m) and _copies_plainly(type(m))]
    for m in plain:
        memo[id(m)] = type(m).__new__(type(m))
    for m in module.modules():
        if is_wrapper(m):  # a compiled part: the copy uses the original, uncompiled module
            memo[id(m)] = copy.deepcopy(m._modules["_orig_mod"], memo)
    for m in plain:
        for name, value in vars(m).items():
            object.__setattr__(memo[id(m)], name, _copied(name, value, memo))  # one by one: takes less memory
    copies = {id(m): copy.deepcopy(m, memo) for m in module.modules()}
    for m in copies.values():
        vars(m).pop("_compiled_call_impl", None)  # set by module.compile(); it would run the user's module
    return copies


def _copies_plainly(kind: type[nn.Module]) -> bool:
    """Whether a class copies its instances as torch's own modules do. Others are copied by their own methods."""
    return (
        kind.__getstate__ is nn.Module.__getstate__
        and kind.__reduce_ex__ is object.__reduce_ex__
        and not hasattr(kind, "__deepcopy__")
    )


def _copied(name: str, value: Any, memo: dict[int, Any]) -> Any:
    if name in TENSORS:
        return dict(value)
    hooks = value.values() if name in _HOOKS and isinstance(value, dict) else ()
    if name in _HOOKS and not any(isinstance(hook, MethodType) for hook in hooks):
        return value  # shared, so that hooks which the user adds later run too
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # a lock, a file or the like
        return value


def require_apart(module: nn.Module, copies: dict[int, nn.Module]) -> None:
    """Raise an error that names the attribute by which copies still lead to a module of the original network."""
    originals = {id(m) for m in module.modules() if not is_wrapper(m)}
    if originals.isdisjoint(map(id, reachable(copies.values()))):
        return
    for m in copies.values():
        for name, value in vars(m).items():
            for each in reachable([value]) if name != "_modules" else ():
                if id(each) in originals:
                    raise _unfit(
                        f"{type(m).__name__}.{name}, which refers to a {type(each).__name__} in a way that copying "
                        "cannot follow, such as a closure, a global name or a weak reference",
                        f"keep the layer as an attribute, and make {name} a method that reads it from self",
                    )


def _unfit(got: str, fix: str) -> BatchbayesError:
    return BatchbayesError("a network that can be copied, so that passes leave the user's alone", got, fix)


def reachable(start: Iterable[object]) -> Iterator[object]:
    """Walk through all objects that attributes, containers and closures lead to, tensors included, each once."""
    waiting, seen = list(start), set()
    while waiting:
        value = waiting.pop()
        if not gc.is_tracked(value) or isinstance(value, type | ModuleType) or id(value) in seen:
            continue  # what the garbage collector does not track leads nowhere
        if len(seen) > _MOST_OBJECTS:
            raise ValueError("its attributes lead to too many objects")
        seen.add(id(value))
        yield value
        if isinstance(value, FunctionType):  # of its globals, which lead to everything, only modules that it names
            named = [value.__globals__.get(name) for name in value.__code__.co_names]
            waiting += [each for each in named if isinstance(getattr(each, "__self__", each), nn.Module)]
            waiting += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            waiting += [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        elif isinstance(value, weakref.ref):
            waiting.append(value())
        elif not isinstance(value, SHARED):
            waiting += gc.get_referents(value)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def plain_name(name: str) -> str:
    """Return the name of a module without the parts that torch.compile adds.

    >>> plain_name("encoder._orig_mod.norm")
    'encoder.norm'
    """
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def is_wrapper(module: nn.Module) -> bool:
    """Whether torch.compile made this module around one of the user's."""
    return isinstance(getattr(module, "_orig_mod", None), nn.Module)
