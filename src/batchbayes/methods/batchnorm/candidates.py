"""What an assessment compares of a batch-norm method: its noise at a tuned batch size, and at that of training."""

import warnings
from typing import Any

import torch
from torch import Tensor

from batchbayes._common.text import number
from batchbayes.engines.linearity import measure_linearity
from batchbayes.errors import BatchbayesWarning, warn
from batchbayes.methods import Method
from batchbayes.methods.batchnorm.posterior import BatchNormPosterior
from batchbayes.methods.batchnorm.tuning.batch_size import tune_batch_size
from batchbayes.methods.candidates import Candidate, Setting, TuningCurve


def batch_norm_candidates(method: Method, setting: Setting) -> list[Candidate]:
    """Fit the method, tune its batch size on calibration data, and return both posteriors."""
    options: dict[str, Any] = {"num_samples": setting.num_samples, "seed": setting.seed, "center": setting.center}
    if setting.batch_size is not None:
        options["batch_size"] = setting.batch_size
    trained = method(setting.model, setting.train, **options)
    assert isinstance(trained, BatchNormPosterior)
    examples = setting.calibration(setting.tuning_examples)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BatchbayesWarning)  # said below, in words that fit a report
        draws = setting.tuning_samples or setting.num_samples
        tuned = tune_batch_size(trained, examples, setting.likelihood, num_samples=draws, seed=setting.seed)
    _warn_of_tuning(method.label, tuned.posterior, torch.cat([inputs for inputs, _ in examples]))
    about = f"mean of {setting.num_samples} draws, with the noise of the batch size"
    curve = TuningCurve(tuned.curve.batch_sizes, -tuned.curve.values, tuned.batch_size, trained.batch_size)
    return [
        Candidate(
            name=f"{method.label} tuned, M = {tuned.batch_size:.3g}",
            about=f"{about} that suits calibration data best",
            posterior=tuned.posterior,
            advice=_advice(tuned.posterior),
            rank=2,
            short_name=f"{method.label} tuned",
            settings={"batch_size": tuned.batch_size},
            curve=curve,
        ),
        Candidate(
            name=f"{method.label}, M = {trained.batch_size:g}",
            about=f"{about} of training",
            posterior=trained,
            advice=_advice(trained),
            settings={"batch_size": trained.batch_size},
        ),
    ]


def _advice(posterior: BatchNormPosterior) -> str:
    return f"Average draws at an effective batch size of {number(posterior.batch_size)}"


@torch.no_grad()
def _warn_of_tuning(label: str, tuned: BatchNormPosterior, inputs: Tensor) -> None:
    """Warn if the network is not linear in its statistics: the batch size is tuned as if it were."""
    found = measure_linearity(tuned, inputs, num_draws=8, max_examples=32, seed=0)
    if not found.trusted:
        warn(
            f"The batch size of {label} was tuned as if the network were linear in its batch statistics, which holds "
            f"only roughly here ({found}): the tuned batch size is rough too. The engine by which each method "
            "predicted is named at the end of the report."
        )
