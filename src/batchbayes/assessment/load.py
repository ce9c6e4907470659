"""From options to a network and data that fit together, or to a message that says what does not fit."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from batchbayes.assessment.likelihood import OneLogit, class_likelihood
from batchbayes.assessment.named import build_network, call_named, fitting_weights, named_methods
from batchbayes.assessment.options import AssessOptions, Settings, Task
from batchbayes.assessment.sources import (
    INPUT_DTYPES,
    Reading,
    Training,
    first_reading,
    is_function,
    read_training,
    training_of,
)
from batchbayes.assessment.views import named_views, some_inputs, words
from batchbayes.batches import pick_inputs
from batchbayes.data.examples import Examples
from batchbayes.errors import BatchbayesError, warn
from batchbayes.likelihoods import Gaussian
from batchbayes.methods import Method
from batchbayes.methods.batchnorm.candidates import has_batch_norm
from batchbayes.methods.dropout import has_dropout
from batchbayes.methods.views.transform import Transform
from batchbayes.network import ONE_OUTPUT, as_network

CALIBRATION_SHARE = 1 / 3
"""Share of the test data that is split off for tuning and choosing if there is no calibration data."""
FEW = 64
"""Examples whose outputs show whether they are probabilities."""
MOST_SHARED, COMPARED = 0.5, 1000
"""Test and calibration data are called the same if more of so many examples are in both."""
SEVERAL_LABELS = (
    "A network with several yes-or-no outputs is assessed one output at a time, with a model that returns only this "
    "one; bb.predict(..., bb.bernoulli()) takes all of them"
)
"""What to do with several labels for each example."""


@dataclass(frozen=True, eq=False)
class Case:
    """The network, its data and the methods to compare, checked."""

    network: nn.Module
    settings: Settings
    methods: list[Method]
    task: Task
    likelihood: Any
    """Of the task, at a temperature or precision of 1."""
    train_name: str
    train: Any
    """What methods read training batches from."""
    reference: Any
    """Training data as it looks at prediction time."""
    calibration: Examples
    test: Examples
    ood: Examples | None
    views: Transform | None
    """The random views of inputs that are compared."""
    num_outputs: int
    """The number of classes, or of values."""
    class_names: tuple[str, ...] | None
    members: Sequence[Mapping[str, Tensor]]
    """Other weights of the network, which make an ensemble with its own."""
    split_off: bool
    """Whether the calibration data is a part of the test data."""
    reading: Reading
    """How the data was read."""


def load_case(options: AssessOptions) -> Case:
    """Read everything that the options name."""
    network = build_network(options.model, options.weights, options.device)
    if options.train == options.test:
        warn("WARNING: the test data is the training data, so what is said about new data is too good.")
    train, reading = read_training(options, first_reading(options))
    test, reading = _read_test(options, reading)
    others = reading.optional_columns()
    return make_case(
        network,
        train if options.reference is None else replace(train, plain=_read_reference(options.reference, others)),
        test,
        calibration=reading.read(options.calibration, "the calibration data") if options.calibration else None,
        ood=others.read(options.ood, "the out-of-distribution data", inputs_only=True) if options.ood else None,
        settings=options,
        reading=reading,
        members=[fitting_weights(network, path) for path in (options.weights or ())[1:]],
    )


def make_case(
    network: nn.Module,
    train: Training,
    test: Examples,
    *,
    calibration: Examples | None,
    ood: Examples | None,
    settings: Settings,
    reading: Reading,
    likelihood: Any = None,
    members: Sequence[Mapping[str, Tensor]] = (),
) -> Case:
    """Check that network and data fit together, and find out what the task is."""
    if name := needed_dtype(network, test):
        dtype, reading = INPUT_DTYPES[name], replace(reading, input_dtype=name)
        train, test = train.typed(dtype), replace(test, input_dtype=dtype)
        calibration, ood = (part and replace(part, input_dtype=dtype) for part in (calibration, ood))
    outputs = trial(network, test)
    task = settings.task or guess_task(outputs, test, likelihood)
    split_off = calibration is None
    if calibration is None:
        calibration, test = test.split(CALIBRATION_SHARE, settings.seed)
        if any(next(iter(part), None) is None for part in (calibration, test)):
            raise BatchbayesError(
                expected="test data of which a random third can be set aside for calibration",
                got="too few examples",
                fix="give more test data, or calibration data of its own (calibration=, --calibration)",
            )
    elif _share_of(test, calibration) > MOST_SHARED:
        warn("WARNING: most test examples are calibration examples too, so what is said about them is too good.")
    for part in [part for part in (calibration, ood) if part]:
        trial(network, part)
    inputs = some_inputs(calibration)
    if likelihood is None:
        ignored = settings.ignore_label if task == "segmentation" else None
        likelihood = class_likelihood(_outputs(network, inputs), ignored) if task != "regression" else Gaussian(1.0)
    case = Case(
        network=network,
        settings=settings,
        methods=named_methods(settings.method, network),
        task=task,
        likelihood=likelihood,
        train_name=train.name,
        train=train.batches,
        reference=train.plain,
        calibration=calibration,
        test=test,
        ood=ood,
        views=named_views(settings.views, inputs, task),
        num_outputs=2 if isinstance(likelihood, OneLogit) else outputs.shape[1] if outputs.ndim > 1 else 1,
        class_names=settings.class_names or reading.class_names,
        members=members,
        split_off=split_off,
        reading=reading,
    )
    _require_fitting(case, outputs)
    return case


def _share_of(data: Examples, others: Examples) -> float:
    """Return the share of the first examples of a source that are among the first of another one."""
    some, known = ([row.numpy().tobytes() for row in some_inputs(part, COMPARED)] for part in (data, others))
    return len(set(some) & set(known)) / len(set(some))


def found_in(case: Case) -> str:
    """Say which layers of the network methods can use, and what was therefore compared."""
    layers = [text for text, has in (("batch norm", has_batch_norm), ("dropout", has_dropout)) if has(case.network)]
    compared = [method.label for method in case.methods]
    compared += ["the ensemble of all its weights"] if case.members else []
    compared += [f"views ({words(case.views)})"] if case.views else []
    return (
        f"The network has {' and '.join(layers) or 'neither batch norm nor dropout'}. Beside the network as it is, "
        f"{'; '.join(compared) or 'no other method'} was tried"
        + ("." if case.task == "regression" else ", each also with a temperature.")
    )


def _read_reference(source: str, reading: Reading) -> Any:
    """Return training data without random transforms."""
    if is_function(source):
        return training_of(source, call_named(source, "the reference data"), None).plain
    return reading.read(source, "the reference data", inputs_only=True)


def _read_test(options: AssessOptions, reading: Reading) -> tuple[Examples, Reading]:
    """Read the test data. If the training data said nothing about columns and classes, the test data does."""
    test = reading.read(options.test, "the test data")
    settled = reading.like(test, options.class_names)
    if test.class_names not in (None, settled.class_names):
        test = settled.read(options.test, "the test data")
    return test, settled


@torch.no_grad()
def _outputs(network: nn.Module, inputs: Tensor) -> Tensor:
    """Return outputs for a few examples, enough to see whether they are probabilities."""
    wrapped = as_network(network)
    return wrapped(inputs[:FEW].to(wrapped.device)).cpu()


@torch.no_grad()
def needed_dtype(network: nn.Module, source: Examples) -> str | None:
    """Return the type that inputs must have: that of the weights, or whole numbers. None if they can stay as they are.

    Inputs are converted only if the network does not take them as they are, and takes them so.
    """
    wrapped, first = as_network(network), next(iter(source), None)
    if first is None:
        return None
    inputs = pick_inputs(first)[:2].to(wrapped.device)
    weights = next((p.dtype for p in wrapped.module.parameters() if p.is_floating_point()), inputs.dtype)
    others = [name for name, dtype in INPUT_DTYPES.items() if dtype == weights != inputs.dtype]
    others += ["int64"] if bool((inputs == inputs.round()).all()) else []
    for name in (None, *others):
        with suppress(Exception):  # `trial` says what is wrong if nothing works
            wrapped(inputs if name is None else inputs.to(INPUT_DTYPES[name]))
            return name
    return None


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
    except BatchbayesError as error:
        if error.expected != ONE_OUTPUT:
            raise
        fix = "let the model return the logits alone, by a module around it whose forward takes them from its outputs"
        raise BatchbayesError(expected=error.expected, got=error.got, fix=fix) from error
    except Exception as error:
        raise BatchbayesError(
            expected=f"inputs that {type(network).__name__} takes",
            got=f"shape {tuple(inputs.shape)} from {source.name} ({' '.join(str(error).split())[:160]})",
            fix="give the data the shape and the columns that the network was trained on",
        ) from error


def guess_task(outputs: Tensor, test: Examples, likelihood: Any = None) -> Task:
    """Guess the task from the outputs for some examples, from the targets, and from the likelihood if it is given.

    Whole-number targets are classes: of pixels if the outputs are maps. One output with other targets than 0 and 1, and
    everything else, is a regression.
    """
    _, targets = next(iter(test))
    if targets is None:
        raise BatchbayesError(
            expected=f"targets beside the inputs of {test.name}",
            got="inputs alone",
            fix="name the column by --target, or give batches as (inputs, targets)",
        )
    if isinstance(likelihood, Gaussian):
        return "regression"
    if likelihood is None and targets.is_floating_point() and _yes_or_no(test):
        raise BatchbayesError(
            expected=f"targets in {test.name} whose meaning is clear",
            got=f"zeros and ones as {targets.dtype}, which may be yes and no, or values",
            fix='pass y.long() for yes and no, or task="regression" (--task regression) for values'
            + (f". {SEVERAL_LABELS}" if targets.ndim > 1 and targets.shape[1] > 1 else ""),
        )
    one = outputs.ndim < 2 or outputs.shape[1] == 1
    if likelihood is None and one and not targets.is_floating_point():
        _require_clear_numbers(test)
    if likelihood is None and (targets.is_floating_point() or (one and not _yes_or_no(test))):
        return "regression"
    return "segmentation" if outputs.ndim == 4 else "classification"


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


def _require_fitting(case: Case, outputs: Tensor) -> None:
    """Raise an error if targets or class names do not fit the outputs of the network."""
    shape = outputs.shape
    axes = {"segmentation": (4,), "classification": (1, 2)}.get(case.task, (outputs.ndim,))
    if outputs.ndim not in axes:
        steps = "let the network return (N, classes, 1, steps) for labels (N, 1, steps)"
        raise BatchbayesError(
            expected="outputs (N, classes, height, width) of a segmentation, or (N, classes) of a classification",
            got=f"{tuple(shape)} for a {case.task}",
            fix=steps if outputs.ndim == 3 else "choose another --task, or leave it out",
        )
    if isinstance(case.likelihood, OneLogit):  # as many classes as yes and no
        shape = torch.Size([shape[0], 2, *shape[2:]])
    for part in (case.calibration, case.test):
        for _, targets in part:
            if targets is None:
                raise BatchbayesError(
                    expected=f"targets in every batch of {part.name}", got="inputs alone", fix="check the data"
                )
            if case.task == "regression":
                _require_targets(part.name, targets, outputs)
            else:
                _require_labels(part.name, targets, shape, case.settings.ignore_label)
    names = case.class_names
    if names is not None and case.task != "regression" and len(names) < case.num_outputs:
        raise BatchbayesError(
            expected=f"{case.num_outputs} class names, one for each output",
            got=f"{len(names)}",
            fix="check --class-names, and that the model has as many outputs as there are classes",
        )
    if names is not None and len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise BatchbayesError(
            expected="a name of its own for each class", got=f"{twice!r} twice", fix="rename one of them"
        )


def _require_targets(name: str, targets: Tensor, outputs: Tensor) -> None:
    shape = outputs.shape[1:]
    if targets.shape[1:] != shape and not (targets.ndim == 1 and shape == (1,)):
        raise BatchbayesError(
            expected=f"targets of shape (N, {', '.join(map(str, shape))}) in {name}",
            got=f"(N, {', '.join(map(str, targets.shape[1:]))})",
            fix="give one target for each output of the network",
        )


def _require_labels(name: str, targets: Tensor, shape: torch.Size, ignored_label: int | None) -> None:
    classes = shape[1]
    if targets.ndim == 2 and len(shape) == 2:
        raise BatchbayesError(
            expected=f"one label for each example of {name}",
            got=f"{targets.shape[1]} for each",
            fix=SEVERAL_LABELS if targets.shape[1] > 1 else "pass y[:, 0]",
        )
    if targets.is_floating_point() or targets.shape[1:] != shape[2:]:
        raise BatchbayesError(
            expected=f"whole-number labels of shape {('N', *shape[2:])} in {name}",
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
