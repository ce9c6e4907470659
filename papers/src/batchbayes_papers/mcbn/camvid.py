"""MCBN in segmentation: street scenes of CamVid, with measures of its uncertainty for every pixel.

Teye, Azizpour and Smith, "Bayesian Uncertainty Estimation for Batch Normalized Deep Networks" (ICML 2018) show maps of
uncertainty of Bayesian SegNet. They take the statistics of the first two blocks from batches of 10 images, in 20
passes. Here the same is done with the public ESPNet, and beside it: all layers, a tuned batch size, the linear engine,
and views whose maps are moved back. The paper has pictures alone; the measures are those that people use today.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn

import batchbayes as bb
from batchbayes.tools import Figure, GlobalStream, generator
from batchbayes_papers.data.camvid import CLASSES, UNLABELLED, Frame, camvid_frames, standardise
from batchbayes_papers.data.folder import DataFolder, data_file
from batchbayes_papers.mcbn.camvid_tables import camvid_figures, camvid_tables
from batchbayes_papers.mcbn.frame_sums import counted, frame_sums
from batchbayes_papers.mcbn.novelty_map import fit_novelty_map
from batchbayes_papers.models.espnet import ESPNet
from batchbayes_papers.models.pretrained import espnet_camvid
from batchbayes_papers.runner.experiment import Results, Unit, warnings_ignored
from batchbayes_papers.runner.records import pack_tensors, unpack_tensors
from batchbayes_papers.runner.tables import ResultTable

NETWORK, BLOCKS, ALL = "network", "MCBN, first two blocks (published)", "MCBN, all layers"
LINEAR, TUNED, VIEWS, BOTH = "MCBN, linear", "MCBN, tuned M", "views", "MCBN with views"
FIT, NOVELTY = "fit", "novelty"
METHODS = (NETWORK, BLOCKS, ALL, LINEAR, TUNED, VIEWS, BOTH)
FIRST_BLOCKS = ("encoder.level1.*", "encoder.b1.*", "encoder.level2_0.*", "encoder.level2.*", "encoder.b2.*")
PLACES = ("encoder.b1.bn", "encoder.b2.bn", "encoder.b3.bn", "conv.bn")
"""Sites at the end of each level, for the map of novelty."""
THIN = 2
"""Maps keep every second row and column."""


@dataclass(frozen=True)
class CamvidConfig:
    """A configuration. The defaults are those of the preset `quick`."""

    data: Literal["camvid", "synthetic"] = "camvid"
    num_test: int = 12
    num_tuning: int = 4
    """Frames that tune the batch size. They follow those of the test."""
    batch_size: int = 10
    passes: int = 20
    few_passes: int = 8
    """Of views, and of the draws that tune the batch size."""
    num_maps: int = 6
    """Frames that are shown, at equal distances in the order of their names."""


PRESETS = {
    "smoke": CamvidConfig("synthetic", num_test=4, num_tuning=2, batch_size=4, passes=3, few_passes=2, num_maps=2),
    "quick": CamvidConfig(),
    "paper": CamvidConfig(num_test=33, few_passes=20),
}


def units(config: CamvidConfig) -> list[Unit]:
    """Return the fit to the noise of all layers, one unit for each method, and one for novelty."""
    efforts = {NETWORK: 1.0, VIEWS: 4.0, BOTH: 4.0, NOVELTY: 3.0, BLOCKS: 15.0}
    made = [Unit(FIT, {"method": FIT}, effort=6.0)]
    for name in (*METHODS, NOVELTY):
        needs = (FIT,) if name in (ALL, LINEAR, TUNED, BOTH) else ()
        made.append(Unit(name, {"method": name}, needs, effort=efforts.get(name, 9.0)))
    return made


def work(config: CamvidConfig, unit: Unit, needed: Results, data_folder: DataFolder = None) -> Any:
    """Return the counts of each test frame for one method, and maps of some frames."""
    network = load_network(config, data_folder)
    with warnings_ignored():
        method = unit.arguments["method"]
        if method == NOVELTY:
            return _novelty(config, network, data_folder)
        if method == FIT:
            header, tensors = _noise(config, network, "running", data_folder).state()
            return {"header": header, "tensors": pack_tensors(tensors)}
        posterior = _posterior(config, method, network, needed, data_folder)
        passes = config.few_passes if method in (VIEWS, BOTH) else config.passes
        return _counts(config, posterior, passes, "linear" if method == LINEAR else "sample", data_folder)


def load_network(config: CamvidConfig, folder: DataFolder = None) -> nn.Module:
    """Return the public ESPNet, or a small one with random weights."""
    if config.data == "camvid":
        return espnet_camvid(data_file("weights/espnet_camvid_sacmehta.safetensors", folder))
    with GlobalStream(0):
        return ESPNet(len(CLASSES), p=1, q=1).eval()


def frames(config: CamvidConfig, split: Literal["train", "test"], folder: DataFolder = None) -> Iterator[Frame]:
    """Yield training frames, or the test frames with those that tune the batch size after them."""
    count = config.num_test + config.num_tuning if split == "test" else None
    yield from camvid_frames(split, folder, count) if config.data == "camvid" else _blocks(split, count or 6)


def _blocks(split: str, count: int) -> Iterator[Frame]:
    """Yield small frames of coloured blocks, one colour for each class, to test the program without data."""
    colours = torch.randint(0, 256, (12, 3), generator=generator(0, "colours"))
    for number in range(count):
        random = generator(number, split)
        labels = torch.randint(0, 12, (3, 4), generator=random).repeat_interleave(16, 0).repeat_interleave(16, 1)
        image = colours[labels].permute(2, 0, 1) + 20 * torch.randn(3, 48, 64, generator=random)
        yield Frame(f"{split} {number}", image.clamp(0, 255).to(torch.uint8), labels)


def _noise(
    config: CamvidConfig, network: nn.Module, center: Literal["batches", "running"], folder: DataFolder, **options: Any
) -> bb.BatchNormPosterior:
    """Fit MCBN to batches of training frames."""
    images = torch.stack([frame.image for frame in frames(config, "train", folder)])
    size, count = config.batch_size, config.passes
    return bb.mcbn(network, standardise(images), batch_size=size, num_samples=count, center=center, **options)


def _posterior(
    config: CamvidConfig, method: str, network: nn.Module, needed: Results, folder: DataFolder
) -> bb.Posterior:
    """Return the posterior of a method. The unit "fit" has the noise of all layers for those that need it."""
    if method == BLOCKS:
        return _noise(config, network, "batches", folder, sites=FIRST_BLOCKS)
    host: Any = bb.deterministic(network)
    if FIT in needed:
        tensors = unpack_tensors(needed[FIT]["tensors"])
        host = bb.BatchNormPosterior.restore(needed[FIT]["header"], tensors, network)
    if method == TUNED:
        held_out = list(frames(config, "test", folder))[config.num_test :]
        batches = [(standardise(frame.image[None]), frame.labels[None]) for frame in held_out]
        likelihood = bb.categorical(ignore_index=UNLABELLED)
        return bb.tune_batch_size(host, batches, likelihood, num_samples=config.few_passes).posterior
    return bb.with_views(host, look()) if method in (VIEWS, BOTH) else host


def look() -> bb.Compose:
    """Return the views: shifts, zooms and flips. What comes in from outside is black."""
    black = tuple(standardise(torch.zeros(1, 3, 1, 1, dtype=torch.uint8)).flatten().tolist())
    return bb.Compose(bb.RandomShiftScale(0.02, 0.1, black), bb.RandomFlip())


def shown_frames(count: int, shown: int) -> list[int]:
    """Return the numbers of frames at equal distances, from the first to the last.

    >>> shown_frames(24, 6)
    [0, 5, 9, 14, 18, 23]
    """
    return torch.linspace(0, count - 1, shown).round().long().tolist()


def _counts(
    config: CamvidConfig, posterior: bb.Posterior, passes: int, engine: Literal["sample", "linear"], folder: DataFolder
) -> dict[str, Any]:
    """Predict the test frames one by one, and keep counts of each."""
    every, maps, used, count = [], {}, engine, passes
    shown = shown_frames(config.num_test, config.num_maps)
    for number, (frame, seen) in enumerate(predicted(config, posterior, passes, engine, folder)):
        every.append(frame_sums(seen, frame.labels, UNLABELLED))
        used, count = seen.engine, seen.num_samples
        if number in shown:
            maps |= {f"{number}.{name}": value for name, value in _maps(frame, seen).items()}
    sums = {name: torch.stack([own[name] for own in every]) for name in every[0]}
    size = getattr(posterior, "batch_size", None)
    return {"sums": pack_tensors(sums), "maps": pack_tensors(maps), "engine": used, "passes": count, "M": size}


def predicted(
    config: CamvidConfig, posterior: bb.Posterior, passes: int, engine: Literal["sample", "linear"], folder: DataFolder
) -> Iterator[tuple[Frame, bb.CategoricalPredictive]]:
    """Yield each test frame with its prediction. One frame is in memory at a time, and running sums over draws."""
    kept: list[Frame] = []

    def inputs() -> Iterator[Tensor]:
        for frame in islice(frames(config, "test", folder), config.num_test):
            kept[:] = [frame]
            yield standardise(frame.image[None])

    for found in bb.predict_stream(posterior, inputs(), [bb.categorical()], num_samples=passes, engine=engine):
        yield kept[0], found.predictives[0]


def _maps(frame: Frame, seen: bb.CategoricalPredictive) -> dict[str, Tensor]:
    """Return what is shown of a frame, with fewer pixels."""
    answer = seen.log_probs[0].argmax(-1)
    wrong = (answer != frame.labels) & (frame.labels != UNLABELLED)
    thin = {
        "image": frame.image,
        "predicted": answer.to(torch.uint8),
        "wrong": wrong.to(torch.uint8),
        "entropy": seen.entropy[0].half(),
        "information": seen.mutual_information[0].half(),
    }
    return {name: values[..., ::THIN, ::THIN] for name, values in thin.items()}


def _novelty(config: CamvidConfig, network: nn.Module, folder: DataFolder) -> dict[str, Any]:
    """Count novelty on wrong and right pixels, and on pixels without a label; keep maps of some frames."""

    def training() -> Iterator[Tensor]:
        for frame in frames(config, "train", folder):
            yield standardise(frame.image[None])

    detector = fit_novelty_map(network, training, PLACES)
    shown = shown_frames(config.num_test, config.num_maps)
    maps, counts = {}, []
    for number, frame in enumerate(islice(frames(config, "test", folder), config.num_test)):
        inputs = standardise(frame.image[None])
        with torch.no_grad():
            wrong = network(inputs)[0].argmax(0) != frame.labels
        score = detector(inputs)[0]
        labelled = frame.labels != UNLABELLED
        cell = torch.where(labelled, (~wrong).long(), 2)  # wrong, right, unlabelled
        counts.append(counted((score + 10).clamp(0, 40).flatten(), cell.flatten(), 3, 40.0))
        if number in shown:
            maps[f"{number}.novelty"] = score[::THIN, ::THIN].half()
    return {"counts": pack_tensors({"counts": torch.stack(counts)}), "maps": pack_tensors(maps)}


def tables(config: CamvidConfig, results: Results) -> list[ResultTable]:
    """Return all measures of all methods with standard errors over frames."""
    return camvid_tables(METHODS, results)


def figures(config: CamvidConfig, results: Results) -> dict[str, Figure]:
    """Show maps of some frames, and how well uncertainty finds wrong pixels."""
    shown: Sequence[int] = shown_frames(config.num_test, config.num_maps)
    return camvid_figures(METHODS, ALL, shown, results)


def notes(config: CamvidConfig) -> list[str]:
    """Say how this differs from the paper."""
    return [
        "The public ESPNet of sacmehta replaces Bayesian SegNet; its training batch size is not known. Its first two "
        "blocks are the levels at a half and a quarter of the resolution, with 6 of 21 batch-norm layers.",
        f"{config.num_test} of the 233 test frames. Batches of {config.batch_size} come from 41 training frames, "
        "so they share frames more often than those of the paper (367).",
        "The test frame is not in the batch. In the authors' script it is; their paper does not say.",
        f"Views: {config.few_passes} shifts, zooms and flips. The centre of the noise is that of the batches for the "
        "published method, and the running statistics for all others.",
    ]
