r"""Distillation: one network that predicts what a posterior predicts, at the cost of one forward pass.

A student learns from draws $f_s$ of any posterior, the teacher, on inputs without labels:

- its mean prediction: cross-entropy against the mean of the teacher's class probabilities. Cross-entropy is linear in
  its target, so this equals the mean over draws;
- also its uncertainty about classes: the student returns the logarithms of Dirichlet parameters $\alpha(x)$, which make
  the probabilities $\pi_s$ of the draws likely, $-\frac1S\sum_s\log\mathrm{Dir}(\pi_s\mid\alpha)$;
- real targets: the mean of the teacher by least squares, or a mean and a log variance, fitted to the mixture of
  $N(f_s, 1/\tau)$.

References: Hinton, Vinyals, Dean, "Distilling the Knowledge in a Neural Network", 2015; Malinin, Mlodozeniec, Gales,
"Ensemble Distribution Distillation", ICLR 2020.
"""

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from batchbayes._common.checks import as_tensor, whole_number
from batchbayes._common.rng import even_numbers
from batchbayes.errors import BatchbayesError
from batchbayes.likelihoods import Categorical, Gaussian
from batchbayes.methods.views.transforms import Transform
from batchbayes.network.function import as_network
from batchbayes.network.inputs import require_finite
from batchbayes.posterior import Posterior
from batchbayes.predict import predict
from batchbayes.predictive import CategoricalPredictive
from batchbayes.training.batches import shuffled
from batchbayes.training.loop import Loss, TrainingConfig, half_squared_error, supervised, train

Head = Literal["mean", "dirichlet", "gaussian"]
SMOOTHING = 1e-4
"""How far the probabilities of draws are moved towards equal ones, because the Dirichlet density has no limit at 0."""


def train_student(
    posterior: Posterior,
    student: nn.Module,
    inputs: Tensor,
    likelihood: Categorical | Gaussian,
    config: TrainingConfig,
    *,
    head: Head = "mean",
    num_samples: int = 16,
    transform: Transform | None = None,
    num_views: int = 0,
    seed: int = 0,
) -> list[float]:
    """Train a student in place to predict what a posterior predicts. Return the mean loss of each epoch.

    Args:
        posterior: the teacher.
        student: the network to train. With the head "mean" its outputs have the shape and the meaning of the
            teacher's. With "dirichlet" it returns (N, K), as a classifier does, and with "gaussian" (N, 2 D): means,
            then log variances.
        inputs: inputs of the training set, or others without labels, (N, ...).
        likelihood: `categorical()` for the heads "mean" and "dirichlet", `gaussian(precision=...)` for "mean" and
            "gaussian".
        config: how to train.
        head: what the student learns: "mean", "dirichlet" or "gaussian".
        num_samples: draws of the teacher.
        transform: how views of the inputs are made, such as `RandomCrop(...)`. The teacher is surer on inputs that it
            was trained on than on new ones, so views let the student see more of its uncertainty.
        num_views: how many views of all inputs are added to the inputs themselves.
        seed: the seed of the draws and the views.

    To predict with a student of the mean, pass `bb.deterministic(student)` and the likelihood to `bb.predict`. With a
    Gaussian head the likelihood is `bb.heteroscedastic_gaussian()`. For a Dirichlet head call `dirichlet_predictive`.

    >>> import batchbayes as bb
    >>> teacher, student = bb.ensemble([nn.Linear(2, 3), nn.Linear(2, 3)]), nn.Linear(2, 3)
    >>> losses = train_student(teacher, student, torch.randn(64, 2), bb.categorical(), TrainingConfig(20, 16))
    >>> losses[-1] < losses[0]
    True
    """
    loss = _loss(head, likelihood)
    teacher = getattr(getattr(posterior, "network", None), "module", None)
    taught = {id(parameter) for parameter in teacher.parameters()} if isinstance(teacher, nn.Module) else set()
    if student is teacher or any(id(parameter) in taught for parameter in student.parameters()):
        raise BatchbayesError(
            expected="a student of its own",
            got="weights of the teacher, which training would change",
            fix="pass a new network, or a copy.deepcopy of this one",
        )
    whole_number("num_samples", num_samples)
    inputs = require_finite(as_tensor(inputs, "the inputs"), "the inputs")
    seen = _with_views(inputs, transform, whole_number("num_views", num_views, 0), seed)
    options: dict[str, Any] = {"num_samples": num_samples, "seed": seed, "keep_draws": True}
    draws = predict(posterior, seen, likelihood, **options).draws  # (S, N, ...)
    told = likelihood.logits(draws).softmax(-1) if isinstance(likelihood, Categorical) else draws
    targets = told.movedim(0, 1)  # (N, S, ...)
    shape = draws.shape[2:]
    if head == "mean":
        targets = targets.mean(1)
    elif len(shape) != 1:
        raise BatchbayesError(
            expected=f'a teacher whose outputs have the shape (N, K), for head="{head}"',
            got=f"{tuple(draws.shape[1:])}",
            fix='use head="mean", or add an axis to the outputs',
        )
    shape = (2 * shape[0],) if head == "gaussian" else tuple(shape)

    def checked(outputs: Tensor, told: Tensor) -> Tensor:
        return loss(_with_shape(outputs, shape), told)

    return train(student, shuffled(seen, targets, config.batch_size, config.seed), supervised(checked), config)


