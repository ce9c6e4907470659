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
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Self, TypedDict

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from batchbayes.copying import SHARED, copy_modules, is_wrapper, plain_name, reachable
from batchbayes.errors import BatchbayesError, warn
from batchbayes.restoring import Part

_FORWARD_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
_SHORT_CUTS = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
"""Modules of torch that do not call the modules inside them, if these have no hooks."""
_MISSING = object()
_LOCAL = threading.local()
_LOCK = threading.RLock()


class Changes(TypedDict, total=False):
    """What is different in one pass through a network."""

    tensors: Mapping[str, Tensor | None]
    """Parameters or buffers to use instead of the network's own, by their full names. Each gets the dtype and device of
    the tensor that it replaces. If modules share a parameter, it is replaced in all of them. A batch-norm layer whose
    running statistics are None normalises by the statistics of its batch."""
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


def workplace(module: nn.Module, *, own_modes: bool = False) -> "AbstractContextManager[Workplace]":
    """Give the calling thread a place to run the network: its own shadow, or the network itself under a lock."""
    shadow = _shadow_of(module)
    if isinstance(shadow, Workplace):
        shadow.own_modes = own_modes
        return shadow
    if own_modes:
        raise BatchbayesError(
            expected="a network that can be copied, to train it with noise",
            got=f"{type(module).__name__}: {shadow}",
            fix="train a network of plain modules",
        )
    return _in_place(module)


@contextmanager
def _in_place(module: nn.Module) -> "Iterator[Workplace]":
    """Work inside the user's own modules. Everything is put back twice, in case Ctrl-C interrupts the first time."""
    with _LOCK:
        place = Workplace({id(m): m for m in module.modules()}, module)
        scripted = [(m, m.training) for m in module.modules() if isinstance(m, torch.jit.ScriptModule)]

        def put_back() -> None:
            place.put_back()
            for m, mode in scripted:  # parents come first, because train() sets the children too
                m.train(mode)

        try:
            for m, _ in scripted:  # their attributes cannot be set through vars()
                m.eval()
            with place:
                yield place
        finally:
            try:
                put_back()
            finally:
                put_back()


def why_in_place(module: nn.Module) -> str | None:
    """Return why a network cannot be copied; None if it can."""
    shadow = _shadow_of(module)
    return None if isinstance(shadow, Workplace) else shadow


