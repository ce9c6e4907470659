"""What the task is, and whether targets and class names fit the outputs of the network."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from batchbayes.errors import BatchbayesError, warn
from batchbayes.likelihoods import Gaussian
from batchbayes.report.options import Task
from batchbayes.report.read.examples import Examples
from batchbayes.report.read.likelihood import OneLogit, classes_first

SEVERAL_LABELS = (
    "A network with several yes-or-no outputs is assessed one output at a time, with a model that returns only this "
    "one; bb.predict(..., bb.bernoulli()) takes all of them"
)
"""What to do with several labels for each example."""


def guess_task(outputs: Tensor, test: Examples, likelihood: Any = None) -> Task:
    """Guess the task from the outputs for some examples, from the targets, and from the likelihood if it is given.

    Whole-number targets are classes: of pixels or tokens if the outputs have more than two axes. One output with other
    targets than 0 and 1, and everything else, is a regression.
    """
    _, targets = next(test.labelled())
    if isinstance(likelihood, Gaussian):
        return "regression"
    if likelihood is None and targets.is_floating_point() and _yes_or_no(test):
        raise BatchbayesError(
            expected=f"targets in {test.name} whose meaning is clear",
            got=f"zeros and ones as {targets.dtype}, which may be yes and no, or values",
            fix='pass y.long() for yes and no, or task="regression" (--task regression) for values'
            + (f". {_fix_for_labels(targets)}" if targets.ndim > 1 and targets.shape[1] > 1 else ""),
        )
    one = outputs.ndim < 2 or (outputs.ndim != 3 and outputs.shape[1] == 1)
    if likelihood is None and one and not targets.is_floating_point():
        _require_clear_numbers(test)
    if likelihood is None and (targets.is_floating_point() or (one and not _yes_or_no(test))):
        return "regression"
    return "segmentation" if outputs.ndim > 2 else "classification"


def _fix_for_labels(targets: Tensor) -> str:
    """Say what to do with labels (N, K)."""
    if targets.shape[1] == 1:
        return "pass y[:, 0]"
    one_hot = bool((targets.sum(1) == 1).all() and ((targets == 0) | (targets == 1)).all())
    return "If just one of the columns is 1, pass y.argmax(1)" if one_hot else SEVERAL_LABELS


def _require_clear_numbers(data: Examples) -> None:
    """Raise an error if whole-number targets of one output have two values that are not 0 and 1."""
    low, *others = data.targets().unique().tolist()
    if len(others) == 1 and (low, *others) != (0, 1):
        raise BatchbayesError(
            expected=f"targets in {data.name} whose meaning is clear",
            got=f"the whole numbers {low} and {others[0]} alone, which may be two classes, or values",
            fix=f'pass (y == {others[0]}).long() for classes, or task="regression" (--task regression) for values',
        )


def _yes_or_no(data: Examples) -> bool:
    """Return whether all targets are 0 or 1, and both occur."""
    return set(data.targets().unique().tolist()) == {0, 1}


def require_fitting(
    task: Task, likelihood: Any, outputs: Tensor, parts: Sequence[Examples], ignored_label: int | None
) -> None:
    """Raise an error if the targets of some part of the data do not fit the outputs of the network."""
    shape = classes_first(likelihood, outputs).shape
    axes = {"segmentation": (3, 4), "classification": (1, 2)}.get(task, (outputs.ndim,))
    if outputs.ndim not in axes:
        raise BatchbayesError(
            expected="outputs (N, classes, height, width) of a segmentation, (N, steps, classes) of tokens, or "
            "(N, classes) of a classification",
            got=f"{tuple(shape)} for a {task}",
            fix="choose another --task, or leave it out",
        )
    if isinstance(likelihood, OneLogit):  # as many classes as yes and no
        shape = torch.Size([shape[0], 2, *shape[2:]])
    for part in parts:
        found: set[int] = set()
        for _, targets in part.labelled():
            if task == "regression":
                _require_targets(part.name, targets, outputs)
            else:
                found.update(_require_labels(part.name, targets, shape, ignored_label).unique().tolist())
        if task == "segmentation" and len(found) == 1:
            noun = "tokens" if outputs.ndim == 3 else "pixels"
            warn(
                f"all {noun} of {part.name} that count are of class {found.pop()}, so that every answer of the network "
                "can look right. Check the masks, and ignore_label= (--ignore-label)."
            )


def require_class_names(names: Sequence[str], num_classes: int, ignored_label: int | None) -> None:
    """Raise an error unless there is a name of its own for each class. A label that does not count may have one too."""
    if len(names) < num_classes or (len(names) > num_classes and ignored_label is None):
        raise BatchbayesError(
            expected=f"{num_classes} class names, one for each output",
            got=f"{len(names)}",
            fix="check --class-names, and that the model has as many outputs as there are classes",
        )
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise BatchbayesError(
            expected="a name of its own for each class", got=f"{twice!r} twice", fix="rename one of them"
        )


def _require_targets(name: str, targets: Tensor, outputs: Tensor) -> None:
    shape = outputs.shape[1:]
    if targets.shape[1:] != shape and not (targets.ndim == 1 and shape == (1,)):
        classes = targets.ndim == 1 and bool((targets == targets.round()).all())
        raise BatchbayesError(
            expected=f"targets of shape {('N', *shape)} in {name}",
            got=f"{targets.dtype} of shape {('N', *targets.shape[1:])}",
            fix="write classes as whole numbers (y.long()), without a decimal point"
            if classes
            else "give one target for each output of the network",
        )


def _require_labels(name: str, targets: Tensor, shape: torch.Size, ignored_label: int | None) -> Tensor:
    """Return the labels that count, or raise an error if they do not fit outputs of this shape."""
    classes = shape[1]
    if targets.ndim == 2 and len(shape) == 2:
        raise BatchbayesError(
            expected=f"one label for each example of {name}",
            got=f"{targets.shape[1]} for each",
            fix=_fix_for_labels(targets),
        )
    if targets.is_floating_point() or targets.shape[1:] != shape[2:]:
        raise BatchbayesError(
            expected=f"whole-number labels of shape {('N', *shape[2:])} in {name}",
            got=f"{targets.dtype} of shape {('N', *targets.shape[1:])}",
            fix="the network returns its classes last, it seems: pass likelihood=bb.categorical(class_axis=-1)"
            if len(shape) > 2 and targets.shape[1:] == shape[1:-1]
            else "pass class numbers from 0, or choose another --task",
        )
    keep = targets != ignored_label if ignored_label is not None else torch.ones_like(targets, dtype=torch.bool)
    if not keep.reshape(len(keep), -1).any(1).all():
        raise BatchbayesError(
            expected=f"at least one label that counts in every example of {name}",
            got="an example without",
            fix="leave it out, or check ignore_label= (--ignore-label)",
        )
    kept = targets[keep]
    if kept.numel() and not 0 <= int(kept.min()) <= int(kept.max()) < classes:
        high, fix = int(kept.max()), "renumber the labels from 0, or leave one out by ignore_label= (--ignore-label)"
        raise BatchbayesError(
            expected=f"labels from 0 to {classes - 1}, as the network has {classes} outputs",
            got=f"{int(kept.min())} to {high} in {name}",
            fix=f"pass (y == {high}).long() for two classes" if set(kept.unique().tolist()) == {0, high} else fix,
        )
    return kept
