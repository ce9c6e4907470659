"""Running sums over draws, as the steps of a file compute them: the counterpart of the sums in `predictive.py`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from batchbayes.calibrate import ConformalIntervals, interval_ends
from batchbayes.errors import BatchbayesError
from batchbayes.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian
from batchbayes.running_sums import RunningBernoulli

State = list[Tensor]


@dataclass(frozen=True)
class ClassSummary:
    """Sums of probabilities and of entropies."""

    likelihood: Categorical | Bernoulli

    def start(self, outputs: Tensor) -> State:
        """Return sums of nothing for outputs (N, ...), with axes of length one."""
        ndim = self.likelihood.logits(outputs[None]).ndim - 1
        return [outputs.new_zeros([1] * ndim), outputs.new_zeros([1] * (ndim - 1))]

    def add(self, outputs: Tensor, number: Tensor, state: State) -> State:
        """Add the outputs (N, ...) of draw `number`, which is counted from 0."""
        log_probs = self.likelihood.logits(outputs[None])[0].log_softmax(-1)  # (N, ..., K)
        probs = log_probs.exp()
        return [state[0] + probs, state[1] - (probs * log_probs).sum(-1)]

    def finish(self, state: State, count: int) -> tuple[dict[str, Tensor], Tensor]:
        """Return what is said, by name, and the uncertainty (N,) that a flag is set by. Only its own sums are read."""
        probs = state[0] / count
        entropy = -(probs * probs.clamp_min(torch.finfo(probs.dtype).tiny).log()).sum(-1)
        information = (entropy - state[1] / count).clamp_min(0) if count > 1 else torch.zeros_like(entropy)
        shown = probs[..., 1] if isinstance(self.likelihood.summary(), RunningBernoulli) else probs
        found = {"probs": shown, "entropy": entropy, "mutual_information": information}
        return found, entropy.reshape(entropy.shape[0], -1).mean(1)


@dataclass(frozen=True)
class ValueSummary:
    """Mean, sum of squared deviations (Welford's update) and mean noise."""

    likelihood: Gaussian | HeteroscedasticGaussian
    conformal: ConformalIntervals | None

    def start(self, outputs: Tensor) -> State:
        return [outputs.new_zeros([1] * outputs.ndim) for _ in range(3)]

    def add(self, outputs: Tensor, number: Tensor, state: State) -> State:
        component, share = self.likelihood(outputs[None]), 1 / (number + 1)
        value, noise = component.mean[0], component.variance.expand_as(component.mean)[0]
        middle, squares, noises = state
        moved = middle + (value - middle) * share
        return [moved, squares + (value - middle) * (value - moved), noises + (noise - noises) * share]

    def finish(self, state: State, count: int) -> tuple[dict[str, Tensor], Tensor]:
        middle, squares, noise = state[:3]
        variance = squares / count
        spread = (variance + noise).sqrt()
        found = {"pred_mean": middle, "pred_std": spread, "epistemic_std": variance.sqrt()}
        if self.conformal is not None:
            found["lower"], found["upper"] = interval_ends(middle, self.conformal.width * spread)
        return found, variance.sqrt().reshape(variance.shape[0], -1).amax(1)


Summary = ClassSummary | ValueSummary
"""How outputs of draws become sums, and sums become what a file says."""


def summary_of(likelihood: object, conformal: ConformalIntervals | None) -> Summary:
    """Return the sums that belong to a likelihood."""
    if isinstance(likelihood, Categorical | Bernoulli):
        if conformal is not None:
            raise BatchbayesError("intervals for real targets only", "intervals for classes", "drop conformal=")
        return ClassSummary(likelihood)
    if isinstance(likelihood, Gaussian | HeteroscedasticGaussian):
        return ValueSummary(likelihood, conformal)
    raise BatchbayesError(
        expected="one of our own likelihoods, which a file can hold",
        got=type(likelihood).__name__,
        fix="use bb.categorical(), bb.bernoulli(), bb.gaussian(...) or bb.heteroscedastic_gaussian()",
    )
