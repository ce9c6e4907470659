"""From options to a network and data that fit together, or to a message that says what does not fit."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from batchbayes._common.rng import GlobalStream
from batchbayes.errors import BatchbayesError, warn
from batchbayes.likelihoods import Categorical, Gaussian
from batchbayes.methods.table import Method
from batchbayes.methods.views.transforms import Transform
from batchbayes.network.function import SeveralOutputsError, as_network
from batchbayes.network.inputs import pick_inputs
from batchbayes.network.source import ordered_loader
from batchbayes.report.options import AssessOptions, Settings, Task
from batchbayes.report.read.examples import Examples
from batchbayes.report.read.factories import build_network, call_named, fitting_weights, named_methods
from batchbayes.report.read.likelihood import OneLogit, class_likelihood, classes_first
from batchbayes.report.read.preprocess import InTargetUnits
from batchbayes.report.read.reading import INPUT_DTYPES, Reading
from batchbayes.report.read.sources import Training, first_reading, is_function, read_source, read_training, training_of
from batchbayes.report.read.task import guess_task, require_class_names, require_fitting
from batchbayes.report.read.views import named_views, some_inputs
from batchbayes.report.words.say import say

CALIBRATION_SHARE = 1 / 3
"""Share of the test data that is split off for tuning and choosing if there is no calibration data."""
FEW = 64
"""Examples whose outputs show whether they are probabilities."""
MOST_SHARED, COMPARED = 0.5, 1000
"""Test data is called a part of other data if it shares more than this share with it, among this number of examples."""
MOST_MISSING = 0.05
"""Classes that calibration data lacks are not worth a word up to this share of the test data."""


@dataclass(frozen=True, eq=False)
class Case:
    """The network, its data and the methods to compare, checked."""

    network: nn.Module
    settings: Settings
    methods: list[Method]
    task: Task
    likelihood: Any
    """Of the task, at a temperature or precision of 1."""
    train: Training
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
    nouns: tuple[str, str]
    """What an example of a segmentation is called, and what it is made of."""

    @cached_property
    def held_out(self) -> Tensor:
        """The targets of the calibration data, (N, ...)."""
        return self.calibration.targets()

    @cached_property
    def truth(self) -> Tensor:
        """The targets of the test data, (N, ...)."""
        return self.test.targets()

    @property
    def classes_along(self) -> int | None:
        """The axis of the classes in the outputs; None if there are none, or one logit."""
        return getattr(self.likelihood, "class_axis", None)

    def at(self, temperature: float) -> Any:
        """Return the likelihood of classes at a temperature, for all pixels: some are left out of sums later."""
        plain = replace(self.likelihood, temperature=temperature)
        return replace(plain, ignore_index=None) if isinstance(plain, Categorical) else plain


def load_case(options: AssessOptions) -> Case:
    """Read everything that the options name."""
    network = build_network(options.model, options.weights, options.device)
    members = [fitting_weights(network, path) for path in (options.weights or ())[1:]]
    train, reading = read_training(options, first_reading(options))
    if reading.target_scale:
        network, options = reading.in_target_units(network), replace(options, task="regression")
        members = [InTargetUnits.weights(weights) for weights in members]
    test, reading = _read_test(options, reading)
    others = reading.optional_columns()
    return make_case(
        network,
        train if options.reference is None else replace(train, plain=_read_reference(options.reference, others)),
        test,
        calibration=read_source(options.calibration, reading, "the calibration data") if options.calibration else None,
        ood=read_source(options.ood, others, "the out-of-distribution data", inputs_only=True) if options.ood else None,
        settings=options,
        reading=reading,
        members=members,
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
    as_given = test
    if name := needed_dtype(network, test):
        dtype, reading = INPUT_DTYPES[name], replace(reading, input_dtype=name)
        train, test = train.typed(dtype), replace(test, input_dtype=dtype)
        calibration, ood = (part and replace(part, input_dtype=dtype) for part in (calibration, ood))
    outputs = trial(network, test)
    if _share_of(as_given, _some_training_inputs(train)) > MOST_SHARED:
        warn(say("data.trained_on"))
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
    elif _share_of(test, some_inputs(calibration, COMPARED)) > MOST_SHARED:
        warn(say("data.calibrated_on"))
    for part in [part for part in (calibration, ood) if part]:
        trial(network, part)
    inputs = some_inputs(calibration)
    if likelihood is None:
        ignored = settings.ignore_label if task == "segmentation" else None
        labels = next(iter(test))[1]
        likelihood = (
            Gaussian(1.0)
            if task == "regression" or labels is None
            else class_likelihood(_outputs(network, inputs), labels, ignored)
        )
    require_fitting(task, likelihood, outputs, (calibration, test), settings.ignore_label)
    if task == "classification":
        _warn_of_missing_classes(calibration, test)
    shape = classes_first(likelihood, outputs).shape
    num_outputs = 2 if isinstance(likelihood, OneLogit) else shape[1] if len(shape) > 1 else 1
    class_names = settings.class_names or reading.class_names
    if class_names is not None and task != "regression":
        require_class_names(class_names, num_outputs, settings.ignore_label)
    return Case(
        network=network,
        settings=settings,
        methods=named_methods(settings.method, network),
        task=task,
        likelihood=likelihood,
        train=train,
        calibration=calibration,
        test=test,
        ood=ood,
        views=named_views(settings.views, inputs, task),
        num_outputs=num_outputs,
        class_names=class_names,
        members=members,
        split_off=split_off,
        reading=reading,
        nouns=("sequence", "token") if outputs.ndim == 3 else ("image", "pixel"),
    )


def _warn_of_missing_classes(calibration: Examples, test: Examples) -> None:
    """Warn if many test examples are of classes that took no part in tuning and choosing."""
    labels = test.targets()
    missing = labels[~torch.isin(labels, calibration.targets())]
    if len(missing) > MOST_MISSING * len(labels):
        warn(say("data.lacking", share=len(missing) / len(labels)))


def _share_of(test: Examples, others: Tensor) -> float:
    """Return the share of the first test examples that are among other inputs."""
    some, known = (
        {hash(row.tobytes()) for row in rows.detach().float().cpu().numpy()}
        for rows in (some_inputs(test, COMPARED), others)
    )
    return len(some & known) / len(some)


def _some_training_inputs(train: Training) -> Tensor:
    """Return the first training inputs, many if they are in memory; none if they can be read only once."""
    if isinstance(train.plain, Tensor):
        return train.plain[: 100 * COMPARED]
    if train.examples is None:
        return torch.empty(0)
    batches = train.examples.batches
    if loader := train.examples.whole_loader:
        batches = ordered_loader(loader.dataset, loader.batch_size, collate_fn=loader.collate_fn)
    elif not isinstance(batches, list | tuple):
        return torch.empty(0)
    with GlobalStream(0):
        return some_inputs(replace(train.examples, batches=batches), COMPARED)


def _read_reference(source: str, reading: Reading) -> Any:
    """Return training data without random transforms."""
    if is_function(source):
        return training_of(source, call_named(source, "the reference data"), None).plain
    return read_source(source, reading, "the reference data", inputs_only=True)


def _read_test(options: AssessOptions, reading: Reading) -> tuple[Examples, Reading]:
    """Read the test data. If the training data said nothing about columns and classes, the test data does."""
    test = read_source(options.test, reading, "the test data")
    settled = reading.like(test, options.class_names)
    if test.class_names not in (None, settled.class_names):
        test = read_source(options.test, settled, "the test data")
    return test, settled


@torch.no_grad()
def _outputs(network: nn.Module, inputs: Tensor) -> Tensor:
    """Return outputs for a few examples, enough to see whether they are probabilities."""
    wrapped = as_network(network)
    return wrapped(inputs[:FEW].to(wrapped.device)).cpu()


@torch.no_grad()
def needed_dtype(network: nn.Module, source: Examples) -> str | None:
    """Return the type that inputs must have: that of the weights, or whole numbers. None if they can stay as they are.

    Inputs are converted only if the network refuses them as they are, and accepts them after the conversion.
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
    except SeveralOutputsError as error:
        fix = "let the model return the logits alone, by a module around it whose forward takes them from its outputs"
        raise BatchbayesError(expected=error.expected, got=error.got, fix=fix) from error
    except BatchbayesError:
        raise
    except Exception as error:
        raise BatchbayesError(
            expected=f"inputs that {type(network).__name__} takes",
            got=f"shape {tuple(inputs.shape)} from {source.name} ({' '.join(str(error).split())[:160]})",
            fix="give the data the shape and the columns that the network was trained on",
        ) from error
