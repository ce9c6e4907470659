"""Checks of tensors and numbers that many modules share. Each check raises a `BatchbayesError`."""

import math
import numbers
import operator
import os
import shlex
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from batchbayes.errors import BatchbayesError, unknown_name

SUM_TOLERANCE = 1e-3
"""Largest error of a sum of probabilities: averages in half precision stay below it, logits almost never do."""
FIX_NAN = "find where they come from, or drop those examples"

if TYPE_CHECKING:
    Values = Any
else:
    Values = Tensor
"""Numbers in a tensor, an array, a list, a tuple or a column of pandas. What `checked` decorates gets a tensor."""

_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # torch can do little with these
T = TypeVar("T")


def as_tensor(values: Any, name: str = "the values") -> Tensor:
    """Return a tensor as it is. Make one of an array, of a column of pandas, or of a list or tuple of numbers.

    >>> as_tensor(np.array([1.5, 2.0]))
    tensor([1.5000, 2.0000], dtype=torch.float64)
    """
    if isinstance(values, Tensor):
        if values.layout is not torch.strided or values.is_nested or values.is_meta:
            got = "a nested one" if values.is_nested else f"one of {values.layout} on {values.device}"
            raise BatchbayesError(expected=f"{name} as a plain tensor", got=got, fix="make it dense, as by to_dense()")
        if values.is_quantized:
            got, fix = f"one of {values.dtype}", "pass values.dequantize()"
            raise BatchbayesError(expected=f"{name} as a plain tensor", got=got, fix=fix)
        return _signed(values, name) if values.dtype in _UNSIGNED else values
    if np.ma.is_masked(values):
        fix = "leave them out, or fill them with .filled(...)"
        raise BatchbayesError(expected=f"{name} without masked numbers", got=f"{np.ma.count_masked(values)}", fix=fix)
    try:
        array = np.asarray(values) if hasattr(values, "__array__") or isinstance(values, list | tuple) else None
    except (TypeError, ValueError, RuntimeError):  # rows of different lengths, or tensors with gradients
        array = None
    if array is None or array.dtype.kind not in "fiub" or array.dtype.itemsize > 8:
        raise BatchbayesError(
            expected=f"{name} as a tensor or an array of numbers",
            got=f"a {type(values).__name__}" + (f" of {array.dtype}" if array is not None else ""),
            fix="pass numbers, in rows of one length; number classes from 0 if they have names",
        )
    kind = np.int64 if array.dtype.kind == "u" and array.dtype.itemsize > 1 else array.dtype.newbyteorder("=")
    found = torch.from_numpy(np.require(array, kind, ["C", "W"]))
    return _not_wrapped(found, name) if array.dtype == np.uint64 else found


def _signed(values: Tensor, name: str) -> Tensor:
    found = values.long()
    return _not_wrapped(found, name) if values.dtype == torch.uint64 else found


def _not_wrapped(values: Tensor, name: str) -> Tensor:
    """Refuse what was uint64 and is negative as int64: it was 2^63 or more."""
    if values.numel() and int(values.min()) < 0:
        fix = "pass them as float64, or leave out what is a mark for a missing number"
        raise BatchbayesError(expected=f"{name} below 2^63", got="larger numbers, as uint64", fix=fix)
    return values


def as_path(given: object) -> Path:
    """Return the path of a file or folder, or raise an error. Bytes and open files are no paths."""
    if not isinstance(given, str | os.PathLike) or isinstance(os.fspath(given), bytes):
        expected, got = "the path of a file or folder as text or as a pathlib.Path", f"a {type(given).__name__}"
        raise BatchbayesError(expected=expected, got=got, fix="pass its path")
    return Path(os.fspath(given))


def require_choice(what: str, value: object, choices: Sequence[str]) -> None:
    """Raise an error that lists the choices if the value is none of them, and suggests one.

    >>> require_choice("a score", "crps", ["crps", "log_likelihood"])
    """
    if value not in choices:
        raise unknown_name(what, value, choices)


def require_option(name: str, value: T, choices: Sequence[object]) -> T:
    """The same for a keyword argument, named as it is written in a call.

    >>> require_option("center", "batch", ("batches", "running"))
    Traceback (most recent call last):
    ...
    batchbayes.errors.BatchbayesError: expected center="batches" or "running"; got 'batch'. Do this: choose one of them.
    """
    if value not in choices:
        *most, last = (f'"{choice}"' for choice in choices)
        raise BatchbayesError(f"{name}={', '.join(most)} or {last}", repr(value), "choose one of them")
    return value


def require_type(value: object, kind: type | UnionType | tuple[type, ...], *, expected: str, fix: str) -> None:
    """Raise an error that names the type of the value if it is of another kind."""
    if not isinstance(value, kind):
        raise BatchbayesError(expected=expected, got=f"a {type(value).__name__}", fix=fix)


