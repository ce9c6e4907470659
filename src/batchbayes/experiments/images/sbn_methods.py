"""What each method predicts for known and unknown images: mean probabilities over draws of one trained network."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import batchbayes as bb
from batchbayes.experiments.images.sbn_data import LENET, NetworkSetting, SbnData, one_view, scaled, training_batches
from batchbayes.methods.batchnorm.omega import as_buffers, unpack
from batchbayes.network import Function

NETWORK, SBN = "network", "SBN"
ENSEMBLE, ENSEMBLE_SBN = "deep ensemble", "deep ensemble, SBN"
DROPOUT, DROPOUT_SBN = "dropout", "dropout, SBN"
GEOMETRIC = "network, geometric mean of variances"
MOVING, CONVOLUTIONS = "SBN, moving average", "SBN, convolutions only"
CORRELATED, MCBN, TUNED, VIEWS = "correlated SBN", "MCBN", "MCBN, tuned M", "views"
VARIANTS = (GEOMETRIC, MOVING, CONVOLUTIONS, CORRELATED, MCBN, TUNED, VIEWS)
"""In the order of the table: open choices of the paper, then what lies beyond it."""
CHUNK = 500
NOVELTY_EXAMPLES = 4000

Probabilities = tuple[Tensor, Tensor]
"""Of known images (N, K) and of unknown images (N', K)."""


@torch.no_grad()
def mean_probabilities(functions: Sequence[Function], data: SbnData) -> Probabilities:
    """Return the mean softmax of several drawn networks."""
    found = []
    for images in (data.known[0], data.unknown):
        chunks = []
        for chunk in images.split(CHUNK):
            total: Any = sum(function(chunk).double().softmax(-1) for function in functions)
            chunks.append(total / len(functions))
        found.append(torch.cat(chunks))
    return found[0], found[1]


def draws_of(posterior: bb.Posterior, passes: int) -> list[Function]:
    """Return so many draws, or one if all are the same."""
    return [posterior.draw(0, index) for index in range(1 if posterior.is_point else passes)]


def fit_sbn(name: str, network: nn.Module, data: SbnData, setting: NetworkSetting, **options: Any) -> Any:
    """Fit stochastic BN to mini-batches of the size of training."""
    size = setting.recipe.batch_size
    batches = training_batches(name, data.train[0], size, setting.num_batches)
    return bb.stochastic_bn(network, batches, batch_size=size, num_samples=setting.num_batches, **options)


def member_probabilities(
    name: str, network: nn.Module, data: SbnData, setting: NetworkSetting
) -> dict[str, Probabilities]:
    """Return the predictions of a network as it is, and by stochastic BN."""
    posterior = fit_sbn(name, network, data, setting)
    return {
        NETWORK: mean_probabilities(draws_of(bb.deterministic(network), 1), data),
        SBN: mean_probabilities(draws_of(posterior, setting.passes), data),
    }


def dropout_probabilities(
    name: str, network: nn.Module, data: SbnData, setting: NetworkSetting
) -> dict[str, Probabilities]:
    """Return the predictions by dropout masks, and by masks together with draws of stochastic BN."""
    statistics = fit_sbn(name, network, data, setting, dropout=True)
    alone = bb.mc_dropout(network)
    return {
        DROPOUT: mean_probabilities(draws_of(alone, setting.passes), data),
        DROPOUT_SBN: mean_probabilities(
            [dropped_draw(network, statistics, index) for index in range(setting.passes)], data
        ),
    }


def dropped_draw(network: nn.Module, statistics: bb.BatchNormPosterior, index: int) -> Function:
    """Return a draw of the masks and of the statistics together."""
    omega = statistics.center + statistics.deviation(0, index)
    buffers = as_buffers(statistics.sites, unpack(statistics.sites, omega))
    noisy = copy.deepcopy(network)
    noisy.load_state_dict({**noisy.state_dict(), **buffers})
    return bb.mc_dropout(noisy).draw(0, index)


def variants(
    name: str, network: nn.Module, data: SbnData, setting: NetworkSetting
) -> Mapping[str, Callable[[], bb.Posterior]]:
    """Return the choices that paper and code leave open, and methods beyond the paper, each as a fit."""
    size = setting.recipe.batch_size

    def batches(count: int) -> list[Tensor]:
        return training_batches(name, data.train[0], size, count)

    def noiseless() -> bb.Posterior:
        fitted = fit_sbn(name, network, data, setting)
        return replace(fitted, deviations=torch.zeros_like(fitted.center)[None], noise="rows")

    def tuned() -> bb.Posterior:
        fitted = bb.mcbn(network, batches(64), batch_size=size, num_samples=64, center="running")
        return bb.tune_batch_size(fitted, [data.held_out], bb.categorical(), num_samples=32).posterior

    fits: dict[str, Callable[[], bb.Posterior]] = {
        GEOMETRIC: noiseless,
        MOVING: lambda: fit_sbn(name, network, data, setting, estimator="moving-average"),
        CORRELATED: lambda: fit_sbn(name, network, data, setting, covariance="correlated"),
        MCBN: lambda: bb.mcbn(network, batches(setting.passes), batch_size=size, num_samples=setting.passes),
        VIEWS: lambda: bb.with_views(bb.deterministic(network), partial(one_view, name)),
    }
    if name == LENET:
        fits[CONVOLUTIONS] = lambda: fit_sbn(name, network, data, setting, sites=("norm1", "norm2"))
    if len(data.held_out[0]):
        fits[TUNED] = tuned
    return fits


def novelty_auroc(network: nn.Module, data: SbnData) -> float:
    """Return how well the novelty of one pass tells unknown from known images."""
    detector = bb.novelty(network, scaled(data.train[0][:NOVELTY_EXAMPLES]))
    return bb.metrics.ood_auroc(detector.score(data.known[0]), detector.score(data.unknown))
