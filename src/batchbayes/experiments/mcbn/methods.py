"""What is done with networks that cross-validation has chosen: every method of the regression tables, tuned and tested.

The paper's: MCBN, batch norm with the statistics of all rows (BN), MC dropout (MCDO), dropout without noise (DO), and
constant uncertainty around the means of MCBN and MCDO. Ours: the linear engine, the correlated Gaussian, MCBN with a
batch size tuned on the folds left out, and an ensemble of the networks of all seeds.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch

from batchbayes.engines.choose import EngineName
from batchbayes.errors import BatchbayesError
from batchbayes.experiments.mcbn.protocol import (
    SELECTION_SEED,
    Candidate,
    Part,
    Protocol,
    Split,
    best_candidate,
    choose,
    trained,
)
from batchbayes.experiments.mcbn.scores import Drawn, draw, scored, scores_of, tune_precision
from batchbayes.methods.batchnorm.mcbn import mcbn
from batchbayes.methods.batchnorm.population import population
from batchbayes.methods.batchnorm.posterior import BatchNormPosterior
from batchbayes.methods.dropout import mc_dropout
from batchbayes.methods.point import deterministic
from batchbayes.models.mlp import MLP
from batchbayes.posterior import Posterior

TUNING_SIZES = (3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512)
"""Batch sizes to choose from after training."""
TUNING_DRAWS, TUNING_POINTS = 100, 2000
"""Enough to compare them."""


@dataclass(frozen=True, eq=False)
class Networks:
    """The networks of one candidate."""

    on_folds: list[MLP]
    """One for each fold, from the first seed."""
    on_first_fold: list[MLP]
    """One for each seed."""
    on_whole: list[MLP]
    """One for each seed, on all rows but the test rows."""


def train_networks(own: Protocol, dataset: str, split: Split, candidate: Candidate) -> Networks:
    """Train a candidate on each fold and on the whole, all in one stack."""
    seeds, folds = [*range(1, own.seeds + 1)], split.folds
    parts = [*folds, *[folds[0]] * (own.seeds - 1), *[split.whole] * own.seeds]
    names = [*range(len(folds)), *[0] * (own.seeds - 1), *["whole"] * own.seeds]
    networks = trained(dataset, parts, candidate, [*[SELECTION_SEED] * len(folds), *seeds[1:], *seeds], names)
    count = len(folds) + own.seeds - 1
    return Networks(networks[: len(folds)], [networks[0], *networks[len(folds) : count]], networks[count:])


Fit = Callable[[MLP, Part, int], Posterior]
"""From a trained network, the part that it was trained on and a seed."""


def score_dropout(
    own: Protocol, dataset: str, split: Split, stochastic: Candidate, plain: Candidate, *, keep_points: bool
) -> dict[str, Any]:
    """MC dropout, and the dropout network without noise."""
    networks = train_networks(own, dataset, split, stochastic)
    folds, tests = predicted(split, fitted(split, networks, lambda network, part, seed: mc_dropout(network)), own)
    runs = {"MCDO": scored(folds, tests, split.precisions)}
    if plain != stochastic:
        networks = train_networks(own, dataset, split, plain)
    noiseless = fitted(split, networks, lambda network, part, seed: deterministic(network))
    runs["DO"] = scored(*predicted(split, noiseless, own), split.precisions)
    return {"runs": runs, "points": {"MCDO": _points(tests[0], runs["MCDO"][0])} if keep_points else {}}


def score_batch_norm(
    own: Protocol, dataset: str, split: Split, stochastic: Candidate, plain: Candidate, *, keep_points: bool
) -> dict[str, Any]:
    """MCBN and its relatives, and the network with the statistics of all training rows."""
    networks = train_networks(own, dataset, split, stochastic)
    posteriors = fitted(split, networks, mcbn_at(stochastic.batch_size, own.num_samples))
    folds, tests = predicted(split, posteriors, own)
    runs = {"MCBN": scored(folds, tests, split.precisions)}
    if all(posterior.deviations.any() for posterior in posteriors.on_folds):
        runs["MCBN, linear"] = scored(*predicted(split, posteriors, own, engine="linear"), split.precisions)
        runs["correlated SBN"] = scored(*predicted(split, posteriors.each(correlated), own), split.precisions)
    else:
        rows = min(len(part.inputs) for part in split.folds) // 4
        posteriors = fitted(split, networks, mcbn_at(rows, own.num_samples))  # networks that saw all rows at once
    tuned, sizes = tuned_batch_size(own, split, posteriors)
    runs |= tuned | {"ensemble": ensemble(split, networks)}
    if plain != stochastic:
        networks = train_networks(own, dataset, split, plain)
    noiseless = fitted(split, networks, lambda network, part, seed: population(network, part.inputs))
    runs["BN"] = scored(*predicted(split, noiseless, own), split.precisions)
    points = {"MCBN": _points(tests[0], runs["MCBN"][0])} if keep_points else {}
    return {"runs": runs, "tuned_batch_sizes": sizes, "points": points}


P = TypeVar("P", bound=Posterior)


@dataclass(frozen=True, eq=False)
class Posteriors(Generic[P]):
    """One for each fold, and one for each seed on the whole."""

    on_folds: list[P]
    on_whole: list[P]

    def each(self, change: Callable[[P], P]) -> "Posteriors[P]":
        """The same, each changed."""
        return Posteriors([change(posterior) for posterior in self.on_folds], [*map(change, self.on_whole)])


def fitted(split: Split, networks: Networks, fit: Callable[[MLP, Part, int], P]) -> Posteriors[P]:
    """Fit to each network, given the part that it was trained on and a seed."""
    return Posteriors(
        [fit(network, part, SELECTION_SEED) for network, part in zip(networks.on_folds, split.folds, strict=True)],
        [fit(network, split.whole, seed) for seed, network in enumerate(networks.on_whole, 1)],
    )


def mcbn_at(batch_size: int, num_samples: int) -> Callable[[MLP, Part, int], BatchNormPosterior]:
    """MCBN as in the paper; where a batch would hold all rows there is no noise."""

    def fit(network: MLP, part: Part, seed: int) -> BatchNormPosterior:
        if batch_size >= len(part.inputs):
            return population(network, part.inputs)
        return mcbn(network, part.inputs, batch_size=batch_size, num_samples=num_samples, seed=seed)

    return fit


def correlated(posterior: BatchNormPosterior) -> BatchNormPosterior:
    """The Gaussian with the covariance of the same rows, as `stochastic_bn(covariance="correlated")` would fit it."""
    return replace(posterior, noise="correlated")


def predicted(
    split: Split, posteriors: Posteriors[Any], own: Protocol, engine: EngineName = "sample"
) -> tuple[list[Drawn], list[Drawn]]:
    """Predictions of each fold left out, and of the test rows from each seed."""
    pairs = zip(posteriors.on_folds, split.folds, strict=True)
    folds = [_predicted(posterior, part, SELECTION_SEED, own, engine) for posterior, part in pairs]
    return folds, on_test_rows(split, posteriors, own, engine)


def on_test_rows(
    split: Split, posteriors: Posteriors[Any], own: Protocol, engine: EngineName = "sample"
) -> list[Drawn]:
    """Predictions of the test rows from each seed."""
    return [_predicted(each, split.whole, seed, own, engine) for seed, each in enumerate(posteriors.on_whole, 1)]


def _predicted(posterior: Posterior, part: Part, seed: int, own: Protocol, engine: EngineName) -> Drawn:
    """One draw is enough where all would be the same."""
    noiseless = isinstance(posterior, BatchNormPosterior) and not posterior.deviations.any()
    count = 1 if noiseless else own.num_samples
    return draw(posterior, part.others, part.truth, part.in_units, count, seed, engine)


def chosen_mcbn(
    own: Protocol, dataset: str, split: Split, batch_size: int
) -> tuple[Candidate, list[Drawn], list[Drawn]]:
    """MCBN at a given batch size, the weight decay and epochs chosen: predictions of the folds and of the test rows."""
    candidate = best_candidate(choose(own, dataset, split.folds, "BN", batch_size)["MCBN"])
    networks = train_networks(own, dataset, split, candidate)
    return candidate, *predicted(split, fitted(split, networks, mcbn_at(batch_size, own.num_samples)), own)


def tuned_batch_size(
    own: Protocol, split: Split, posteriors: Posteriors[BatchNormPosterior]
) -> tuple[dict[str, list[dict[str, float]]], dict[str, float]]:
    """MCBN at the batch size, and with the precision, that score best on the folds left out, by CRPS and by PLL."""

    def at(batch_size: float) -> list[Drawn]:
        count = min(TUNING_DRAWS, own.num_samples)
        return [
            draw(posterior.at_batch_size(batch_size), part.others[:TUNING_POINTS], part.truth[:TUNING_POINTS],
                 part.in_units, count, SELECTION_SEED)
            for posterior, part in zip(posteriors.on_folds, split.folds, strict=True)
        ]  # fmt: skip

    by_size: dict[float, list[Drawn]] = {}
    for batch_size in TUNING_SIZES:
        with suppress(BatchbayesError):  # so far from the observed statistics that outputs overflow: no candidate
            by_size[batch_size] = at(batch_size)
    runs, sizes = {}, {}
    for objective in ("CRPS", "PLL"):
        tuned = {size: tune_precision(folds, objective, split.precisions) for size, folds in by_size.items()}
        best = min(tuned, key=lambda size: tuned[size][1])
        constant, _ = tune_precision([fold.constant() for fold in by_size[best]], objective, split.precisions)
        name = f"MCBN, tuned by {objective}"
        sizes[name] = best
        there = posteriors.each(lambda posterior, best=best: posterior.at_batch_size(best))
        runs[name] = [scores_of(test, tuned[best][0], constant) for test in on_test_rows(split, there, own)]
    return runs, sizes


def ensemble(split: Split, networks: Networks) -> list[dict[str, float]]:
    """The networks of all seeds together, without noise in any: one run. Its precision is that of the first fold."""

    def together(networks: Sequence[MLP], part: Part) -> Drawn:
        members = [
            draw(population(network, part.inputs), part.others, part.truth, part.in_units, 1, 0) for network in networks
        ]
        return Drawn(torch.cat([member.draws for member in members]), part.truth)

    folds, tests = [together(networks.on_first_fold, split.folds[0])], [together(networks.on_whole, split.whole)]
    return scored(folds, tests, split.precisions)


def _points(drawn: Drawn, scores: Mapping[str, float]) -> dict[str, Any]:
    """What the uncertainty-error figure shows, to four digits."""
    std, error = drawn.std(scores["precision"]), (drawn.truth - drawn.mean).abs()
    return {
        "std": [float(f"{value:.4g}") for value in std.tolist()],
        "error": [float(f"{value:.4g}") for value in error.tolist()],
        "constant_std": scores["constant_precision"] ** -0.5,
    }
