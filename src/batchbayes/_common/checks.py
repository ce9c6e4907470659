"""Checks of tensors that scores, metrics and predictives share. Each check raises a `BatchbayesError`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from batchbayes.errors import BatchbayesError

SUM_TOLERANCE = 1e-3
"""Largest error of a sum of probabilities: averages in half precision stay below it, logits almost never do."""
FIX_NAN = "find where they come from, or drop those examples"


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
            got=f"values from {float(tensor.min())} to {float(tensor.max())}",
            fix="add observation noise, because a prediction without spread has no density",
        )


def check_bool(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    """Check that a tensor is of type bool and has the shape of another one."""
    check_same_shape(name, tensor, like_name, like)
    if tensor.dtype != torch.bool:
        fix = f"compare it with the value that counts as true, for example {name} == 1"
        raise BatchbayesError(expected=f"{name} as torch.bool", got=f"{tensor.dtype}", fix=fix)


def check_in_unit_interval(name: str, tensor: Tensor) -> None:
    """Check that all numbers are between 0 and 1, up to rounding."""
    if not bool(((tensor >= 0) & (tensor <= 1 + SUM_TOLERANCE)).all()):
        raise BatchbayesError(
            expected=f"{name} between 0 and 1",
            got=f"values from {float(tensor.min())} to {float(tensor.max())}",
            fix="pass probabilities, not logits or percentages",
        )


def check_probabilities(probs: Tensor) -> None:
    """Check that a tensor (N, ..., K) holds probabilities over its last axis."""
    if probs.ndim < 2 or not probs.is_floating_point():
        raise BatchbayesError(
            expected="floating-point probabilities of shape (N, ..., K)",
            got=f"{probs.dtype} of shape {tuple(probs.shape)}",
            fix="put examples first and classes last",
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
            fix="number the classes from 0, and drop ignored labels first or name them as ignored_label",
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
