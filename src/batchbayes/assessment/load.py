"""From options to a network and data that fit together, or to a message that says what does not fit."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from batchbayes.assessment.named import build_network, named_method
from batchbayes.assessment.options import AssessOptions, Task
from batchbayes.assessment.sources import Reading, first_reading, read_training
from batchbayes.batches import pick_inputs
from batchbayes.data.examples import Examples
from batchbayes.errors import BatchbayesError
from batchbayes.methods import Method
from batchbayes.network import as_network

CALIBRATION_SHARE = 1 / 3
"""Share of the test data that is split off for tuning if there is no validation data."""


@dataclass(frozen=True, eq=False)
class Case:
    """The network, its data and the methods to compare, checked."""

    network: nn.Module
    methods: list[Method]
    task: Task
    train: Any
    """What methods read training batches from."""
    calibration: Examples
    test: Examples
    ood: Examples | None
    num_outputs: int
    class_names: tuple[str, ...] | None
    split_off: bool
    """Whether the calibration data is a part of the test data."""
    reading: Reading
    """How the data was read."""


def load_case(options: AssessOptions) -> Case:
    """Read everything that the options name."""
    methods = [named_method(name) for name in options.method]
    network = build_network(options.model, options.weights, options.device)
    train, reading = read_training(options, first_reading(options))
    test, reading = _read_test(options, reading)
    validation = reading.read(options.validation, "the validation data") if options.validation else None
    outputs = trial(network, test)
    task = options.task or guess_task(outputs, test)
    calibration, test = (validation, test) if validation else test.split(CALIBRATION_SHARE, options.seed)
    others = reading.optional_columns()
    ood = others.read(options.ood, "the out-of-distribution data", inputs_only=True) if options.ood else None
    for part in [part for part in (calibration, ood) if part]:
        trial(network, part)
    case = Case(
        network=network,
        methods=methods,
        task=task,
        train=train,
        calibration=calibration,
        test=test,
        ood=ood,
        num_outputs=outputs.shape[1] if outputs.ndim > 1 else 1,
        class_names=options.class_names or reading.class_names,
        split_off=validation is None,
        reading=reading,
    )
    _require_fitting(case, outputs, options.ignore_label)
    return case


def _read_test(options: AssessOptions, reading: Reading) -> tuple[Examples, Reading]:
    """Read the test data. If the training data said nothing about columns and classes, the test data does."""
    test = reading.read(options.test, "the test data")
    settled = reading.like(test, options.class_names)
    if test.class_names not in (None, settled.class_names):
        test = settled.read(options.test, "the test data")
    return test, settled


@torch.no_grad()
def trial(network: nn.Module, source: Examples) -> Tensor:
    """Return the outputs for two examples. Raise an error if the network does not take them."""
    first = next(iter(source), None)
    if first is None:
        raise BatchbayesError(expected=f"examples in {source.name}", got="none", fix="check the data")
    inputs = pick_inputs(first)[:2]
    wrapped = as_network(network)
    try:
        return wrapped(inputs.to(wrapped.device)).cpu()
    except BatchbayesError:
        raise
    except Exception as error:
        raise BatchbayesError(
            expected=f"inputs that {type(network).__name__} takes",
            got=f"shape {tuple(inputs.shape)} from {source.name} ({' '.join(str(error).split())[:160]})",
            fix="give the data the shape and the columns that the network was trained on",
        ) from error


def guess_task(outputs: Tensor, test: Examples) -> Task:
    """Guess the task from the outputs for some examples and from the targets.

    Whole-number targets are classes: of pixels if the outputs are maps. Everything else is a regression.
    """
    _, targets = next(iter(test))
    if targets is None:
        raise BatchbayesError(
            expected=f"targets beside the inputs of {test.name}",
            got="inputs alone",
            fix="name the column by --target, or give batches as (inputs, targets)",
        )
    if targets.is_floating_point() or outputs.ndim < 2 or outputs.shape[1] == 1:
        return "regression"
    return "segmentation" if outputs.ndim == 4 else "classification"


def _require_fitting(case: Case, outputs: Tensor, ignored_label: int | None) -> None:
    """Raise an error if targets or class names do not fit the outputs of the network."""
    for part in (case.calibration, case.test):
        for _, targets in part:
            if targets is None:
                raise BatchbayesError(
                    expected=f"targets in every batch of {part.name}", got="inputs alone", fix="check the data"
                )
            if case.task == "regression":
                _require_targets(part.name, targets, outputs)
            else:
                _require_labels(part.name, targets, outputs, ignored_label)
    names = case.class_names
    if names is not None and case.task != "regression" and len(names) < case.num_outputs:
        raise BatchbayesError(
            expected=f"{case.num_outputs} class names, one for each output",
            got=f"{len(names)}",
            fix="check --class-names, and that the model has as many outputs as there are classes",
        )


def _require_targets(name: str, targets: Tensor, outputs: Tensor) -> None:
    shape = outputs.shape[1:]
    if targets.shape[1:] != shape and not (targets.ndim == 1 and shape == (1,)):
        raise BatchbayesError(
            expected=f"targets of shape (N, {', '.join(map(str, shape))}) in {name}",
            got=f"(N, {', '.join(map(str, targets.shape[1:]))})",
            fix="give one target for each output of the network",
        )


def _require_labels(name: str, targets: Tensor, outputs: Tensor, ignored_label: int | None) -> None:
    classes = outputs.shape[1]
    if targets.is_floating_point() or targets.shape[1:] != outputs.shape[2:]:
        raise BatchbayesError(
            expected=f"whole-number labels of shape {('N', *outputs.shape[2:])} in {name}",
            got=f"{targets.dtype} of shape {('N', *targets.shape[1:])}",
            fix="pass class numbers from 0, or choose another --task",
        )
    keep = targets != ignored_label if ignored_label is not None else torch.ones_like(targets, dtype=torch.bool)
    if not keep.reshape(len(keep), -1).any(1).all():
        raise BatchbayesError(
            expected=f"at least one label that counts in every example of {name}",
            got="an example without",
            fix="leave it out, or check --ignore-label",
        )
    kept = targets[keep]
    if kept.numel() and not 0 <= int(kept.min()) <= int(kept.max()) < classes:
        raise BatchbayesError(
            expected=f"labels from 0 to {classes - 1}, as the network has {classes} outputs",
            got=f"{int(kept.min())} to {int(kept.max())} in {name}",
            fix="renumber the labels from 0, or leave one out by --ignore-label",
        )
