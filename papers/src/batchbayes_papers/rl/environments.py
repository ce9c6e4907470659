"""CartPole and Acrobot of gymnasium (the extra "rl"), many at once.

Gymnasium has a vectorised CartPole. It has none of Acrobot, so its own equations of motion are integrated here for all
copies together, with the same Runge-Kutta step; a test compares the two.
"""

from importlib import import_module
from typing import Any, Protocol

import numpy as np

from batchbayes.tools import require_packages


class Environments(Protocol):
    """Copies of one environment that run side by side."""

    num_inputs: int
    num_actions: int

    def reset(self, seed: int) -> np.ndarray:
        """Start all episodes, and return observations (E, O)."""
        ...

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Act (E,), and return observations (E, O), rewards (E,), and which episodes end with this step (E,)."""
        ...


def make_environments(name: str, count: int, most_steps: int) -> Environments:
    """Return copies of "CartPole" or "Acrobot", whose episodes end after a number of steps."""
    require_packages("the experiment rl", "rl", package="batchbayes-papers", gymnasium="gymnasium")
    return {"CartPole": CartPoles, "Acrobot": Acrobots}[name](count, most_steps)


class CartPoles:
    """The vectorised CartPole of gymnasium: a reward of 1 for each step until the pole falls."""

    num_inputs, num_actions = 4, 2

    def __init__(self, count: int, most_steps: int) -> None:
        module = import_module("gymnasium.envs.classic_control.cartpole")
        self._environment: Any = module.CartPoleVectorEnv(count, max_episode_steps=most_steps)

    def reset(self, seed: int) -> np.ndarray:
        return self._environment.reset(seed=seed)[0]

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        observations, rewards, terminated, truncated, _ = self._environment.step(actions)
        return observations, rewards, terminated | truncated


class Acrobots:
    """Acrobot: a reward of -1 for each step until the lower end swings above the line."""

    num_inputs, num_actions = 6, 3

    def __init__(self, count: int, most_steps: int) -> None:
        module = import_module("gymnasium.envs.classic_control.acrobot")
        self._one: Any = module.AcrobotEnv()
        self._count, self._most_steps, self._steps = count, most_steps, 0
        self.state = np.zeros((4, count))
        """Two angles and two velocities of each copy, (4, E)."""

    def reset(self, seed: int) -> np.ndarray:
        self._steps = 0
        self.state = np.random.default_rng(seed).uniform(-0.1, 0.1, (4, self._count))
        return self._observations()

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        one, torque = self._one, np.asarray(self._one.AVAIL_TORQUE)[actions]
        moved = runge_kutta(lambda state: np.stack(one._dsdt((*state, torque))[:4]), self.state, one.dt)
        angles = (moved[:2] + np.pi) % (2 * np.pi) - np.pi
        limits = np.array([[one.MAX_VEL_1], [one.MAX_VEL_2]])
        self.state = np.concatenate([angles, np.clip(moved[2:], -limits, limits)])
        self._steps += 1
        is_up = -np.cos(self.state[0]) - np.cos(self.state[0] + self.state[1]) > 1
        return self._observations(), np.where(is_up, 0.0, -1.0), is_up | (self._steps >= self._most_steps)

    def _observations(self) -> np.ndarray:
        first, second, *velocities = self.state
        parts = [np.cos(first), np.sin(first), np.cos(second), np.sin(second), *velocities]
        return np.stack(parts, 1).astype(np.float32)


def runge_kutta(slope: Any, state: np.ndarray, step: float) -> np.ndarray:
    """Return the state after one step of the classical method of fourth order.

    >>> float(runge_kutta(lambda state: -state, np.ones(1), 0.1)[0])  # exp(-0.1) = 0.904837418
    0.9048375
    """
    first = slope(state)
    second = slope(state + step / 2 * first)
    third = slope(state + step / 2 * second)
    fourth = slope(state + step * third)
    return state + step / 6 * (first + 2 * second + 2 * third + fourth)
