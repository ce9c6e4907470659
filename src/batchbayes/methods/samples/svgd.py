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

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    particles = Particles.of(networks, inputs)
    _move(particles, inputs, targets, checked_loss(loss), config, prior_precision)
    particles.copy_into(networks)
    return stack_states(as_network(networks[0].eval(), output), [state_of(n) for n in networks], "svgd")


@dataclass(frozen=True, eq=False)
class Particles:
    """The weights of S perceptrons of one shape, (S, D), and what they belong to."""

    layers: tuple[tuple[str, bool], ...]
    """For each linear layer its name, and whether a ReLU follows."""
    shapes: dict[str, torch.Size]
    weights: Tensor

    @staticmethod
    def of(networks: Sequence[nn.Module], inputs: Tensor) -> "Particles":
        """Copy the weights of networks. Those that do more than their linear layers and ReLUs say are refused."""
        first = dict(networks[0].named_parameters())
        if first and inputs.dtype != (own := next(iter(first.values())).dtype):
            fix = f"convert the data, for example with x.to({own})"
            raise BatchbayesError(f"inputs of {own}, as the networks are", f"{inputs.dtype}", fix)
        shapes = {name: parameter.shape for name, parameter in first.items()}
        rows = [nn.utils.parameters_to_vector(network.parameters()).detach() for network in networks]
        found = Particles(_chain(networks[0]), shapes, torch.stack(rows).requires_grad_())
        with torch.no_grad():
            alike = all(
                torch.allclose(own, network(inputs[:8]), atol=1e-6)
                for own, network in zip(found.outputs(inputs[:8]), networks, strict=True)
            )
        if not alike:
            fix = "give each ReLU its own module, and define modules in the order in which they are called"
            raise BatchbayesError("networks that are chains of linear layers and ReLUs", "one that does more", fix)
        return found

    def outputs(self, inputs: Tensor) -> Tensor:
        """Return the outputs (S, n, K) of all networks for inputs (n, Q), with gradients."""
        sizes = [shape.numel() for shape in self.shapes.values()]
        parts = zip(self.shapes.items(), self.weights.split(sizes, 1), strict=True)
        tensors = {name: part.view(-1, *shape) for (name, shape), part in parts}
        values = inputs.expand(len(self.weights), -1, -1)
        for layer, rectified in self.layers:
            weight, bias = tensors[f"{layer}.weight"], tensors.get(f"{layer}.bias")
            values = values @ weight.mT if bias is None else torch.baddbmm(bias[:, None], values, weight.mT)
            values = values.relu() if rectified else values
        return values

    def copy_into(self, networks: Sequence[nn.Module]) -> None:
        """Copy the weights into as many networks, in place."""
        for network, row in zip(networks, self.weights.detach(), strict=True):
            nn.utils.vector_to_parameters(row, network.parameters())


def _chain(network: nn.Module) -> tuple[tuple[str, bool], ...]:
    """Return the linear layers of a perceptron by name, and whether a ReLU follows each."""
    found: list[tuple[str, bool]] = []
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear):
            if module is network:
                raise BatchbayesError("a chain of modules", "a linear layer alone", "pass nn.Sequential(layer)")
            found.append((name, False))
        elif isinstance(module, nn.ReLU) and found:
            found[-1] = (found[-1][0], True)
        elif not isinstance(module, nn.Identity) and not any(True for _ in module.children()):
            raise BatchbayesError(
                expected="a chain of linear layers and ReLUs, without batch norm and dropout",
                got=f"{type(module).__name__} at {name or 'the top'}",
                fix="leave this layer out: with noise of its own a network has no density at single weights",
            )
    return tuple(found)


def _move(
    particles: Particles, inputs: Tensor, targets: Tensor, loss: Loss, config: TrainingConfig, prior_precision: float
) -> None:
    """Take all steps, in place."""
    weights, count = particles.weights, len(inputs)
    optimiser = torch.optim.Adam([weights], lr=config.learning_rate)
    with Progress("moving particles", config.epochs) as shown:
        for epoch in range(config.epochs):
            for rows in shuffled_batches(count, config.batch_size, config.seed, epoch):
                fit = torch.stack([loss(each, targets[rows]) for each in particles.outputs(inputs[rows])]).sum()
                total = fit + 0.5 * prior_precision / count * weights.square().sum()
                (slopes,) = torch.autograd.grad(total, weights)
                weights.grad = -direction(weights.detach(), -slopes, 1 / count)
                optimiser.step()
            shown.advance()
    if not bool(torch.isfinite(weights).all()):
        raise BatchbayesError(
            expected="finite weights", got="NaN or infinity", fix="lower the learning rate, or scale the data"
        )


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