def _with_views(inputs: Tensor, transform: Transform | None, num_views: int, seed: int) -> Tensor:
    if num_views and transform is None:
        raise BatchbayesError(expected="transform= beside num_views=", got="none", fix="pass RandomFlip(), for example")
    views = [transform.apply(inputs, even_numbers(seed, v, transform.size)) for v in range(num_views) if transform]
    return torch.cat([inputs, *views])


def _with_shape(outputs: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Refuse outputs of another shape (n, ...) than expected, because shapes that differ may be broadcast."""
    if outputs.shape[1:] != shape:
        raise BatchbayesError(
            expected=f"a student that returns outputs of shape {(len(outputs), *shape)}",
            got=f"outputs of shape {tuple(outputs.shape)}",
            fix="change its last layer: as many numbers as the teacher returns, or twice as many for a Gaussian head",
        )
    return outputs


def _loss(head: Head, likelihood: Categorical | Gaussian) -> Loss:
    """Return the loss of a head, from outputs (n, ...) and what the teacher says about them."""
    if isinstance(likelihood, Categorical) and head in ("mean", "dirichlet"):
        if head == "dirichlet":
            return dirichlet_loss
        return lambda outputs, probs: soft_cross_entropy(likelihood.logits(outputs[None])[0], probs)
    if isinstance(likelihood, Gaussian) and head in ("mean", "gaussian"):
        noise = torch.as_tensor(likelihood.precision).reciprocal()
        return half_squared_error if head == "mean" else partial(mixture_loss, noise_variance=noise)
    raise BatchbayesError(
        expected='head="mean" or "dirichlet" with categorical(), or head="mean" or "gaussian" with '
        "gaussian(precision=...)",
        got=f"head={head!r} with {likelihood!r}"[:200],
        fix="choose a head that fits the likelihood",
    )


def soft_cross_entropy(logits: Tensor, probs: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits (n, ..., K) against probabilities (n, ..., K).

    >>> soft_cross_entropy(torch.zeros(1, 2), torch.tensor([[0.3, 0.7]]))
    tensor(0.6931)
    """
    return -(probs * logits.log_softmax(-1)).sum(-1).mean()


def dirichlet_loss(log_alpha: Tensor, probs: Tensor) -> Tensor:
    r"""Return the mean of $-\frac1S\sum_s\log\mathrm{Dir}(\pi_s\mid\alpha)$, for log alpha (n, K), draws (n, S, K)."""
    smooth = (1 - SMOOTHING) * probs + SMOOTHING / probs.shape[-1]
    alpha = log_alpha.exp()
    normaliser = torch.lgamma(alpha.sum(-1)) - torch.lgamma(alpha).sum(-1)
    return -(normaliser + ((alpha - 1) * smooth.log().mean(1)).sum(-1)).mean()


def mixture_loss(outputs: Tensor, draws: Tensor, noise_variance: Tensor) -> Tensor:
    r"""Return the mean of $-E\log N(y; m, v)$ over $y \sim \frac1S\sum_s N(f_s, 1/\tau)$, in closed form.

    Outputs are means m and log variances, (n, 2 D), and draws f_s are (n, S, D).
    """
    mean, log_variance = outputs.chunk(2, 1)
    square = (draws - mean[:, None]).square().mean(1) + noise_variance.to(mean)
    return 0.5 * (log_variance + square * (-log_variance).exp()).mean() + 0.5 * torch.tensor(2 * torch.pi).log()


@torch.no_grad()
def dirichlet_predictive(student: nn.Module, inputs: Tensor) -> CategoricalPredictive:
    r"""Return what a student with a Dirichlet head predicts, in closed form, from one forward pass.

    With $\alpha_0 = \sum_k\alpha_k$ and $p = \alpha/\alpha_0$: the expected entropy is
    $-\sum_k p_k(\psi(\alpha_k + 1) - \psi(\alpha_0 + 1))$, and the variance of a probability is
    $p_k(1 - p_k)/(\alpha_0 + 1)$.
    """
    network = as_network(student)
    log_alpha = network(inputs.to(network.device)).double().cpu()
    if log_alpha.ndim != 2:
        got = f"shape {tuple(log_alpha.shape)}"
        raise BatchbayesError("outputs (N, K) of a student with a Dirichlet head", got, "train another student")
    log_probs, total = log_alpha.log_softmax(-1), log_alpha.logsumexp(-1).exp()
    probs, alpha = log_probs.exp(), log_alpha.exp()
    expected = -(probs * (torch.digamma(alpha + 1) - torch.digamma(total + 1)[:, None])).sum(-1)
    entropy = -(probs * log_probs).sum(-1)
    variance = probs * (1 - probs) / (total + 1)[:, None]
    parts = {
        "log_probs": log_probs,
        "entropy": entropy,
        "mutual_information": (entropy - expected).clamp_min(0),
        "epistemic_variance": variance,
    }
    found: dict[str, Any] = {name: part.to(inputs.dtype) for name, part in parts.items()}
    return CategoricalPredictive(**found, num_samples=1, likelihood=Categorical(), engine="Dirichlet")
