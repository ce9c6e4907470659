"""Copies of a module tree that share its tensors: how they are made, and what they can still reach of the original.

What one pass may change in one module of a network, and how it is put back.
"""

import copy
import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

SHARED = (Tensor, np.ndarray)
"""What a copy shares with the original."""
TENSORS = frozenset({"_parameters", "_buffers"})
"""Where a module keeps its tensors."""
TORCH = frozenset(vars(nn.Module()))
"""What torch itself keeps in a module: its tensors, its children, its mode and its hooks."""
_HOOKS = TORCH - {"training", "_modules", *TENSORS}
_MOST_OBJECTS = 50_000
"""If attributes lead to more objects than this, the search stops and the network is not copied."""


def copy_modules(module: nn.Module, shared: Iterable[object]) -> dict[int, nn.Module]:
    """Copy all modules of a network, but not what is shared; the keys are the identities of the originals."""
    memo: dict[int, Any] = {id(value): value for value in shared}
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
        m.training = False
        vars(m).pop("_compiled_call_impl", None)
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


_CONTAINERS = (dict, list, set)
_SMALL = 4096
"""Buffers of at most this many numbers are copied for each pass, in case the network changes them."""
_MISSING = object()


class Part:
    """One of the user's modules, and the module that passes run on in its place."""

    __slots__ = (
        "_changing",
        "_children",
        "_copied",
        "_is_copy",
        "_module",
        "_own",
        "_shared",
        "contents",
        "ours",
        "theirs",
    )

    def __init__(self, theirs: nn.Module, ours: nn.Module) -> None:
        self._module, self._is_copy = ours, theirs is not ours
        self.ours: dict[str, Any] = vars(ours)
        """The attributes of the module that passes run on."""
        self.theirs: dict[str, Any] = vars(theirs) if theirs is not ours else vars(theirs).copy()
        """Those of the user's module; what they were at the start, if passes run on that module itself."""
        self._children = tuple(theirs._modules.values())
        shared = self.theirs.keys() & (TENSORS | {"training"})
        self._own = {n: v for n, v in self.ours.items() if v is not self.theirs.get(n, _MISSING) and n not in shared}
        """Attributes that belong to the copy. All others are shared with the user's module."""
        copied = [n for n, v in self.ours.items() if n in self._own or (n not in TORCH and isinstance(v, _CONTAINERS))]
        self.contents = tuple(
            _Container(self.theirs[n], self.ours[n], n) for n in copied if n in self.theirs and n != "_modules"
        )
        """Containers and other objects in attributes that were copied: some layers keep results of a pass there."""
        self._changing: frozenset[str] = frozenset()
        """Large buffers that the module is known to change. A pass works on copies of them and of all small ones."""
        self._copied: dict[str, Tensor] | None = None
        """Copies of all buffers, which the first pass works on."""
        self._shared: tuple[tuple[str, Tensor, int], ...] = ()
        """Large buffers that this pass shares with the user's module, each with its version at the start."""

    def is_outdated(self) -> bool:
        """Whether the user has replaced a child module or changed a container since the copy was made."""
        if tuple(self.theirs["_modules"].values()) != self._children:
            return True
        return any(container.is_outdated(self.theirs) for container in self.contents)

    def begin(self, *, first: bool) -> None:
        """Take over the user's present tensors and attributes, and set evaluation mode."""
        self.put_back()
        ours, buffers = self.ours, self.theirs["_buffers"].copy()
        if buffers and (first or not isinstance(self._module, _NormBase)):  # which changes none in evaluation mode
            own = {name: buffer for name, buffer in buffers.items() if buffer is not None}
            copied = {n: b.clone() for n, b in own.items() if first or b.numel() <= _SMALL or n in self._changing}
            buffers.update(copied)
            self._copied = copied if first else None
            self._shared = tuple((n, b, version_of(b)) for n, b in own.items() if n not in copied)
        ours.pop("_compiled_call_impl", None)  # set by module.compile(); it would run the user's module
        ours["training"], ours["_parameters"], ours["_buffers"] = False, self.theirs["_parameters"].copy(), buffers

    def begin_training(self) -> None:
        """Take over the user's present tensors, attributes and mode. Changes of buffers reach the user's module."""
        self.put_back()
        ours, theirs = self.ours, self.theirs
        ours.pop("_compiled_call_impl", None)
        ours["training"], ours["_buffers"] = theirs["training"], theirs["_buffers"]
        ours["_parameters"] = theirs["_parameters"].copy()

    @property
    def is_adaptable(self) -> bool:
        """Whether `adapted` may have something to return."""
        return isinstance(self._module, _DropoutNd | nn.RNNBase)

    @property
    def needs_copies(self) -> bool:
        """Whether each pass gets new copies of buffers, because the module may change them in evaluation mode."""
        return bool(self.theirs["_buffers"]) and not isinstance(self._module, _NormBase)

    def end_training(self) -> None:
        """End a pass for training. What else it has changed is put back at the start of the next one."""
        self.ours["training"] = False

    def adapted(self, dropout: bool) -> tuple[str, Any] | None:
        """Return the attribute to set, and its value, if this kind of module has to be told what has changed."""
        if dropout and isinstance(self._module, _DropoutNd):
            return "training", True
        if isinstance(self._module, nn.RNNBase):
            return "_flat_weights", [getattr(self._module, name) for name in self._module._flat_weights_names]
        return None

    def find_changing_buffers(self) -> list[str]:
        """Look which large buffers the pass changed: later passes work on copies of them.

        Returns:
            The names of those that this pass shared with the user's module, so that the user's have changed.
        """
        if not self._copied and not self._shared:
            return []
        theirs = self.theirs["_buffers"]
        found = [n for n, copied in (self._copied or {}).items() if _is_changed(theirs.get(n), copied)]
        late = [name for name, buffer, version in self._shared if version_of(buffer) != version]
        self._changing, self._copied, self._shared = self._changing.union(found, late), None, ()
        return late

    def put_back(self) -> None:
        """Undo what a pass has changed."""
        ours = self.ours
        ours.update(self.theirs)
        ours.update(self._own)
        if self._is_copy:
            ours["training"] = False  # so that a pass which runs late cannot update statistics
        if len(ours) > len(self.theirs):
            for name in ours.keys() - self.theirs.keys() - self._own.keys():
                del ours[name]
        for container in self.contents:
            container.put_back()


