"""Shadows: copies of a network that share its tensors, one for each thread that uses it.

A shadow copies the module tree. It shares every parameter and buffer with the user's network, so it costs no memory for
weights, and it follows later changes of the weights. It owns everything else: modes, hooks, attributes, and the tensors
that replace the network's own during a pass. So the user's network stays as it is, and threads do not disturb each
other.

Some networks cannot be copied: scripted modules, and networks in which a function or an object refers to a module in a
way that copying cannot follow (a closure, a weak reference, an object that refuses to be copied). Then passes run
inside the user's own modules, one thread at a time, and put everything back. `why_in_place` tells the reason.

A call of a public function looks for changes by the user once, at its start, and its shadows stay ready from pass to
pass (`one_call`).
"""

import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from batchbayes.errors import BatchbayesError
from batchbayes.network.copies import SHARED, copy_modules, is_wrapper, reachable
from batchbayes.network.workplace import Workplace

_LOCAL = threading.local()
_LOCK = threading.RLock()


class _Call:
    """What a call of a public function has made ready: it is done once, not in each pass."""

    def __init__(self, only: tuple[nn.Module, ...]) -> None:
        self.only = only
        self.places: weakref.WeakKeyDictionary[nn.Module, Workplace] = weakref.WeakKeyDictionary()
        """The places that stay ready between passes. A draw may make a network that lives no longer than the draw."""
        self.met: dict[tuple[int, ...], tuple[object, ...]] = {}
        """What was looked at, by identity; the objects are kept, so that no other gets the same identity."""


@contextmanager
def one_call(*only: nn.Module) -> Iterator[None]:
    """Inside the block, networks stay ready between passes, and changes by the user are looked for once, at the start.

    The block belongs to one thread. If code of the user's runs inside, other than that of networks, say which networks
    stay ready: some that the user cannot reach. A block inside another one looks for changes by itself.
    """
    before: _Call | None = getattr(_LOCAL, "call", None)
    own = _Call(only)
    _LOCAL.call = own
    try:
        yield
    finally:
        _LOCAL.call = before
        for place in own.places.values():
            place.close()


def first_time(*objects: object) -> bool:
    """Whether these objects are met for the first time in this call. Outside of a call each time is the first."""
    call: _Call | None = getattr(_LOCAL, "call", None)
    if call is None or call.only:
        return True
    key = tuple(map(id, objects))
    is_new = key not in call.met
    if is_new:
        call.met[key] = objects
    return is_new


def workplace(module: nn.Module, *, own_modes: bool = False) -> AbstractContextManager[Workplace]:
    """Give the calling thread a place to run the network: its own shadow, or the network itself under a lock."""
    call: _Call | None = getattr(_LOCAL, "call", None)
    place = None if call is None else call.places.get(module)
    if place is not None and not place.in_use:
        if place.own_modes != own_modes:
            place.set_modes(own_modes)
        return place
    shadow = _shadow_of(module)
    if isinstance(shadow, Workplace):
        shadow.close()  # if it stays ready for a call around this one
        shadow.set_modes(own_modes)
        if call is not None and place is None and (not call.only or any(module is each for each in call.only)):
            shadow.stays_open, call.places[module] = True, shadow
        return shadow
    if own_modes:
        raise BatchbayesError(
            expected="a network that can be copied, to train it with noise",
            got=f"{type(module).__name__}: {shadow}",
            fix="train a network of plain modules",
        )
    return _in_place(module)


@contextmanager
def _in_place(module: nn.Module) -> Iterator[Workplace]:
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


def _shadow_of(module: nn.Module) -> Workplace | str:
    """Return the calling thread's shadow of a network, made when first asked for, or why there can be none."""
    table = _LOCAL.__dict__.setdefault("shadows", weakref.WeakKeyDictionary())
    shadow = table.get(module)
    if shadow is None or (isinstance(shadow, Workplace) and not shadow.is_usable()):
        shadow = table[module] = _make_shadow(module)
    return shadow


def _make_shadow(module: nn.Module) -> Workplace | str:
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
