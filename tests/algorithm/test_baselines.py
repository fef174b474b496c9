"""What is known from earlier steps: moving baselines, the KL budget, and that a checkpoint keeps both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import agentlightning as agl
from agentlightning.algorithm.checkpoint import list_checkpoints, read_checkpoint
from agentlightning.algorithm.credit.assignment import credit
from agentlightning.algorithm.credit.units import CreditRule, make_units
from agentlightning.algorithm.episode import Episode
from agentlightning.algorithm.parts.moving_baseline import MovingBaselines
from agentlightning.algorithm.update import Updater
from agentlightning.errors import ConfigError
from agentlightning.metrics import Reporter

from .fakes import CountingLearner
from .test_credit import episode
from .test_loop import Recorded, run


def of_task(task: int, reward: float, name: str = "r") -> Episode:
    e = episode(f"g{task}", [(reward, 1)], name=name)
    return replace(e, rollout=e.rollout.model_copy(update={"metadata": {"group": f"g{task}", "task": task}}))


def subtract(baselines: MovingBaselines, episodes: list[Episode]) -> list[float]:
    rule = CreditRule(advantage="reinforce")
    found = baselines.subtract(episodes, make_units(episodes, rule, {}))
    return [found[e.calls[-1].info.call_id] for e in episodes]


def test_a_step_is_compared_with_what_its_task_earned_before() -> None:
    baselines = MovingBaselines("task", decay=0.75)
    first = [of_task(0, 1.0, "a"), of_task(1, 0.0, "b"), of_task(1, 1.0, "c")]
    assert subtract(baselines, first) == pytest.approx([-2 / 3] * 3), "nothing is known yet: the mean of the step"
    assert baselines.values == pytest.approx({"0": 1.0, "1": 0.5})
    assert subtract(baselines, [of_task(0, 0.0, "d"), of_task(1, 1.0, "e")]) == pytest.approx([-1.0, -0.5])
    assert baselines.values == pytest.approx({"0": 0.75, "1": 0.625})


def test_each_role_has_a_baseline_of_its_own() -> None:
    """White wins more often than black: what counts is winning more than the role does (SPIRAL, section 3.3)."""
    game = episode("g", [(1.0, 1), (0.0, 1)], agents=("white", "black"))
    named = [replace(r, agent=a) for r, a in zip(game.rewards, ("white", "black"), strict=True)]
    game = replace(game, rewards=named)
    baselines = MovingBaselines("agent", 0.5, {"white": 0.8, "black": 0.2})
    units = make_units([game], CreditRule(advantage="reinforce"), {})
    found = baselines.subtract([game], units)
    assert sorted(found.values()) == pytest.approx([-0.8, -0.2])
    assert baselines.values == pytest.approx({"white": 0.9, "black": 0.1})


def test_each_seat_and_each_game_has_a_baseline_of_its_own() -> None:
    """In a league the policy takes either side, and calls of one agent have no name that tells them apart."""
    baselines = MovingBaselines("agent", 0.5, {"go seat 0": 0.75, "go seat 1": 0.25, "chess seat 0": 0.5})
    played = [("go", 0), ("go", 1), ("chess", 0)]
    episodes = [of_task(n, 1.0, f"r{n}") for n in range(3)]
    for e, (game, seat) in zip(episodes, played, strict=True):
        e.rollout.metadata.update(source=game, seat=seat)
    assert subtract(baselines, episodes) == [-0.75, -0.25, -0.5]
    assert baselines.values == {"go seat 0": 0.875, "go seat 1": 0.625, "chess seat 0": 0.75}


def test_what_is_replayed_is_compared_and_says_nothing_new() -> None:
    baselines = MovingBaselines("task", 0.5, {"0": 0.5})
    again = replace(of_task(0, 1.0, "old"), replayed=True)
    assert subtract(baselines, [of_task(0, 0.0, "new"), again]) == [-0.5, -0.5]
    assert baselines.values == {"0": 0.25}


async def test_the_updater_learns_from_what_is_above_the_baseline() -> None:
    settings = agl.REINFORCE(model="calc", group_size=1, baseline="task", baseline_decay=0.5, check_packing_every=0)
    learner: Any = CountingLearner()
    updater = Updater(settings, learner, Reporter())
    await updater.parts.load({"baseline": {"0": 0.25, "1": 0.75}})
    await updater.learn([of_task(0, 1.0, "a"), of_task(1, 0.0, "b")], 0.1)
    assert sorted(set(learner.batches[0].advantages_E.tolist())) == [-0.75, 0.75]
    assert updater.parts.state()["baseline"] == pytest.approx({"0": 0.625, "1": 0.375})


async def test_a_checkpoint_keeps_the_baselines(tmp_path: Path) -> None:
    given: dict[str, Any] = {"advantage": "reinforce", "loss": "reinforce", "baseline": "task", "save_every": 1}
    await run(tmp_path, Recorded(steps=1, **given), range(9))
    (_, last) = list_checkpoints(tmp_path)
    saved = read_checkpoint(last).learning["policy"]
    assert saved["baseline"] == {"None": 0.5}
    await run(tmp_path, Recorded(steps=2, **given), range(9), resume=last)
    assert read_checkpoint(list_checkpoints(tmp_path)[-1]).learning["policy"]["baseline"] == {"None": 0.5}


def test_a_baseline_that_would_change_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="baseline='task' has no effect here"):
        agl.GRPO(model="calc", baseline="task")


async def test_the_kl_budget_moves_the_weight() -> None:
    learner: Any = CountingLearner()
    updater = Updater(agl.GRPO(model="calc", kl_coef=0.1, kl_target=0.02), learner, Reporter())
    for kl, expected in [(0.04, 0.102), (0.021, 0.102 * 1.005), (0.0, 0.102 * 1.005 * 0.98)]:
        update = await updater.prepare([])
        update.metrics["kl_reference"] = kl
        await updater.parts.after_update(update, [])
        assert updater.parts.state()["reference"]["coef"] == pytest.approx(expected)
    assert updater.loss.kl_coef == pytest.approx(expected)
    with pytest.raises(ConfigError, match=r"kl_target=0\.1 has no effect"):
        agl.GRPO(model="calc", kl_target=0.1)


def test_reinforce_pp_whitens_over_tokens_as_its_reference_does() -> None:
    """Returns broadcast to tokens, then (x − mean) / std over all of them: a long response counts for more."""
    episodes = [episode("g", [(r, 0)], tokens=(n,)) for r, n in [(1.0, 1), (0.0, 5), (3.0, 2)]]
    (batch,) = credit(episodes, CreditRule(advantage="reinforce++"))
    tokens = np.array([1.0, *[0.0] * 5, *[3.0] * 2])
    expected = (tokens - tokens.mean()) / tokens.std()
    assert np.concatenate([c.advantages for c in batch]) == pytest.approx(expected, rel=1e-5)
    assert len({a for c in batch for a in c.advantages.tolist()}) == 3
