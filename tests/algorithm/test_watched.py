"""A part of a reward that is watched: what a run and the doctor say of it, how seldom wrongly, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import agentlightning as agl
from agentlightning.algorithm.checkpoint import list_checkpoints, read_checkpoint
from agentlightning.algorithm.episode import Earned, Episode, Sampled
from agentlightning.algorithm.parts.watched import Watched, audit
from agentlightning.algorithm.sampling.schedule import TaskSchedule
from agentlightning.algorithm.sampling.source import FinishedRollouts, RolloutSource, Source
from agentlightning.doctor.evidence import Evidence
from agentlightning.doctor.in_steps import step_findings
from agentlightning.errors import ConfigError
from agentlightning.metrics import SilentConsole

from .test_credit import episode
from .test_loop import Recorded, run

STEPS = 40
RISES = [0.1 + 0.8 * n / STEPS for n in range(STEPS)]
FALLS = [0.9 - 0.8 * n / STEPS for n in range(STEPS)]


class GradedSource(RolloutSource):
    """Two rollouts a step: the trained part rises from step to step, the watched one falls."""

    async def sample(self, step: int, position: int) -> Sampled | None:
        if step > (self._settings.steps or 0):
            return None
        found = [self._graded(step, sign) for sign in (-0.05, 0.05)]
        return Sampled(found, [position], position + 1, 0.0, 0.0)

    def _graded(self, step: int, apart: float) -> Episode:
        right, careful = RISES[step - 1] + apart, FALLS[step - 1] + apart
        one = episode("g", [(right, 1)], name=f"{step}-{apart}")
        return replace(one, rewards=[Earned(right, 1, parts={"right": right, "careful": careful})])


@dataclass(frozen=True, kw_only=True)
class Graded(Recorded):
    """Of which every rollout has two graders."""

    watched_parts: Sequence[str] = field(default_factory=lambda: ["careful"])

    def make_source(self, schedule: TaskSchedule, again: Sequence[int], finished: FinishedRollouts) -> Source:
        return GradedSource(self, self.context, schedule, again)


class Listening(SilentConsole):
    def __init__(self) -> None:
        self.verdicts: list[str] = []
        self.warnings: list[str] = []

    def verdict(self, text: str) -> None:
        self.verdicts.append(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)


async def said(tmp_path: Path, algorithm: Any, **how: Any) -> Listening:
    console = Listening()
    await run(tmp_path, algorithm, range(999), console=console, **how)
    return console


async def test_a_run_says_it_once_with_the_rollouts_to_read(tmp_path: Path) -> None:
    (verdict,) = [v for v in (await said(tmp_path, Graded(steps=STEPS))).verdicts if "watched" in v]
    assert "'careful'" in verdict
    assert "0.05" in verdict, "the ids of the last step"


async def test_what_was_seen_before_a_checkpoint_counts_after_it(tmp_path: Path) -> None:
    """Neither half of the run alone is long enough for a verdict."""
    console = await said(tmp_path, Graded(steps=6, save_every=6))
    (*_, last) = list_checkpoints(tmp_path)
    assert len(read_checkpoint(last).parts["watched"]["careful"]) == 6
    assert not [v for v in console.verdicts if "watched" in v]
    console = await said(tmp_path, Graded(steps=STEPS), resume=last)
    assert [v for v in console.verdicts if "watched" in v]


async def test_a_part_that_nobody_gives_is_said_once(tmp_path: Path) -> None:
    console = await said(tmp_path, Graded(steps=3, watched_parts=["carful"]))
    (warning,) = [w for w in console.warnings if "watched_parts" in w]
    assert "They have: careful, right." in warning


def test_the_doctor_says_it_of_the_recorded_run() -> None:
    steps = [
        {"step": n, "reward": a, "reward/careful": b} for n, (a, b) in enumerate(zip(RISES, FALLS, strict=True), 1)
    ]
    episodes = [episode("g", [(r, 1)], name=f"r{r}") for r in (0.2, 0.9, 0.4)]
    for names, codes in ((["careful"], ["watched_part_fell"]), ([], []), (["other"], [])):
        evidence = Evidence(steps=steps, episodes=episodes, settings={"watched_parts": names})
        found = [f for f in step_findings(evidence) if f.code == "watched_part_fell"]
        assert [f.code for f in found] == codes
        assert all(f.evidence["rollouts"] == ["r0.9", "r0.4", "r0.2"] for f in found)


@pytest.mark.parametrize(
    ("rewards", "watched"), [(RISES, RISES), (FALLS, FALLS), (FALLS, RISES), (RISES, [0.5] * STEPS)]
)
def test_only_a_fall_beside_a_rise_counts(rewards: list[float], watched: list[float]) -> None:
    assert audit("careful", rewards, watched, []) is None


def test_runs_whose_part_does_not_fall_are_seldom_accused() -> None:
    """However often one looks: here after every fourth step of 80."""
    rng, runs, accused = np.random.default_rng(0), 120, 0
    for _ in range(runs):
        rewards = np.linspace(0.2, 0.9, 80) + rng.normal(0, 0.08, 80)
        watched = 0.5 + rng.normal(0, 0.1, 80)
        accused += any(audit("x", rewards[:n].tolist(), watched[:n].tolist(), []) for n in range(8, 81, 4))
    assert accused / runs <= 0.05


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({"watched_parts": "careful"}, "takes a list of names"),
        ({"watched_parts": [1]}, "takes a list of names"),
        ({"watched_parts": ["a"], "reward_weights": {"a": 0.5, "b": 1.0}}, "'a', which has a weight"),
    ],
)
def test_what_cannot_be_watched_is_refused(given: dict[str, Any], cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        agl.GRPO(model="calc", **given)
    assert Watched.of(agl.GRPO(model="calc")) is None
