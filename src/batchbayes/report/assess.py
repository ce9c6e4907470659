"""The assessment as a whole: `bb.assess`, and the command `batchbayes assess`."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from batchbayes._common.checks import as_path, require_type, whole_number
from batchbayes._common.rng import GlobalStream
from batchbayes.errors import BatchbayesError, unknown_name, warn
from batchbayes.likelihoods import Categorical
from batchbayes.methods.batchnorm.candidates import has_batch_norm
from batchbayes.methods.mc_dropout import has_dropout
from batchbayes.methods.table import resolve
from batchbayes.network.function import Output, as_network, one_output
from batchbayes.network.inputs import Picker
from batchbayes.novelty.detector import FEWEST, Novelty, novelty
from batchbayes.report.compare.rows import Show, assessed_rows
from batchbayes.report.compare.task import Task, compare, scores_for_limit
from batchbayes.report.maps import map_writer
from batchbayes.report.notes import notes_for_prediction
from batchbayes.report.options import AssessOptions, Settings, names, positive, reader_of, whole
from batchbayes.report.page.pictures import pick_details, pick_thumbnails
from batchbayes.report.read.case import Case, load_case, make_case
from batchbayes.report.read.data_check import UNFAMILIAR, outside_ranges, unfamiliar
from batchbayes.report.read.likelihood import given_likelihood
from batchbayes.report.read.objects import from_object, loaders_of, picked_pairs
from batchbayes.report.read.packing import Packing, one_input
from batchbayes.report.read.reading import Reading
from batchbayes.report.read.sources import Training, training_of
from batchbayes.report.read.views import words
from batchbayes.report.result import Assessment
from batchbayes.report.running import noted_warnings, running
from batchbayes.report.words.methods import caution_of
from batchbayes.report.words.say import say
from batchbayes.report.write import require_extras, require_place

TASKS = {
    "classification": "batchbayes.report.compare.classes:Classes",
    "regression": "batchbayes.report.compare.values:Regression",
    "segmentation": "batchbayes.report.compare.pixels:Pixels",
}
LEVEL = 0.01
"""Inputs are called novel if fewer ordinary ones than this share are as unusual."""


def assess(
    model: nn.Module | Sequence[nn.Module],
    train: Any,
    test: Any = None,
    *,
    inputs: Picker = None,
    targets: Picker = None,
    output: Output = None,
    calibration: Any = None,
    ood: Any = None,
    reference: Any = None,
    likelihood: Any = None,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    **settings: Any,
) -> Assessment:
    """Say how good a trained network is, how honest it is, when not to trust it, and which method to use.

    Data is a DataLoader, a Dataset, a list of batches, or tensors or arrays (x, y). Only the training data may be
    shuffled. This is what `batchbayes assess` does with files.

    Args:
        model: the trained network. It is not changed. Several networks of one shape are compared with their ensemble.
        train: training data, with the training-time transforms. Targets are not needed. A `LightningDataModule` brings
            all loaders along.
        test: test data, with targets.
        inputs: where the inputs are in a batch, as in `mcbn`: `inputs="pixel_values"` for loaders of dicts. Several, as
            `inputs=("input_ids", "attention_mask")`, must have the same shapes in all batches.
        targets: where the targets are: `targets="labels"`. By default they are last in a tuple.
        output: which output counts, if the network returns several, as in `mcbn`. Load what was saved with
            `batchbayes.tools.one_output(model, output)`.
        calibration: data for tuning and choosing, with targets. By default it is a random third of the test data, which
            then does not count as test data.
        ood: inputs that the network should be unsure about.
        reference: training data without random transforms, to tell what is unlike it. By default that of `train`.
        likelihood: `bb.categorical()`, `bb.bernoulli()` for one logit, or `bb.gaussian(1.0)`, if it cannot be guessed
            from outputs and targets. Temperature and precision are tuned. For tokens (N, T, K), where padding does not
            count: `bb.categorical(class_axis=-1, ignore_index=-100)`.
        out: a folder that does not exist yet, for report.html and all other files. `save` writes them later.
        overwrite: whether to replace the files of an earlier assessment in that folder.
        settings: `batch_size=` of the training, unless `train` is a loader; and `task`, `class_names`, `unit`,
            `ignore_label`, `method`, `views`, `budget`, `center`, `engine`, `draws`, `changes`, `seed`. They are the
            options of `batchbayes assess`, and its `--help` explains them.

    >>> import torch
    >>> from torch.nn import BatchNorm1d, Linear, Sequential
    >>> network = Sequential(Linear(2, 8), BatchNorm1d(8), Linear(8, 3))
    >>> x, y = torch.randn(300, 2), torch.randint(0, 3, (300,))
    >>> found = assess(network, x[:150], (x[150:], y[150:]), batch_size=32, draws=8)
    >>> sorted(found.metrics)[:2]
    ['MCBN + temperature', 'MCBN tuned + temperature']
    """
    require_extras()
    place = None if out is None else as_path(out)
    if place is not None:
        require_place(place, overwrite)
    given, start = _settings(settings), time.monotonic()
    networks: list[Any] = list(model) if isinstance(model, Sequence) and model else [model]
    if output is not None:
        networks = [one_output(as_network(network).module, output) for network in networks]
    packing = Packing()
    if callable(inputs) or (isinstance(inputs, list | tuple) and len(inputs) > 1):
        networks = [one_input(as_network(network).module, packing) for network in networks]
    train, test, calibration = loaders_of(train, test, calibration)
    train, test, calibration, ood, reference = (
        picked_pairs(data, inputs, targets, packing) for data in (train, test, calibration, ood, reference)
    )
    wanted = None if likelihood is None else given_likelihood(likelihood)
    if isinstance(wanted, Categorical) and given.ignore_label is None:
        given = replace(given, ignore_label=wanted.ignore_index)
    with noted_warnings(shown=True) as caveats:
        for network in networks:
            as_network(network)
        case = make_case(
            networks[0],
            _training(train, reference, given.batch_size),
            from_object("test", test),
            calibration=None if calibration is None else from_object("calibration", calibration),
            ood=None if ood is None else from_object("ood", ood),
            settings=given,
            reading=Reading(),
            likelihood=wanted,
            members=[network.state_dict() for network in networks[1:]],
        )
        found = assessed(case)
    found = replace(found, caveats=tuple(caveats), seconds=time.monotonic() - start)
    if place is not None:
        found.save(place, overwrite=overwrite)
    return found


def _training(train: Any, reference: Any, batch_size: int | None) -> Training:
    found = training_of("train", train, batch_size)
    return found if reference is None else replace(found, plain=training_of("reference", reference, None).plain)


def _settings(given: Mapping[str, Any]) -> Settings:
    """Return the settings that were passed by name, checked as those of the command line are. None is the default."""
    known, plain = {field.name: reader_of(field.type) for field in fields(Settings)}, {}
    for name, value in given.items():
        if name not in known:
            raise unknown_name("an option of assess", name, sorted(known))
        read = known[name]
        if isinstance(read, tuple) and value not in (*read, None):
            raise unknown_name(name, str(value), read)
        if value is not None:
            plain[name] = PLAIN[read](name, value) if read in PLAIN else value
    return Settings(**plain)


def _names(name: str, value: Any) -> tuple[str, ...]:
    return tuple(map(str, value if isinstance(value, Iterable) and not isinstance(value, str) else [value]))


def _text(name: str, value: Any) -> str:
    fix = f"write it as on the command line, where --help explains --{name}"
    require_type(value, str, expected=f"{name} as a text", fix=fix)
    return value


PLAIN: dict[Any, Callable[[str, Any], Any]] = {
    positive: whole_number,
    whole: partial(whole_number, least=None),
    bool: lambda _, value: bool(value),
    names: _names,
    str: _text,
}
"""By what reads an option on the command line: what reads it in Python."""


def assessed(case: Case, show: Show | None = None) -> Assessment:
    """Assess a network on data that fits it. `show` takes the predictions of test images, for maps."""
    task: Task = resolve(TASKS[case.task])()
    case, contenders, choice = compare(case, task)
    chosen = choice.recommended
    scores = scores_for_limit(*task.uncertainty(case, chosen))
    novelty, why_not = fit_novelty(case)
    notes = notes_for_prediction(
        case, chosen, threshold=task.threshold(scores), novelty_level=novelty_level(novelty), **task.notes(case, chosen)
    )
    rows = assessed_rows(case, chosen.posterior, notes, task.truth(case, chosen), novelty, show)
    columns = [*task.columns, *(task.strange_columns if case.ood else ())]
    counts = {"test_count": len(chosen.losses), "calibration_count": len(chosen.calibration_losses)}
    found = Assessment(case, columns, contenders, choice, rows, notes, novelty, counts | {"no_novelty": why_not})
    found = task.told(found, len(scores))
    uncertainty = None if found.explorer is None else str(found.explorer["x"])
    found = replace(
        found,
        terms={**found.terms, "What was tried": _tried(case)},
        thumbnails=pick_thumbnails(case, rows, uncertainty),
        details={} if case.task == "segmentation" else pick_details(case, rows, uncertainty),
    )
    if case.settings.changes:
        found = resolve("batchbayes.report.compare.changes:with_changes")(found)
    return _with_warnings(found)


def _tried(case: Case) -> str:
    """Say which layers of the network methods can use, and what was therefore compared."""
    layers = [text for text, has in (("batch norm", has_batch_norm), ("dropout", has_dropout)) if has(case.network)]
    compared = [method.label for method in case.methods]
    compared += ["the ensemble of all its weights"] if case.members else []
    compared += [f"views ({words(case.views)})"] if case.views else []
    return say(
        "data.tried",
        layers=" and ".join(layers) or "neither batch norm nor dropout",
        compared="; ".join(compared) or "no other method",
        how="" if case.task == "regression" else ", each also with a temperature",
    )


def _with_warnings(found: Assessment) -> Assessment:
    """Warn of what makes the figures doubtful. Data unlike that of training comes first in the verdict."""
    case = found.case
    if caution := caution_of(found.recommended.candidate):
        warn(caution)
    test = case.test.whole() if case.split_off else case.test
    if outside := outside_ranges(test, case.reading.schema):
        warn(outside)
    reason = unfamiliar(case.network, test, classes=case.task != "regression" and case.classes_along in (None, 1))
    if reason is None:
        return found
    warn(f"{UNFAMILIAR} {reason}")
    first = {"headline": UNFAMILIAR, "What to do next": say("data.prepare"), "What is strange about it": reason}
    verdict = {**first, **{key: text for key, text in found.verdict.items() if key not in first}}
    return replace(found, verdict=verdict, is_usable=False)


def fit_novelty(case: Case) -> tuple[Novelty | None, str]:
    """Return the detector, and an empty text; or None, and why there is none.

    Its p-values are calibrated on the calibration data, which the network was not trained on.
    """
    if (count := len(case.calibration.rows())) < FEWEST:  # before any pass
        return None, say("data.no_novelty", expected=f"at least {FEWEST} calibration examples", got=count)
    is_class = case.task != "regression" and case.classes_along in (None, 1)
    try:
        with GlobalStream(case.settings.seed):  # data sets may draw random numbers
            return novelty(
                case.network,
                case.train.plain,
                calibration=case.calibration,
                logits=None if is_class else False,
                seed=case.settings.seed,
            ), ""
    except BatchbayesError as error:
        return None, say("data.no_novelty", expected=error.expected, got=error.got)


def novelty_level(found: Novelty | None) -> float:
    """Return the level below which an input is called novel: at least the smallest p-value that there is."""
    return LEVEL if found is None else max(LEVEL, found.least_level)


def assess_command(options: AssessOptions) -> None:
    """Assess, and then print the verdict and where the report is."""
    with running(options):
        report = run_assessment(options, say=(lambda _: None) if options.quiet else _say)
    document = (report.parent / "metrics.json").read_text(encoding="utf-8")
    if options.json:
        print(document, end="")
    elif not options.quiet:
        found = json.loads(document)
        verdict = found["verdict"]
        if found["usable"]:
            verdict["What to do next"] += f"\n  {found['call']}"
        print(verdict.pop("headline"), *(f"\n{heading}: {text}" for heading, text in verdict.items()), sep="")
        print(f"\nReport: {report}")


def run_assessment(options: AssessOptions, say: Callable[[str], None] = lambda _: None) -> Path:
    """Assess, write the output folder, whole or not at all, and return the path of the report."""
    start = time.monotonic()
    require_extras(parquet=options.parquet)
    require_place(options.out, options.overwrite)
    with noted_warnings() as caveats:
        say("reading the network and the data")
        case = load_case(options)
        methods = ", ".join(method.label for method in case.methods) or "no other method"
        say(f"assessing a {case.task} with {methods}")
        maps = options.maps
        found = assessed(case, None if maps is None else map_writer(maps, case.task, case.num_outputs))
    say("writing the report")
    found = replace(found, caveats=tuple(caveats), seconds=time.monotonic() - start)
    return found.save(options.out, overwrite=True, parquet=options.parquet)


def _say(text: str) -> None:
    print(f"batchbayes: {text}", file=sys.stderr)
