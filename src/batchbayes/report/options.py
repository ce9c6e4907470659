"""The options of `batchbayes assess` and `batchbayes predict`. The command line is generated from these fields.

This module does not import torch, so that `batchbayes --help` is quick.
"""

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from batchbayes.methods.table import compared_names

Task = Literal["classification", "regression", "segmentation"]
EngineName = Literal["auto", "sample", "linear"]
Center = Literal["running", "batches"]
IntervalName = Literal["auto", "plain", "spread", "groups", "quantiles"]
NUMBER = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?"


def option(text: str | Callable[[], str], *, default: Any = MISSING, **more: Any) -> Any:
    """Return a field that is an option. Without a default it is required; False makes it a switch.

    Args:
        text: the help text, or a function that returns it when the help is shown.
        default: the value if the option is not given.
        more: arguments of `ArgumentParser.add_argument`.
    """
    return field(default=default, metadata={"help": text, **more})


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


def _method_help() -> str:
    return (
        "methods to compare (default: mcbn if the network has batch norm, mc-dropout if it has dropout), out of "
        f"{', '.join(compared_names())}, or none. A method of your own is named as pkg.module:name: the module is "
        "EXECUTED, and registers the method"
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is compared and how: options of `batchbayes assess` and of `bb.assess`."""

    task: Task | None = option("(default: guessed from the data)", default=None, choices=get_args(Task))
    class_names: tuple[str, ...] | None = option(
        "names of the classes, in order", default=None, type=names, metavar="A,B,..."
    )
    unit: tuple[str, ...] | None = option(
        "unit of the targets, for each output or for all (default: what stands in brackets in the target's name)",
        default=None,
        type=names,
        metavar="U,...",
    )
    ignore_label: int | None = option("label of pixels that do not count", default=None, type=whole, metavar="K")
    batch_size: int | None = option(
        "batch size of the training (default: the loader's)", default=None, type=positive, metavar="M"
    )
    method: tuple[str, ...] | None = option(_method_help, default=None, type=names, metavar="A,B,...")
    views: str = option(
        "random views of the inputs to average over, as in training: none, or some of crop:PADDING[:FILL], flip, "
        "shift:SHARE, jitter:SHARE (default: crop by 1/8 of the width and flip for images, flip for segmentation, "
        "none for tables)",
        default="auto",
        metavar="A,B,...",
    )
    budget: int | None = option(
        "most forward passes that a prediction may cost (default: no limit)", default=None, type=positive, metavar="N"
    )
    center: Center = option(
        "where the draws of batch-norm methods scatter around: the running statistics of the network (running), or "
        "the mean over training batches, as in the MCBN paper (batches)",
        default="running",
        choices=get_args(Center),
    )
    engine: EngineName = option(
        "how draws are made: one by one (sample), by a linear approximation (linear), or by the latter if it is "
        "accurate (auto)",
        default="auto",
        choices=get_args(EngineName),
    )
    draws: int | None = option(
        "number of draws to average, without views (default: 64 by the linear approximation, 16 exact ones)",
        default=None,
        type=positive,
        metavar="S",
    )
    intervals: IntervalName = option(
        "intervals of real targets: as wide as the predicted spread says (plain), scaled by a spread that depends "
        "on the prediction (spread), of a width for each group of predictions (groups), by quantile regression "
        "(quantiles), or the simplest that is as good as the best and not too narrow anywhere (auto)",
        default="auto",
        choices=get_args(IntervalName),
    )
    seed: int = option("seed of the split and of the draws (0)", default=0, type=whole)
    recommend: str | None = option(
        "recommend the method whose name in the tables begins so, instead of the best one", default=None, metavar="NAME"
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

    model: str = option("a function that builds the network; it is EXECUTED", metavar="pkg.module:factory")
    weights: Sequence[Path] | None = option(
        "the weights (.safetensors, .pt, .pth), unless the factory loads them; with several files, their ensemble "
        "is compared with the network of the first",
        default=None,
        type=Path,
        nargs="+",
        metavar="W",
    )
    target: str | None = option("target column of tables, or target array of .npz files", default=None, metavar="NAME")
    id: str | None = option(
        "column of tables with a name for each row, which is written beside its prediction; images have "
        "their file names",
        default=None,
        metavar="NAME",
    )
    threads: int | None = option("number of threads (default: torch decides)", default=None, type=positive, metavar="N")
    quiet: bool = option("show no progress and no summary", default=False)
    json: bool = option("print the result as JSON", default=False)


@dataclass(frozen=True, kw_only=True)
class RunOptions(CommonOptions):
    """What commands need that predict."""

    device: str = option("for example cpu or cuda:0 (cpu)", default="cpu")
    maps: Path | None = option(
        "a folder for maps of the classes and of their uncertainty as .png files (segmentation)",
        default=None,
        type=Path,
        metavar="FOLDER",
    )


@dataclass(frozen=True, kw_only=True)
class AssessOptions(RunOptions, Settings):
    """The options of `batchbayes assess`."""

    train: str = option("training data, with the training-time transforms", metavar="T")
    test: str = option("test data, with targets", metavar="X")
    out: Path = option("a folder that does not exist yet", type=Path, metavar="DIR")
    calibration: str | None = option(
        "data for tuning and choosing (default: a random third of the test data)", default=None, metavar="V"
    )
    ood: str | None = option("inputs that the network should be unsure about", default=None, metavar="O")
    reference: str | None = option(
        "training data without random transforms, to tell what is unlike it (default: that of --train)",
        default=None,
        metavar="R",
    )
    mean: tuple[float, ...] | None = option(
        "subtracted from images with values from 0 to 1, or from columns: one number for each channel",
        default=None,
        type=numbers,
        metavar="R,G,B",
    )
    std: tuple[float, ...] | None = option("what they are divided by then", default=None, type=numbers, metavar="R,G,B")
    resize: tuple[int, int] | None = option(
        "size of the images for the network", default=None, type=size, metavar="HxW"
    )
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

    posterior: Path = option("posterior.safetensors of an assessment", type=Path, metavar="P")
    input: Sequence[str] = option(
        "inputs; targets are ignored. With --parts: several files, or folders of .npz, .zarr, .csv or .parquet",
        nargs="+",
        metavar="I",
    )
    out: Path | None = option("a new .csv file (default: printed)", default=None, type=Path, metavar="FILE")
    parts: Path | None = option(
        "for data of any size: a folder for part-00000.csv and so on, which are made one by one, in memory that "
        "does not grow. If this is stopped, give the same command again: it continues",
        default=None,
        type=Path,
        metavar="DIR",
    )
    parquet: bool = option("beside --parts: part-00000.parquet and so on (needs pyarrow)", default=False)
    part_rows: int = option("most rows of a part (65536)", default=2**16, type=positive, metavar="N")
    cluster: str | None = option(
        "make --parts on a dask cluster: tcp://HOST:PORT of its scheduler, or local:N to start N workers here. "
        "The network and the posterior are sent once to each worker; --input and --model must be found there",
        default=None,
        metavar="WHERE",
    )
    scheduler_file: Path | None = option("the scheduler file of a dask cluster", default=None, type=Path, metavar="F")
    method: str | None = option(
        "only for a method of your own: imports its module", default=None, metavar="pkg.module:name"
    )
    engine: EngineName | None = option(
        "how draws are made (as in the assessment)", default=None, choices=get_args(EngineName)
    )
    draws: int | None = option("number of networks to average (as in the assessment)", default=None, type=positive)
    seed: int | None = option("seed of the draws (as in the assessment)", default=None, type=whole)


@dataclass(frozen=True, kw_only=True)
class ExportOptions(CommonOptions):
    """The options of `batchbayes export`."""

    posterior: Path = option("posterior.safetensors of an assessment", type=Path, metavar="P")
    input: str = option("inputs such as those to come; the file is compared on them", metavar="I")
    out: Path = option("a new file: .onnx or .pt2", type=Path, metavar="FILE")
    novelty: Path | None = option(
        "another detector than that of the assessment", default=None, type=Path, metavar="N.safetensors"
    )
    drift: Path | None = option(
        "a saved bb.drift: the file then watches for drift and adapts to it", default=None, type=Path,
        metavar="D.safetensors",
    )  # fmt: skip
    draws: int | None = option("number of networks to average (as in the assessment)", default=None, type=positive)
