"""A user's network as a pure function from inputs to outputs.

The user's own modules are never run and never changed: each pass runs on the calling thread's shadow of the network
(see `shadow.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from batchbayes.errors import BatchbayesError, warn
from batchbayes.shadow import input_of, is_wrapper, plain_name, why_in_place, workplace

Function = Callable[[Tensor], Tensor]
"""One drawn network: a deterministic function from inputs (N, ...) to outputs (N, ...)."""


@dataclass(frozen=True, eq=False)
class Network:
    """A module that is called in evaluation mode, and the name of the output that counts if it returns several."""

    module: nn.Module
    output: str | int | None = None

    def __call__(
        self,
        inputs: Tensor,
        *,
        tensors: Mapping[str, Tensor | None] | None = None,
        before: Mapping[str, Callable[[Tensor], Tensor | None]] | None = None,
        instead: Mapping[str, Function] | None = None,
        dropout: bool = False,
    ) -> Tensor:
        """Run the network on inputs (N, ...), and return its outputs (N, ...).

        Args:
            inputs: the inputs.
            tensors: parameters or buffers to use instead of the network's own, by their full names. A batch-norm layer
                whose running statistics are None normalises by the statistics of its batch.
            before: functions by name of module. Each gets the input of its module before the module runs. If it
                returns a tensor, the module gets that tensor instead.
            instead: functions by name of module. Each gets the input of its module, and its result takes the place of
                the module's output. The user's own hooks see that result.
            dropout: whether dropout modules are active, as in training.
        """
        with workplace(self.module) as place:
            place.prepare(tensors or {}, before or {}, instead or {}, dropout)
            outputs = pick_output(place.module(inputs), self.output)
        if outputs.shape[:1] != inputs.shape[:1]:
            raise BatchbayesError(
                expected=f"outputs of shape ({len(inputs)}, ...), one row for each example",
                got=f"shape {tuple(outputs.shape)}",
                fix="wrap the network so that its output has one row for each example",
            )
        return outputs

    @property
    def device(self) -> torch.device:
        """The device of the first parameter or buffer; the CPU if the network has neither."""
        return reference_tensor(self.module).device

    def __repr__(self) -> str:
        return type(self.module).__name__ + (" (in place)" if why_in_place(self.module) else "")


def as_network(model: nn.Module, output: str | int | None = None) -> Network:
    """Wrap a user's model without copying it. DataParallel and torch.compile wrappers are taken off."""
    if not isinstance(model, nn.Module):
        raise BatchbayesError(
            expected="a torch.nn.Module",
            got=type(model).__name__,
            fix="pass the network itself, not its output",
        )
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(original := getattr(model, "_orig_mod", None), nn.Module):  # torch.compile
            model = original
        else:
            break
    lazy = [type(m).__name__ for m in model.modules() if any(map(is_lazy, m.parameters(recurse=False)))]
    if lazy:
        raise BatchbayesError(
            expected="a network whose parameters all have a shape",
            got=f"lazy modules that have never run: {', '.join(lazy[:6])}",
            fix="run one forward pass, and load the weights, before you pass the network",
        )
    if why := why_in_place(model):
        warn(
            f"{type(model).__name__} cannot be copied: {why}. Passes therefore run inside the network itself, one "
            "thread at a time, and put everything back. Do not call the network from other threads meanwhile."
        )
    return Network(model, output)


def reference_tensor(module: nn.Module) -> Tensor:
    """Return the first floating-point parameter or buffer: it tells the module's dtype and device."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            return tensor
    return torch.empty(0)


def pick_output(outputs: object, name: str | int | None) -> Tensor:
    """Return the tensor that the user named among the outputs of the network."""
    if name is None and isinstance(outputs, Tensor):
        return outputs
    if name is not None and not isinstance(outputs, Tensor):
        try:
            picked = outputs[name]  # type: ignore[index]
        except (KeyError, IndexError, TypeError) as error:
            raise BatchbayesError(
                expected=f"a network output named {name!r}", got=_describe(outputs), fix="name one of these"
            ) from error
        if isinstance(picked, Tensor):
            return picked
        outputs = picked
    wanted = "one output tensor" if name is None else f"a tensor as output {name!r}"
    fix = "drop output=" if isinstance(outputs, Tensor) else 'name the output, as in output="logits" or output=0'
    raise BatchbayesError(expected=wanted, got=_describe(outputs), fix=fix)


def _describe(outputs: object) -> str:
    if isinstance(outputs, Mapping):
        return f"a {type(outputs).__name__} with keys {sorted(map(str, outputs))}"
    if isinstance(outputs, list | tuple):
        return f"a {type(outputs).__name__} of {len(outputs)} ({', '.join(type(o).__name__ for o in outputs)})"
    return f"a single {type(outputs).__name__}"


def modules_by_name(module: nn.Module, kind: type | tuple[type, ...] = nn.Module) -> dict[str, Any]:
    """Return the modules of a kind by name, each once. A part that was compiled keeps the name that it had before."""
    return {plain_name(name): m for name, m in module.named_modules() if isinstance(m, kind) and not is_wrapper(m)}


@contextmanager
def inputs_watched(modules: Mapping[str, nn.Module], see: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call `see(name, input)` whenever one of the user's own modules runs inside the block, as in training."""

    def hook(name: str, _: nn.Module, args: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        see(name, input_of(args, named))

    handles = [m.register_forward_pre_hook(partial(hook, name), with_kwargs=True) for name, m in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def require_layout(
    module: nn.Module, saved: Sequence[Sequence[object]], own: Sequence[Sequence[object]], what: str, row: str
) -> None:
    """Refuse a network whose layers are not those that a file describes. `row` puts one layer into words."""
    if (kept := [tuple(r) for r in saved]) != (found := [tuple(r) for r in own]):
        parts = [f"{len(found)} {what} layers where the file has {len(kept)}"] if len(found) != len(kept) else []
        parts += ["no " + row.format(*r) for r in [r for r in kept if r not in found][:3]]
        parts += ["an unknown " + row.format(*r) for r in [r for r in found if r not in kept][:3]]
        raise BatchbayesError(
            expected="the network that the posterior was fitted to",
            got=f"{type(module).__name__}: {'; '.join(parts) or 'the same layers in another order'}",
            fix="build the same network, load its weights, and pass that",
        )
