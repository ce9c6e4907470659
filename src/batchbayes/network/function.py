"""A user's network as a pure function from inputs to outputs.

The user's own modules are not run and not changed: each pass runs on a replica of the network (see `replicas.py`).
"""

import copy
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from batchbayes.errors import BatchbayesError, warn
from batchbayes.network.copies import is_wrapper, plain_name
from batchbayes.network.inputs import Inputs, Picker, Whole, as_it_is, tensors_of
from batchbayes.network.replicas import Changes, Lent, first_time, input_of
from batchbayes.network.staleness import WeightsThen

Function = Callable[[Any], Tensor]
"""One drawn network: a deterministic function from inputs (N, ...) to outputs (N, ...). The inputs are a tensor,
`inputs.Inputs` if the network takes several, or `inputs.Whole`, whose outputs have any number of rows."""

Output = str | int | Callable[[Any], Tensor] | None
"""Which output counts: a key, an attribute or a position, a function of what the network returns, or None."""


@dataclass(frozen=True, eq=False, repr=False)
class Network:
    """A module that is called in evaluation mode, and which output to use, if it returns several."""

    module: nn.Module
    output: Output = None
    then: WeightsThen | None = None
    """The weights when something was fitted to the network."""
    inputs: Picker = None
    """Where the inputs were in the batches of the fit."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out a function that no other program can import: it is asked for again where it is needed."""
        home = sys.modules.get(getattr(self.inputs, "__module__", ""))
        is_found = getattr(home, getattr(self.inputs, "__qualname__", ""), None) is self.inputs
        return {**vars(self), "inputs": self.inputs if is_found or not callable(self.inputs) else None}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Network":
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    def warn_if_changed(self) -> None:
        """Warn if the weights have changed since something was fitted to the network. Each change is told once."""
        if self.then is not None and first_time(self.then) and self.then.have_changed():
            warn(
                f"the weights of {type(self.module).__name__} have changed since the fit, and what was fitted belongs "
                "to the old ones: the spread and the scores may be wrong. Fit again, or load the old weights."
            )

    def __call__(self, inputs: Tensor | Inputs, **changes: Unpack[Changes]) -> Tensor:
        """Run the network on inputs (N, ...), and return its outputs (N, ...). `Changes` lists the options."""
        with Lent(self.module, changes) as lent:
            return self._run(lent.module, changes.get("tensors", {}), inputs)

    @contextmanager
    def running(self, inputs: Tensor | Inputs, **changes: Unpack[Changes]) -> Iterator[Tensor]:
        """Run the network as in a call, and keep everything in place inside the block.

        A backward pass belongs inside the block: a network with activation checkpoints runs parts of itself again.
        """
        with self.prepared(**changes) as run:
            yield run(inputs)

    @contextmanager
    def prepared(self, **changes: Unpack[Changes]) -> Iterator[Function]:
        """Make the changes once, for any number of passes inside the block."""
        passes = itertools.count()
        with Lent(self.module, changes, again_and_again=True) as lent:

            def next_pass(inputs: Tensor | Inputs) -> Tensor:
                if next(passes):
                    lent.again()
                return self._run(lent.module, changes.get("tensors", {}), inputs)

            yield next_pass

    def _run(self, module: nn.Module, tensors: Mapping[str, Tensor | None], inputs: Tensor | Inputs) -> Tensor:
        own = inputs.clone() if isinstance(inputs, Tensor) else as_it_is(inputs).map(torch.clone)
        count = None if isinstance(own, Whole) else own.shape[0] if isinstance(own, Tensor) else len(own)
        outputs = call_module(module, own, tensors)
        if self.output is not None or not isinstance(outputs, Tensor):
            outputs = pick_output(outputs, self.output)
        return _checked_outputs(
            outputs, count
        ).clone()  # the next pass may overwrite them: a network may use its output tensor again

    @property
    def device(self) -> torch.device:
        """The device of the first floating-point parameter or buffer."""
        return reference_tensor(self.module).device

    def __repr__(self) -> str:
        return type(self.module).__name__


def call_module(
    module: nn.Module, inputs: Tensor | Inputs | Whole, tensors: Mapping[str, Tensor | None] = MappingProxyType({})
) -> Any:
    """Return what a module returns for inputs. If it fails, raise an error that says for which inputs, and what to do.

    `tensors` are those that were put into the module instead of its own.
    """
    try:
        return module(inputs) if isinstance(inputs, Tensor) else module(*inputs.args, **inputs.named)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, NotImplementedError) as error:
        if isinstance(error, BatchbayesError | torch.OutOfMemoryError):
            raise
        raise _failed(module, inputs, tensors, error) from error


def _checked_outputs(outputs: Tensor, count: int | None) -> Tensor:
    """Check the rows of outputs, if their number is known, and their type."""
    if outputs.shape[:1] != (count,) and (count is not None or not outputs.ndim):
        expected = f"outputs of shape ({count or 'rows'}, ...), one row for each example"
        fix = "wrap the network so that its output has one row for each example"
        raise BatchbayesError(expected, f"shape {tuple(outputs.shape)}", fix)
    if not outputs.is_floating_point():
        fix = "return logits or means; name the right output by output= if there are several"
        raise BatchbayesError("real numbers as outputs of the network", f"{outputs.dtype}", fix)
    return outputs


