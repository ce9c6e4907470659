r"""Adversarial attacks by gradients, through any posterior.

An attack moves each input by at most $\epsilon$ in every coordinate, so that the prediction becomes wrong. Its gradient
is that of the log of the mean probability over draws, so it fools the average and not one draw.

References: Goodfellow, Shlens, Szegedy, "Explaining and Harnessing Adversarial Examples", ICLR 2015; Kurakin,
Goodfellow, Bengio, "Adversarial Machine Learning at Scale", ICLR 2017; Madry et al., "Towards Deep Learning Models
Resistant to Adversarial Attacks", ICLR 2018.
"""

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from batchbayes import BatchbayesError, Posterior
from batchbayes.tools import (
    Categorical,
    as_tensor,
    finite_number,
    generator,
    num_draws,
    require_finite,
    require_likelihood,
    require_posterior,
    stream_seed,
    unknown_name,
    whole_number,
)

Along = Literal["sign", "gradient"]
FIX_EPSILON = "pass for example 0.1 in the unit of the inputs"


def input_gradient(
    posterior: Posterior,
    inputs: Tensor,
    labels: Tensor,
    likelihood: Categorical,
    *,
    num_samples: int = 8,
    seed: int = 0,
) -> Tensor:
    r"""Return the gradient of $-\log\frac1S\sum_s p_s(y\mid x)$ by the inputs x, in their shape.

    Draws are run one by one, and their gradients are averaged with the weights $p_s / \sum_s p_s$ as they come. So
    memory is that of one draw, whatever their number.
    """
    require_posterior(posterior)
    require_likelihood(likelihood)
    inputs = _movable(inputs)
    total, mean = torch.full(inputs.shape[:1], -math.inf), torch.zeros_like(inputs)
    for index in range(num_draws(posterior, whole_number("num_samples", num_samples))):
        with torch.inference_mode(False), torch.enable_grad():  # whatever the caller has set
            leaf = inputs.clone().requires_grad_()
            outputs = posterior.draw(seed, index)(leaf.to(posterior.device))[None].cpu()
            fitting = likelihood.fitting(outputs, labels).clone()  # gradients keep it, so it must be an ordinary tensor
            log_prob = likelihood(outputs).log_prob(fitting)[0]
            total_log_prob = log_prob.sum()
        if not log_prob.requires_grad:
            raise BatchbayesError(
                expected="a posterior whose draws pass gradients to their inputs",
                got=f"{posterior!r}, which does not",
                fix="remove torch.no_grad() or .detach() from the network",
            )
        if log_prob.shape != total.shape:
            got = f"labels of shape {tuple(log_prob.shape)}"
            raise BatchbayesError(
                expected="one label for each input", got=got, fix="attack a classifier of whole inputs"
            )
        (gradient,) = torch.autograd.grad(total_log_prob, leaf)
        total = torch.logaddexp(total, log_prob.detach())
        share = (log_prob.detach() - total).exp().to(gradient)  # of this draw in the sum so far, (N,)
        mean += share.view(-1, *[1] * (inputs.ndim - 1)) * (gradient - mean)
    return -mean


def _movable(inputs: Any) -> Tensor:
    """Return inputs as a tensor without gradients, or refuse what an attack cannot move."""
    found = require_finite(as_tensor(inputs, "the inputs"), "the inputs").detach()
    if not found.is_floating_point():
        fix = "attack what the network gets, such as images from 0 to 1 as float32"
        raise BatchbayesError(expected="real inputs, which have gradients", got=f"{found.dtype}", fix=fix)
    return found


