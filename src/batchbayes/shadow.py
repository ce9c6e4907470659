"""Shadows: copies of a network that share its tensors, one for each thread that uses it.

A shadow copies the module tree. It shares every parameter and buffer with the user's network, so it costs no memory for
weights, and it follows later changes of the weights. It owns everything else: modes, hooks, attributes, and the tensors
that replace the network's own during a pass. So the user's network stays as it is, and threads do not disturb each
other.

Some networks cannot be copied: scripted modules, and networks in which a function or an object refers to a module in a
way that copying cannot follow (a closure, a weak reference, an object that refuses to be copied). Then passes run
inside the user's own modules, one thread at a time, and put everything back. `why_in_place` tells the reason.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Self, TypedDict

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from batchbayes.copying import SHARED, TENSORS, TORCH, copy_modules, is_wrapper, reachable
from batchbayes.errors import BatchbayesError

_FORWARD_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
_CONTAINERS = (dict, list, set)
_SMALL = 4096
"""Buffers of at most this many numbers are copied for each pass, in case the network changes them."""
_MISSING = object()
_LOCAL = threading.local()
_LOCK = threading.RLock()


class Changes(TypedDict, total=False):
    """What is different in one pass through a network."""

    tensors: Mapping[str, Tensor | None]
    """Parameters or buffers to use instead of the network's own, by their full names. A batch-norm layer whose running
    statistics are None normalises by the statistics of its batch."""
    before: Mapping[str, Callable[[Tensor], Tensor | None]]
    """Functions by name of module. Each gets the input of its module before the module runs. If it returns a tensor,
    the module gets that tensor instead."""
    instead: Mapping[str, Callable[[Tensor], Tensor]]
    """Functions by name of module. Each runs in the place of its module's `forward`: it gets the input and returns the
    output. The user's own hooks run around it."""
    dropout: bool
    """Whether dropout modules are active, as in training."""
    own_modes: bool
    """Whether each module runs in its own mode, as for training. Batch norm then normalises by its batch and updates
    its statistics, which change in the network itself."""


@contextmanager
def workplace(module: nn.Module, *, own_modes: bool = False) -> "Iterator[Workplace]":
    """Give the calling thread a place to run the network: its own shadow, or the network itself under a lock."""
    shadow = _shadow_of(module)
    if isinstance(shadow, Workplace):
        shadow.own_modes = own_modes
        with shadow:
            yield shadow
    elif own_modes:
        raise BatchbayesError(
            expected="a network that can be copied, to train it with noise",
            got=f"{type(module).__name__}: {shadow}",
            fix="train a network of plain modules",
        )
    else:
        with _LOCK, _evaluating_scripted(module), Workplace({id(m): m for m in module.modules()}, module) as place:
            yield place


@contextmanager
def _evaluating_scripted(module: nn.Module) -> Iterator[None]:
    """Set evaluation mode in scripted modules, whose attributes cannot be set through vars()."""
    modes = [(m, m.training) for m in module.modules() if isinstance(m, torch.jit.ScriptModule)]
    try:
        for m, _ in modes:
            m.eval()
        yield
    finally:
        for m, mode in modes:  # parents come first, because train() sets the children too
            m.train(mode)


def why_in_place(module: nn.Module) -> str | None:
    """Return why a network cannot be copied; None if it can."""
    shadow = _shadow_of(module)
    return None if isinstance(shadow, Workplace) else shadow


def _shadow_of(module: nn.Module) -> "Workplace | str":
    """Return the calling thread's shadow of a network, made when first asked for, or why there can be none."""
    table = _LOCAL.__dict__.setdefault("shadows", weakref.WeakKeyDictionary())
    shadow = table.get(module)
    if shadow is None or (isinstance(shadow, Workplace) and shadow.is_outdated()):
        shadow = table[module] = _make_shadow(module)
    return shadow


def _make_shadow(module: nn.Module) -> "Workplace | str":
    if any(isinstance(m, torch.jit.ScriptModule) for m in module.modules()):
        return "it holds scripted modules"
    try:
        theirs = list(reachable([module]))
        copies = copy_modules(module, shared=[value for value in theirs if isinstance(value, SHARED)])
    except Exception as error:
        return f"copying it failed ({type(error).__name__}: {error})"
    originals = {id(value) for value in theirs if isinstance(value, nn.Module) and not is_wrapper(value)}
    for value in reachable(copies.values()):
        if id(value) in originals:
            return f"copying cannot follow how a function or an object in it refers to a {type(value).__name__}"
    return Workplace(copies, module)