def install_command(extra: str = "", package: str = "batchbayes") -> str:
    """Return the command that installs an extra of ours: of the checkout that this is, or of the installed package."""
    folder, what = Path(__file__).resolve().parents[3], f"[{extra}]" if extra else ""
    if not (folder / "papers" / "pyproject.toml").is_file():
        return f"pip install {shlex.quote(package + what)}"
    return f"pip install -e {shlex.quote(str(folder / package.removeprefix('batchbayes').lstrip('-')) + what)}"


def missing_package(package: str, holds: str) -> BatchbayesError:
    """Return the error that names a package of ours which is not installed, and what it holds."""
    got, fix = "an environment without it", install_command(package=package)
    return BatchbayesError(f"the package {package}, which has {holds}", got, fix)


def moved(home: str) -> Any:
    """Return what "module:name" stands for in another package of ours; or the module, if there is no name.

    >>> moved("batchbayes.metrics:ood_auroc").__name__
    'ood_auroc'
    """
    module, _, name = home.partition(":")
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name != package:
            raise
        raise missing_package(package.replace("_", "-"), name or module) from error
    return getattr(found, name) if name else found


def require_packages(purpose: str, extra: str, *, package: str = "batchbayes", **packages: str) -> None:
    """Raise an error before the work if a package is missing. `packages` maps names of modules to names of packages.

    `extra` is the extra of our `package` that brings them.
    """
    missing = [module for module in packages if find_spec(module) is None]
    if missing:
        raise BatchbayesError(
            expected=f"{' and '.join(packages.values())} for {purpose}",
            got=f"no {' and no '.join(missing)}",
            fix=install_command(extra, package),
        )


def real(values: Tensor) -> Tensor:
    """Return integers and bools as float64, and other tensors as they are. Differences of integers may overflow."""
    return values if values.is_floating_point() else values.double()


