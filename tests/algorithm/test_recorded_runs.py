"""The verdicts on real runs (scripts/record_runs.py): none on those that learned, one on those that could not.

All healthy runs are real ones, more than a hundred. Of the sick ones there are few; the others of a hundred are the
same with their steps in another order.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentlightning.algorithm.episode import Episode
from agentlightning.doctor.evidence import Evidence
from agentlightning.doctor.in_steps import RECENT, step_findings
from agentlightning.types.finding import Severity

from .test_parts import episode
from .test_trend import verdict

LINES = (Path(__file__).parent / "recorded_runs.jsonl").read_text().splitlines()
RUNS: list[dict[str, Any]] = [json.loads(line) for line in LINES]
ROLLOUTS = 200


def of_kind(*kinds: str) -> list[dict[str, Any]]:
    return [run for run in RUNS if run["kind"] in kinds]


def rows(run: dict[str, Any]) -> list[dict[str, Any]]:
    """The metrics of each step."""
    steps = range(len(run["metrics"]["reward"]))
    return [{name: column[step] for name, column in run["metrics"].items()} for step in steps]


def findings(run: dict[str, Any]) -> list[str]:
    """What `agl why` finds in the steps, beside first and last rollouts that earned what the steps say."""
    rewards = run["metrics"]["reward"]
    metrics = [{k: v for k, v in row.items() if v is not None} for row in rows(run)]
    early, late = earned(rewards[:RECENT]), earned(rewards[-RECENT:])
    found = step_findings(Evidence(steps=metrics, early=early, episodes=late, settings=run["settings"]))
    return [f.code for f in found if f.severity is not Severity.NOTE]


def earned(rewards: Sequence[float]) -> list[Episode]:
    return [episode("g", float(n < float(np.mean(rewards)) * ROLLOUTS)) for n in range(ROLLOUTS)]


def drawn_again(run: dict[str, Any], number: int) -> dict[str, Any]:
    """The same sick run with its steps in another order."""
    rewards = np.random.default_rng(number).permutation(run["metrics"]["reward"]).tolist()
    return {**run, "of": f"{run['of']}, drawn again", "metrics": {**run["metrics"], "reward": rewards}}


def told(folder: Path, run: dict[str, Any]) -> list[str]:
    """What training itself says while the run goes on."""
    last = {name: column[-1] for name, column in run["metrics"].items() if column[-1] is not None}
    return verdict(folder, list(run["metrics"]["reward"]), **{k: v for k, v in last.items() if k != "reward"})


def hundred(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    more = [drawn_again(runs[n % len(runs)], n) for n in range(100 - len(runs))]
    return [*runs, *more]


def test_there_are_real_runs_of_each_kind() -> None:
    assert {run["kind"] for run in RUNS} >= {"healthy", "rate 0", "chance", "flat"}
    assert len(of_kind("healthy")) >= 100
    assert len({run["algorithm"] for run in of_kind("healthy")}) >= 12
    assert all(run["held_out"][1] - run["held_out"][0] >= 0.1 for run in of_kind("healthy"))


def test_no_alarm_in_healthy_runs(tmp_path: Path) -> None:
    assert [run["of"] for run in of_kind("healthy") if told(tmp_path, run)] == []


@pytest.mark.slow
def test_nothing_is_found_in_the_steps_of_healthy_runs() -> None:
    assert {run["of"]: findings(run) for run in of_kind("healthy") if findings(run)} == {}


@pytest.mark.parametrize(
    ("kind", "codes"),
    [
        ("rate 0", {"learning_rate_zero"}),
        ("flat", {"no_updates"}),
        ("chance", {"not_rising", "reward_fell"}),
    ],
)
def test_what_is_wrong_is_found_in_the_steps_of_sick_runs(kind: str, codes: set[str]) -> None:
    assert {run["of"]: findings(run) for run in of_kind(kind) if not codes & set(findings(run))} == {}


@pytest.mark.parametrize("kind", ["rate 0", "chance"])
def test_an_alarm_in_sick_runs(tmp_path: Path, kind: str) -> None:
    """At the first look; a run that escapes it is looked at again (`test_a_run_that_escaped_is_looked_at_again`)."""
    sick = hundred(of_kind(kind))
    silent = [run["of"] for run in sick if not told(tmp_path, run)]
    assert len(silent) <= 0.2 * len(sick), silent
