"""A user's network as a pure function. This module alone touches modes, buffers and hooks, and puts all back.

Every change is made inside a context manager and undone in its `finally`, so that an error, Ctrl-C or a
generator left half-way leaves the user's network bit-identical: parameters, buffers, modes, hooks, requires_grad.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from batchbayes.errors import BatchbayesError

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Network:
    """A module called in evaluation mode, and the name of the output that counts when it returns several."""

    module: nn.Module
    output: str | int | None = None

    def __call__(self, inputs: Tensor) -> Tensor:
        with evaluation_mode(self.module):
            outputs = pick_output(self.module(inputs), self.output)
        if outputs.shape[:1] != inputs.shape[:1]:
            raise BatchbayesError(
                expected=f"outputs of shape ({len(inputs)}, ...), one row an example",
                got=f"shape {tuple(outputs.shape)}",
                fix="wrap the network so that its output has one row an example",
            )
        return outputs

    def device(self) -> torch.device:
        """Where the network lives (its first parameter or buffer); the CPU if it has neither."""
        return reference_tensor(self.module).device


def as_network(model: nn.Module, output: str | int | None = None) -> Network:
    """Wrap a user's model: DataParallel and torch.compile wrappers are taken off, the module is not copied."""
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
            return Network(model, output)


def reference_tensor(module: nn.Module) -> Tensor:
    """The first floating-point parameter or buffer: the module's dtype and device."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            return tensor
    return torch.empty(0)


def pick_output(outputs: object, name: str | int | None) -> Tensor:
    """The tensor that the user named among what the network returned."""
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


@contextmanager
def evaluation_mode(module: nn.Module, *, dropout: bool = False) -> Iterator[None]:
    """Evaluation mode everywhere, but for dropout modules if asked; compiled parts run eagerly.

    Compiled code is specialised to the modes and buffers it has seen, and each draw changes buffers: running it
    eagerly avoids a recompilation a draw.
    """
    modules = list(module.modules())
    changed = [m for m in modules if m.training != (dropout and isinstance(m, _DropoutNd))]
    compiled = any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in modules)
    with ExitStack() as stack:
        stack.enter_context(_attributes_kept(modules))
        if compiled:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            for m in changed:
                m.training = not m.training
            yield
        finally:
            for m in changed:
                m.training = not m.training


_REGISTRIES = frozenset(vars(nn.Module()))
"""What torch itself keeps in a module: parameters, buffers, children, hooks, the mode."""


@contextmanager
def _attributes_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put back what modules note down in attributes of their own while they run.

    Some attention layers memoise what they derive from their weights while in evaluation mode, and forget it when
    `train()` is called. We flip modes without that call, so a note of ours would outlive the weights it came from.
    """
    kept: list[tuple[nn.Module, dict[str, object]]] = []
    contents: list[tuple[Any, Any]] = []
    for m in modules:
        plain = {name: vars(m)[name] for name in vars(m).keys() - _REGISTRIES}
        kept.append((m, plain))
        contents += [(value, value.copy()) for value in plain.values() if type(value) in (dict, list, set)]
    try:
        yield
    finally:
        for m, plain in kept:
            attributes = vars(m)
            for name in attributes.keys() - plain.keys() - _REGISTRIES:
                del attributes[name]
            attributes.update(plain)
        for container, content in contents:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(content)


@contextmanager
def statistics_in_place(
    layers: Iterable[_BatchNorm], statistics: Iterable[tuple[Tensor | None, Tensor | None]]
) -> Iterator[None]:
    """Let each layer normalise by the given (mean, biased variance); by its batch's own where they are None.

    A batch-norm layer in evaluation mode that has no running statistics uses those of the batch, and writes
    nothing: a training-mode forward pass without its side effects.
    """
    kept: list[tuple[_BatchNorm, Tensor | None, Tensor | None]] = []
    try:
        for layer, (mean, variance) in zip(layers, statistics, strict=True):
            kept.append((layer, layer.running_mean, layer.running_var))
            layer.running_mean, layer.running_var = mean, variance
        yield
    finally:
        for layer, mean, variance in reversed(kept):
            layer.running_mean, layer.running_var = mean, variance


class affine_batch_norm(TorchFunctionMode):  # noqa: N801
    """Inside the block, batch norm by given statistics is the multiplication and addition that it comes to.

    Torch's own backward pass of it reads the input again for gradients that nobody asked for: three times as slow.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.batch_norm or kwargs.get("training"):
            return func(*args, **kwargs)
        return _affine(*args, **kwargs) if args[0].dtype == args[2].dtype else func(*args, **kwargs)


def _affine(
    inputs: Tensor,
    mean: Tensor,
    variance: Tensor,
    *,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    **_: object,
) -> Tensor:
    """What `torch.nn.functional.batch_norm` returns in evaluation mode; the parameters are constants."""
    scale = (variance + eps).rsqrt()
    scale = scale if weight is None else scale * weight.detach()
    shift = -mean * scale if bias is None else bias.detach() - mean * scale
    shape = (-1, *[1] * (inputs.ndim - 2))
    return torch.addcmul(shift.view(shape), inputs, scale.view(shape))


def _see(
    see: Callable[[str, Tensor], Tensor | None],
    name: str,
    _: nn.Module,
    args: tuple[Tensor, ...],
    named: dict[str, Tensor],
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]] | None:
    other = see(name, args[0] if args else named["input"])
    if other is None:
        return None
    return ((other, *args[1:]), named) if args else (args, {**named, "input": other})


@contextmanager
def inputs_seen(layers: Mapping[str, nn.Module], see: Callable[[str, Tensor], Tensor | None]) -> Iterator[None]:
    """Call `see(name, input)` whenever a layer is about to run; a tensor it returns takes the input's place."""
    with ExitStack() as stack:
        for name, layer in layers.items():
            handle = layer.register_forward_pre_hook(partial(_see, see, name), with_kwargs=True)
            stack.callback(handle.remove)
        yield


@contextmanager
def outputs_replaced(layers: Mapping[str, nn.Module], replace: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """Let each layer return `replace(name, input)`, whatever it computes itself; the user's own hooks see that."""

    def hook(name: str, _: nn.Module, args: tuple[Tensor, ...], named: dict[str, Tensor], __: object) -> Tensor:
        return replace(name, args[0] if args else named["input"])

    with ExitStack() as stack:
        for name, layer in layers.items():
            handle = layer.register_forward_hook(partial(hook, name), prepend=True, with_kwargs=True)
            stack.callback(handle.remove)
        yield
