"""Replicas: copies of a network that share its tensors. Passes run on one of them; the user's own modules never run.

A replica copies the module tree. It shares parameters, statistics of batch norm and tensors in attributes with the
user's network, so it costs no memory for weights, and it follows later changes of them. It owns everything else: modes,
other buffers, attributes, and the tensors that replace the network's own during a pass. A thread borrows a replica,
patches it, runs it, undoes the patch and gives it back to a pool. A replica that a pass has changed otherwise, that was
interrupted, or whose network the user has changed, is thrown away, and the next pass gets a new one.

A call of a public function looks for changes by the user once, at its start, and keeps its replicas from pass to pass
(`one_call`).
"""

import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import is_, is_not
from typing import Any, Self, TypedDict

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils import parametrize

from batchbayes.errors import BatchbayesError
from batchbayes.network.copies import TORCH, copy_modules, is_wrapper, plain_name, require_apart

_FORWARD_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
_SHORT_CUTS = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
"""Modules of torch that do not call the modules inside them, if these have no hooks."""
_SMALL = 4096
"""Buffers of at most this many numbers are compared, the others by torch's counter of changes."""
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
    its statistics, which change in the network itself. Tensors stay in place until the next pass, because a backward
    pass may run modules again."""


class _Call:
    """What a call of a public function has made ready: it is done once, not in each pass."""

    def __init__(self, only: tuple[nn.Module, ...]) -> None:
        self.only = only
        self.replicas: weakref.WeakKeyDictionary[nn.Module, Replica] = weakref.WeakKeyDictionary()
        """A draw may make a network that lives no longer than the draw."""
        self.met: dict[tuple[int, ...], tuple[object, ...]] = {}
        """What was looked at, by identity; the objects are kept, so that no other gets the same identity."""


class _Latest(threading.local):
    call: _Call | None = None


_LATEST = _Latest()
_POOLS: "weakref.WeakKeyDictionary[nn.Module, list[Replica]]" = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


@contextmanager
def one_call(*only: nn.Module) -> Iterator[None]:
    """Inside the block, networks stay ready between passes, and changes by the user are looked for once, at the start.

    The block belongs to one thread. If code of the user's runs inside, other than that of networks, say which networks
    stay ready: some that the user cannot reach. A block inside another one looks for changes by itself.
    """
    before, _LATEST.call = _LATEST.call, _Call(only)
    own = _LATEST.call
    try:
        yield
    finally:
        _LATEST.call = before
        for module, replica in own.replicas.items():
            replica.rest()  # a fit is over, and no backward pass needs its tensors any more
            _give_back(module, replica)


def first_time(*objects: object) -> bool:
    """Whether these objects are met for the first time in this call. Outside of a call each time is the first."""
    call = _LATEST.call
    if call is None or call.only:
        return True
    key = tuple(map(id, objects))
    is_new = key not in call.met
    if is_new:
        call.met[key] = objects
    return is_new


class Lent:
    """A replica with changes, for the length of a block; `module` is what runs."""

    def __init__(self, network: nn.Module, changes: Changes, *, again_and_again: bool = False) -> None:
        self._network, self._changes, self._is_kept = network, changes, again_and_again
        self._own_modes = changes.get("own_modes", False)

    def __enter__(self) -> Self:
        self._call = _call_of(self._network)
        self._replica = replica = _borrowed(self._network, self._call, self._own_modes)
        self.module = replica.module
        replica.patch(self._changes)
        if self._is_kept:
            self._replica.note()
        return self

    def again(self) -> None:
        """Make ready for another pass with the same changes."""
        if not self._replica.is_ready():
            self.__exit__(None)
            self.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return  # thrown away: nobody knows what it holds
        self._replica.undo()
        call = self._call
        if call is None or self._is_kept or self._network in call.replicas:
            _give_back(self._network, self._replica)
        else:
            call.replicas[self._network] = self._replica


def _call_of(module: nn.Module) -> _Call | None:
    """Return the call in which this network stays ready."""
    call = _LATEST.call
    return call if call is None or not call.only or any(module is each for each in call.only) else None


def _borrowed(module: nn.Module, call: _Call | None, own_modes: bool) -> "Replica":
    """Return a replica that no other thread and no other pass has: that of this call, one of the pool, or a new one."""
    replica = None if call is None else call.replicas.pop(module, None)
    if replica is not None:
        if replica.own_modes == own_modes and replica.is_ready():
            return replica
        _give_back(module, replica)
    replica = _from_pool(module)
    replica.begin(own_modes)
    if call is not None:
        replica.note()
    return replica


def _from_pool(module: nn.Module) -> "Replica":
    """Return a replica that is as the network is now. The pool may hold others, which end here."""
    pool, latest = _POOLS.get(module), None
    while pool:
        try:
            latest = pool.pop()
        except IndexError:  # another thread was faster
            break
        if latest.is_current():
            return latest
    return Replica(module, latest)


def _give_back(module: nn.Module, replica: "Replica") -> None:
    if not replica.own_modes:  # else tensors stay, as long as a backward pass may need them
        replica.rest()
    with _LOCK:
        _POOLS.setdefault(module, []).append(replica)


class Replica:
    """A copy of a network, and what it holds at rest."""

    def __init__(self, network: nn.Module, latest: "Replica | None" = None) -> None:
        copies = copy_modules(network)
        own = [m for m in network.modules() if not is_wrapper(m)]
        self.module = copies[id(network)]
        self._pairs = [(vars(m), vars(copies[id(m)])) for m in own]
        """The attributes of each of the user's modules, and those of the copy."""
        self._with_buffers = [pair for m, pair in zip(own, self._pairs, strict=True) if _may_change_buffers(m)]
        self._told = [m for m in copies.values() if isinstance(m, _DropoutNd | nn.RNNBase)]
        self._takes_short_cuts = any(isinstance(m, _SHORT_CUTS) for m in own)
        self._ties = _names_of_tied(network)
        self._by_name: dict[str, nn.Module] = {}
        self._registries: dict[str, tuple[dict[str, Any], str, str]] = {}
        """Where each tensor was found: attributes of its module, the name of the registry there, and its key."""
        self._replaced: list[_Old] = []
        """What this pass has replaced, but for tensors."""
        self._tensors: list[_Old] = []
        self._noted: list[tuple[dict[str, Any], tuple[Any, ...]]] = []
        """What attributes and registries held when a pass began."""
        self._empty: list[dict[str, Any]] = []
        """Those that held nothing."""
        self._cloned: list[tuple[Tensor, Tensor, int]] = []
        """Copies of buffers that passes may change, with the user's, and the number of changes at the start."""
        self.own_modes = False
        self.rest()
        self._theirs = [(theirs, tuple(theirs.values()), theirs["training"]) for theirs, _ in self._pairs]
        self._ours = [(ours, ours.copy()) for _, ours in self._pairs]
        held = [both for pair in self._pairs for both in _held_apart(*pair)]
        self._our_contents = [(ours, _content(ours)) for _, ours in held]
        self._their_contents = [(theirs, _content(theirs)) for theirs, _ in held]
        self._their_contents += [(m._modules, _content(m._modules)) for m in own]
        if latest is None or not latest.is_followed():
            require_apart(network, copies)

    def is_followed(self) -> bool:
        """Whether the user's modules have the attributes, children and containers that they had at the copy."""
        for theirs, values, training in self._theirs:
            others = theirs["training"] is not training
            if len(theirs) != len(values) or sum(map(is_not, theirs.values(), values)) != others:
                return False
        return all(_same(_content(each), content) for each, content in self._their_contents)

    def is_current(self) -> bool:
        """Whether a call may begin here, after attributes have got back what passes have changed in them."""
        if self.own_modes:
            self.rest()
        for held, saved in self._ours:
            if not _same(held.values(), saved.values()):
                held.clear()
                held.update(saved)
        return all(_same(_content(each), content) for each, content in self._our_contents) and self.is_followed()

    def rest(self) -> None:
        """Hold no tensor that is not the user's, in registries that are the user's, and evaluation mode."""
        _undo(self._tensors)
        self._noted, self._empty, self._cloned = [], [], []
        for theirs, ours in self._pairs:
            ours["training"] = False
            ours["_parameters"], ours["_buffers"] = theirs["_parameters"], theirs["_buffers"]

    def begin(self, own_modes: bool) -> None:
        """Take over the user's present tensors, and their modes for training."""
        self.own_modes = own_modes
        for theirs, ours in self._pairs:
            ours["_parameters"] = theirs["_parameters"].copy()
            if own_modes:
                ours["training"] = theirs["training"]
            else:
                ours["_buffers"] = theirs["_buffers"].copy()
        for theirs, ours in () if own_modes else self._with_buffers:
            for name, buffer in theirs["_buffers"].items():
                if buffer is not None:
                    clone = ours["_buffers"][name] = buffer.clone()
                    self._cloned.append((clone, buffer, version_of(clone)))

    def note(self) -> None:
        """Note what everything holds now."""
        every = [held for _, ours in self._pairs for held in (ours, ours["_parameters"], ours["_buffers"])]
        self._noted = [(held, tuple(held.values())) for held in every if held]
        self._empty = [held for held in every if not held]

    def is_ready(self) -> bool:
        """Whether another pass of this call may begin here: nothing has changed since everything was noted."""
        if self.own_modes:
            _undo(self._tensors)
            for theirs, ours in self._pairs:
                ours["training"] = theirs["training"]
        if any(self._empty):
            return False
        for held, values in self._noted:
            if len(held) != len(values) or not all(map(is_, held.values(), values)):
                return False
        for each, content in self._our_contents:
            if not _same(_content(each), content):
                return False
        for clone, buffer, version in self._cloned:
            if version_of(clone) != version or (clone.numel() <= _SMALL and not torch.equal(clone, buffer)):
                return False
        return True

    def patch(self, changes: Changes) -> None:
        """Make the changes of one pass."""
        given = changes.get("tensors", {})
        if parametrize._cache_enabled and any("parametrizations." in name for name in given):
            got = "a call inside of it, where torch gives every draw the weights of the first"
            fix = "end that block before you fit or predict"
            raise BatchbayesError("random weights outside of torch.nn.utils.parametrize.cached()", got, fix)
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
        for m in self._told:
            if isinstance(m, nn.RNNBase):
                self._replace(vars(m), "_flat_weights", [getattr(m, name) for name in m._flat_weights_names])
            elif changes.get("dropout", False):
                self._replace(vars(m), "training", True)

    def undo(self) -> None:
        """Undo the changes of a pass, but for tensors in training. A pass that runs late updates no statistics."""
        if self._replaced:
            _undo(self._replaced)
        if not self.own_modes:
            _undo(self._tensors)
            return
        for _, ours in self._pairs:
            ours["training"] = False

    def _tied(self, given: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Return the tensors for other names of the parameters that are given by one of their names."""
        return {other: t for name, t in given.items() for other in self._ties.get(name, ()) if self._same(other, name)}

    def _same(self, first: str, second: str) -> bool:
        """Whether two names are still names of one tensor."""
        (one, key), (other, other_key) = self._place_of(first), self._place_of(second)
        return one[key] is other[other_key]

    def _place_of(self, name: str) -> tuple[dict[str, Tensor | None], str]:
        """Return the registry that holds a tensor, and its key there."""
        if name not in self._registries:
            path, _, key = name.rpartition(".")
            module = self._find(path)
            self._registries[name] = vars(module), "_parameters" if key in module._parameters else "_buffers", key
        attributes, kind, key = self._registries[name]
        if key not in attributes[kind]:
            raise _changed_network(f"the tensor {name}", self._find(name.rpartition(".")[0]))
        return attributes[kind], key

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

    def _replace(self, attributes: dict[str, Any], name: str, value: Any) -> None:
        self._replaced.append((attributes, name, attributes.get(name, _MISSING)))
        attributes[name] = value

    def _with_own_hooks(self, name: str) -> nn.Module:
        """Return a module with its own hook registries, so that new hooks do not reach the user's module."""
        module = self._find(name)
        attributes = vars(module)
        for kind in _FORWARD_HOOKS:
            self._replace(attributes, kind, attributes[kind].copy())
        return module


_Old = tuple[dict[str, Any], str, Any]
"""Attributes of a module or one of its registries, the name of an entry, and its old value."""


def _undo(replaced: list[_Old]) -> None:
    """Put old values back, the latest first."""
    for attributes, name, value in reversed(replaced):
        if value is _MISSING:
            attributes.pop(name, None)
        else:
            attributes[name] = value
    replaced.clear()


def _may_change_buffers(module: nn.Module) -> bool:
    """Whether a module has buffers that it may change in evaluation mode. Torch's own batch norm changes none."""
    torch_s = isinstance(module, _NormBase) and type(module).__module__.startswith("torch.nn.")
    return bool(module._buffers) and not torch_s


def version_of(tensor: Tensor) -> int:
    """Return the number of in-place changes of a tensor so far. Tensors of inference mode do not count them."""
    return 0 if tensor.is_inference() else tensor._version


def _held_apart(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield containers and objects in attributes of both modules: some layers keep results of a pass there."""
    for name, value in ours.items():
        own = value is not theirs.get(name) and name not in ("training", "_modules")
        if name in theirs and (own or (name not in TORCH and isinstance(value, dict | list | set))):
            yield theirs[name], value


def _content(value: Any) -> tuple[Any, ...]:
    """Return what a container holds, or the attributes of an object with names and values in turn."""
    if isinstance(value, list | set):
        return tuple(value)
    if not isinstance(value, dict):
        value = {} if callable(value) else getattr(value, "__dict__", {})
    return (*value, *value.values())


def _same(first: Collection[Any], second: Collection[Any]) -> bool:
    return len(first) == len(second) and all(map(is_, first, second))


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
