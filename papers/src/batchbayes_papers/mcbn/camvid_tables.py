"""Tables and figures of the segmentation experiment."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchbayes.tools import Figure
from batchbayes_papers.data.camvid import CLASSES, UNLABELLED
from batchbayes_papers.mcbn.frame_sums import BINS, measures, ranked, with_standard_errors
from batchbayes_papers.runner.experiment import Results
from batchbayes_papers.runner.figures import Line, MapColumn, lines_figure, maps_figure
from batchbayes_papers.runner.records import unpack_tensors
from batchbayes_papers.runner.tables import CellValue, ResultTable

QUALITY = {
    "mean IoU": ("iou", 100, 1), "accuracy": ("accuracy", 100, 1), "NLL": ("nll", 1, 3), "ECE": ("ece", 100, 1),
    "PAvPU": ("pavpu", 100, 1),
}  # fmt: skip
DETECTION = {
    "AUROC by entropy": ("auroc", 1, 3), "by MI": ("auroc_information", 1, 3), "by variance": ("auroc_variance", 1, 3),
    "inside, by entropy": ("auroc_inside", 1, 3), "wrong among 5 %": ("precision", 100, 1),
    "of all wrong": ("recall", 100, 1),
}  # fmt: skip
BOUNDARY = {
    "error at boundaries": ("error_edge", 100, 1), "error inside": ("error_inside", 100, 1),
    "entropy at boundaries": ("entropy_edge", 1, 3), "entropy inside": ("entropy_inside", 1, 3),
}  # fmt: skip
"""Headings, and for each a measure, its factor and its digits."""


def camvid_tables(methods: Sequence[str], results: Results) -> list[ResultTable]:
    """Return three tables of measures of methods, and one of novelty."""
    found = {
        name: with_standard_errors(unpack_tensors(results[name]["sums"]), partial(measures, ignored=UNLABELLED))
        for name in methods
        if name in results
    }
    ways = "; ".join(f"{name}: {_way(results[name])}" for name in found)
    return [
        _table("Segmentation of CamVid", found, QUALITY, (
            "All ± are standard errors over frames. IoU, accuracy, ECE and PAvPU in per cent; NLL in nats for a pixel.",
            "PAvPU: patches of 4 x 4 pixels that are accurate and certain, or neither.", f"{ways}.")),
        _table("Wrong pixels found by uncertainty", found, DETECTION, (
            "Wrong among 5 %: the share of wrong pixels among the most uncertain 5 %. Of all wrong: the share of all "
            "wrong pixels that are among them. Variance: of the probabilities, mean over classes, as in the paper's "
            "maps. Inside: pixels more than 3 rows and columns from a boundary.",)),
        _table("Boundaries between classes", found, BOUNDARY, ("Errors in per cent, entropy in nats.",)),
        _novelty_table(results.get("novelty")),
    ]  # fmt: skip


def _way(result: Mapping[str, Any]) -> str:
    noise = "" if result["M"] is None else f", noise of M = {result['M']:.3g}"
    return f"passes {result['passes']}, {result['engine']}{noise}"


def _table(
    title: str, found: Mapping[str, Any], columns: Mapping[str, tuple[str, float, int]], notes: tuple[str, ...]
) -> ResultTable:
    rows = []
    for name, values in found.items():
        cells: list[CellValue] = [name]
        for key, factor, digits in columns.values():
            value, error = values[key]
            defined = value == value  # no AUROC of a score that is the same everywhere
            cells.append(f"{factor * value:.{digits}f} ± {factor * error:.{digits}f}" if defined else None)
        rows.append(tuple(cells))
    return ResultTable(title, ("method", *columns), tuple(rows), notes=notes)


def _novelty_table(result: Mapping[str, Any] | None) -> ResultTable:
    rows: tuple[tuple[CellValue, ...], ...] = ()
    if result:
        counts = unpack_tensors(result["counts"])["counts"].double()  # (frames, wrong right unlabelled, BINS)

        def auroc(total: Mapping[str, Any]) -> dict[str, float]:
            wrong, right, blank = total["counts"]
            return {
                "wrong pixels against right ones": ranked(torch.stack([wrong, right])),
                "unlabelled pixels against labelled ones": ranked(torch.stack([blank, wrong + right])),
            }

        values = with_standard_errors({"counts": counts}, auroc)
        rows = tuple((what, value, error) for what, (value, error) in values.items())
    return ResultTable(
        "Novelty of a pixel: AUROC",
        ("what it tells apart", "AUROC", "standard error"),
        rows,
        ("", ".3f", ".3f"),
        ("Novelty asks whether the network has seen such a place, and not whether its answer is right.",),
    )


def camvid_figures(methods: Sequence[str], mapped: str, shown: Sequence[int], results: Results) -> dict[str, Figure]:
    """Draw the maps of one method, and how many wrong pixels the most uncertain pixels hold."""
    tensors = {**unpack_tensors(results[mapped]["maps"]), **unpack_tensors(results["novelty"]["maps"])}

    def column(title: str, name: str, kind: Any) -> MapColumn:
        each = [tensors[f"{number}.{name}"] for number in shown]
        arrays = [own.permute(1, 2, 0) if name == "image" else own.float() for own in each]
        return MapColumn(title, kind, [array.numpy() for array in arrays])

    columns = [
        column("frame", "image", "image"), column("prediction", "predicted", "classes"),
        column("wrong (black)", "wrong", "mask"), column("entropy, nats", "entropy", "heat"),
        column("mutual information, nats", "information", "heat"), column("novelty", "novelty", "heat"),
    ]  # fmt: skip
    return {
        "maps-of-prediction-error-and-uncertainty": maps_figure(columns, class_names=CLASSES),
        "uncertainty-and-wrong-pixels": _errors_figure(methods, mapped, results),
    }


def _errors_figure(methods: Sequence[str], mapped: str, results: Results) -> Figure:
    """Draw the share of wrong pixels found, and the entropy of right and wrong pixels."""
    lift, spread = [], []
    for name in methods:
        wrong, right = unpack_tensors(results[name]["sums"])["entropy"].double().sum((0, 1))  # (BINS,)
        looked, found = (_rising(part.flip(0)) for part in (wrong + right, wrong))
        lift.append(Line(name, looked, found))
        if name == mapped:
            places = 2.485 * torch.linspace(0, 1, BINS).pow(4)
            spread = [
                Line(f"{what} pixels", places.numpy(), _rising(part)[1:])
                for what, part in (("wrong", wrong), ("right", right))
            ]
    return lines_figure(
        {"% of wrong pixels found": lift, "% of pixels with less entropy": spread},
        ("% of pixels looked at, the most uncertain first", "entropy, nats"),
    )


def _rising(counts: Tensor) -> np.ndarray:
    """Return how many of all are counted up to each bin, in per cent, from 0 on."""
    return (100 * torch.cat([torch.zeros(1), counts.cumsum(0) / counts.sum()])).numpy()
