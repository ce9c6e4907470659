"""The likelihood of an assessment: that of its task, with what the outputs of the network look like."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from batchbayes.errors import BatchbayesError, warn
from batchbayes.likelihoods import Bernoulli, Categorical, Gaussian
from batchbayes.predictive import CategoricalPredictive
from batchbayes.running_sums import RunningCategorical, RunningSummary


@dataclass(frozen=True)
class OneLogit(Bernoulli):
    """Two classes from one logit, that of the second class: outputs (N,), (N, 1) or (N, 1, ...)."""

    def __call__(self, outputs: Tensor) -> torch.distributions.Bernoulli:
        return super().__call__(_flat(outputs))

    def logits(self, outputs: Tensor) -> Tensor:
        """Return the logits of both classes, (S, N, 1, ...) -> (S, N, ..., 2)."""
        return super().logits(_flat(outputs))

    def fitting(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().fitting(_flat(outputs), targets)

    def summary(self) -> RunningSummary[CategoricalPredictive]:  # type: ignore[override]
        return RunningCategorical(self)


def _flat(outputs: Tensor) -> Tensor:
    """Drop the axis of the one logit from outputs (S, N, 1, ...)."""
    return outputs.squeeze(2) if outputs.ndim > 2 and outputs.shape[2] == 1 else outputs


def class_likelihood(outputs: Tensor, ignore_label: int | None) -> Categorical | OneLogit:
    """Return the likelihood of classes for a network with such outputs (n, K, ...), (n, 1, ...) or (n,).

    If the outputs are probabilities, a warning says that they are taken so.
    """
    one = outputs.ndim < 2 or outputs.shape[1] == 1
    plain = OneLogit() if one else Categorical(ignore_index=ignore_label)
    try:
        plain.check_outputs(outputs)
    except BatchbayesError:
        warn("The outputs of the network are probabilities, it seems. They are taken so, and not as logits.")
        return replace(plain, probabilities=True)
    return plain


def given_likelihood(likelihood: Any) -> Categorical | OneLogit | Gaussian:
    """Return the likelihood that a user passed, in the form that an assessment needs: with nothing tuned."""
    if isinstance(likelihood, Bernoulli):
        return OneLogit(probabilities=likelihood.probabilities)
    if isinstance(likelihood, Categorical) and likelihood.class_axis == 1:
        return replace(likelihood, temperature=1.0)
    if isinstance(likelihood, Gaussian):
        return Gaussian(1.0)
    raise BatchbayesError(
        expected="bb.categorical() with classes along axis 1, bb.bernoulli() for one logit, or bb.gaussian(1.0)",
        got=getattr(likelihood, "__name__", None) or repr(likelihood),
        fix="call one of these, or leave likelihood= out",
    )


def likelihood_notes(likelihood: Categorical | OneLogit) -> dict[str, Any]:
    """Return what a file has to say about a likelihood of classes, beside its temperature."""
    axis = likelihood.class_axis if isinstance(likelihood, Categorical) else None
    return {"class_axis": axis, "probabilities": likelihood.probabilities}


def noted_likelihood(notes: Mapping[str, Any]) -> Categorical | OneLogit:
    """Return the likelihood of classes that the notes of an assessment describe."""
    axis, probabilities = notes.get("class_axis", 1), notes.get("probabilities")
    if axis is None:
        return OneLogit(notes["temperature"], probabilities)
    return Categorical(axis, notes["temperature"], None, probabilities)