def _shadow_of(module: nn.Module) -> "Workplace | str":
    """Return the calling thread's shadow of a network, made when first asked for, or why there can be none."""
    table = _LOCAL.__dict__.setdefault("shadows", weakref.WeakKeyDictionary())
    shadow = table.get(module)
    if shadow is None or (isinstance(shadow, Workplace) and not shadow.is_usable()):
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
        self._parts = [Part(m, copies[id(m)]) for m in own]
        self._adaptable = [part for part in self._parts if part.is_adaptable]
        self._takes_short_cuts = any(isinstance(m, _SHORT_CUTS) for m in own)
        self._by_name: dict[str, nn.Module] = {}
        self._ties = _names_of_tied(module)
        self._replaced: list[tuple[dict[str, Any], str, Any]] = []
        """What this pass has replaced: attributes of a module, the name of one, and its old value."""
        self._first, self._in_use = True, False
        self.own_modes = False
        """Whether modules run in the modes of the user's, and changes of buffers stay."""

    def is_usable(self) -> bool:
        """Whether a new pass can run here.

        It cannot if the user has changed modules or containers of the network since the copy was made, if this is a
        pass inside another one, or if the last pass was interrupted before it had put everything back.
        """
        return not self._in_use and not any(part.is_outdated() for part in self._parts)

    def __enter__(self) -> Self:
        self._in_use = True
        for part in self._parts:
            if self.own_modes:
                part.begin_training()
            else:
                part.begin(first=self._first)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        late: list[str] = []
        if kind is None and not self.own_modes:
            late = [name for part in self._parts for name in part.find_changing_buffers()]
            self._first = False
        self.put_back()
        if late:
            warn(
                f"{type(self.module).__name__} has changed its own buffers while it predicted: {', '.join(late[:6])}. "
                "They are large, and it had not changed them in its first pass, so they were not copied. From now on "
                "they are. If their former values matter, load the weights again."
            )

    def put_back(self) -> None:
        """Undo what a pass has changed."""
        for attributes, name, value in self._replaced:
            if value is _MISSING:
                attributes.pop(name, None)
            else:
                attributes[name] = value
        self._replaced.clear()
        for part in self._parts:
            if self.own_modes:
                part.end_training()
            else:
                part.put_back()
        self._in_use = False

    def prepare(self, changes: Changes) -> None:
        """Make the changes of one pass."""
        given = changes.get("tensors", {})
        if parametrize._cache_enabled and any("parametrizations." in name for name in given):
            raise BatchbayesError(
                expected="random weights outside of torch.nn.utils.parametrize.cached()",
                got="a call inside of it, where torch gives every draw the weights of the first",
                fix="end that block before you fit or predict",
            )
        tied = {other: t for name, t in given.items() for other in self._ties.get(name, ()) if self._same(other, name)}
        for name, tensor in {**tied, **given}.items():
            registry, key = self._place_of(name)
            registry[key] = _placed_like(registry[key], tensor)
        for name, see in changes.get("before", {}).items():
            self._with_own_hooks(name).register_forward_pre_hook(partial(_before, see), with_kwargs=True)
        for name, replace in changes.get("instead", {}).items():
            if self._takes_short_cuts:
                self._with_own_hooks(name).register_forward_pre_hook(_do_nothing)
            self._replace(vars(self._find(name)), "forward", partial(_instead, replace))
        for part in self._adaptable:
            part.adapt(changes.get("dropout", False))

    def _replace(self, attributes: dict[str, Any], name: str, value: Any) -> None:
        self._replaced.append((attributes, name, attributes.get(name, _MISSING)))
        attributes[name] = value

    def _place_of(self, name: str) -> tuple[dict[str, Tensor | None], str]:
        """Return the registry that holds a tensor, and its key there."""
        path, _, key = name.rpartition(".")
        attributes = vars(self._find(path))
        registry = attributes["_parameters" if key in attributes["_parameters"] else "_buffers"]
        if key not in registry:
            raise _changed_network(f"the tensor {name}", self._find(path))
        return registry, key

    def _same(self, first: str, second: str) -> bool:
        """Whether two names are still names of one tensor."""
        (one, key), (other, other_key) = self._place_of(first), self._place_of(second)
        return one[key] is other[other_key]

    def _find(self, name: str) -> nn.Module:
        """Return the module of a name, with or without the parts that torch.compile adds."""
        if name not in self._by_name:
            found: Any = self.module
            for part in plain_name(name).split(".") if name else ():
                found = found._modules.get(part)
                if found is None:
                    raise _changed_network(f"the module {name}", self.module)
                found = getattr(found, "_orig_mod", found)
            self._by_name[name] = found
        return self._by_name[name]

    def _with_own_hooks(self, name: str) -> nn.Module:
        """Return a module with its own hook registries, so that new hooks do not reach the user's module."""
        module = self._find(name)
        attributes = vars(module)
        for kind in _FORWARD_HOOKS:
            self._replace(attributes, kind, attributes[kind].copy())
        return module


def _changed_network(missing: str, found: nn.Module) -> BatchbayesError:
    return BatchbayesError(
        expected=f"a network with {missing}",
        got=f"a {type(found).__name__} without it in its place",
        fix="fit again after you change the network",
    )


def _names_of_tied(module: nn.Module) -> dict[str, list[str]]:
    """Return the names of each parameter that has several, by each of its names."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(plain_name(name))
    return {name: same for same in names.values() if len(same) > 1 for name in same}


def _placed_like(own: Tensor | None, tensor: Tensor | None) -> Tensor | None:
    """Give a tensor the dtype and device of the one that it replaces: the user may have moved the network."""
    if own is None or tensor is None or (own.dtype == tensor.dtype and own.device == tensor.device):
        return tensor
    return tensor.to(own)


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
