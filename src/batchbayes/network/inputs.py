"""The inputs of one batch: a tensor, several tensors for a network with several inputs, or a whole batch as it is."""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map

from batchbayes._common.checks import as_tensor
from batchbayes.errors import BatchbayesError

Picker = str | int | Sequence[str | int] | Callable[[Any], Any] | None
"""Where the inputs are in a batch: a key or a position, several of them for a network with several inputs, a function
of the batch, or None for x and (x, y)."""


class _Tree:
    """What a network is called with: a tree of tensors and other things, by position and by name."""

    def __init__(self, args: Sequence[Any], named: Mapping[str, Any]) -> None:
        self.args, self.named = tuple(args), dict(named)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors, also those inside of lists and the like."""
        return tuple(leaf for leaf in tree_leaves((self.args, self.named)) if isinstance(leaf, Tensor))

    def each(self, change: Callable[[Any], Any]) -> Self:
        """Return the same with a function applied to each leaf. A packed sequence is one, and None is."""
        found = copy.copy(self)
        found.args, found.named = tree_map(change, (self.args, self.named), is_leaf=_is_packed)
        return found

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the inputs with a function applied to each tensor; other objects are copied."""
        return self.each(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else copy.deepcopy(leaf))

    def to(self, device: Any) -> Self:
        return self.each(lambda leaf: leaf.to(device) if hasattr(leaf, "to") else leaf)

    def numel(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors())


class Inputs(_Tree):
    """Several input tensors of a network, by position and by name. Each has one row for each example.

    It has the few methods of a tensor that are needed to pass examples on: length, rows, `to`, `split`, `torch.cat`.

    >>> both = Inputs([torch.zeros(5, 2)], {"mask": torch.ones(5)})
    >>> len(both), len(both[:3]), len(torch.cat([both, both]))
    (5, 3, 10)
    """

    def __init__(self, args: Sequence[Any] = (), named: Mapping[str, Any] | None = None) -> None:
        by_name = {name: as_tensor(value, f"the input {name}") for name, value in (named or {}).items()}
        super().__init__([as_tensor(value, "an input") for value in args], by_name)
        if len({len(tensor) if tensor.ndim else 0 for tensor in self.tensors()}) != 1:
            fix = "pass tensors of the same length, and other arguments by a wrapper around the network; inputs that "
            fix += "are no rows of examples as a whole, as in inputs=lambda batch: bb.Whole(batch[0], batch[1])"
            raise BatchbayesError("input tensors with one row for each example", f"{self}", fix)

    def __len__(self) -> int:
        return len(self.tensors()[0])

    def __getitem__(self, rows: Any) -> Any:
        if isinstance(rows, int):  # one example: only its size is ever asked for
            return torch.cat([t[rows].flatten().to(torch.float32) for t in self.tensors()])
        return self.map(lambda tensor: tensor[rows])

    def split(self, size: int) -> tuple[Self, ...]:
        return tuple(self[start : start + size] for start in range(0, len(self), size)) or (self,)

    def __repr__(self) -> str:
        shapes = [str(tuple(t.shape)) for t in self.args] + [f"{n} {tuple(t.shape)}" for n, t in self.named.items()]
        return f"Inputs({', '.join(shapes)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.cat:
            raise BatchbayesError("one input tensor here", "several inputs", "wrap the network so that it takes one")
        parts = args[0]
        joined = iter([torch.cat(each) for each in zip(*(part.tensors() for part in parts), strict=True)])
        return parts[0].each(lambda _: next(joined))


class Whole(_Tree):
    """Inputs that are no rows of examples, such as a graph or a ragged sequence: never cut, joined or stacked.

    They go to the network as they are, as arguments by position and by name, and all rows of its output are the answer
    to the batch. As `inputs=Whole` it passes the batch itself. A batch of a class of its own with a method `to`, such
    as those of PyTorch Geometric, and a `PackedSequence`, are taken as a whole without it.

    >>> whole = Whole(torch.zeros(5, 2), torch.tensor([[0, 1], [1, 2]]))  # nodes and edges
    >>> len(whole), whole[:3] is whole
    (1, True)
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(args, named)

    @property
    def num_examples(self) -> int | None:
        """How many graphs or sequences there are, as far as the arguments tell."""
        for part in self.args:
            if _is_packed(part):
                return int(part.batch_sizes[0])
            if isinstance(part, list):
                return len(part)
            if isinstance(graphs := getattr(part, "num_graphs", None), int):
                return graphs
        return None

    def __len__(self) -> int:
        return 1

    def __getitem__(self, rows: Any) -> Self:
        return self

    def split(self, size: int) -> tuple[Self, ...]:
        return (self,)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fix = "use mcbn, predict, detections and save, which take them; for all else pad them to rows of one size"
        got = "batches that go whole to the network, as graphs do"
        raise BatchbayesError("inputs that are rows of examples here", got, fix)

    def __repr__(self) -> str:
        parts = [*self.args, *self.named.values()]
        return f"Whole({', '.join(describe_batch(part) for part in parts)})"


def _is_packed(part: object) -> bool:
    return isinstance(part, PackedSequence)


ROWS = (Tensor, np.ndarray, Mapping, list, tuple, Inputs)


def is_whole(batch: object) -> bool:
    """Whether a batch goes to the network as it is: an object of its own kind, which is no row of examples."""
    if isinstance(batch, Whole | PackedSequence):
        return True
    return not isinstance(batch, (*ROWS, type, nn.Module)) and callable(getattr(batch, "to", None))


def as_it_is(batch: Any) -> Any:
    """Return `Whole` around a batch that goes to the network as it is; other inputs unchanged."""
    return Whole(batch) if is_whole(batch) and not isinstance(batch, Whole) else batch


def tensors_of(inputs: Any) -> tuple[Tensor, ...]:
    """Return a tensor, or the tensors of several inputs, in a tuple."""
    return inputs.tensors() if isinstance(inputs, _Tree) else (inputs,)


def each_tensor(inputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to a tensor, or to each tensor of several inputs."""
    return inputs.map(change) if isinstance(inputs, _Tree) else change(inputs)


