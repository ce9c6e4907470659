"""What one pass may change in one module of a network, and how it is put back."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from batchbayes.copying import TENSORS, TORCH

_CONTAINERS = (dict, list, set)
_SMALL = 4096
"""Buffers of at most this many numbers are copied for each pass, in case the network changes them."""
_MISSING = object()


class Part:
    """One of the user's modules, and the module that passes run on in its place."""

    __slots__ = ("_changing", "_children", "_contents", "_copied", "_is_copy", "_module", "_own", "_shared", "_theirs")

    def __init__(self, theirs: nn.Module, ours: nn.Module) -> None:
        self._module, self._is_copy = ours, theirs is not ours
        self._theirs = vars(theirs) if theirs is not ours else vars(theirs).copy()
        self._children = tuple(theirs._modules.values())
        shared = self._theirs.keys() & (TENSORS | {"training"})
        self._own = {n: v for n, v in vars(ours).items() if v is not self._theirs.get(n, _MISSING) and n not in shared}
        """Attributes that belong to the copy. All others are shared with the user's module."""
        copied = [n for n, v in vars(ours).items() if n in self._own or (n not in TORCH and isinstance(v, _CONTAINERS))]
        self._contents = tuple(
            _Container(self._theirs[n], vars(ours)[n], n) for n in copied if n in self._theirs and n != "_modules"
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
        if tuple(self._theirs["_modules"].values()) != self._children:
            return True
        return any(container.is_outdated(self._theirs) for container in self._contents)

    def begin(self, *, first: bool) -> None:
        """Take over the user's present tensors and attributes, and set evaluation mode."""
        self.put_back()
        ours, buffers = vars(self._module), self._theirs["_buffers"].copy()
        if buffers and (first or not isinstance(self._module, _NormBase)):  # which changes none in evaluation mode
            own = {name: buffer for name, buffer in buffers.items() if buffer is not None}
            copied = {n: b.clone() for n, b in own.items() if first or b.numel() <= _SMALL or n in self._changing}
            buffers.update(copied)
            self._copied = copied if first else None
            self._shared = tuple((n, b, version_of(b)) for n, b in own.items() if n not in copied)
        ours.pop("_compiled_call_impl", None)  # set by module.compile(); it would run the user's module
        ours["training"], ours["_parameters"], ours["_buffers"] = False, self._theirs["_parameters"].copy(), buffers

    def begin_training(self) -> None:
        """Take over the user's present tensors, attributes and mode. Changes of buffers reach the user's module."""
        self.put_back()
        ours, theirs = vars(self._module), self._theirs
        ours.pop("_compiled_call_impl", None)
        ours["training"], ours["_buffers"] = theirs["training"], theirs["_buffers"]
        ours["_parameters"] = theirs["_parameters"].copy()

    @property
    def is_adaptable(self) -> bool:
        """Whether `adapt` may have something to do."""
        return isinstance(self._module, _DropoutNd | nn.RNNBase)

    def end_training(self) -> None:
        """End a pass for training. What else it has changed is put back at the start of the next one."""
        vars(self._module)["training"] = False

    def adapt(self, dropout: bool) -> None:
        """Make the changes that depend on the kind of module."""
        if dropout and isinstance(self._module, _DropoutNd):
            vars(self._module)["training"] = True
        elif isinstance(self._module, nn.RNNBase):
            weights = [getattr(self._module, name) for name in self._module._flat_weights_names]
            vars(self._module)["_flat_weights"] = weights

    def find_changing_buffers(self) -> list[str]:
        """Look which large buffers the pass changed: later passes work on copies of them.

        Returns:
            The names of those that this pass shared with the user's module, so that the user's have changed.
        """
        if not self._copied and not self._shared:
            return []
        theirs = self._theirs["_buffers"]
        found = [n for n, copied in (self._copied or {}).items() if _is_changed(theirs.get(n), copied)]
        late = [name for name, buffer, version in self._shared if version_of(buffer) != version]
        self._changing, self._copied, self._shared = self._changing.union(found, late), None, ()
        return late

    def put_back(self) -> None:
        """Undo what a pass has changed."""
        ours = vars(self._module)
        ours.update(self._theirs)
        ours.update(self._own)
        if self._is_copy:
            ours["training"] = False  # so that a pass which runs late cannot update statistics
        if len(ours) > len(self._theirs):
            for name in ours.keys() - self._theirs.keys() - self._own.keys():
                del ours[name]
        for container in self._contents:
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

    def put_back(self) -> None:
        content = self._ours_before
        if _same(_content(self._ours), content):
            return
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
