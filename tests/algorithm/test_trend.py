"""The verdict on a run's reward: no alarm in healthy runs, an alarm in dead ones (see scripts/reward_series.py)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentlightning.algorithm.credit.units import CreditRule
from agentlightning.algorithm.parts.preflight import Preflight
from agentlightning.algorithm.verdicts import WATCHED_STEPS, chance_of_no_rise, fall_of, noise_of, visible_rise
from agentlightning.metrics import JsonlSink, Reporter, SilentConsole

from .test_parts import episode

RUNS: dict[str, list[dict[str, Any]]] = json.loads((Path(__file__).parent / "reward_series.json").read_text())


class Words(SilentConsole):
    """Keeps what was warned of."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def verdict(folder: Path, rewards: Sequence[float], **metrics: Any) -> list[str]:
    """What is said of a run with these rewards, whose single rollouts earned 0 or 1."""
    words = Words()
    reporter = Reporter(JsonlSink(folder / "m.jsonl"), words)
    preflight = Preflight(reporter, CreditRule())
    preflight.check([episode("g", 0.0), episode("g", 1.0)])
    for reward in rewards:
        preflight.watch({"reward": reward, "updates": 1, **metrics})
    reporter.close()
    return words.warnings


COLLAPSED = [0.67, 0.63, 0.71, 0.88, 0.75, 0.92, 0.88, 1.0, 0.96, 0.75, 0.88, 0.79, 0.42, 0.21, 0.0, 0.0]
"""A run of examples/werewolf whose learning rate did not fall."""


def test_a_reward_that_falls_is_told_while_the_run_goes_on(tmp_path: Path) -> None:
    assert verdict(tmp_path, COLLAPSED[:13]) == [], "one step says nothing"
    (told,) = verdict(tmp_path, COLLAPSED)
    assert told.startswith("The reward was 0.94 6 steps ago and has fallen to 0.355.")
    assert "Go back to the best checkpoint" in told


def test_a_fall_is_one_from_a_level_and_large() -> None:
    found = fall_of(COLLAPSED, 1.0)
    assert found is not None
    assert (found.best, found.since, found.now) == (pytest.approx(0.94), 7, pytest.approx(0.1575))
    assert fall_of(COLLAPSED, 10.0) is None, "of rewards that range so far this is little"
    assert fall_of(COLLAPSED[:9], 1.0) is None
    assert fall_of(COLLAPSED[7:], 1.0) is not None
    assert fall_of([*COLLAPSED[:9], 0.2, *COLLAPSED[5:9]], 1.0) is None, "it has recovered"
    assert fall_of([1.0] * 7, 1.0) is None
    assert fall_of([1.0] * 20, 1.0) is None
    assert fall_of([], 1.0) is None


def test_noise_is_no_fall() -> None:
    noise = np.random.default_rng(0).normal(0.5, 0.15, (200, 30))
    accused = [row for row in noise.tolist() if any(fall_of(row[:n], 1.0) for n in range(31))]
    assert len(accused) <= 10


def test_no_alarm_in_healthy_runs(tmp_path: Path) -> None:
    assert len(RUNS["healthy"]) >= 100
    alarmed = [run["of"] for run in RUNS["healthy"] if verdict(tmp_path, run["rewards"])]
    assert alarmed == []


def test_an_alarm_in_dead_runs(tmp_path: Path) -> None:
    """Some dead runs look as if they rose, by chance: no more than the rate that `TREND_LEVEL` was chosen for."""
    silent = [run["of"] for run in RUNS["dead"] if not verdict(tmp_path, run["rewards"])]
    assert len(silent) <= 0.1 * len(RUNS["dead"]), silent


def test_a_run_that_escaped_is_looked_at_again(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    once, twice = 0, 0
    for _ in range(100):
        rewards = rng.binomial(128, 0.4, 2 * WATCHED_STEPS) / 128
        once += bool(verdict(tmp_path, rewards[:WATCHED_STEPS].tolist()))
        twice += bool(verdict(tmp_path, rewards.tolist()))
    assert 100 >= twice > once >= 75
    assert twice >= 90


def test_a_reward_that_never_moves_at_all(tmp_path: Path) -> None:
    (said,) = verdict(tmp_path, [0.25] * WATCHED_STEPS, updates=0)
    assert "equal rewards" in said


def test_a_learning_rate_of_zero_is_named(tmp_path: Path) -> None:
    rewards = (np.random.default_rng(0).binomial(128, 0.3, WATCHED_STEPS) / 128).tolist()
    (said,) = verdict(tmp_path, rewards, learning_rate=0.0)
    assert "The learning rate is 0" in said


def test_no_alarm_where_the_reward_is_high_already(tmp_path: Path) -> None:
    rewards = (np.random.default_rng(0).binomial(128, 0.96, WATCHED_STEPS) / 128).tolist()
    assert verdict(tmp_path, rewards) == []


def test_steps_too_noisy_for_a_verdict_get_more_time(tmp_path: Path) -> None:
    rewards = (np.random.default_rng(0).binomial(4, 0.4, 8 * WATCHED_STEPS) / 4).tolist()
    assert verdict(tmp_path, rewards[:WATCHED_STEPS]) == []
    assert verdict(tmp_path, rewards)


@pytest.mark.parametrize("steps", [30, 60])
def test_pure_noise_looks_risen_as_often_as_the_level_says(steps: int) -> None:
    rng = np.random.default_rng(3)
    chances = np.array([chance_of_no_rise(rng.normal(size=steps).tolist()) for _ in range(1000)])
    for level in (0.01, 0.05, 0.2):
        assert abs(np.mean(chances <= level) - level) < 3 * np.sqrt(level * (1 - level) / 1000) + 0.005


def test_a_rise_in_the_first_steps_and_a_slow_one_are_both_found() -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(0.0, 0.05, 30)
    jump, slow, fall = np.r_[0.2, 0.4, np.full(28, 0.8)], np.linspace(0.3, 0.6, 30), np.linspace(0.6, 0.3, 30)
    assert chance_of_no_rise((noise + jump).tolist()) < 1e-3
    assert chance_of_no_rise((noise + slow).tolist()) < 1e-3
    assert chance_of_no_rise((noise + fall).tolist()) > 0.5


def test_the_smallest_rise_that_is_seen_shrinks_with_more_steps() -> None:
    rng = np.random.default_rng(0)
    short, long = (visible_rise(rng.normal(0, 0.1, n).tolist(), 0.05) for n in (30, 120))
    assert 0.05 < long < short < 0.15
    assert noise_of([0.0, 1.0, 2.0]) == pytest.approx(1 / np.sqrt(2))
