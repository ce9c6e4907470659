r"""Elastic weight consolidation (EWC): the network goes on learning, and a spring for each weight remembers the past.

A part is learned at the maximum of its log-likelihood minus $\frac12\sum_i P_i (w_i - m_i)^2$, with the maximum m of
the former parts. Then the diagonal of the Fisher matrix of the part is added to the precision:
$P_i \leftarrow P_i + \sum_n \left(J_n^\top \Lambda_n J_n\right)_{ii}$ with $J_n = \partial f_n / \partial w$ and
$\Lambda_n = -\nabla_f^2\log p(y_n\mid f_n)$. This is online Laplace with a diagonal in the place of Kronecker factors,
and predictions come from the maximum alone. Before the first part P is the precision of the prior, and m is zero.

Reference: Kirkpatrick et al., "Overcoming Catastrophic Forgetting in Neural Networks", PNAS 2017. There each former
part keeps a spring of its own, around its own maximum, with a strength that is tuned. Here one spring around the last
maximum has the strength of all parts, as Huszár ("Note on the Quadratic Penalties in Elastic Weight Consolidation",
PNAS 2018) derives it, and there is nothing to tune.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap

from batchbayes import TrainingConfig
from batchbayes.methods.laplace.curvature import output_hessians
from batchbayes.tools import Network, TargetLikelihood, as_network, finite_number
from batchbayes_papers.online.parts import DataPart, require_finite_weights, require_plain, training_steps

CHUNK = 100
"""Examples whose Jacobians are in memory at once."""


@dataclass(frozen=True, eq=False)
class ElasticWeights:
    """The maximum after the parts so far, and the precision of each weight around it."""

    network: Network
    likelihood: TargetLikelihood[Any]
    mean: Mapping[str, Tensor]
    precision: Mapping[str, Tensor]
    num_parts: int = 0

    @classmethod
    def start(cls, model: nn.Module, likelihood: TargetLikelihood[Any], prior_std: float = 1.0) -> Self:
        """Return what is known before the first part. Learning starts at the present weights of the network."""
        finite_number("prior_std", prior_std, above=0, fix="pass 1, for example")
        network = as_network(model)
        mean = {name: parameter.detach().clone() for name, parameter in network.module.named_parameters()}
        return cls(network, likelihood, mean, {name: torch.full_like(m, prior_std**-2) for name, m in mean.items()})

    def update(self, part: DataPart, config: TrainingConfig) -> Self:
        """Return the state after one more part.

        `config` has the epochs, the batch size, the learning rate of Adam, which falls to zero, and the seed.
        """
        inputs, targets = require_plain(part, config)
        weights = {name: tensor.clone().requires_grad_() for name, tensor in self.mean.items()}
        optimiser = torch.optim.Adam(weights.values(), lr=config.learning_rate)
        with torch.enable_grad():
            for rows in training_steps(optimiser, len(inputs), config):
                outputs = self.network(inputs[rows], tensors=weights)
                fit = -self.likelihood(outputs[None]).log_prob(self._fitting(outputs, targets[rows])).sum() / len(rows)
                loss = fit + 0.5 * self.squared_distance(weights) / len(inputs)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                require_finite_weights([loss.detach()], self.num_parts)
        mean = {name: tensor.detach() for name, tensor in weights.items()}
        fisher = self._fisher(mean, inputs)
        precision = {name: given + fisher[name] for name, given in self.precision.items()}
        return replace(self, mean=mean, precision=precision, num_parts=self.num_parts + 1)

    def squared_distance(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Return the squared distance from the former maximum, or from zero before the first part."""
        away = {n: w - self.mean[n] if self.num_parts else w for n, w in weights.items()}
        return torch.stack([(self.precision[n] * moved.square()).sum() for n, moved in away.items()]).sum()

    def _fitting(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.likelihood.fitting(outputs[None], targets)

    def _fisher(self, weights: Mapping[str, Tensor], inputs: Tensor) -> dict[str, Tensor]:
        """Return the diagonal of the Fisher matrix of some examples, summed over them."""
        total = {name: torch.zeros_like(weight) for name, weight in weights.items()}

        def outputs(own: dict[str, Tensor], one: Tensor) -> Tensor:
            return self.network(one[None], tensors=own)[0]

        for some in inputs.split(CHUNK):
            curvature = output_hessians(self.likelihood, self.network(some, tensors=dict(weights)))
            jacobians = vmap(jacrev(outputs), (None, 0))(dict(weights), some)  # (n, K, ...) by name
            for name, jacobian in jacobians.items():
                flat = jacobian.flatten(2)  # (n, K, weights)
                total[name] += torch.einsum("nkw,nkl,nlw->w", flat, curvature, flat).view_as(total[name])
        return total

    @torch.no_grad()
    def log_prob(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return log p(y | f) at the maximum, (N, ...)."""
        outputs = self.network(inputs, tensors=dict(self.mean))
        return self.likelihood(outputs[None]).log_prob(self._fitting(outputs, targets))[0]