class Workplace:
    """Modules to run passes on. What a pass changes in them is put back at its end.

    `copies` maps the identity of each of the user's modules to the module to work on: a copy, or the module itself.
    """

    def __init__(self, copies: Mapping[int, nn.Module], module: nn.Module) -> None:
        self.module = copies[id(module)]
        own = [m for m in module.modules() if not is_wrapper(m) and not isinstance(m, torch.jit.ScriptModule)]
        self._parts = [_Part(m, copies[id(m)]) for m in own]
        self._by_name: dict[str, nn.Module] = {}
        self._hooked: list[tuple[dict[str, Any], str, Any]] = []
        """Hook registries replaced in this pass: attributes of the module, name of the registry, old registry."""
        self._first, self._in_use = True, False
        self.own_modes = False
        """Whether modules run in the modes of the user's, and changes of buffers stay."""

    def is_outdated(self) -> bool:
        """Whether the user has changed modules or containers of the network since the copy was made."""
        return any(part.is_outdated() for part in self._parts)

    def __enter__(self) -> Self:
        if self._in_use:  # the last pass was interrupted before it had put everything back
            self._put_back()
        self._in_use = True
        for part in self._parts:
            if self.own_modes:
                part.begin_training()
            else:
                part.begin(first=self._first)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._first and kind is None and not self.own_modes:
            for part in self._parts:
                part.find_changing_buffers()
            self._first = False
        self._put_back()

    def _put_back(self) -> None:
        for attributes, kind, hooks in self._hooked:
            attributes[kind] = hooks
        self._hooked.clear()
        for part in self._parts:
            part.put_back()
        self._in_use = False

    def prepare(self, changes: Changes) -> None:
        """Make the changes of one pass."""
        for name, tensor in changes.get("tensors", {}).items():
            path, _, key = name.rpartition(".")
            attributes = vars(self._find(path))
            kind = attributes["_parameters" if key in attributes["_parameters"] else "_buffers"]
            if key not in kind:
                raise BatchbayesError(
                    expected=f"a network with the tensor {name}",
                    got=f"a {type(self._find(path)).__name__} without it in its place",
                    fix="fit again after you change the network",
                )
            kind[key] = tensor
        for name, see in changes.get("before", {}).items():
            self._with_own_hooks(name).register_forward_pre_hook(partial(_before, see), with_kwargs=True)
        for name, replace in changes.get("instead", {}).items():
            found = self._with_own_hooks(name)
            found.register_forward_pre_hook(
                _do_nothing
            )  # torch's short cut for transformers skips modules without hooks
            vars(found)["forward"] = partial(_instead, replace)
        for part in self._parts:
            part.adapt(changes.get("dropout", False))

    def _find(self, name: str) -> nn.Module:
        """Return the module of a name, as `plain_name` writes it."""
        if name not in self._by_name:
            found: Any = self.module
            for part in name.split(".") if name else ():
                found = found._modules[part]
                found = getattr(found, "_orig_mod", found)
            self._by_name[name] = found
        return self._by_name[name]

    def _with_own_hooks(self, name: str) -> nn.Module:
        """Return a module with its own hook registries, so that new hooks do not reach the user's module."""
        module = self._find(name)
        attributes = vars(module)
        for kind in _FORWARD_HOOKS:
            self._hooked.append((attributes, kind, attributes[kind]))
            attributes[kind] = attributes[kind].copy()
        return module


