"""The options of `batchbayes assess` and `batchbayes predict`. The command line is generated from these fields.

This module does not import torch, so that `batchbayes --help` is quick.
"""

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from batchbayes.methods.table import compared_names

Task = Literal["classification", "regression", "segmentation"]
EngineName = Literal["auto", "sample", "linear"]
Center = Literal["running", "batches"]
IntervalName = Literal["auto", "plain", "spread", "groups", "quantiles"]
NUMBER = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?"


def option(text: str | Callable[[], str], metavar: str | None = None, *, default: Any = None, **more: Any) -> Any:
    """Return a field that is an option. Its annotation says how its text is read; False makes it a switch.

    Args:
        text: the help text, or a function that returns it when the help is shown.
        metavar: what stands for the value in the help.
        default: the value if the option is not given.
        more: arguments of `ArgumentParser.add_argument`.
    """
    shown = {} if metavar is None else {"metavar": metavar}
    return field(default=default, metadata={"help": text, **shown, **more})


def needed(text: str, metavar: str, **more: Any) -> Any:
    """Return a field that is an option which has to be given."""
    return option(text, metavar, default=MISSING, **more)


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    if not re.fullmatch("[0-9]{1,18}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def whole(text: str) -> int:
    """Read a whole number. Python itself accepts more, such as 1_0 and digits of other scripts."""
    if not re.fullmatch("[+-]?[0-9]{1,18}", text):
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}")
    return int(text)


def names(text: str) -> tuple[str, ...]:
    """Read names that are separated by commas.

    >>> names("cat, dog")
    ('cat', 'dog')
    """
    return tuple(name.strip() for name in text.split(","))


def numbers(text: str) -> tuple[float, ...]:
    """Read numbers that are separated by commas.

    >>> numbers("0.5, 0.25")
    (0.5, 0.25)
    """
    if not all(re.fullmatch(NUMBER, part.strip()) for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"must be numbers with commas between them, not {text!r}")
    return tuple(map(float, text.split(",")))


def size(text: str) -> tuple[int, int]:
    """Read a height and a width, or one number for both.

    >>> size("32"), size("240x320")
    ((32, 32), (240, 320))
    """
    sides = [positive(side) for side in text.split("x")]
    if len(sides) > 2:
        raise argparse.ArgumentTypeError(f"must be HEIGHTxWIDTH in pixels, not {text!r}")
    return sides[0], sides[-1]


Positive = Annotated[int, positive]
Whole = Annotated[int, whole]
Names = Annotated[tuple[str, ...], names]
Numbers = Annotated[tuple[float, ...], numbers]
Size = Annotated[tuple[int, int], size]


def reader_of(kind: Any) -> Any:
    """Return what reads the text of an option with this annotation: a function, or a tuple of names to choose from.

    >>> reader_of(Positive | None) is positive, reader_of(Sequence[Path]), reader_of(Literal["a", "b"] | None)
    (True, <class 'pathlib.Path'>, ('a', 'b'))
    """
    if isinstance(kind, UnionType) or get_origin(kind) is Union:
        return reader_of(get_args(kind)[0])
    if get_origin(kind) is Annotated:
        return kind.__metadata__[0]
    parts = get_args(kind)
    return parts if get_origin(kind) is Literal else parts[0] if parts else kind


