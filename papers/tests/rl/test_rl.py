"""Policies with noise in their weights, against brute force and against gymnasium itself."""

import numpy as np
import pytest
import torch
from batchbayes_papers.rl import experiment as rl
from batchbayes_papers.rl.policies import Episodes, Policy, advantages_of, learn_policy, play, policy_loss
from batchbayes_papers.runner.tables import to_markdown
from helpers.experiments import run_experiment

RANDOM = torch.Generator().manual_seed(0)


class Guessing:
    """One step: the reward is 1 if the action is the sign of the first observation."""

    num_inputs, num_actions = 2, 2

    def __init__(self, count: int) -> None:
        self._count = count

    def reset(self, seed: int) -> np.ndarray:
        self._seen = np.random.default_rng(seed).normal(size=(self._count, 2)).astype(np.float32)
        return self._seen

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self._seen, (actions == (self._seen[:, 0] > 0)).astype(np.float64), np.ones(self._count, dtype=bool)


@pytest.mark.parametrize("kind", rl.KINDS)
def test_every_policy_learns_what_is_easy(kind):
    torch.manual_seed(0)
    scores = learn_policy(
        Policy(2, 2, kind, 16), Guessing(64), iterations=80, count=64, rate=0.03, discount=0.9, seed=0
    )
    assert sum(scores[:5]) / 5 < 0.65
    assert sum(scores[-5:]) / 5 > 0.8


@pytest.mark.parametrize("kind", rl.KINDS)
def test_the_update_repeats_the_noise_of_the_episodes(kind):
    torch.manual_seed(1)
    policy = Policy(2, 2, kind, 8)
    episodes = play(policy, Guessing(5), 5, RANDOM)
    once, again = (policy(episodes.observations, episodes.noise) for _ in range(2))
    assert torch.equal(once, again)
    other = play(policy, Guessing(5), 5, RANDOM).noise
    assert kind == "deterministic" or not torch.equal(policy(episodes.observations, other), once)


def test_advantages_are_returns_less_those_of_the_others():
    rewards = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    is_alive = rewards > 0
    episodes = Episodes(torch.zeros(3, 3, 1), torch.zeros(3, 3), rewards, is_alive, None)
    returns = [[1.75, 1.5, 1.0], [1.5, 1.0, 0.0], [1.0, 0.0, 0.0]]
    expected = torch.tensor([
        [own - sum(other[t] for other in returns if other is not row) / 2 for t, own in enumerate(row)]
        for row in returns
    ])  # fmt: skip
    torch.testing.assert_close(advantages_of(episodes, 0.5), expected / expected[is_alive].std(), rtol=1e-5, atol=1e-5)


def test_steps_after_the_end_do_not_count():
    torch.manual_seed(2)
    policy = Policy(2, 2, "deterministic", 4)
    observations, actions = torch.randn(1, 3, 2), torch.tensor([[0, 1, 1]])
    advantages = torch.tensor([[1.0, -2.0, 9.0]])
    short = torch.tensor([[True, True, False]])
    found = policy_loss(policy, Episodes(observations, actions, torch.ones(1, 3), short, None), advantages)
    log_probs = policy(observations, None)[0].log_softmax(-1)
    torch.testing.assert_close(found, -(log_probs[0, 0] - 2 * log_probs[1, 1]) / 2)


def test_acrobots_move_as_those_of_gymnasium():
    acrobot = pytest.importorskip("gymnasium.envs.classic_control.acrobot", reason="needs the extra rl")
    from batchbayes_papers.rl.environments import Acrobots

    many, actions = Acrobots(3, 500), np.random.default_rng(0).integers(0, 3, (60, 3))
    many.reset(7)
    singles = [acrobot.AcrobotEnv() for _ in range(3)]
    for number, single in enumerate(singles):
        single.state = many.state[:, number].copy()
    for row in actions:
        found = many.step(row)
        for number, single in enumerate(singles):
            seen, reward, is_over, *_ = single.step(row[number])
            np.testing.assert_allclose(found[0][number], seen, atol=1e-4)
            assert (found[1][number], found[2][number]) == (reward, is_over)


def test_episodes_of_acrobot_end_in_time():
    pytest.importorskip("gymnasium", reason="needs the extra rl")
    policy, environments = Policy(6, 3, "variance", 4), rl.make_environments("Acrobot", 2, 5)
    episodes = play(policy, environments, 2, RANDOM)
    assert episodes.rewards.tolist() == [[-1.0] * 5] * 2
    assert bool(episodes.is_alive.all())


def test_from_units_to_tables():
    pytest.importorskip("gymnasium", reason="needs the extra rl")
    config = rl.PRESETS["smoke"]
    results = run_experiment(rl, config)
    first = rl.units(config)[0]
    assert rl.work(config, first, {}) == results[first.name]
    text = to_markdown(rl.tables(config, results)[0])
    assert "parameter noise" in text
    assert set(rl.figures(config, results)) == {"score-on-CartPole", "score-on-Acrobot"}
    rl.tables(config, {})
    assert rl.notes(config)