def whole_number(name: str, value: object, least: int | None = 1) -> int:
    """Return a whole number that is at least `least`, or raise an error. True and False are no numbers.

    >>> whole_number("num_samples", np.int64(3))
    3
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        raise BatchbayesError(
            expected=f"{name} as a whole number" + (f" of at least {least}" if least is not None else ""),
            got=f"{name}={value!r}"[:200],
            fix="pass a number without a fraction" if least is None else f"pass {max(1, least)} or more",
        )
    return number


def finite_number(name: str, value: object, *, above: float, below: float = math.inf, fix: str) -> float:
    """Return a number between two limits, both excluded, or raise an error."""
    number = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    if not above < number < below:
        limits = f"between {above:g} and {below:g}, both excluded" if below < math.inf else f"above {above:g}"
        raise BatchbayesError(expected=f"{name} {limits}", got=f"{value!r}"[:200], fix=fix)
    return number


def log_inverse_error(error: float) -> float:
    """Return log(1 / error) of a mean squared error, around which noise precisions are searched, or raise an error."""
    if not 0 < error < math.inf:
        raise BatchbayesError(
            expected="errors whose squares are finite and not all zero",
            got=f"a mean squared error of {error}",
            fix="use held-out points that the network has not seen, in a unit in which targets are near 1",
        )
    return -math.log(error)


def check_same_shape(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    """Check that two tensors have the same shape."""
    if tensor.shape != like.shape:
        raise BatchbayesError(
            expected=f"{name} in the shape of {like_name}, {tuple(like.shape)}",
            got=f"{tuple(tensor.shape)}",
            fix="reshape one of them: they are never broadcast, because (N, 1) against (N,) would give (N, N)",
        )


def check_not_empty(name: str, tensor: Tensor) -> None:
    """Check that a tensor has at least one element."""
    if tensor.numel() == 0:
        got = f"shape {tuple(tensor.shape)}"
        raise BatchbayesError(expected=f"at least one example in {name}", got=got, fix="check how data is selected")


def check_finite(name: str, tensor: Tensor) -> None:
    """Check that a tensor has no NaN and no infinity."""
    if bad := int((~torch.isfinite(tensor)).sum()):
        raise BatchbayesError(expected=f"finite numbers in {name}", got=f"{bad} NaN or infinite", fix=FIX_NAN)


def check_no_nan(name: str, tensor: Tensor) -> None:
    """Check that a tensor has no NaN; infinity is allowed."""
    if bad := int(torch.isnan(tensor).sum()):
        raise BatchbayesError(expected=f"numbers in {name}", got=f"{bad} NaN", fix=FIX_NAN)


def check_truth(prediction: Tensor, target: Tensor) -> None:
    """Check that predictions and targets have the same shape and are finite."""
    check_same_shape("target", target, "the prediction", prediction)
    check_finite("the prediction", prediction)
    check_finite("target", target)


def check_positive(name: str, tensor: Tensor) -> None:
    """Check that all numbers are above zero and finite."""
    if not bool(((tensor > 0) & torch.isfinite(tensor)).all()):
        raise BatchbayesError(
            expected=f"{name} above zero and finite",
            got=f"values from {tensor.min().item()} to {tensor.max().item()}",
            fix="add observation noise, because a prediction without spread has no density",
        )


def check_bool(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    """Check that a tensor is of type bool and has the shape of another one."""
    check_same_shape(name, tensor, like_name, like)
    if tensor.dtype != torch.bool:
        fix = f"pass {like_name} first, then {name}; compare numbers with the value that counts, as in {name} == 1"
        raise BatchbayesError(expected=f"{name} as torch.bool", got=f"{tensor.dtype}", fix=fix)


def check_in_unit_interval(name: str, tensor: Tensor) -> None:
    """Check that all numbers are between 0 and 1, up to rounding."""
    if not bool(((tensor >= 0) & (tensor <= 1 + SUM_TOLERANCE)).all()):
        check_no_nan(name, tensor)
        raise BatchbayesError(
            expected=f"{name} between 0 and 1",
            got=f"values from {tensor.min().item()} to {tensor.max().item()}",
            fix="pass probabilities, not logits or percentages",
        )


def check_probabilities(probs: Tensor) -> None:
    """Check that a tensor (N, ..., K) holds probabilities over its last axis."""
    if probs.ndim < 2 or not probs.is_floating_point():
        raise BatchbayesError(
            expected="floating-point probabilities of shape (N, ..., K)",
            got=f"{probs.dtype} of shape {tuple(probs.shape)}",
            fix="put examples first and classes last, and pass labels after them; for yes or no, stack 1 - p and p",
        )
    check_in_unit_interval("probabilities", probs)
    worst = (probs.detach().sum(-1, dtype=torch.float64) - 1).abs()
    if worst.numel() and float(worst.max()) > SUM_TOLERANCE:
        raise BatchbayesError(
            expected="probabilities that sum to one over the last axis",
            got=f"a sum that is off by {float(worst.max()):.3g}",
            fix="apply softmax over the classes, and put classes last",
        )


def check_classes(name: str, classes: Tensor, num_classes: int) -> None:
    """Check that a tensor holds integers from 0 to `num_classes - 1`."""
    if classes.is_floating_point() or classes.is_complex() or classes.dtype == torch.bool:
        raise BatchbayesError(
            expected=f"integer {name}",
            got=f"{classes.dtype}",
            fix="pass class numbers, not one-hot rows or probabilities, and convert them with .long()",
        )
    if classes.numel() and not 0 <= int(classes.min()) <= int(classes.max()) < num_classes:
        raise BatchbayesError(
            expected=f"{name} from 0 to {num_classes - 1}",
            got=f"{int(classes.min())} to {int(classes.max())}",
            fix="number the classes from 0, and drop examples that do not count, or name their label by ignore_index=",
        )


def check_labels(labels: Tensor, shape: Sequence[int], num_classes: int, name: str = "labels") -> None:
    """Check that labels are class numbers in the shape that the predictions ask for."""
    if labels.shape != tuple(shape):
        raise BatchbayesError(
            expected=f"integer {name} of shape {tuple(shape)}",
            got=f"shape {tuple(labels.shape)}",
            fix="pass one class number for each example; classes are the last axis of the predictions alone",
        )
    check_classes(name, labels, num_classes)


def without_ignored(predictions: Tensor, labels: Tensor, ignore_index: int | None) -> tuple[Tensor, Tensor]:
    """Leave out elements whose label is `ignore_index`: (N, ..., K) and (N, ...) become (n, K) and (n,)."""
    if ignore_index is None or labels.shape != predictions.shape[:-1]:
        return predictions, labels
    kept = labels != ignore_index
    return predictions[kept.to(predictions.device)], labels[kept]


def fitting_labels(targets: Tensor, shape: Sequence[int], num_classes: int) -> Tensor:
    """Return labels as int64 on the CPU, or raise an error if they do not fit. Bool labels are classes 0 and 1."""
    labels = as_tensor(targets, "labels")
    check_labels(labels.long() if labels.dtype == torch.bool else labels, shape, num_classes)
    return labels.long().cpu()


def shaped_like(values: Tensor, shape: torch.Size) -> Tensor:
    """Return values in the given shape. Values (N,) fit (N, 1); any other shape is an error, as it would broadcast."""
    values = as_tensor(values, "targets")
    check_no_nan("targets", values)
    if values.shape == shape:
        return values.cpu()
    if values.shape == shape[:-1] and shape[-1] == 1:
        return values.cpu().unsqueeze(-1)
    raise BatchbayesError(
        expected=f"targets of shape {tuple(shape)}",
        got=f"shape {tuple(values.shape)}",
        fix="reshape the targets like the network's output",
    )


def fitting_yes_or_no(targets: Tensor, shape: torch.Size) -> Tensor:
    """Return targets 0 and 1 in the given shape, on the CPU. Targets (N, ...) also fit outputs (N, 1, ...)."""
    targets = as_tensor(targets, "targets")
    if len(shape) > 1 and shape[1] == 1 and targets.shape == (shape[0], *shape[2:]):
        targets = targets.unsqueeze(1)
    targets = shaped_like(targets, shape)
    if bad := int(((targets != 0) & (targets != 1)).sum()):
        raise BatchbayesError(
            expected="targets of 0 and 1", got=f"{bad} others", fix="use bb.categorical() for more than two classes"
        )
    return targets
