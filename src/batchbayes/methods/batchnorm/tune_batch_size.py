r"""The batch size as a variational parameter, chosen after training.

MCBN takes its noise from the mini-batches of training. A network that was trained with large batches therefore has
hardly any noise (Mukhoti et al., "On Batch Normalisation for Approximate Bayesian Inference", 2021, who propose to
choose the batch size by the ELBO). Deviations scale as $1/\sqrt M$, so the Jacobians of the linear engine are computed
once and serve for every M. The objective is the score on held-out data, or the ELBO
$N\,E[\log p(y \mid x, \omega)] - \mathrm{KL}(q_M \| p)$ with the prior that weight decay implies.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from batchbayes._common.checks import log_inverse_error
from batchbayes._common.signatures import Count, Seed, checked
from batchbayes._common.tune import tune
from batchbayes.engines.check import measure_linearity, warn_unless_trusted
from batchbayes.errors import BatchbayesError
from batchbayes.likelihoods import Categorical, Gaussian, TargetLikelihood, require_likelihood
from batchbayes.methods.batchnorm.omega import site_of
from batchbayes.methods.batchnorm.posterior import BatchNormPosterior, require_noise
from batchbayes.methods.batchnorm.prior import kl_to_implied_prior
from batchbayes.methods.batchnorm.tuning_family import LinearFamily, linear_family
from batchbayes.network.inputs import Picker, pick_inputs
from batchbayes.network.source import Batches, Source

Objective = Literal["held-out", "elbo"]
Score = Literal["log-likelihood", "crps"]
GRID = 25


class BatchSizeCurve(NamedTuple):
    """The objective at each batch size of a grid, per example; higher is better. All (G,)."""

    batch_sizes: Tensor
    values: Tensor
    kl: Tensor
    """KL divergence per example, already subtracted in `values`; zero for a held-out objective."""
    examples: Tensor
    """The score of each example, without the KL divergence, (G, n). With very many examples, of an even selection."""


class TunedBatchSize(NamedTuple):
    """A posterior at the best batch size."""

    posterior: BatchNormPosterior
    value: float
    """The objective at the optimum."""
    curve: BatchSizeCurve
    likelihood: Any
    """The likelihood. A Gaussian one has the noise precision that is best at the optimum."""
    batch_sizes: tuple[float, ...]
    """The best batch size of each site, in order. All are the same unless tuned per site."""

    @property
    def batch_size(self) -> float:
        """The best batch size, a real number. If sites differ, the geometric mean."""
        return self.posterior.batch_size


@checked
def tune_batch_size(
    posterior: BatchNormPosterior,
    batches: Batches,
    likelihood: TargetLikelihood[Any],
    *,
    objective: Objective = "held-out",
    score: Score = "log-likelihood",
    per_site: bool = False,
    penalty: float = 0.01,
    num_examples: int | None = None,
    weight_decay: float = 1e-4,
    num_samples: Count = 64,
    seed: Seed = 0,
    inputs: Picker = None,
    targets: Picker = None,
) -> TunedBatchSize:
    """Choose the batch size after training, on labelled data.

    Args:
        posterior: any batch-norm posterior with noise. It is not changed.
        batches: a pair (x, y), a Dataset, or batches of pairs: held-out data for "held-out", training data for "elbo".
        likelihood: `categorical()`, or `gaussian(precision)`, whose precision is tuned as well; with a list of
            precisions, that of each output is.
        objective: "held-out" maximises the score of data that the network has not seen. "elbo" needs no such data.
        score: "log-likelihood" of the mixture over draws, or, for regression, "crps" of the moment-matched Gaussian.
        per_site: whether to choose one batch size for each batch-norm layer.
        penalty: weight of the variance of the logarithms of these batch sizes, which keeps them together.
        num_examples: the size of the training set, for the ELBO, if `batches` are a part of it.
        weight_decay: the weight decay of the training, as in torch's optimisers, for the prior of the ELBO.
        num_samples: number of draws in the objective.
        seed: seed of the draws.
        inputs: where the inputs are in a batch, if they are not first.
        targets: where the targets are, if they are not last.

    The noise is scaled by the square root of the batch size. Far from the batch size of the fit this is less accurate,
    because statistics of small batches are less Gaussian. If you have the training data, fit `mcbn` with small batches
    before you tune. The batch size stays below the number of training examples, as far as that is known.

    >>> import batchbayes as bb
    >>> network = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
    >>> x = torch.randn(400, 2)
    >>> posterior = bb.mcbn(network.eval(), x, batch_size=50)
    >>> y = network(x).argmax(1)  # no answer is wrong, so noise does harm
    >>> tune_batch_size(posterior, [(x, y)], bb.categorical()).batch_size > 50
    True
    """
    _check_options(objective, score, per_site, likelihood)
    if require_noise(posterior).site_batch_sizes:
        posterior = posterior.at_batch_size(posterior.batch_size)  # the same for all sites
    groups = site_of(posterior.sites) * per_site
    labelled = _batches(batches, inputs)
    read: dict[str, Any] = {"inputs": inputs, "targets": targets, "most": _largest(posterior, num_examples)}
    if objective == "elbo":
        given = sum(len(pick_inputs(batch, inputs)) for batch in labelled)
        num_examples = given if num_examples is None else num_examples
        if num_examples < given:
            raise BatchbayesError(
                expected=f"num_examples= as the size of the training set, at least the {given} examples of `batches`",
                got=f"{num_examples}",
                fix="leave it out, or pass len(loader.dataset): len(loader) is the number of batches",
            )
        read["most"] = min(read["most"], num_examples - 1.0)
    family = linear_family(posterior, labelled, groups, num_samples=num_samples, seed=seed, **read)
    family = replace(family, targets=likelihood.fitting(family.middle[None], family.targets))
    count = family.num_examples if num_examples is None else num_examples
    kl = _kl_per_example(posterior, count, weight_decay) if objective == "elbo" else lambda *_: 0.0
    goal = Goal(family, likelihood, objective, score, kl)
    with torch.no_grad():
        curve = goal.curve()
        log_sizes, value = goal.optimum(curve)
    if per_site:
        log_sizes, value = goal.optimum_per_group(log_sizes, penalty)
    sizes = tuple(log_sizes.exp().tolist())
    tuned = posterior.at_batch_size(sizes if per_site else sizes[0])
    linearity = measure_linearity(tuned, family.inputs, num_draws=8, max_examples=32, seed=seed)
    warn_unless_trusted(linearity, 'the best batch size may be off. Predict there with engine="sample", and compare')
    best = goal.best_likelihood(family.outputs(log_sizes))
    return TunedBatchSize(tuned, value, curve, best, sizes if per_site else sizes * len(posterior.sites))


def _batches(data: Batches, picker: Picker) -> list[Any]:
    """Return labelled batches. Two tensors in a tuple are one batch (x, y), also if both are real numbers."""
    is_pair = isinstance(data, tuple) and len(data) == 2 and all(hasattr(part, "shape") for part in data)
    batches = [data] if is_pair else list(Source(data, picker).read())
    if batches and not sum(len(pick_inputs(batch, picker)) for batch in batches):
        raise BatchbayesError(expected="at least one labelled example", got="none", fix="check how data is selected")
    return batches


def _largest(posterior: BatchNormPosterior, num_examples: int | None) -> float:
    """Return the largest batch size to be tried: below the number of training examples, as far as that is known."""
    known = [posterior.num_examples or math.inf, num_examples or math.inf, posterior.population]
    return max(posterior.batch_size, min(known) - 1)


def _kl_per_example(
    posterior: BatchNormPosterior, num_examples: int, weight_decay: float
) -> Callable[[float, float], float]:
    """Return the KL divergence from the implied prior as a function of (log batch size, noise precision)."""

    def kl(log_size: float, precision: float) -> float:
        sizes = torch.tensor([math.exp(log_size)], dtype=torch.float64)
        prior = {"num_examples": num_examples, "weight_decay": weight_decay, "precision": precision}
        return float(kl_to_implied_prior(posterior, sizes, **prior)) / num_examples

    return kl


@dataclass(frozen=True, eq=False)
class Goal:
    """What is maximised, per example, as a function of log batch sizes."""

    family: LinearFamily
    likelihood: TargetLikelihood[Any]
    objective: Objective
    score: Score
    kl: Callable[[float, float], float]
    """KL divergence as a function of (log batch size, noise precision)."""

    def scores(self, outputs: Tensor, likelihood: Any) -> Tensor:
        """Return the score of each target by draws (S, n, ...), or their expected log-likelihood, in their shape."""
        targets = self.family.targets
        if self.score == "crps":
            from batchbayes.metrics import gaussian_crps

            mean, variance = outputs.mean(0), outputs.var(0, correction=0) + likelihood.noise_std(outputs) ** 2
            return -gaussian_crps(mean, variance.sqrt(), targets)
        log_prob = likelihood(outputs).log_prob(targets)  # (S, n, ...)
        return log_prob.mean(0) if self.objective == "elbo" else log_prob.logsumexp(0) - math.log(len(log_prob))

    def expected(self, outputs: Tensor, likelihood: Any) -> Tensor:
        """Return the mean of the scores."""
        return self._mean(self.scores(outputs, likelihood), likelihood)

    def _mean(self, scores: Tensor, likelihood: Any) -> Tensor:
        """Return the mean over examples for the ELBO, and else over all targets that count."""
        if self.objective == "elbo":
            return scores.reshape(len(scores), -1).sum(1).mean()
        return scores[self._counts(likelihood)].mean()

    def _of_examples(self, scores: Tensor, likelihood: Any) -> Tensor:
        """Return the mean score of the targets of each example that count, (n,)."""
        counts = self._counts(likelihood).reshape(len(scores), -1)
        return (scores.reshape(counts.shape).double() * counts).sum(1) / counts.sum(1).clamp(min=1)

    def _counts(self, likelihood: Any) -> Tensor:
        targets = self.family.targets
        return likelihood.counts(targets) if isinstance(likelihood, Categorical) else torch.ones_like(targets).bool()

    def best_likelihood(self, outputs: Tensor) -> Any:
        """Return the likelihood with its best noise precision, searched in log tau around the best constant one."""
        if not isinstance(self.likelihood, Gaussian):
            return self.likelihood
        if isinstance(self.likelihood.precision, tuple):
            count = len(self.likelihood.precision)
            return Gaussian(tuple(self._of_output(i).best_likelihood(outputs[:, :, i]).precision for i in range(count)))

        def cost(log_precision: float) -> float:
            return -float(self.expected(outputs, Gaussian(math.exp(log_precision))))

        with torch.no_grad():
            middle = log_inverse_error(float((outputs.mean(0) - self.family.targets).square().mean()))
            return Gaussian(tune(cost, middle - 2, middle + 6, grid=0, steps=16).value)

    def _of_output(self, number: int) -> "Goal":
        """Return the same for one output, whose noise has a precision of its own."""
        family = replace(self.family, targets=self.family.targets[:, number])
        return replace(self, family=family, likelihood=Gaussian(1.0))

    def evaluate(self, log_size: float) -> tuple[float, float, Tensor]:
        """Return the objective with one batch size for all sites, the KL divergence in it, and examples' scores."""
        outputs = self.family.outputs(torch.full((len(self.family.spread),), log_size))
        likelihood = self.best_likelihood(outputs)
        precision = likelihood.precision if isinstance(likelihood, Gaussian) else 1.0
        precision = precision if isinstance(precision, float) else 1.0  # several have no KL divergence
        divergence = self.kl(log_size, precision)
        scores = self.scores(outputs, likelihood)
        value = float(self._mean(scores, likelihood)) - divergence
        return value, divergence, self._of_examples(scores, likelihood)

    def curve(self) -> BatchSizeCurve:
        """Return the objective over the whole range of batch sizes."""
        grid = torch.linspace(float(self.family.knots[0]), float(self.family.knots[-1]), GRID)
        values, divergences, scores = zip(*(self.evaluate(float(u)) for u in grid), strict=True)
        value, kl = (torch.tensor(column).double() for column in (values, divergences))
        return BatchSizeCurve(grid.exp(), value, kl, torch.stack(scores))

    def optimum(self, curve: BatchSizeCurve) -> tuple[Tensor, float]:
        """Search between the neighbours of the best point of the curve."""
        grid, best = curve.batch_sizes.log(), int(curve.values.argmax())
        low, high = float(grid[max(0, best - 1)]), float(grid[min(GRID - 1, best + 1)])
        refined = tune(lambda u: -self.evaluate(u)[0], low, high, grid=0, steps=12)
        log_size, cost = min(refined, (float(grid[best]), -float(curve.values[best])), key=lambda found: found[1])
        return torch.full((len(self.family.spread),), log_size), -cost

    def optimum_per_group(self, start: Tensor, penalty: float, steps: int = 80) -> tuple[Tensor, float]:
        """Start from one batch size for all groups, and climb to one for each group."""
        likelihood = self.best_likelihood(self.family.outputs(start))
        log_sizes = start.clone().requires_grad_()
        optimiser = torch.optim.Adam([log_sizes], lr=0.1, maximize=True)
        with torch.enable_grad():
            for _ in range(steps):
                optimiser.zero_grad()
                value = self.expected(self.family.outputs(log_sizes), likelihood)
                (value - penalty * log_sizes.var(correction=0)).backward()
                optimiser.step()
                with torch.no_grad():
                    log_sizes.clamp_(self.family.knots[0], self.family.knots[-1])
        outputs = self.family.outputs(log_sizes.detach())
        return log_sizes.detach(), float(self.expected(outputs, self.best_likelihood(outputs)))


def _check_options(objective: str, score: str, per_site: bool, likelihood: Any) -> None:
    require_likelihood(likelihood)
    if isinstance(likelihood, Gaussian) and isinstance(likelihood.precision, tuple) and objective == "elbo":
        raise BatchbayesError(
            expected="one precision for the ELBO, which is tuned with the batch size",
            got=f"{len(likelihood.precision)} of them",
            fix="pass gaussian(1.0), and then use calibrate.tune_precision(..., per_output=True)",
        )
    if objective == "elbo" and (per_site or score == "crps"):
        raise BatchbayesError(
            expected="the log-likelihood of one batch size for the ELBO",
            got=f"per_site={per_site}, score={score!r}",
            fix='leave these out, or use objective="held-out"',
        )
    if score == "crps" and not isinstance(likelihood, Gaussian):
        raise BatchbayesError(
            expected='a gaussian likelihood for score="crps"', got=type(likelihood).__name__, fix="drop score="
        )