def _failed(
    module: nn.Module, inputs: Tensor | Inputs | Whole, tensors: Mapping[str, Tensor | None], error: Exception
) -> BatchbayesError:
    """Return the error to raise when the network itself raises one."""
    forms = [(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors_of(inputs)]
    shapes = " and ".join(f"{shape} of {dtype}" for shape, dtype in forms)
    own = str(reference_tensor(module).dtype).removeprefix("torch.")
    fix = f"check shape and dtype of the inputs (the weights are {own}): model(inputs) should run by itself"
    if all("float" in dtype and dtype != own for _, dtype in forms):
        fix = f"convert the inputs to {own}, the dtype of the weights: model(inputs) should run by itself"
    if None in tensors.values() and isinstance(error, TypeError | AttributeError):
        fix = (
            "use torch's BatchNorm layers: a layer that reads running_mean in Python cannot normalise by its batch in "
            "evaluation mode. Leave such layers out with sites="
        )
    if isinstance(error, ValueError) and _lacks_examples(str(error)):
        fix = "give the inputs an axis of examples first: inputs[None] for one example"
    elif isinstance(error, ValueError) and all(shape[:1] == (1,) for shape, _ in forms):
        fix = "leave out batches of one example, with drop_last=True in a DataLoader: they have no batch statistics"
    if isinstance(error, TypeError) and isinstance(inputs, Tensor) and not _takes_one(module):
        fix = "if the network takes several inputs, say where they are in a batch, as in inputs=(0, 1)"
    if isinstance(error, TypeError) and isinstance(inputs, Inputs):
        fix = "if the network takes fewer inputs, say which, as in inputs=lambda batch: batch[0][0]"
    if isinstance(error, TypeError) and isinstance(inputs, Inputs) and inputs.named:
        fix = "let forward() take these inputs by name; put a module that does so around a network that takes one dict"
    first = (str(error).strip().splitlines() or [""])[0][:300]
    return BatchbayesError(
        expected=f"inputs that {type(module).__name__} runs on",
        got=f"inputs of shape {shapes}, and {type(error).__name__}: {first}",
        fix=fix,
    )


def _lacks_examples(error: str) -> bool:
    """Return whether a batch-norm layer says that its input has too few axes.

    >>> _lacks_examples("expected 4D input (got 3D input)"), _lacks_examples("expected 2D or 3D input (got 4D input)")
    (True, False)
    """
    axes = [int(number) for number in re.findall(r"(\d)D", error)]
    return error.startswith("expected ") and "(got " in error and len(axes) > 1 and axes[-1] < min(axes[:-1])


def _takes_one(module: nn.Module) -> bool:
    """Return whether `forward` can be called with one input, as far as its signature tells."""
    try:
        inspect.signature(module.forward).bind(None)
    except TypeError:
        return False
    except ValueError:  # no signature, as of a scripted module
        return True
    return True


def require_default_device() -> None:
    """Raise an error if torch makes new tensors elsewhere than on the CPU, where all random numbers are drawn."""
    if (device := torch.empty(0).device).type != "cpu":  # four times as fast as torch.get_default_device()
        got = f"{device}, by torch.set_default_device or by a block of torch.device"
        fix = f'call torch.set_default_device("cpu"), and move the network itself, as in network.to("{device}")'
        raise BatchbayesError(
            "the CPU as the default device of torch; the network and the data may be anywhere", got, fix
        )


class SeveralOutputsError(BatchbayesError):
    """A network that returns something else than one tensor, and nobody said which of its outputs counts."""


def as_network(model: nn.Module, output: Output = None, inputs: Picker = None) -> Network:
    """Wrap a user's model. Its weights are not copied. DataParallel and torch.compile wrappers are taken off."""
    require_default_device()
    if not isinstance(model, nn.Module):
        raise BatchbayesError("a torch.nn.Module", type(model).__name__, "pass the network itself, not its output")
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(original := getattr(model, "_orig_mod", None), nn.Module):  # torch.compile
            model = original
        else:
            break
    own = {m: (*m.parameters(recurse=False), *m.buffers(recurse=False)) for m in model.modules()}
    lazy = [type(m).__name__ for m, tensors in own.items() if any(map(is_lazy, tensors))]
    if lazy:
        got = f"lazy modules that have never run: {', '.join(lazy[:6])}"
        fix = "run one forward pass, and load the weights, before you pass the network"
        raise BatchbayesError("a network whose parameters all have a shape", got, fix)
    plain = (Tensor, nn.Parameter)  # other kinds of tensors may keep their numbers elsewhere
    if any(tensor.is_meta and type(tensor) in plain for tensors in own.values() for tensor in tensors):
        fix = 'call network.to_empty(device="cpu"), and load the weights, before you pass the network'
        got = "weights on the device meta, which have shapes alone"
        raise BatchbayesError("a network with numbers in its weights", got, fix)
    with Lent(model, {}):
        pass  # a network that cannot be copied is refused now
    return Network(model, output, WeightsThen(model), inputs)


def reference_tensor(module: nn.Module) -> Tensor:
    """Return the first floating-point parameter or buffer: it tells the module's dtype and device."""
    found = _first_parameter(module)
    return next((b for b in module.buffers() if b.is_floating_point()), torch.empty(0)) if found is None else found


def _first_parameter(module: nn.Module) -> Tensor | None:
    """Return the first floating-point parameter, much quicker than `parameters()` does."""
    for tensor in module._parameters.values():
        if tensor is not None and tensor.is_floating_point():
            return tensor
    return next((found for m in module.children() if (found := _first_parameter(m)) is not None), None)


def pick_output(outputs: Any, name: Output) -> Tensor:
    """Return the tensor that the user named among the outputs of the network."""
    if name is None and isinstance(outputs, Tensor):
        return outputs
    picked: Any = None
    if callable(name):
        try:
            picked = name(outputs)
        except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
            if isinstance(error, BatchbayesError):
                raise
            got = f"{_describe(outputs)}, and {type(error).__name__}: {error}"[:300]
            fix = "call it with what the network returns, and look what it does"
            raise BatchbayesError("a function output= that returns a tensor", got, fix) from error
    elif name is not None and not isinstance(outputs, Tensor):
        picked = _named_output(outputs, name)
    if isinstance(picked, Tensor):
        return picked
    shown = outputs if name is None or isinstance(outputs, Tensor) else picked
    fix = "drop output=" if isinstance(outputs, Tensor) else 'name the output, as in output="logits" or output=0'
    if name is None:
        raise SeveralOutputsError(expected="one output tensor", got=_describe(shown), fix=fix)
    raise BatchbayesError(expected=f"a tensor as output {name!r}", got=_describe(shown), fix=fix)


def _named_output(outputs: Any, name: str | int) -> Any:
    """Return an output by key or position, or by the name of an attribute."""
    try:
        return outputs[name]
    except (KeyError, IndexError, TypeError) as error:
        if isinstance(name, str) and hasattr(outputs, name):
            return getattr(outputs, name)
        raise BatchbayesError(f"a network output named {name!r}", _describe(outputs), "name one of these") from error


def _describe(outputs: object) -> str:
    if isinstance(outputs, Mapping):
        return f"a {type(outputs).__name__} with keys {sorted(map(str, outputs))}"
    if isinstance(outputs, list | tuple):
        return f"a {type(outputs).__name__} of {len(outputs)} ({', '.join(type(o).__name__ for o in outputs)})"
    if is_dataclass(outputs):
        return f"a {type(outputs).__name__} with {', '.join(field.name for field in fields(outputs))}"
    return f"a single {type(outputs).__name__}"


def one_output(model: nn.Module, output: Output) -> nn.Module:
    """Return the same network, weights and names of layers included, that returns one of its outputs alone.

    >>> class Two(nn.Linear):
    ...     def forward(self, x):
    ...         return {"logits": super().forward(x), "features": x}
    >>> one_output(Two(3, 2), "logits")(torch.zeros(4, 3)).shape
    torch.Size([4, 2])
    """
    kind: Any = type(model)
    return with_forward(model, lambda self, *args, **named: pick_output(kind.forward(self, *args, **named), output))


def with_forward(model: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """Return a network that shares all layers, parameters and buffers, with another forward pass."""
    if isinstance(model, torch.jit.ScriptModule):
        raise BatchbayesError("a network in Python", "a scripted one", "pass the network that was scripted")
    found, kind = copy.copy(model), type(model)
    found.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return found


def modules_by_name(module: nn.Module, kind: type | tuple[type, ...] = nn.Module) -> dict[str, Any]:
    """Return the modules of a kind by name, each once. Names omit the `_orig_mod` that torch.compile adds."""
    return {plain_name(name): m for name, m in module.named_modules() if isinstance(m, kind) and not is_wrapper(m)}


@contextmanager
def inputs_watched(modules: Mapping[str, nn.Module], see: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Inside the block, call `see(name, input)` before each run of these modules. They are the user's own."""

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
    """Refuse a network whose layers are not those that a file describes.

    Args:
        module: the network.
        saved: a row for each layer, from the file.
        own: the same of the network.
        what: the kind of layers, for the message.
        row: a format string that describes one layer by its row.
    """
    if (kept := [tuple(r) for r in saved]) != (found := [tuple(r) for r in own]):
        parts = [f"{len(found)} {what} layers where the file has {len(kept)}"] if len(found) != len(kept) else []
        parts += ["no " + row.format(*r) for r in [r for r in kept if r not in found][:3]]
        parts += ["an unknown " + row.format(*r) for r in [r for r in found if r not in kept][:3]]
        got = f"{type(module).__name__}: {'; '.join(parts) or 'the same layers in another order'}"
        fix = "build the same network, load its weights, and pass that"
        raise BatchbayesError("the network that the posterior was fitted to", got, fix)