def pick_inputs(batch: Any, picker: Picker = None) -> Any:
    """Return the inputs of one batch: a tensor, or `Inputs` if there are several.

    >>> pick_inputs((torch.zeros(2, 3), torch.ones(2))).shape
    torch.Size([2, 3])
    >>> pick_inputs({"image": torch.zeros(2, 3), "age": torch.ones(2)}, ("image", "age"))
    Inputs((2, 3), (2,))
    """
    if callable(picker):
        found = _called(picker, batch)
    elif isinstance(picker, list | tuple) and picker:
        found = tuple(_at(batch, each) for each in picker)
    elif picker is not None:
        found = _at(batch, picker)
    elif isinstance(batch, list | tuple) and batch and not is_whole(batch):
        _refuse_ragged(batch)
        found = batch[0]
    else:
        found = batch
    inputs = _as_inputs(found, named=picker is not None or found is not batch)
    if inputs is None or (isinstance(inputs, Tensor) and inputs.ndim == 0):
        fix = 'say where the inputs are, as in inputs="image", inputs=1 or inputs=lambda batch: batch.x; if they are '
        fix += "no rows of examples, as for graphs, inputs=lambda batch: bb.Whole(batch.x, batch.edges)"
        raise BatchbayesError(
            "a batch that is a tensor (N, ...), or a tuple that starts with one", describe_batch(batch), fix
        )
    return inputs


def _refuse_ragged(batch: Sequence[Any]) -> None:
    """Raise an error if a batch is a list of sequences of different lengths: the first is not the inputs of all."""
    if not isinstance(batch, list) or len(batch) < 2 or not are_arrays(batch):
        return
    if len({len(part) for part in batch}) > 1 and len({(part.shape[1:], part.dtype) for part in batch}) == 1:
        got = f"a list of {len(batch)} sequences of different lengths"
        fix = "pass such batches as they are by inputs=bb.Whole, or pad the sequences"
        raise BatchbayesError("a batch (x, y) whose parts have one row for each example", got, fix)


def _as_inputs(found: Any, *, named: bool) -> Any:
    """Return a tensor or several inputs; None for anything else. A dict counts only where it was picked."""
    if isinstance(found, Tensor | np.ndarray):
        return as_tensor(found, "the inputs")
    if isinstance(found, Inputs) or is_whole(found):
        return as_it_is(found)
    if isinstance(found, Mapping) and found and named and are_arrays(found.values()):
        return Inputs((), found)
    if isinstance(found, list | tuple) and len(found) and are_arrays(found):
        several = Inputs(found)
        return several if len(found) > 1 else several.args[0]
    return None


def are_arrays(values: Iterable[Any]) -> bool:
    """Whether all values are tensors or arrays with at least one axis."""
    return all(isinstance(value, Tensor | np.ndarray) and value.ndim for value in values)


def _at(batch: Any, key: Any) -> Any:
    """Return what is at a key or position of a batch. A position in a tensor would be an example, not the inputs."""
    try:
        if isinstance(batch, Tensor | np.ndarray):
            raise TypeError("a tensor has no parts")
        return batch[key]
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        fix = "pass a key or a position that the batch has as inputs=, or leave it out"
        raise BatchbayesError(f"a batch with inputs at {key!r}"[:200], describe_batch(batch), fix) from error


def _called(picker: Callable[[Any], Any], batch: Any) -> Any:
    try:
        return picker(batch)
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        got = f"{describe_batch(batch)}, and {type(error).__name__}: {error}"[:300]
        fix = "call it with one batch of the data, and look what it does"
        raise BatchbayesError("a function inputs= that takes a batch and returns its inputs", got, fix) from error


def describe_batch(batch: object) -> str:
    """Say what a batch is, for error messages."""
    if isinstance(batch, Mapping):
        return f"a {type(batch).__name__} with keys {sorted(map(str, batch))}"
    if isinstance(batch, Tensor | np.ndarray):
        return f"a tensor of shape {tuple(batch.shape)}"
    if isinstance(batch, list | tuple):
        return f"a {type(batch).__name__} of {len(batch)} ({', '.join(type(part).__name__ for part in batch[:6])})"
    return f"a {type(batch).__name__}"


def require_finite(values: Any, what: str) -> Any:
    """Return the values if they are real and finite. NaN or infinity would get into every statistic without a sign."""
    for tensor in tensors_of(values):
        if tensor.is_complex():
            raise BatchbayesError(f"real numbers in {what}", f"{tensor.dtype}", "pass real and imaginary part as two")
        # A sum is much faster than a test of each number.
        suspect = tensor.is_floating_point() and not math.isfinite(tensor.sum().item())
        if suspect and (bad := int((~torch.isfinite(tensor)).sum())):
            fix = "drop or fill those rows; if the inputs are fine, look for NaN in the weights of the network"
            if int((tensor == -math.inf).sum()) == bad:
                fix += ", and put a number such as -1e9 where it masks by -inf"
            got = f"{bad} of {tensor.numel()} that are NaN or infinite"
            raise BatchbayesError(f"finite numbers in {what}", got, fix)
    return values
