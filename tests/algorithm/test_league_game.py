"""A league on a game without a best throw: it is exploited less than plain self-play, most so as its average.

Rock, paper, scissors with unequal prizes, a policy of three numbers, and GRPO's step on them; the pool, its draws and
its win rates are the league's own. The held-out opponent knows how often a player throws what, and gives the best
answer.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import agentlightning as agl
from agentlightning.algorithm.parts.league import Opponents

from .fakes import CountingBackend
from .test_credit import episode

PRIZES = np.array([[0, -3, 1], [3, 0, -2], [-1, 2, 0]])
"""Of rock, paper, scissors against each; the equilibrium throws them in 2, 1 and 3 of 6 games."""
STEPS, GROUPS, SIBLINGS, RATE = 60, 8, 8, 2.0


class Throwers(CountingBackend):
    """Holds the selves that joined, by alias."""

    def __init__(self, logits_A: np.ndarray) -> None:
        super().__init__()
        self.logits_A = logits_A
        self.played = {"start": odds(logits_A)}
        vars(self.learners["policy"])["export"] = self.export

    async def export(self, uri: str) -> None: ...

    async def take_up(self, policy: str, uri: str) -> None:
        self.played[policy] = odds(self.logits_A)


def odds(logits_A: np.ndarray) -> np.ndarray:
    return np.exp(logits_A) / np.exp(logits_A).sum()


def exploited(odds_A: np.ndarray) -> float:
    """What the best answer earns a game; 0 at the equilibrium alone."""
    return float((PRIZES @ odds_A).max())


async def play(folder: Path, draw: str, seed: int) -> tuple[float, float]:
    """How far the newest self and the pool's average are exploited, over the last half of a run."""
    rng = np.random.default_rng(seed)
    backend = Throwers(np.log([0.6, 0.2, 0.2]))
    opponents = Opponents(agl.League(draw=draw, size=STEPS, every=2), "start", seed)
    found: list[tuple[float, float]] = []
    for step in range(1, STEPS + 1):
        mine_A, gradient_A = odds(backend.logits_A), np.zeros(3)
        for group in range(GROUPS):
            match = opponents.match(step, group)
            throws_S = rng.choice(3, SIBLINGS, p=mine_A)
            rewards_S = PRIZES[throws_S, rng.choice(3, SIBLINGS, p=backend.played[match["opponent"]])]
            advantages_S = (rewards_S - rewards_S.mean()) / (rewards_S.std() + 1e-6)
            gradient_A += (advantages_S[:, None] * (np.eye(3)[throws_S] - mine_A)).mean(0) / GROUPS
            opponents.record([ended(match, group, n, float(r)) for n, r in enumerate(rewards_S)])
        backend.logits_A = backend.logits_A + RATE * gradient_A
        made: Any = backend
        await opponents.grow(made, "policy", folder, step)
        if step > STEPS // 2:
            pool_A = np.mean([backend.played[alias] for alias in opponents.pool], axis=0)
            found.append((exploited(odds(backend.logits_A)), exploited(pool_A)))
    newest, pool = np.mean(found, axis=0)
    return float(newest), float(pool)


def ended(match: dict[str, Any], group: int, n: int, reward: float) -> Any:
    made = episode(f"g{group}", [(reward, 0)], tokens=(1,), name=f"{group}-{n}")
    return replace(made, rollout=made.rollout.model_copy(update={"metadata": {**match, "group": group}}))


@pytest.mark.slow
async def test_a_league_is_exploited_less_than_plain_self_play(tmp_path: Path) -> None:
    plain = np.array([await play(tmp_path, "latest", seed) for seed in range(3)])
    league = np.array([await play(tmp_path, "uniform", seed) for seed in range(3)])
    assert (league[:, 0] < plain[:, 0]).all(), ("the newest selves", plain, league)
    assert (league[:, 1] < plain[:, 0] / 2).all(), ("the league as its average", plain, league)
