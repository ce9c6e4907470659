"""What an assessment compares of a batch-norm method: its noise at a tuned batch size, and at that of training."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from batchbayes._common.text import number
from batchbayes.batches import spread_evenly
from batchbayes.engines.linear_check import measure_linearity
from batchbayes.errors import BatchbayesWarning
from batchbayes.methods.batchnorm.posterior import BatchNormPosterior
from batchbayes.methods.batchnorm.sites import all_sites
from batchbayes.methods.batchnorm.tuning.batch_size import TunedBatchSize, tune_batch_size
from batchbayes.methods.candidates import Candidate, Setting, TuningCurve, cross_fitted_gain
from batchbayes.methods.table import Method
from batchbayes.network import as_network


def has_batch_norm(model: nn.Module) -> bool:
    """Return whether a network has batch-norm layers, so that these methods apply."""
    return bool(all_sites(as_network(model).module))


def batch_norm_candidates(method: Method, setting: Setting) -> list[Candidate]:
    """Fit the method, tune its batch size on calibration data, and return both posteriors."""
    options: dict[str, Any] = {"num_samples": setting.num_samples, "seed": setting.seed, "center": setting.center}
    if setting.batch_size is not None:
        options["batch_size"] = setting.batch_size
    trained = method(setting.model, setting.train, **options)
    assert isinstance(trained, BatchNormPosterior)
    tuned, caution = _tune(trained, method.label, setting)
    about = "mean of draws with the noise of the batch size"
    return [
        Candidate(
            name=f"{method.label}, M = {trained.batch_size:g}",
            about=f"{about} of training",
            posterior=trained,
            advice=_advice(trained),
            rank=1,
            short_name=method.label,
            settings={"batch_size": trained.batch_size, "center": setting.center},
        ),
        Candidate(
            name=_tuned_name(method.label, tuned.batch_size, float(tuned.curve.batch_sizes.max())),
            about=f"{about} that suits calibration data best",
            posterior=tuned.posterior,
            advice=_advice(tuned.posterior),
            rank=2,
            short_name=f"{method.label} tuned",
            settings={"batch_size": tuned.batch_size, "center": setting.center},
            curve=TuningCurve(
                values=tuned.curve.batch_sizes,
                losses=-tuned.curve.values,
                best=tuned.batch_size,
                start=trained.batch_size,
                caption=f"How much noise suits {method.label}: the loss on calibration data at each effective batch "
                "size. A smaller batch size means more noise.",
            ),
            caution=caution,
            tuning_gain=_gain(tuned, setting),
        ),
    ]


def _gain(tuned: TunedBatchSize, setting: Setting) -> Tensor:
    """Return by how much the tuning favours each calibration example, measured in the linear family of the tuning."""
    gain = cross_fitted_gain(tuned.curve.examples, setting.folds, setting.seed)
    whole = torch.zeros(sum(len(inputs) for inputs, _ in setting.calibration), dtype=gain.dtype)
    whole[spread_evenly(len(whole), len(gain))] = gain  # the tuning may have used a selection
    return whole


def _tuned_name(label: str, batch_size: float, largest: float) -> str:
    """Return the name of a tuned method. If the best batch size is the largest that was tried, less noise is better.

    >>> _tuned_name("MCBN", 12.8, 4096), _tuned_name("MCBN", 4090.1, 4096)
    ('MCBN tuned, M = 12.8', 'MCBN tuned (no noise helps)')
    """
    return (
        f"{label} tuned, M = {number(batch_size)}" if batch_size < 0.95 * largest else f"{label} tuned (no noise helps)"
    )


def _advice(posterior: BatchNormPosterior) -> str:
    return f"Average draws at an effective batch size of {number(posterior.batch_size)}"


def _tune(trained: BatchNormPosterior, label: str, setting: Setting) -> tuple[TunedBatchSize, str]:
    """Tune the batch size. Also return a caution if the network is not linear in its statistics, as tuning takes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BatchbayesWarning)  # the caution below says it in words that fit a report
        tuned = tune_batch_size(
            trained, setting.calibration, setting.likelihood, num_samples=setting.tuning_samples, seed=setting.seed
        )
    inputs = torch.cat([inputs for inputs, _ in setting.calibration])
    found = measure_linearity(tuned.posterior, inputs, num_draws=8, max_examples=32, seed=0)
    caution = (
        f"The tuned batch size of {label} is only rough. Tuning takes the network as linear in its batch statistics, "
        f"and this holds only roughly here ({found}). How good it is was measured with the draws that are recommended."
    )
    return tuned, "" if found.trusted else caution