def fast_gradient_sign(
    posterior: Posterior,
    inputs: Tensor,
    labels: Tensor,
    likelihood: Categorical,
    *,
    epsilon: float,
    num_samples: int = 8,
    seed: int = 0,
    bounds: tuple[float, float] | None = None,
) -> Tensor:
    r"""Return inputs moved by $\epsilon$ along the sign of the gradient: one step.

    Args:
        posterior: whose predictions shall become wrong.
        inputs: what is moved, (N, ...).
        labels: the right classes, (N,).
        likelihood: `categorical()`.
        epsilon: how far each coordinate moves, in the unit of the inputs.
        num_samples: draws whose gradients are averaged.
        seed: of the draws.
        bounds: the least and the largest value that an input may have.

    >>> import batchbayes as bb
    >>> posterior = bb.ensemble([torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)])
    >>> moved = fast_gradient_sign(posterior, torch.zeros(1, 2), torch.tensor([0]), bb.categorical(), epsilon=0.5)
    >>> moved.abs()
    tensor([[0.5000, 0.5000]])
    """
    options: Any = {"epsilon": epsilon, "num_samples": num_samples, "seed": seed, "bounds": bounds}
    return next(attack_steps(posterior, inputs, labels, likelihood, step=epsilon, **options))


def projected_gradient(
    posterior: Posterior,
    inputs: Tensor,
    labels: Tensor,
    likelihood: Categorical,
    *,
    epsilon: float,
    steps: int = 10,
    step: float | None = None,
    num_samples: int = 8,
    seed: int = 0,
    bounds: tuple[float, float] | None = None,
) -> Tensor:
    r"""Return inputs after several steps along gradient signs, each projected back to within $\epsilon$.

    This is PGD: it starts at a random point within epsilon. The step is by default 2.5 epsilon / steps. The other
    arguments are those of `fast_gradient_sign`. Each step has its own draws.
    """
    finite_number("epsilon", epsilon, above=0, fix=FIX_EPSILON)
    whole_number("steps", steps)
    size = 2.5 * epsilon / steps if step is None else step
    options: Any = {"epsilon": epsilon, "step": size, "num_samples": num_samples, "seed": seed, "bounds": bounds}
    path = attack_steps(posterior, inputs, labels, likelihood, random_start=True, **options)
    return next(islice(path, steps - 1, None))


def attack_steps(
    posterior: Posterior,
    inputs: Tensor,
    labels: Tensor,
    likelihood: Categorical,
    *,
    epsilon: float,
    step: float,
    along: Along = "sign",
    random_start: bool = False,
    num_samples: int = 8,
    seed: int = 0,
    bounds: tuple[float, float] | None = None,
) -> Iterator[Tensor]:
    """Yield the inputs after one, two, three, ... steps without end, to see success against the number of updates.

    A step goes along the sign of the gradient, or along the gradient itself. The gradient is small where a prediction
    is sure, so such steps are slow there. The other arguments are those of `projected_gradient`.
    """
    finite_number("epsilon", epsilon, above=0, fix=FIX_EPSILON)
    finite_number("the step", step, above=0, fix="pass for example epsilon / 4")
    inputs = _movable(inputs)
    if along not in get_args(Along):
        raise unknown_name("a kind of steps (along=)", str(along), get_args(Along))
    low, high = bounds or (-math.inf, math.inf)
    if not low < high:
        raise BatchbayesError(expected="bounds (low, high) with low below high", got=f"{bounds}", fix="swap them")
    least, most = (float(value) for value in inputs.aminmax()) if inputs.numel() else (low, high)
    if not low <= least <= most <= high:
        raise BatchbayesError(
            expected=f"inputs within the bounds {bounds}",
            got=f"{least:g} to {most:g}",
            fix="pass bounds in the unit of the inputs, after any standardisation",
        )
    moved, number = inputs, 0
    if random_start:
        uniform = torch.rand(inputs.shape, generator=generator(seed, "attack")).to(inputs)
        moved = (inputs + epsilon * (2 * uniform - 1)).clamp(low, high)
    while True:
        own = seed if number == 0 else stream_seed(seed, "attack", number)  # each step has its own draws
        gradient = input_gradient(posterior, moved, labels, likelihood, num_samples=num_samples, seed=own)
        move = gradient.sign() if along == "sign" else gradient
        moved = (moved + step * move).clamp(inputs - epsilon, inputs + epsilon).clamp(low, high)
        number += 1
        yield moved
