"""The questions that scores and metrics ask of their inputs. Each refusal says: expected, got, do this."""

from typing import NoReturn

import torch
from torch import Tensor

from batchbayes.errors import BatchbayesError

# Probabilities averaged over draws in half precision sum to one within this; logits practically never do.
SUM_TOLERANCE = 1e-3


def refuse(expected: str, got: str, do: str) -> NoReturn:
    """Stop with a paragraph of help."""
    raise BatchbayesError(expected, got, do[0].lower() + do[1:].rstrip("."))


def check_same_shape(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    if tensor.shape != like.shape:
        refuse(
            f"{name} in the shape of {like_name}, {tuple(like.shape)}",
            f"{tuple(tensor.shape)}",
            "Reshape one of them: they are never broadcast, since (N, 1) against (N,) would give (N, N).",
        )


def check_not_empty(name: str, tensor: Tensor) -> None:
    if tensor.numel() == 0:
        refuse(
            f"at least one example in {name}",
            f"shape {tuple(tensor.shape)}",
            "Check how the data was selected.",
        )


def check_finite(name: str, tensor: Tensor) -> None:
    if not bool(torch.isfinite(tensor).all()):
        bad = int((~torch.isfinite(tensor)).sum())
        refuse(
            f"finite numbers in {name}",
            f"{bad} NaN or infinite",
            "Find where they come from, or drop those examples.",
        )


def check_no_nan(name: str, tensor: Tensor) -> None:
    if bool(torch.isnan(tensor).any()):
        bad = int(torch.isnan(tensor).sum())
        refuse(f"numbers in {name}", f"{bad} NaN", "Find where they come from, or drop those examples.")


def check_positive(name: str, tensor: Tensor) -> None:
    if not bool(((tensor > 0) & torch.isfinite(tensor)).all()):
        refuse(
            f"{name} above zero and finite",
            f"values from {float(tensor.min())} to {float(tensor.max())}",
            "A prediction without spread has no density: add observation noise.",
        )


def check_bool(name: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.bool:
        refuse(f"{name} as torch.bool", f"{tensor.dtype}", f"Say what counts as true, for example {name} == 1.")


def check_in_unit_interval(name: str, tensor: Tensor) -> None:
    if not bool(((tensor >= 0) & (tensor <= 1 + SUM_TOLERANCE)).all()):
        refuse(
            f"{name} between 0 and 1",
            f"values from {float(tensor.min())} to {float(tensor.max())}",
            "Pass probabilities, not logits or percentages.",
        )


def check_probabilities(probs: Tensor) -> None:
    """Probabilities over the last axis."""
    if probs.ndim < 2 or not probs.is_floating_point():
        refuse(
            "floating-point probabilities of shape (N, ..., K)",
            f"{probs.dtype} of shape {tuple(probs.shape)}",
            "Put examples first and classes last.",
        )
    check_in_unit_interval("probabilities", probs)
    worst = (probs.detach().sum(-1, dtype=torch.float64) - 1).abs()
    if worst.numel() and float(worst.max()) > SUM_TOLERANCE:
        refuse(
            "probabilities that sum to one over the last axis",
            f"a sum off by {float(worst.max()):.3g}",
            "Apply softmax over the classes, and put classes last.",
        )


def check_integer(name: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        refuse(f"{name} as integers", f"{tensor.dtype}", "Convert them with .long().")


def check_labels(labels: Tensor, predictions: Tensor) -> None:
    """Labels (N, ...) that belong to predictions (N, ..., K)."""
    check_integer("labels", labels)
    if labels.shape != predictions.shape[:-1]:
        refuse(
            f"labels of shape {tuple(predictions.shape[:-1])}",
            f"{tuple(labels.shape)}",
            "Labels have one entry an example; classes are the last axis of the predictions.",
        )
    num_classes = predictions.shape[-1]
    if labels.numel() and not (int(labels.min()) >= 0 and int(labels.max()) < num_classes):
        refuse(
            f"labels from 0 to {num_classes - 1}",
            f"{int(labels.min())} to {int(labels.max())}",
            "Drop ignored labels first: keep = labels != ignored, then index both with keep.",
        )
