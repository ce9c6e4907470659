"""The modules that passes run on: what is different in a pass, and how it is put back.

A place may stay ready after a pass. Then the next pass costs little: only what was different is taken out, and if the
network has changed nothing by itself, nothing else is done.
"""

from collections.abc import Callable, Mapping
from functools import partial
from operator import is_
from typing import Any, Self, TypedDict

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from batchbayes.errors import BatchbayesError, warn
from batchbayes.network.copies import Part, is_wrapper, plain_name

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
_NOWHERE: tuple[dict[str, Any], str, str] = {"nothing": {}}, "nothing", ""


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
        self._registries: dict[str, tuple[dict[str, Any], str, str]] = {}
        """Where each tensor was found: attributes of its module, the name of the registry there, and its key."""
        self._ties = _names_of_tied(module)
        self._replaced: list[tuple[dict[str, Any], str, Any]] = []
        """What this pass has replaced: attributes of a module, the name of one, and its old value."""
        self._tensors: list[tuple[dict[str, Any], str, Any]] = []
        """The same for tensors. In training they stay until the next pass, because the backward pass may need them."""
        self._noted: list[tuple[dict[str, Any], tuple[Any, ...]]] = []
        """What modules held when everything was ready, to find out whether a pass has changed it."""
        self._empty: list[dict[str, Any]] = []
        """The same, of those that held nothing."""
        self._containers: list[Any] = []
        self._first, self._is_ready = True, False
        self.in_use = False
        """Whether a pass is running here, or was interrupted."""
        self._copying: list[Part] = []
        """Modules that get new copies of their buffers for each pass."""
        self.own_modes = False
        self.stays_open = False
        """Whether everything stays ready after a pass, until `close` is called."""

    def is_usable(self) -> bool:
        """Whether a new pass can run here.

        It cannot if the user has changed modules or containers of the network since the copy was made, if this is a
        pass inside another one, or if the last pass was interrupted before it had put everything back.
        """
        return not self.in_use and not any(part.is_outdated() for part in self._parts)

    def set_modes(self, own_modes: bool) -> None:
        """Choose whether modules run in the modes of the user's, and changes of buffers stay."""
        if self.own_modes != own_modes and self._is_ready:
            self.put_back()
        self.own_modes = own_modes

    def __enter__(self) -> Self:
        self.in_use = True
        if self._is_ready and self.own_modes:
            _undo(self._tensors)
            for part in self._parts:
                part.ours["training"] = part.theirs["training"]
            self._is_ready = not self._is_disturbed()
        if self._is_ready:
            for part in self._copying:
                part.begin(first=False)
        else:
            self._begin()
        return self

    def _begin(self) -> None:
        """Take over what the user's modules hold."""
        for part in self._parts:
            if self.own_modes:
                part.begin_training()
            else:
                part.begin(first=self._first)
        self._tensors.clear()
        if self.stays_open:
            self.note()
        self._is_ready = self.stays_open

    def note(self) -> None:
        """Note what the modules hold now."""
        self._noted, self._empty, self._copying, self._containers = [], [], [], []
        for part in self._parts:
            if not self.own_modes and part.needs_copies:
                self._copying.append(part)
                continue
            for held in (part.ours, part.ours["_parameters"], part.ours["_buffers"]):
                if held:
                    self._noted.append((held, tuple(held.values())))
                else:
                    self._empty.append(held)
            self._containers += part.contents

    def _is_disturbed(self) -> bool:
        """Whether modules hold anything else than what was noted."""
        if any(self._empty):
            return True
        for held, values in self._noted:
            if len(held) != len(values) or not all(map(is_, held.values(), values)):
                return True
        return bool(self._containers) and any(container.is_changed() for container in self._containers)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        late: list[str] = []
        if kind is None and not self.own_modes:
            for part in self._copying if self._is_ready and not self._first else self._parts:
                late += part.find_changing_buffers()
        if kind is None and self._is_ready and (self.own_modes or not self._first) and self._tidy_up():
            self.in_use = False
        else:
            self.put_back()
            self._first = self._first and (kind is not None or self.own_modes)
        if late:
            warn(
                f"{type(self.module).__name__} has changed its own buffers while it predicted: {', '.join(late[:6])}. "
                "They are large, and it had not changed them in its first pass, so they were not copied. From now on "
                "they are. If their former values matter, load the weights again."
            )

    def _tidy_up(self) -> bool:
        """Take out what this pass has put in. Return whether everything is as it was before the pass."""
        if self._replaced:
            _undo(self._replaced)
        if self.own_modes:  # it is looked at when the next pass begins: a backward pass may run modules again
            for part in self._parts:
                part.ours["training"] = False
            return True
        for registry, key, own in reversed(self._tensors):
            registry[key] = own
        self._tensors.clear()
        for part in self._copying:
            part.put_back()
        return not self._is_disturbed()

    def again(self, changes: Changes) -> None:
        """Make the place ready for another pass with the same changes."""
        if self._first or self._copying or self._is_disturbed():
            self.__exit__(None)
            self.__enter__()
            self.prepare(changes)
            self.note()

    def close(self) -> None:
        """End what `stays_open` began. After a pass modules hold nothing that is not the user's, but for registries."""
        self.stays_open = False
        if self._is_ready and self.own_modes:
            self.put_back()
        elif self._is_ready:
            self._is_ready = False
            for part in self._parts:  # the user's own, which keep no tensor alive that the user replaces
                part.ours["_parameters"], part.ours["_buffers"] = part.theirs["_parameters"], part.theirs["_buffers"]
            self._noted, self._empty, self._containers = [], [], []

    def put_back(self) -> None:
        """Undo what a pass has changed."""
        _undo(self._replaced)
        self._tensors.clear()
        for part in self._parts:
            if self.own_modes:
                part.end_training()
            else:
                part.put_back()
        self._noted, self._empty, self._containers = [], [], []
        self.in_use = self._is_ready = False

    def prepare(self, changes: Changes) -> None:
        """Make the changes of one pass."""
        given = changes.get("tensors", {})
        if parametrize._cache_enabled and any("parametrizations." in name for name in given):
            raise BatchbayesError(
                expected="random weights outside of torch.nn.utils.parametrize.cached()",
                got="a call inside of it, where torch gives every draw the weights of the first",
                fix="end that block before you fit or predict",
            )
        if self._ties:
            given = {**self._tied(given), **given}
        for name, tensor in given.items():
            attributes, kind, key = self._registries.get(name, _NOWHERE)
            registry = attributes[kind]
            if key not in registry:
                registry, key = self._place_of(name)
            own = registry[key]
            self._tensors.append((registry, key, own))
            if own is not None and tensor is not None and (own.dtype != tensor.dtype or own.device != tensor.device):
                tensor = tensor.to(own)  # the user may have moved the network
            registry[key] = tensor
        for name, see in changes.get("before", {}).items():
            self._with_own_hooks(name).register_forward_pre_hook(partial(_before, see), with_kwargs=True)
        for name, replace in changes.get("instead", {}).items():
            if self._takes_short_cuts:
                self._with_own_hooks(name).register_forward_pre_hook(_do_nothing)
            self._replace(vars(self._find(name)), "forward", partial(_instead, replace))
        for part in self._adaptable:
            if change := part.adapted(changes.get("dropout", False)):
                self._replace(part.ours, *change)

    def _tied(self, given: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Return the tensors for other names of the parameters that are given by one of their names."""
        return {other: t for name, t in given.items() for other in self._ties.get(name, ()) if self._same(other, name)}

    def _replace(self, attributes: dict[str, Any], name: str, value: Any) -> None:
        self._replaced.append((attributes, name, attributes.get(name, _MISSING)))
        attributes[name] = value

    def _place_of(self, name: str) -> tuple[dict[str, Tensor | None], str]:
        """Return the registry that holds a tensor, and its key there."""
        path, _, key = name.rpartition(".")
        module = self._find(path)
        registry: dict[str, Any] = module._parameters if key in module._parameters else module._buffers
        if key not in registry:
            raise _changed_network(f"the tensor {name}", module)
        self._registries[name] = vars(module), "_parameters" if registry is module._parameters else "_buffers", key
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


def _undo(replaced: list[tuple[dict[str, Any], str, Any]]) -> None:
    """Put old values back, the latest first."""
    for attributes, name, value in reversed(replaced):
        if value is _MISSING:
            attributes.pop(name, None)
        else:
            attributes[name] = value
    replaced.clear()


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