def _method_help() -> str:
    return (
        "methods to compare (default: mcbn if the network has batch norm, mc-dropout if it has dropout), out of "
        f"{', '.join(compared_names())}, or none. A method of your own is named as pkg.module:name: the module is "
        "EXECUTED, and registers the method"
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is compared and how: options of `batchbayes assess` and of `bb.assess`."""

    task: Task | None = option("(default: guessed from the data)")
    class_names: Names | None = option("names of the classes, in order", "A,B,...")
    unit: Names | None = option(
        "unit of the targets, for each output or for all (default: what stands in brackets in the target's name)",
        "U,...",
    )
    ignore_label: Whole | None = option("label of pixels that do not count", "K")
    batch_size: Positive | None = option("batch size of the training (default: the loader's)", "M")
    method: Names | None = option(_method_help, "A,B,...")
    views: str = option(
        "random views of the inputs to average over, as in training: none, or some of crop:PADDING[:FILL], flip, "
        "shift:SHARE, jitter:SHARE (default: crop by 1/8 of the width and flip for images, flip for segmentation, "
        "none for tables)",
        "A,B,...",
        default="auto",
    )
    budget: Positive | None = option("most forward passes that a prediction may cost (default: no limit)", "N")
    center: Center = option(
        "where the draws of batch-norm methods scatter around: the running statistics of the network (running), or "
        "the mean over training batches, as in the MCBN paper (batches)",
        default="running",
    )
    engine: EngineName = option(
        "how draws are made: one by one (sample), by a linear approximation (linear), or by the latter if it is "
        "accurate (auto)",
        default="auto",
    )
    draws: Positive | None = option(
        "number of draws to average, without views (default: 64 by the linear approximation, 16 exact ones)", "S"
    )
    intervals: IntervalName = option(
        "intervals of real targets: as wide as the predicted spread says (plain), scaled by a spread that depends "
        "on the prediction (spread), of a width for each group of predictions (groups), by quantile regression "
        "(quantiles), or the simplest that is as good as the best and not too narrow anywhere (auto)",
        default="auto",
    )
    seed: Whole = option("seed of the split and of the draws (0)", default=0)
    recommend: str | None = option(
        "recommend the method whose name in the tables begins so, instead of the best one", "NAME"
    )
    no_figures: bool = option("draw no figures, to save time", default=False)
    changes: bool = option(
        "also show what noise, blur and the like would do to the network, and how much adapting repairs: about 17,000 "
        "forward passes of single images, and one of the training data (networks with batch norm)",
        default=False,
    )


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """What all commands need: a network, and how to read data."""

    model: str = needed("a function that builds the network; it is EXECUTED", "pkg.module:factory")
    weights: Sequence[Path] | None = option(
        "the weights (.safetensors, .pt, .pth), unless the factory loads them; with several files, their ensemble "
        "is compared with the network of the first",
        "W",
        nargs="+",
    )
    target: str | None = option("target column of tables, or target array of .npz files", "NAME")
    id: str | None = option(
        "column of tables with a name for each row, which is written beside its prediction; images have "
        "their file names",
        "NAME",
    )
    threads: Positive | None = option("number of threads (default: torch decides)", "N")
    quiet: bool = option("show no progress and no summary", default=False)
    json: bool = option("print the result as JSON", default=False)


@dataclass(frozen=True, kw_only=True)
class RunOptions(CommonOptions):
    """What commands need that predict."""

    device: str = option("for example cpu or cuda:0 (cpu)", default="cpu")
    maps: Path | None = option(
        "a folder for maps of the classes and of their uncertainty as .png files (segmentation)", "FOLDER"
    )


@dataclass(frozen=True, kw_only=True)
class AssessOptions(RunOptions, Settings):
    """The options of `batchbayes assess`."""

    train: str = needed("training data, with the training-time transforms", "T")
    test: str = needed("test data, with targets", "X")
    out: Path = needed("a folder that does not exist yet", "DIR")
    calibration: str | None = option("data for tuning and choosing (default: a random third of the test data)", "V")
    ood: str | None = option("inputs that the network should be unsure about", "O")
    reference: str | None = option(
        "training data without random transforms, to tell what is unlike it (default: that of --train)", "R"
    )
    mean: Numbers | None = option(
        "subtracted from images with values from 0 to 1, or from columns: one number for each channel", "R,G,B"
    )
    std: Numbers | None = option("what they are divided by then", "R,G,B")
    resize: Size | None = option("size of the images for the network", "HxW")
    standardise: bool = option("learn the mean and the std of each column from the training file", default=False)
    standardise_targets: bool = option(
        "the network was trained on standardised targets: learn their mean and std from the training file, and give "
        "all results in the unit of the targets (regression)",
        default=False,
    )
    overwrite: bool = option("replace the files of an earlier assessment in DIR", default=False)
    parquet: bool = option("write predictions.parquet too (needs pyarrow)", default=False)
    command: str = ""
    """The command line as it was given, for the report."""


@dataclass(frozen=True, kw_only=True)
class PredictOptions(RunOptions):
    """The options of `batchbayes predict`. Draws, seed and engine are as in the assessment if they are None."""

    posterior: Path = needed("posterior.safetensors of an assessment", "P")
    input: Sequence[str] = needed(
        "inputs; targets are ignored. With --parts: several files, or folders of .npz, .zarr, .csv or .parquet",
        "I",
        nargs="+",
    )
    out: Path | None = option("a new .csv file (default: printed)", "FILE")
    parts: Path | None = option(
        "for data of any size: a folder for part-00000.csv and so on, which are made one by one, in memory that "
        "does not grow. If this is stopped, give the same command again: it continues",
        "DIR",
    )
    parquet: bool = option("beside --parts: part-00000.parquet and so on (needs pyarrow)", default=False)
    part_rows: Positive = option("most rows of a part (65536)", "N", default=2**16)
    cluster: str | None = option(
        "make --parts on a dask cluster: tcp://HOST:PORT of its scheduler, or local:N to start N workers here. "
        "The network and the posterior are sent once to each worker; --input and --model must be found there",
        "WHERE",
    )
    scheduler_file: Path | None = option("the scheduler file of a dask cluster", "F")
    method: str | None = option("only for a method of your own: imports its module", "pkg.module:name")
    engine: EngineName | None = option("how draws are made (as in the assessment)")
    draws: Positive | None = option("number of networks to average (as in the assessment)")
    seed: Whole | None = option("seed of the draws (as in the assessment)")


@dataclass(frozen=True, kw_only=True)
class ExportOptions(CommonOptions):
    """The options of `batchbayes export`."""

    posterior: Path = needed("posterior.safetensors of an assessment", "P")
    input: str = needed("inputs such as those to come; the file is compared on them", "I")
    out: Path = needed("a new file: .onnx or .pt2", "FILE")
    novelty: Path | None = option("another detector than that of the assessment", "N.safetensors")
    drift: Path | None = option("a saved bb.drift: the file then watches for drift and adapts to it", "D.safetensors")
    draws: Positive | None = option("number of networks to average (as in the assessment)")
