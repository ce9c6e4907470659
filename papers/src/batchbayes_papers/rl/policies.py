r"""Policies with noise in their weights, and REINFORCE with a baseline.

A policy has two hidden layers. The second one has ordinary weights, weights $\mu + \sigma\epsilon$ with one draw of
$\epsilon$ for each episode (parameter noise), or weights $\sigma\epsilon$ without means and with a new draw for each
step (a variance layer). It is not the first one, because a variance layer does the same to an input x as to -x, so the
sign of an observation would be lost.

The return depends on the parameters only through the chances of the actions given $\epsilon$, so its gradient is the
mean of $\sum_t A_t \nabla\log\pi(a_t\mid s_t, \epsilon)$ over episodes, with the noise that they were played with.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from batchbayes_papers.rl.environments import Environments

Kind = Literal["deterministic", "variance", "parameter noise"]
TINY = 1e-16


class Policy(nn.Module):
    """Logits of actions, with noise in the weights of the second hidden layer."""

    def __init__(self, num_inputs: int, num_actions: int, kind: Kind, width: int) -> None:
        super().__init__()
        self.kind, bound = kind, width**-0.5
        self.first, self.last = nn.Linear(num_inputs, width), nn.Linear(width, num_actions)
        self.bias = nn.Parameter(torch.zeros(width))
        if kind != "variance":
            self.mean = nn.Parameter(torch.empty(width, width).uniform_(-bound, bound))
        if kind == "variance":
            self.std = nn.Parameter(torch.empty(width, width).uniform_(-bound, bound))
        if kind == "parameter noise":
            self.std = nn.Parameter(torch.full((width, width), 0.5 * bound))  # as in noisy networks for exploration

    def noise(self, count: int, random: torch.Generator) -> Tensor | None:
        """Return new noise: for each episode and unit (E, H), for each episode and weight (E, H, H), or none."""
        if self.kind == "deterministic":
            return None
        size = len(self.bias)
        return torch.randn(count, *[size] * (1 if self.kind == "variance" else 2), generator=random)

    def forward(self, observations: Tensor, noise: Tensor | None) -> Tensor:
        """Return logits (E, T, A) of observations (E, T, O). The noise of a variance layer is (E, T, H)."""
        hidden = self.first(observations).relu()  # (E, T, H)
        if self.kind == "variance":
            assert noise is not None
            hidden = (hidden.square() @ self.std.square().T + TINY).sqrt() * noise
        else:
            weights = self.mean if noise is None else self.mean + self.std * noise
            hidden = hidden @ weights.mT
        return self.last((hidden + self.bias).relu())


@dataclass(frozen=True, eq=False)
class Episodes:
    """What happened in E episodes of up to T steps."""

    observations: Tensor
    """(E, T, O)"""
    actions: Tensor
    """(E, T)"""
    rewards: Tensor
    """(E, T): zero after the end of an episode."""
    is_alive: Tensor
    """(E, T): whether a step belongs to its episode."""
    noise: Tensor | None
    """That of the policy: (E, T, H) of a variance layer, (E, H, H) of parameter noise."""


@torch.no_grad()
def play(policy: Policy, environments: Environments, count: int, random: torch.Generator) -> Episodes:
    """Play one episode in each environment."""
    noise, each_noise = policy.noise(count, random), []
    observations = environments.reset(int(torch.randint(2**31, (), generator=random)))
    is_alive, steps = np.ones(count, dtype=bool), []
    while is_alive.any():
        if policy.kind == "variance":
            noise = policy.noise(count, random)[:, None]  # type: ignore[index]
            each_noise.append(noise)
        seen = torch.from_numpy(observations)
        probs = policy(seen[:, None], noise)[:, 0].softmax(-1)
        actions = torch.multinomial(probs, 1, generator=random)[:, 0]
        observations, rewards, is_over = environments.step(actions.numpy())
        steps.append((seen, actions, torch.from_numpy(rewards * is_alive).float(), torch.from_numpy(is_alive)))
        is_alive = is_alive & ~is_over
    all_seen, actions, rewards, was_alive = (torch.stack(column, 1) for column in zip(*steps, strict=True))
    return Episodes(all_seen, actions, rewards, was_alive, torch.cat(each_noise, 1) if each_noise else noise)


def returns_to_go(rewards: Tensor, discount: float) -> Tensor:
    """Return the discounted sums (E, T) of the rewards from each step on.

    >>> returns_to_go(torch.tensor([[1.0, 1.0, 1.0]]), 0.5)
    tensor([[1.7500, 1.5000, 1.0000]])
    """
    total, found = torch.zeros(len(rewards)), []
    for reward in reversed(rewards.unbind(1)):
        total = reward + discount * total
        found.append(total)
    return torch.stack(found[::-1], 1)


def advantages_of(episodes: Episodes, discount: float) -> Tensor:
    """Return the returns to go (E, T) less their mean over the other episodes at the same step, in standard deviations.

    The baseline does not depend on the actions of an episode itself, so it causes no bias. An episode that is over has
    a return of zero from then on. If all episodes have the same returns, nothing is learnt from them.
    """
    returns = returns_to_go(episodes.rewards, discount)
    others = (returns.sum(0) - returns) / (len(returns) - 1)
    found = returns - others
    return found / (found[episodes.is_alive].std() + 1e-6)


def policy_loss(policy: Policy, episodes: Episodes, advantages: Tensor) -> Tensor:
    """Return what REINFORCE makes small: minus the mean of advantage times log probability over all steps."""
    log_probs = policy(episodes.observations, episodes.noise).log_softmax(-1)
    chosen = log_probs.gather(-1, episodes.actions[..., None])[..., 0]
    return -(advantages * chosen)[episodes.is_alive].mean()


def learn_policy(
    policy: Policy, environments: Environments, *, iterations: int, count: int, rate: float, discount: float, seed: int
) -> list[float]:
    """Train a policy in place. Return the mean score of the episodes of each iteration."""
    random = torch.Generator().manual_seed(seed)
    optimiser, scores = torch.optim.Adam(policy.parameters(), lr=rate), []
    for _ in range(iterations):
        episodes = play(policy, environments, count, random)
        optimiser.zero_grad()
        policy_loss(policy, episodes, advantages_of(episodes, discount)).backward()
        optimiser.step()
        scores.append(float(episodes.rewards.sum(1).mean()))
    return scores
