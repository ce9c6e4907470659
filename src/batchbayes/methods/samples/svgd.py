r"""Stein variational gradient descent: networks that move towards the posterior together and keep apart.

What is random: which of the networks, the particles, predicts.
q(w): $\frac1S\sum_s\delta(w - w_s)$. Each step moves particle i along
$\phi_i = \frac1S\sum_j k(w_j, w_i)\nabla\log p(w_j\mid D) + \nabla_{w_j} k(w_j, w_i)$ with the kernel
$k(w, w') = \exp(-\|w - w'\|^2/h)$, whose width h is the squared median distance over $\log S$. The first term follows
the posterior, and the second keeps particles apart.
Cost: a step is one forward and one backward pass of the whole stack, and S^2 distances of weights.
Reference: Liu, Wang, "Stein Variational Gradient Descent", NeurIPS 2016. Where we differ: steps are taken by Adam, with
gradients divided by the number of examples, so that learning rates are those of the mean loss.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from batchbayes._common.checks import whole_number
from batchbayes._common.progress import Progress
from batchbayes.errors import BatchbayesError
from batchbayes.methods.samples.members import made_members, member_seed, require_counting, require_prior, state_of
from batchbayes.methods.samples.weight_samples import WeightSamples, stack_states
from batchbayes.network.function import Output, as_network
from batchbayes.training.batches import require_data, shuffled_batches, two_tensors
from batchbayes.training.loop import Loss, TrainingConfig, checked_loss
from batchbayes.training.stack.stack import Stack, stack_networks, unstack
from batchbayes.training.stack.train import require_dtype


def svgd(
    make: Callable[[], nn.Module],
    data: tuple[Tensor, Tensor],
    loss: Loss,
    config: TrainingConfig,
    *,
    num_members: int = 20,
    prior_precision: float = 1.0,
    output: Output = None,
) -> WeightSamples:
    """Train small perceptrons together by Stein variational gradient descent.

    Args:
        make: returns a new perceptron with random weights, without batch norm and dropout: a chain of linear layers and
            ReLUs. It is called once for each member.
        data: inputs (N, Q) and targets.
        loss: the mean over a batch of the negative log-likelihood of an example.
        config: epochs, batch size, learning rate of Adam, and seed. The weight decay must be 0.
        num_members: the number of particles S.
        prior_precision: the precision of the Gaussian prior of each weight.
        output: which output counts, if the network returns several.

    >>> from batchbayes.training.loop import half_squared_error
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> make = lambda: nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> svgd(make, (x, x), half_squared_error, TrainingConfig(5, 16, 0.1), num_members=4)
    WeightSamples(svgd on Sequential: 4 members)
    """
    whole_number("num_members", num_members, least=2)
    require_prior(loss, config, prior_precision, "steps are taken by Adam")
    inputs, targets = two_tensors(data)
    require_data(inputs, targets)
    require_counting(targets)
    networks = made_members(make, [member_seed(config.seed, number) for number in range(num_members)])
    stack = _require_plain(stack_networks(networks))
    require_dtype(stack, inputs)
    unstack(_moved(stack, inputs, targets, checked_loss(loss), config, prior_precision), networks)
    return stack_states(as_network(networks[0].eval(), output), [state_of(n) for n in networks], "svgd")


def _moved(
    stack: Stack, inputs: Tensor, targets: Tensor, loss: Loss, config: TrainingConfig, prior_precision: float
) -> Stack:
    """Return the stack after all steps."""
    names = stack.parameter_names()
    particles = torch.cat([stack.tensors[name].flatten(1) for name in names], 1).requires_grad_()  # (S, D)
    optimiser, count = torch.optim.Adam([particles], lr=config.learning_rate), len(inputs)
    with Progress("moving particles", config.epochs) as shown:
        for epoch in range(config.epochs):
            for rows in shuffled_batches(count, config.batch_size, config.seed, epoch):
                outputs = stacked_outputs(_filled(stack, particles), inputs[rows])
                fit = torch.stack([loss(each, targets[rows]) for each in outputs]).sum()
                total = fit + 0.5 * prior_precision / count * particles.square().sum()
                (slopes,) = torch.autograd.grad(total, particles)
                particles.grad = -direction(particles.detach(), -slopes, 1 / count)
                optimiser.step()
            shown.advance()
    if not bool(torch.isfinite(particles).all()):
        raise BatchbayesError(
            expected="finite weights", got="NaN or infinity", fix="lower the learning rate, or scale the data"
        )
    return _filled(stack, particles.detach())


def direction(particles: Tensor, slopes: Tensor, scale: float = 1.0) -> Tensor:
    r"""Return $\phi$ for particles (S, D) and their $\nabla\log p$ (S, D); `scale` multiplies the repulsion.

    Slopes that are divided by N need a scale of 1/N.
    """
    squares = torch.cdist(particles, particles).square()  # (S, S)
    apart = squares[~torch.eye(len(squares), dtype=torch.bool)]
    width = (apart.median() / torch.tensor(float(len(particles))).log()).clamp_min(1e-12)
    kernel = (-squares / width).exp()
    repulsion = 2 / width * (particles * kernel.sum(1, keepdim=True) - kernel @ particles)
    return (kernel @ slopes + scale * repulsion) / len(particles)


def stacked_outputs(stack: Stack, inputs: Tensor) -> Tensor:
    """Return the outputs (S, n, K) of all networks for inputs (n, Q), with gradients."""
    values = inputs.expand(len(stack), -1, -1)
    for layer in stack.layers:
        weight, bias = stack.tensors[f"{layer.linear}.weight"], stack.tensors.get(f"{layer.linear}.bias")
        values = values @ weight.mT if bias is None else torch.baddbmm(bias[:, None], values, weight.mT)
        values = values.relu() if layer.rectified else values
    return values


def _filled(stack: Stack, particles: Tensor) -> Stack:
    """Return a stack with the weights of particles (S, D)."""
    names = stack.parameter_names()
    sizes = [stack.tensors[name][0].numel() for name in names]
    parts = dict(zip(names, particles.split(sizes, 1), strict=True))
    return replace(stack, tensors={n: parts[n].view_as(t) if n in parts else t for n, t in stack.tensors.items()})


def _require_plain(stack: Stack) -> Stack:
    if odd := [layer.norm or layer.dropout for layer in stack.layers if layer.norm or layer.dropout]:
        raise BatchbayesError(
            expected="networks without batch norm and dropout",
            got=f"the layer {odd[0]}",
            fix="leave these layers out: with them a network has no density at single weights",
        )
    return stack
