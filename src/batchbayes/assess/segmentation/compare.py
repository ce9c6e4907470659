"""Assessment of a segmentation: images come one at a time, and only sums over their pixels are kept."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributions

from batchbayes._common.text import count
from batchbayes.assess.candidates import Entry, Way, class_entries, drawing, fit_all, notes_for_new_data
from batchbayes.assess.choice import Choice, choose
from batchbayes.assess.classification.compare import RANKING
from batchbayes.assess.classification.verdict import class_sentences, pixel_rejection
from batchbayes.assess.explorer import image_explorer
from batchbayes.assess.job import FLAGGED_SHARE, Assessment, Column, Job, Loaded, Scored, Thumbnails
from batchbayes.assess.segmentation.figures import pixel_figures
from batchbayes.assess.segmentation.pixels import PixelSums, kept_pixels
from batchbayes.assess.tables import Table, flags
from batchbayes.assess.thumbnails import chosen_rows, displayable, small
from batchbayes.calibrate import lowest
from batchbayes.likelihoods import Categorical, categorical
from batchbayes.metrics import risk_coverage
from batchbayes.posterior import Posterior
from batchbayes.predictive import CategoricalPredictive

COLUMNS = (
    Column("accuracy", "Pixel accuracy", "higher", 1, "share of pixels with the right class", percent=True),
    Column(
        "mean_iou", "Mean IoU", "higher", 1, "overlap of predicted and true regions, mean over classes", percent=True
    ),
    Column("nll", "NLL", "lower", 3, "negative log-likelihood: the surprise at the truth, in nats a pixel"),
    Column("brier", "Brier", "lower", 3, "squared distance of the probabilities from the truth, 0 to 2"),
    Column("ece", "ECE", "lower", 1, "mean gap between confidence and accuracy, 15 equal-width bins", percent=True),
    Column("error_auroc", "AUROC", "higher", 3, "how well entropy tells wrong pixels from right ones", group=RANKING),
    Column("error_auroc_mi", "AUROC by MI", "higher", 3, "how well mutual information does", group=RANKING),
    Column("aurc", "AURC", "lower", 4, "mean error rate as the least certain are set aside", group=RANKING),
)
TUNING_DRAWS, TUNING_IMAGES = 8, 8
"""Jacobians of maps are large: the batch size is tuned on few draws of few images."""
TEMPERATURES = torch.linspace(math.log(0.4), math.log(4), 9).exp().tolist()


@dataclass(frozen=True)
class IgnoringCategorical(Categorical):
    """Labels of one value add nothing to the likelihood."""

    ignored_label: int | None = None

    def __call__(self, outputs: Tensor) -> distributions.Categorical:
        return _Ignoring(self.logits(outputs), self.ignored_label)

    def fitting(self, outputs: Tensor, targets: Tensor) -> Tensor:
        keep = kept_pixels(targets, self.ignored_label)
        return super().fitting(outputs, targets.where(keep, 0)).where(keep.cpu(), targets.cpu())


class _Ignoring(distributions.Categorical):
    def __init__(self, logits: Tensor, ignored_label: int | None) -> None:
        super().__init__(logits=logits, validate_args=False)
        self._ignored_label = ignored_label

    def log_prob(self, value: Tensor) -> Tensor:
        keep = kept_pixels(value, self._ignored_label)
        return torch.where(keep, super().log_prob(value.where(keep, 0)), 0.0)


@dataclass(frozen=True, eq=False)
class Contender:
    """A method with its sums over the test pixels."""

    way: Way
    temperature: float
    posterior: Posterior
    sums: PixelSums
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        return self.way.name


def assess_segmentation(job: Job, loaded: Loaded) -> Assessment:
    """Compare the methods on the test images, and say which to use."""
    tuning = IgnoringCategorical(ignored_label=job.ignored_label)
    fitted = fit_all(job, loaded, tuning, num_samples=TUNING_DRAWS, num_examples=TUNING_IMAGES)
    entries = class_entries(job, loaded, fitted)
    contenders = [contender for entry in entries for contender in _contenders(job, loaded, entry)]
    contenders.sort(key=lambda contender: contender.way.rank)
    scored = [_score(contender) for contender in contenders]
    choice = choose(scored)
    chosen = next(c for c in contenders if c.name == choice.recommended)
    drawn = next(c for c in contenders if c.name == fitted[0].tuned_name)
    uncertainty = chosen.sums.per_image("entropy")
    threshold = float(_calibration_entropy(job, loaded, chosen).quantile(1 - FLAGGED_SHARE))
    rows = loaded.test.rows()
    return Assessment(
        task="segmentation",
        columns=COLUMNS,
        scored=scored,
        recommended=choice.recommended,
        verdict=_verdict(scored, choice, chosen),
        table=_table(chosen, drawn, rows, threshold),
        figures=pixel_figures(job, loaded, contenders, chosen, fitted[0]),
        explorer=image_explorer(chosen.sums.entropy.counts()),
        thumbnails=_thumbnails(loaded, uncertainty, rows),
        details={},
        posterior=fitted[0].tuned.posterior,
        notes={
            "task": "segmentation",
            "temperature": chosen.temperature,
            "draw_temperature": drawn.temperature,
            "class_names": loaded.class_names,
            **notes_for_new_data(job, chosen.settings, drawn.settings, threshold),
        },
        facts={
            "test_count": len(rows),
            "calibration_count": len(loaded.calibration.rows()),
            "classes": loaded.num_outputs,
            "threshold": threshold,
        },
    )


def _contenders(job: Job, loaded: Loaded, entry: Entry) -> list[Contender]:
    """All ways of using a posterior, in one pass over the test images."""
    temperatures = [_best_temperature(job, loaded, entry.posterior) if way.warm else 1.0 for way in entry.ways]
    sums = [PixelSums(loaded.num_outputs, job.ignored_label) for _ in entry.ways]

    def add(predictives: tuple[CategoricalPredictive, ...], _: Tensor, labels: Tensor) -> None:
        for total, seen in zip(sums, predictives, strict=True):
            total.add(seen, labels)

    engine = drawing(job).stream(entry.posterior, loaded.test, [categorical(temperature=t) for t in temperatures], add)
    return [
        Contender(way, t, entry.posterior, total, {**entry.settings, "engine": engine, "temperature": t})
        for way, t, total in zip(entry.ways, temperatures, sums, strict=True)
    ]


def _score(contender: Contender) -> Scored:
    metrics = contender.sums.metrics(has_draws=not contender.settings["network"])
    way, losses = contender.way, contender.sums.per_image("loss")
    return Scored(way.name, way.about, metrics, losses, contender.settings)


def _best_temperature(job: Job, loaded: Loaded, posterior: Any) -> float:
    """The temperature with the lowest NLL of all calibration pixels: one pass for a grid, then between its points."""
    totals = torch.zeros(len(TEMPERATURES), dtype=torch.float64)

    def add(predictives: tuple[CategoricalPredictive, ...], _: Tensor, labels: Tensor) -> None:
        keep = kept_pixels(labels, job.ignored_label)
        for i, seen in enumerate(predictives):
            chosen = seen.log_probs.gather(-1, labels.where(keep, 0).unsqueeze(-1)).squeeze(-1)
            totals[i] -= chosen[keep].double().sum()

    drawing(job).stream(posterior, loaded.calibration, [categorical(temperature=t) for t in TEMPERATURES], add)
    return between(TEMPERATURES, totals.tolist())


def _calibration_entropy(job: Job, loaded: Loaded, chosen: Contender) -> Tensor:
    """Mean entropy of each calibration image, (N,)."""
    sums = PixelSums(loaded.num_outputs, job.ignored_label)

    def add(predictives: tuple[CategoricalPredictive, ...], _: Tensor, labels: Tensor) -> None:
        sums.add(predictives[0], labels)

    likelihoods = [categorical(temperature=chosen.temperature)]
    drawing(job).stream(chosen.posterior, loaded.calibration, likelihoods, add)
    return sums.per_image("entropy")


def between(temperatures: Sequence[float], costs: Sequence[float]) -> float:
    """The lowest point of the parabola in log T through the best of a grid and its neighbours.

    >>> round(between([1.0, 2.0, 4.0], [1.0, 0.0, 1.0]), 3)
    2.0
    """
    best = min(range(1, len(costs) - 1), key=lambda i: costs[i])
    x = [math.log(t) for t in temperatures[best - 1 : best + 2]]
    y = costs[best - 1 : best + 2]

    def parabola(at: float) -> float:
        terms = ((y[i], [x[j] for j in range(3) if j != i], x[i]) for i in range(3))
        return sum(v * (at - a) * (at - b) / ((c - a) * (c - b)) for v, (a, b), c in terms)

    return math.exp(lowest(parabola, x[0], x[2]))


def _verdict(scored: Sequence[Scored], choice: Choice, chosen: Contender) -> dict[str, str]:
    pixels = int(chosen.sums.confusion.counts.sum())
    verdict = class_sentences(
        scored, choice, f"{count(pixels, 'pixel')} in {count(len(chosen.sums.images['loss']), 'test image')}"
    )
    method = verdict.pop("Which method")
    doubt = pixel_rejection(risk_coverage(chosen.sums.entropy.counts()))
    return {**verdict, "When not to trust it": doubt, "Which method": method}


def _table(chosen: Contender, drawn: Contender, rows: Tensor, threshold: float) -> Table:
    """One row an image: means over its pixels."""
    answer, draws = chosen.sums, drawn.sums
    return {
        "source": ["test"] * len(rows),
        "row": rows.tolist(),
        "accuracy": [1 - share for share in answer.images["wrong"]],
        "error_rate": [*answer.images["wrong"]],
        "entropy": [*answer.images["entropy"]],
        "mutual_information": [*draws.images["information"]],
        "flag": flags(answer.per_image("entropy"), threshold),
    }


def _thumbnails(loaded: Loaded, uncertainty: Tensor, rows: Tensor) -> Thumbnails | None:
    """Of the most uncertain images, and some others; each is shrunk as it is read."""
    chosen = chosen_rows(uncertainty)
    images = displayable(loaded.test.take(chosen, lambda image: small(image[None])[0]))
    return None if images is None else Thumbnails([f"test-{int(rows[i])}" for i in chosen], images)