class _Container:
    """A container or another object in an attribute: the user's, ours, and what each of them holds between passes."""

    __slots__ = ("_name", "_ours", "_ours_before", "_theirs", "_theirs_before")

    def __init__(self, theirs: Any, ours: Any, name: str) -> None:
        self._theirs, self._ours, self._name = theirs, ours, name
        self._theirs_before, self._ours_before = _content(theirs), _content(ours)
        if _same(self._theirs_before, self._ours_before):
            self._ours_before = self._theirs_before  # takes less memory

    def is_outdated(self, attributes: Mapping[str, Any]) -> bool:
        """Whether the user's module has another container, or the container holds something else."""
        now = attributes.get(self._name, _MISSING)
        return now is not self._theirs or not _same(_content(now), self._theirs_before)

    def is_changed(self) -> bool:
        """Whether a pass has changed ours."""
        return not _same(_content(self._ours), self._ours_before)

    def put_back(self) -> None:
        if not self.is_changed():
            return
        content = self._ours_before
        ours = self._ours if isinstance(self._ours, _CONTAINERS) else vars(self._ours)
        ours.clear()
        if isinstance(ours, dict):
            ours.update(zip(content[::2], content[1::2], strict=True))
        else:
            (ours.extend if isinstance(ours, list) else ours.update)(content)


def _is_changed(before: Tensor | None, after: Tensor | None) -> bool:
    return before is not None and after is not None and not torch.equal(before, after)


def version_of(tensor: Tensor) -> int:
    """Return the number of in-place changes of a tensor so far. Tensors of inference mode do not count them."""
    return 0 if tensor.is_inference() else tensor._version


def _content(value: Any) -> tuple[Any, ...]:
    """Return what a container holds, or the attributes of an object with names and values in turn."""
    if isinstance(value, list | set):
        return tuple(value)
    if not isinstance(value, dict):
        if callable(value) or not hasattr(value, "__dict__"):
            return ()
        value = vars(value)
    return tuple(part for item in value.items() for part in item)


def _same(first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
    return len(first) == len(second) and all(a is b for a, b in zip(first, second, strict=True))
