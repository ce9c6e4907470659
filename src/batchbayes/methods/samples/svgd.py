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

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from batchbayes._common.progress import Progress
from batchbayes._common.signatures import Least, checked
from batchbayes.errors import BatchbayesError
from batchbayes.methods.samples.members import made_members, member_seed, require_counting, require_prior, state_of
from batchbayes.methods.samples.weight_samples import WeightSamples, stack_states
from batchbayes.network.function import Output, as_network
from batchbayes.training.batches import require_data, shuffled_batches, two_tensors
from batchbayes.training.loop import Loss, TrainingConfig, checked_loss


@checked
def svgd(
    make: Callable[[], nn.Module],
    data: tuple[Tensor, Tensor],
    loss: Loss,
    config: TrainingConfig,
    *,
    num_members: Annotated[int, Least(2)] = 20,
    prior_precision: float = 1.0,
    output: Output = None,
) -> WeightSamples:
    """Train small networks together by Stein variational gradient descent.

    Args:
        make: returns a new network with random weights, without batch norm and dropout. It is called once for each
            member, and must run under `torch.func.vmap`.
        data: inputs (N, ...) and targets.
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
    require_prior(loss, config, prior_precision, "steps are taken by Adam")
    inputs, targets = two_tensors(data)
    require_data(inputs, targets)
    require_counting(targets)
    networks = made_members(make, [member_seed(config.seed, number) for number in range(num_members)])
    _require_no_noise(networks[0], inputs)
    _move(networks, inputs, targets, checked_loss(loss), config, prior_precision)
    return stack_states(as_network(networks[0].eval(), output), [state_of(n) for n in networks], "svgd")


def _require_no_noise(network: nn.Module, inputs: Tensor) -> None:
    """Refuse noise: a network with noise of its own has no density at single weights."""
    noisy = [module for module in network.modules() if isinstance(module, _BatchNorm | _DropoutNd)]
    if noisy:
        got, fix = f"a {type(noisy[0]).__name__}", "leave this layer out, or use deep_ensemble"
        raise BatchbayesError("a network without batch norm and dropout", got, fix)
    own = next(network.parameters()).dtype
    if inputs.dtype != own:
        fix = f"convert the data, for example with x.to({own})"
        raise BatchbayesError(f"inputs of {own}, as the networks are", f"{inputs.dtype}", fix)


def outputs_of(network: nn.Module, shapes: Mapping[str, torch.Size], weights: Tensor, inputs: Tensor) -> Tensor:
    """Return the outputs (S, n, ...) of a network with each row of weights (S, D) for inputs (n, ...)."""
    parts = zip(shapes.items(), weights.split([shape.numel() for shape in shapes.values()], 1), strict=True)
    tensors = {name: part.view(-1, *shape) for (name, shape), part in parts}
    return vmap(lambda own: functional_call(network, own, (inputs,)))(tensors)


def _move(
    networks: Sequence[nn.Module],
    inputs: Tensor,
    targets: Tensor,
    loss: Loss,
    config: TrainingConfig,
    prior_precision: float,
) -> None:
    """Take all steps, and put the particles into the networks."""
    shapes, count = {name: each.shape for name, each in networks[0].named_parameters()}, len(inputs)
    rows = [nn.utils.parameters_to_vector(network.parameters()).detach() for network in networks]
    weights = torch.stack(rows).requires_grad_()
    optimiser = torch.optim.Adam([weights], lr=config.learning_rate)
    with Progress("moving particles", config.epochs) as shown:
        for epoch in range(config.epochs):
            for chosen in shuffled_batches(count, config.batch_size, config.seed, epoch):
                outputs = outputs_of(networks[0], shapes, weights, inputs[chosen])
                fit = torch.stack([loss(each, targets[chosen]) for each in outputs]).sum()
                total = fit + 0.5 * prior_precision / count * weights.square().sum()
                (slopes,) = torch.autograd.grad(total, weights)
                weights.grad = -direction(weights.detach(), -slopes, 1 / count)
                optimiser.step()
            shown.advance()
    if not bool(torch.isfinite(weights).all()):
        raise BatchbayesError(
            expected="finite weights", got="NaN or infinity", fix="lower the learning rate, or scale the data"
        )
    for network, row in zip(networks, weights.detach(), strict=True):
        nn.utils.vector_to_parameters(row, network.parameters())


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
