r"""A mean field over all weights: $q(w) = \prod_i N(w_i; m_i, s_i^2)$.

A part with $N_k$ examples maximises $\sum_n E_q\log p(y_n\mid x_n, w) - \mathrm{KL}(q\,\|\,q_{k-1})$, with the KL
divergence in closed form. The data term is the sum over the part, and not over all data.

References: Nguyen et al., "Variational Continual Learning", ICLR 2018; Blundell et al., "Weight Uncertainty in Neural
Networks", ICML 2015, for the gradients.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from batchbayes import BatchbayesError, TrainingConfig, WeightSamples
from batchbayes.methods.samples.weight_samples import stack_states, state_of
from batchbayes.tools import Network, TargetLikelihood, as_network, finite_number, generator, plain_name, under
from batchbayes_papers.online.parts import (
    DataPart,
    read_state,
    require_finite_weights,
    require_plain,
    training_steps,
    write_state,
)

START_STD = 0.03
"""The standard deviation of each weight before the first part is learned: small, so that training starts well."""


@dataclass(frozen=True, eq=False)
class OnlineMeanField:
    """Independent Gaussians over all weights of a network."""

    network: Network
    likelihood: TargetLikelihood[Any]
    mean: Mapping[str, Tensor]
    std: Mapping[str, Tensor]
    prior_std: float
    num_parts: int = 0
    """How many parts have been learned. Before the first one the prior is N(0, prior_std^2), not this."""

    @classmethod
    def start(cls, model: nn.Module, likelihood: TargetLikelihood[Any], prior_std: float = 1.0) -> Self:
        """Return what is known before the first part. Its means are the present weights of the network.

        Learning runs the network in evaluation mode, so batch norm keeps the running statistics that it has.
        """
        finite_number("prior_std", prior_std, above=0, fix="pass 1, for example")
        network = as_network(model)
        trained = {name: p for name, p in network.module.named_parameters() if p.requires_grad}
        mean = {plain_name(name): p.detach().clone() for name, p in trained.items()}
        if not mean:
            raise BatchbayesError(
                expected="a network with weights to learn",
                got=f"{network!r}, in which no parameter needs a gradient",
                fix="call model.requires_grad_(True), at least for some layers",
            )
        std = {name: torch.full_like(tensor, START_STD) for name, tensor in mean.items()}
        return cls(network, likelihood, mean, std, float(prior_std))

    def update(self, part: DataPart, config: TrainingConfig) -> Self:
        """Return the posterior after one more part, of which the former one is the prior.

        `config` has the epochs, the batch size, the learning rate of Adam, which falls to zero, and the seed.
        """
        inputs, targets = require_plain(part, config)
        before = self if self.num_parts else self._prior()
        mean = {name: tensor.clone().requires_grad_() for name, tensor in self.mean.items()}
        log_std = {name: tensor.log().requires_grad_() for name, tensor in self.std.items()}
        optimiser = torch.optim.Adam([*mean.values(), *log_std.values()], lr=config.learning_rate)
        random = generator(config.seed, "online", self.num_parts)
        with torch.enable_grad():
            for rows in training_steps(optimiser, len(inputs), config):
                std = {name: value.exp() for name, value in log_std.items()}
                drawn = {n: m + std[n] * torch.randn(m.shape, generator=random).to(m) for n, m in mean.items()}
                with self.network.running(inputs[rows].to(self.network.device), tensors=drawn) as outputs:
                    fitting = self.likelihood.fitting(outputs[None], targets[rows]).to(outputs.device)
                    fit = -self.likelihood(outputs[None]).log_prob(fitting).sum() / len(rows)
                    loss = fit + gaussian_kl(mean, std, before.mean, before.std) / len(inputs)
                    optimiser.zero_grad()
                    loss.backward()
                optimiser.step()
                require_finite_weights([loss.detach()], self.num_parts)
        require_finite_weights([*mean.values(), *log_std.values()], self.num_parts)
        return replace(
            self,
            mean={name: tensor.detach() for name, tensor in mean.items()},
            std={name: tensor.detach().exp() for name, tensor in log_std.items()},
            num_parts=self.num_parts + 1,
        )

    def _prior(self) -> "OnlineMeanField":
        zero = {name: torch.zeros_like(tensor) for name, tensor in self.mean.items()}
        return replace(self, mean=zero, std={n: torch.full_like(t, self.prior_std) for n, t in zero.items()})

    def posterior(self, num_members: int = 20, seed: int = 0) -> WeightSamples:
        """Return draws from it, as samples of weights."""
        module, random = self.network.module, generator(seed, "mean field")
        first = {id(p): plain_name(name) for name, p in module.named_parameters()}
        names = {plain_name(n): first[id(p)] for n, p in module.named_parameters(remove_duplicate=False)}
        states = []
        for _ in range(num_members):
            drawn = {n: m + self.std[n] * torch.randn(m.shape, generator=random).to(m) for n, m in self.mean.items()}
            # layers may share a parameter, which then has several names
            states.append({n: drawn.get(names.get(n, n), tensor) for n, tensor in state_of(module).items()})
        return stack_states(self.network, states, "mean_field")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, whole or not at all."""
        write_state(path, {"prior_std": self.prior_std, "num_parts": self.num_parts}, self._tensors())

    def _tensors(self) -> dict[str, Tensor]:
        return {f"mean.{n}": t for n, t in self.mean.items()} | {f"std.{n}": t for n, t in self.std.items()}

    def restored(self, path: str | os.PathLike[str]) -> Self:
        """Return what `save` wrote, for the same network and likelihood."""
        header, tensors = read_state(path, self._tensors())
        return replace(self, mean=under(tensors, "mean."), std=under(tensors, "std."), **header)


def gaussian_kl(
    mean: Mapping[str, Tensor], std: Mapping[str, Tensor], mean0: Mapping[str, Tensor], std0: Mapping[str, Tensor]
) -> Tensor:
    r"""Return $\mathrm{KL}(N(m, s^2)\,\|\,N(m_0, s_0^2))$, summed over all weights.

    >>> one = {"w": torch.ones(1)}
    >>> gaussian_kl({"w": torch.zeros(1)}, one, one, one)
    tensor(0.5000)
    """
    parts = []
    for name, m in mean.items():
        ratio = std[name] / std0[name]
        parts.append((0.5 * (ratio.square() + ((m - mean0[name]) / std0[name]).square() - 1) - ratio.log()).sum())
    return torch.stack(parts).sum()
