"""What an assessment compares of a batch-norm method: its noise at a tuned batch size, and at that of training."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from batchbayes._common.text import number
from batchbayes.engines.check import Linearity, measure_linearity
from batchbayes.errors import BatchbayesWarning
from batchbayes.likelihoods import Gaussian, gaussian
from batchbayes.methods.batchnorm.posterior import BatchNormPosterior
from batchbayes.methods.batchnorm.sites import all_sites
from batchbayes.methods.batchnorm.tune_batch_size import TunedBatchSize, tune_batch_size
from batchbayes.methods.candidates import Candidate, Request, TuningCurve, cross_fitted_gain
from batchbayes.methods.table import Method
from batchbayes.network.function import as_network
from batchbayes.network.source import spread_evenly


def has_batch_norm(model: nn.Module) -> bool:
    """Return whether a network has batch-norm layers, so that these methods apply."""
    return bool(all_sites(as_network(model).module))


def batch_norm_candidates(method: Method, request: Request) -> list[Candidate]:
    """Fit the method, tune its batch size on calibration data, and return both posteriors."""
    options: dict[str, Any] = {"num_samples": request.num_samples, "seed": request.seed, "center": request.center}
    if request.batch_size is not None:
        options["batch_size"] = request.batch_size
    trained = method(request.model, request.train, **options)
    assert isinstance(trained, BatchNormPosterior)
    tuned, linearity = _tune(trained, request)
    curve = TuningCurve(tuned.curve.batch_sizes, -tuned.curve.values, tuned.batch_size, trained.batch_size)
    return [
        Candidate(
            method,
            trained,
            rank=1,
            variant=f"M = {trained.batch_size:g}",
            settings={"batch_size": trained.batch_size, "center": request.center},
        ),
        Candidate(
            method,
            tuned.posterior,
            rank=2,
            variant=f"M = {number(tuned.batch_size)}",
            tuned=True,
            settings={"batch_size": tuned.batch_size, "center": request.center},
            curve=curve,
            linearity=linearity,
            tuning_gain=_gain(tuned, request),
        ),
    ]


def _gain(tuned: TunedBatchSize, request: Request) -> Tensor:
    """Return by how much the tuning favours each calibration example, measured in the linear family of the tuning."""
    gain = cross_fitted_gain(tuned.curve.examples, request.folds, request.seed)
    whole = torch.zeros(sum(len(inputs) for inputs, _ in request.calibration), dtype=gain.dtype)
    whole[spread_evenly(len(whole), len(gain))] = gain  # the tuning may have used a selection
    return whole


def _tune(trained: BatchNormPosterior, request: Request) -> tuple[TunedBatchSize, Linearity]:
    """Tune the batch size. Also return how far the network is linear in its statistics, as tuning takes it."""
    likelihood, outputs = request.likelihood, request.calibration[0][1].shape[1:2].numel()
    if isinstance(likelihood, Gaussian) and outputs > 1:
        likelihood = gaussian([1.0] * outputs)  # they may have units of their own
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BatchbayesWarning)  # the report says it in its own words
        tuned = tune_batch_size(
            trained, request.calibration, likelihood, num_samples=request.tuning_samples, seed=request.seed
        )
    inputs = torch.cat([inputs for inputs, _ in request.calibration])
    return tuned, measure_linearity(tuned.posterior, inputs, num_draws=8, max_examples=32, seed=0)
