"""All methods of the regression tables, with the networks that cross-validation has chosen: tune them and test them.

Methods of the paper: MCBN, batch norm with the statistics of all rows (BN), MC dropout (MCDO), dropout without noise
(DO), and constant uncertainty around the means of MCBN and MCDO. Our additions: the linear engine, the correlated
Gaussian, MCBN with a batch size tuned on the left-out folds, and an ensemble of the networks of all seeds.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch

import batchbayes as bb
from batchbayes.models import MLP
from batchbayes.tools import EngineName
from batchbayes_papers.mcbn.protocol import (
    SELECTION_SEED,
    GridPoint,
    UciProtocol,
    best_candidate,
    cross_validate,
    train_candidate,
)
from batchbayes_papers.mcbn.scores import (
    DrawnPredictions,
    draw_predictions,
    rounded,
    score_runs,
    scores_of,
    tune_fold_precision,
)
from batchbayes_papers.mcbn.splits import Split, StandardisedPart

TUNING_SIZES = (3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512)
"""The batch sizes that can be chosen after training."""
TUNING_DRAWS, TUNING_POINTS = 100, 2000
"""Enough draws and points to compare batch sizes."""


@dataclass(frozen=True, eq=False)
class CandidateNetworks:
    """The trained networks of one candidate."""

    on_folds: list[MLP]
    """One network for each fold, with the first seed."""
    on_first_fold: list[MLP]
    """One network for each seed."""
    on_whole: list[MLP]
    """One network for each seed, trained on all rows except the test rows."""


def train_networks(own: UciProtocol, dataset: str, split: Split, candidate: GridPoint) -> CandidateNetworks:
    """Train a candidate on each fold and on the whole, all in one stack."""
    seeds, folds = [*range(1, own.seeds + 1)], split.folds
    parts = [*folds, *[folds[0]] * (own.seeds - 1), *[split.whole] * own.seeds]
    names = [*range(len(folds)), *[0] * (own.seeds - 1), *["whole"] * own.seeds]
    networks = train_candidate(dataset, parts, candidate, [*[SELECTION_SEED] * len(folds), *seeds[1:], *seeds], names)
    count = len(folds) + own.seeds - 1
    return CandidateNetworks(networks[: len(folds)], [networks[0], *networks[len(folds) : count]], networks[count:])


def score_dropout(
    own: UciProtocol,
    dataset: str,
    split: Split,
    stochastic: GridPoint,
    plain: GridPoint,
    *,
    keep_points: bool,
) -> dict[str, Any]:
    """Score MC dropout, and the dropout network without noise."""
    networks = train_networks(own, dataset, split, stochastic)
    folds, tests = predict_split(
        split, fit_all(split, networks, lambda network, part, seed: bb.mc_dropout(network)), own
    )
    runs = {"MCDO": score_runs(folds, tests, split.precisions)}
    if plain != stochastic:
        networks = train_networks(own, dataset, split, plain)
    noiseless = fit_all(split, networks, lambda network, part, seed: bb.deterministic(network))
    runs["DO"] = score_runs(*predict_split(split, noiseless, own), split.precisions)
    return {"runs": runs, "points": {"MCDO": points_of(tests[0], runs["MCDO"][0])} if keep_points else {}}


def score_batch_norm(
    own: UciProtocol,
    dataset: str,
    split: Split,
    stochastic: GridPoint,
    plain: GridPoint,
    *,
    keep_points: bool,
) -> dict[str, Any]:
    """Score MCBN and its variants, and the network with the statistics of all training rows."""
    networks = train_networks(own, dataset, split, stochastic)
    posteriors = fit_all(split, networks, mcbn_at(stochastic.batch_size, own.num_samples))
    folds, tests = predict_split(split, posteriors, own)
    runs = {"MCBN": score_runs(folds, tests, split.precisions)}
    if all(posterior.deviations.any() for posterior in posteriors.on_folds):
        runs["MCBN, linear"] = score_runs(*predict_split(split, posteriors, own, engine="linear"), split.precisions)
        runs["correlated SBN"] = score_runs(*predict_split(split, posteriors.each(correlated), own), split.precisions)
    else:
        # The chosen batches hold all rows and have no noise: take smaller batches, whose noise can be scaled.
        rows = min(len(part.inputs) for part in split.folds) // 4
        posteriors = fit_all(split, networks, mcbn_at(rows, own.num_samples))
    tuned, sizes = tuned_batch_size(own, split, posteriors)
    runs |= tuned | {"ensemble": score_ensemble(split, networks)}
    if plain != stochastic:
        networks = train_networks(own, dataset, split, plain)
    noiseless = fit_all(split, networks, lambda network, part, seed: bb.population(network, part.inputs))
    runs["BN"] = score_runs(*predict_split(split, noiseless, own), split.precisions)
    points = {"MCBN": points_of(tests[0], runs["MCBN"][0])} if keep_points else {}
    return {"runs": runs, "tuned_batch_sizes": sizes, "points": points}


P = TypeVar("P", bound=bb.Posterior)


@dataclass(frozen=True, eq=False)
class CandidatePosteriors(Generic[P]):
    """One posterior for each fold, and one for each seed on the whole."""

    on_folds: list[P]
    on_whole: list[P]

    def each(self, change: Callable[[P], P]) -> "CandidatePosteriors[P]":
        """Return the posteriors after a change to each of them."""
        return CandidatePosteriors([*map(change, self.on_folds)], [*map(change, self.on_whole)])


def fit_all(
    split: Split, networks: CandidateNetworks, fit: Callable[[MLP, StandardisedPart, int], P]
) -> CandidatePosteriors[P]:
    """Fit a posterior to each network. `fit` gets the network, the part that it was trained on, and a seed."""
    return CandidatePosteriors(
        [fit(network, part, SELECTION_SEED) for network, part in zip(networks.on_folds, split.folds, strict=True)],
        [fit(network, split.whole, seed) for seed, network in enumerate(networks.on_whole, 1)],
    )


def mcbn_at(batch_size: int, num_samples: int) -> Callable[[MLP, StandardisedPart, int], bb.BatchNormPosterior]:
    """Return a function that fits MCBN as in the paper. If a batch holds all rows, there is no noise."""

    def fit(network: MLP, part: StandardisedPart, seed: int) -> bb.BatchNormPosterior:
        if batch_size >= len(part.inputs):
            return bb.population(network, part.inputs)
        return bb.mcbn(
            network, part.inputs, batch_size=batch_size, num_samples=num_samples, seed=seed, center="batches"
        )

    return fit


def at_effective_batch_size(posterior: bb.BatchNormPosterior, batch_size: float) -> bb.BatchNormPosterior:
    """Return the posterior with the noise of another batch size, by the variance sigma^2 / M of the paper.

    Here M is a scale of the noise that is tuned, and may lie above the number of rows. So the batches count as drawn
    from an endless population.
    """
    return replace(posterior, population=math.inf).at_batch_size(batch_size)


def correlated(posterior: bb.BatchNormPosterior) -> bb.BatchNormPosterior:
    """Return the Gaussian with the covariance of the same rows: the fit of `stochastic_bn(covariance="correlated")`."""
    return replace(posterior, noise="correlated")


def predict_split(
    split: Split, posteriors: CandidatePosteriors[Any], own: UciProtocol, engine: EngineName = "sample"
) -> tuple[list[DrawnPredictions], list[DrawnPredictions]]:
    """Predict each left-out fold, and the test rows with each seed."""
    pairs = zip(posteriors.on_folds, split.folds, strict=True)
    folds = [_predict_part(posterior, part, SELECTION_SEED, own.num_samples, engine) for posterior, part in pairs]
    return folds, predict_test_rows(split, posteriors, own, engine)


def predict_test_rows(
    split: Split, posteriors: CandidatePosteriors[Any], own: UciProtocol, engine: EngineName = "sample"
) -> list[DrawnPredictions]:
    """Predict the test rows with each seed."""
    seeded = enumerate(posteriors.on_whole, 1)
    return [_predict_part(each, split.whole, seed, own.num_samples, engine) for seed, each in seeded]


def _predict_part(
    posterior: bb.Posterior, part: StandardisedPart, seed: int, count: int, engine: EngineName = "sample"
) -> DrawnPredictions:
    """Predict the other rows of a part by `count` draws; by one draw if all draws are the same."""
    return draw_predictions(posterior, part.others, part.truth, part.in_units, count, seed, engine)


def chosen_mcbn(
    own: UciProtocol, dataset: str, split: Split, batch_size: int
) -> tuple[GridPoint, list[DrawnPredictions], list[DrawnPredictions]]:
    """Choose weight decay and epochs at a batch size, and predict the folds and the test rows by MCBN."""
    candidate = best_candidate(cross_validate(own, dataset, split.folds, "BN", batch_size)["MCBN"])
    networks = train_networks(own, dataset, split, candidate)
    return candidate, *predict_split(split, fit_all(split, networks, mcbn_at(batch_size, own.num_samples)), own)


def tuned_batch_size(
    own: UciProtocol, split: Split, posteriors: CandidatePosteriors[bb.BatchNormPosterior]
) -> tuple[dict[str, list[dict[str, float]]], dict[str, float]]:
    """Score MCBN with the batch size and the precision that score best on the left-out folds, by CRPS and by PLL.

    Returns the test scores and the chosen batch sizes, both by the name of the method.
    """

    def predict_folds(batch_size: float) -> list[DrawnPredictions]:
        count = min(TUNING_DRAWS, own.num_samples)
        return [
            draw_predictions(at_effective_batch_size(posterior, batch_size), part.others[:TUNING_POINTS],
                             part.truth[:TUNING_POINTS], part.in_units, count, SELECTION_SEED)
            for posterior, part in zip(posteriors.on_folds, split.folds, strict=True)
        ]  # fmt: skip

    by_size: dict[float, list[DrawnPredictions]] = {}
    for batch_size in TUNING_SIZES:
        with suppress(bb.BatchbayesError):  # so far from the observed statistics that outputs overflow: not a candidate
            by_size[batch_size] = predict_folds(batch_size)
    runs, sizes = {}, {}
    for objective in ("CRPS", "PLL"):
        tuned = {size: tune_fold_precision(folds, objective, split.precisions) for size, folds in by_size.items()}
        best = min(tuned, key=lambda size: tuned[size][1])
        constant, _ = tune_fold_precision([fold.constant() for fold in by_size[best]], objective, split.precisions)
        name = f"MCBN, tuned by {objective}"
        sizes[name] = best
        scaled = posteriors.each(lambda posterior, best=best: at_effective_batch_size(posterior, best))
        runs[name] = [scores_of(test, tuned[best][0], constant) for test in predict_test_rows(split, scaled, own)]
    return runs, sizes


def score_ensemble(split: Split, networks: CandidateNetworks) -> list[dict[str, float]]:
    """Score one run: the networks of all seeds together, without noise. The first fold chooses the precision."""

    def predict_together(networks: Sequence[MLP], part: StandardisedPart) -> DrawnPredictions:
        members = [_predict_part(bb.population(network, part.inputs), part, 0, 1) for network in networks]
        return DrawnPredictions(torch.cat([member.draws for member in members]), part.truth)

    fold = predict_together(networks.on_first_fold, split.folds[0])
    return score_runs([fold], [predict_together(networks.on_whole, split.whole)], split.precisions)


def points_of(drawn: DrawnPredictions, scores: Mapping[str, float]) -> dict[str, Any]:
    """Return what the figure of errors against uncertainty shows."""
    return {
        "std": rounded(drawn.std(scores["precision"]), digits=4),
        "error": rounded((drawn.truth - drawn.mean).abs(), digits=4),
        "constant_std": scores["constant_precision"] ** -0.5,
    }
