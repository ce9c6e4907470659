r"""Samplers as optimisers: steps down a noisy gradient, with noise added so that the weights become samples.

The target is $p(w) \propto \exp(-U(w)/T)$. With N examples, $U(w) = N\,\bar U(w)$, where $\bar U$ is the mean loss of
an example plus 1/N of the negative log prior: it is what backward passes differentiate. With steps $\eta$ of
$\bar U$, Langevin dynamics is $w \leftarrow w - \eta\nabla\bar U + \sqrt{2\eta T/N}\,\xi$. Its error in the moments is
of the order of $\eta$ times the curvature of $\bar U$, and mini-batches add noise of the order of $\eta^2$.

References: Welling, Teh, "Bayesian Learning via Stochastic Gradient Langevin Dynamics", ICML 2011; Li et al.,
"Preconditioned Stochastic Gradient Langevin Dynamics", AAAI 2016; Chen, Fox, Guestrin, "Stochastic Gradient Hamiltonian
Monte Carlo", ICML 2014. Where we differ: the preconditioner stops to adapt when sampling begins, so that its missing
derivative causes no bias.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, optim


class Langevin(optim.Optimizer):
    """Stochastic gradient Langevin dynamics, with a diagonal preconditioner if asked.

    Args:
        params: parameters or groups of them.
        lr: eta, the step for the mean loss of an example.
        num_examples: N.
        temperature: T. The group option "temperature" changes it; 0 gives plain gradient steps.
        preconditioned: divide steps by the root of the mean squared gradient, as RMSprop does. The mean is updated
            while the group option "adapts" is True.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        num_examples: int,
        temperature: float = 1.0,
        preconditioned: bool = False,
        smoothing: float = 0.99,
        floor: float = 1e-3,
    ) -> None:
        options = {"lr": lr, "num_examples": num_examples, "temperature": temperature, "adapts": True}
        super().__init__(params, options | {"preconditioned": preconditioned, "smoothing": smoothing, "floor": floor})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            noise = (2 * group["lr"] * group["temperature"] / group["num_examples"]) ** 0.5
            for parameter in (p for p in group["params"] if p.grad is not None):
                scale = self._scale(parameter, group) if group["preconditioned"] else None
                drift = parameter.grad if scale is None else parameter.grad * scale
                parameter.add_(drift, alpha=-group["lr"])
                if noise:
                    random = torch.randn_like(parameter)
                    parameter.add_(random if scale is None else random * scale.sqrt(), alpha=noise)

    def _scale(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Return the factor of the steps of each weight."""
        state = self.state[parameter]
        if not state:
            state["square"] = parameter.grad.square()  # type: ignore[union-attr]
        elif group["adapts"]:
            state["square"].lerp_(parameter.grad.square(), 1 - group["smoothing"])  # type: ignore[union-attr]
        return (state["square"].sqrt() + group["floor"]).reciprocal()


class Hamiltonian(optim.Optimizer):
    r"""Stochastic gradient Hamiltonian Monte Carlo.

    $v \leftarrow (1-\alpha)v - \eta\nabla\bar U + \sqrt{2\alpha\eta T/N}\,\xi$, then $w \leftarrow w + v$.

    Args:
        params: parameters or groups of them.
        lr: eta. One step moves like momentum SGD with this learning rate and momentum $1 - \alpha$.
        num_examples: N.
        temperature: T. The group option "temperature" changes it.
        friction: alpha, between 0 and 1.
    """

    def __init__(
        self, params: Any, lr: float, *, num_examples: int, temperature: float = 1.0, friction: float = 0.1
    ) -> None:
        options = {"lr": lr, "num_examples": num_examples, "temperature": temperature, "friction": friction}
        super().__init__(params, options | {"adapts": True})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, friction = group["lr"], group["friction"]
            noise = (2 * friction * lr * group["temperature"] / group["num_examples"]) ** 0.5
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["velocity"] = torch.zeros_like(parameter)
                velocity = state["velocity"].mul_(1 - friction).add_(parameter.grad, alpha=-lr)
                if noise:
                    velocity.add_(torch.randn_like(parameter), alpha=noise)
                parameter.add_(velocity)