class _Part:
    """One of the user's modules, and the module that passes run on in its place."""

    __slots__ = ("_changing", "_children", "_contents", "_is_copy", "_module", "_own", "_theirs")

    def __init__(self, theirs: nn.Module, ours: nn.Module) -> None:
        self._module, self._is_copy = ours, theirs is not ours
        self._theirs = vars(theirs) if theirs is not ours else vars(theirs).copy()
        self._children = tuple(theirs._modules.values())
        shared = self._theirs.keys() & (TENSORS | {"training"})
        self._own = {n: v for n, v in vars(ours).items() if v is not self._theirs.get(n, _MISSING) and n not in shared}
        """Attributes that belong to the copy. All others are shared with the user's module."""
        copied = [n for n in vars(ours).keys() - TORCH if n in self._own or type(vars(ours)[n]) in _CONTAINERS]
        self._contents = tuple(_Container(self._theirs[n], vars(ours)[n], n) for n in copied if n in self._theirs)
        """Containers and other objects in attributes that were copied: some layers keep results of a pass there."""
        self._changing: dict[str, Tensor | None] | None = None
        """Large buffers that the module changed in the first pass. A pass works on copies of them and of small ones."""

    def is_outdated(self) -> bool:
        """Whether the user has replaced a child module or changed a container since the copy was made."""
        if tuple(self._theirs["_modules"].values()) != self._children:
            return True
        return any(container.is_outdated(self._theirs) for container in self._contents)

    def begin(self, *, first: bool) -> None:
        """Take over the user's present tensors and attributes, and set evaluation mode."""
        self.put_back()
        ours, buffers = vars(self._module), self._theirs["_buffers"].copy()
        guarded = buffers and not isinstance(self._module, _NormBase)  # which changes no buffers in evaluation mode
        for name, buffer in tuple(buffers.items()) if first or guarded else ():
            small = buffer is not None and buffer.numel() <= _SMALL
            if buffer is not None and (first or small or name in (self._changing or ())):
                buffers[name] = buffer.clone()
        if first:
            self._changing = buffers.copy()
        ours["training"], ours["_parameters"], ours["_buffers"] = False, self._theirs["_parameters"].copy(), buffers

    def begin_training(self) -> None:
        """Take over the user's present tensors, attributes and mode. Changes of buffers reach the user's module."""
        self.put_back()
        ours, theirs = vars(self._module), self._theirs
        ours["training"], ours["_parameters"], ours["_buffers"] = (
            theirs["training"],
            theirs["_parameters"].copy(),
            theirs["_buffers"],
        )

    def adapt(self, dropout: bool) -> None:
        """Make the changes that depend on the kind of module."""
        if dropout and isinstance(self._module, _DropoutNd):
            vars(self._module)["training"] = True
        elif isinstance(self._module, nn.RNNBase):
            weights = [getattr(self._module, name) for name in self._module._flat_weights_names]
            vars(self._module)["_flat_weights"] = weights

    def find_changing_buffers(self) -> None:
        """Look which buffers the first pass changed. It ran on copies of all of them."""
        theirs = self._theirs["_buffers"]
        pairs = [(name, theirs.get(name), copied) for name, copied in (self._changing or {}).items()]
        self._changing = {n: None for n, own, copied in pairs if _is_changed(own, copied)} or None

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
        ours = self._ours if type(self._ours) in _CONTAINERS else vars(self._ours)
        ours.clear()
        if isinstance(ours, dict):
            ours.update(zip(content[::2], content[1::2], strict=True))
        else:
            (ours.extend if isinstance(ours, list) else ours.update)(content)


def _is_changed(before: Tensor | None, after: Tensor | None) -> bool:
    return before is not None and after is not None and not torch.equal(before, after)


def _content(value: Any) -> tuple[Any, ...]:
    """Return what a container holds, or the attributes of an object with names and values in turn."""
    if type(value) in (list, set):
        return tuple(value)
    if type(value) is not dict:
        if callable(value) or not hasattr(value, "__dict__"):
            return ()
        value = vars(value)
    return tuple(part for item in value.items() for part in item)


def _same(first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
    return len(first) == len(second) and all(a is b for a, b in zip(first, second, strict=True))


def _before(
    see: Callable[[Tensor], Tensor | None], _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    other = see(input_of(args, named))
    if other is None:
        return None
    return ((other, *args[1:]), named) if args else (args, {**named, "input": other})


def _do_nothing(*_: object) -> None:
    """A hook without effect."""


def _instead(replace: Callable[[Tensor], Tensor], *args: Any, **named: Any) -> Tensor:
    return replace(input_of(args, named))


def input_of(args: tuple[Any, ...], named: Mapping[str, Any]) -> Tensor:
    """Return the input of a module, which it may get by position or by name."""
    return args[0] if args else named["input"]
