"""The likelihood of an assessment: that of its task, with what the outputs of the network look like."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from batchbayes.errors import BatchbayesError, warn
from batchbayes.likelihoods import Bernoulli, Categorical, Gaussian, gaussian
from batchbayes.predictive import CategoricalPredictive, RunningCategorical, RunningSummary


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


def classes_first(likelihood: Any, outputs: Tensor) -> Tensor:
    """Return outputs with the classes along axis 1, wherever the likelihood says that they are."""
    axis = getattr(likelihood, "class_axis", 1)
    return outputs.movedim(axis, 1) if axis != 1 and -outputs.ndim < axis < outputs.ndim else outputs


def class_likelihood(outputs: Tensor, labels: Tensor, ignore_label: int | None) -> Categorical | OneLogit:
    """Return the likelihood of classes for a network with such outputs (n, K, ...), (n, T, K), (n, 1, ...) or (n,).

    Labels (n, T) tell where the classes of tokens are. If the outputs are probabilities, a warning says that they are
    taken so.
    """
    one = outputs.ndim < 2 or outputs.shape[1] == 1
    last = outputs.ndim == 3 and labels.shape[1:] == outputs.shape[1:2]
    if last and outputs.shape[1] == outputs.shape[2]:
        raise BatchbayesError(
            expected="outputs of tokens that tell where their classes are",
            got=f"{tuple(outputs.shape)}, with as many classes as steps",
            fix="pass likelihood=bb.categorical(class_axis=-1) for classes last, or class_axis=1",
        )
    plain = OneLogit() if one and not last else Categorical(-1 if last else 1, ignore_index=ignore_label)
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
    if isinstance(likelihood, Categorical):
        return replace(likelihood, temperature=1.0)
    if isinstance(likelihood, Gaussian):
        return Gaussian(1.0)
    raise BatchbayesError(
        expected="bb.categorical(), bb.bernoulli() for one logit, or bb.gaussian(1.0)",
        got=getattr(likelihood, "__name__", None) or repr(likelihood),
        fix="call one of these, or leave likelihood= out",
    )


def likelihood_notes(likelihood: Categorical | OneLogit) -> dict[str, Any]:
    """Return what a file has to say about a likelihood of classes, beside its temperature."""
    axis = likelihood.class_axis if isinstance(likelihood, Categorical) else None
    return {"class_axis": axis, "probabilities": likelihood.probabilities}


def noted_likelihood(notes: Mapping[str, Any]) -> Categorical | OneLogit | Gaussian:
    """Return the likelihood that the notes of an assessment describe."""
    if notes["task"] == "regression":
        return gaussian(notes["precision"])
    axis, probabilities = notes.get("class_axis", 1), notes.get("probabilities")
    if axis is None:
        return OneLogit(notes["temperature"], probabilities)
    return Categorical(axis, notes["temperature"], None, probabilities)
