"""The room booking example: its grader, its stand-in, and that prompt optimisers find a better prompt with it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentlightning.metrics import SilentConsole
from agentlightning.trainer.sync import run_sync
from examples.room_booking.make_tasks import make_tasks
from examples.room_booking.room_agent import FIRST_PROMPT, room_agent
from examples.room_booking.rooms import Task, fitting, grade
from examples.room_booking.stand_in import _REQUEST, RULES, StandIn, pick
from examples.room_booking.tune import SETTINGS, TRAIN, VAL, trainer_for

ROOT = Path(__file__).parents[2]


def score(template: str, tasks: list[Task]) -> float:
    """The mean reward of the stand-in under a template."""
    prompts = [template.format(request=task["request"]) for task in tasks]
    found = [(_REQUEST.search(prompt), prompt) for prompt in prompts]
    picked = [pick(prompt, asked, t["rooms"]) for (asked, prompt), t in zip(found, tasks, strict=True) if asked]
    return sum(map(grade, picked, tasks)) / len(tasks)


def test_the_grader() -> None:
    task = make_tasks(1, seed=5)[0]
    good = [room["id"] for room in task["rooms"] if all(fitting(room, task).values())]
    bad = next(room["id"] for room in task["rooms"] if not all(fitting(room, task).values()))
    assert grade(f"Not {bad}, take {task['expected']}.", task) == 1.0
    assert {grade(name, task) for name in good if name != task["expected"]} == {0.6}
    assert grade(bad, task) <= 0.3
    assert grade("no idea", task) == 0.0


def test_the_tasks_are_made_alike_each_time() -> None:
    assert make_tasks(3, seed=1) == make_tasks(3, seed=1)
    assert make_tasks(3, seed=1) != make_tasks(3, seed=2)


def test_the_stand_in_does_better_with_every_rule_and_all_of_them_are_enough() -> None:
    sentences = [rule.sentence for rule in RULES.values()]
    scores = [score(FIRST_PROMPT + " ".join(sentences[:n]), VAL) for n in range(len(sentences) + 1)]
    assert 0.5 <= scores[0] <= 0.6
    assert scores == sorted(scores)
    assert scores[-1] == 1.0


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("algorithm", list(SETTINGS))
def test_five_seeds_of_five_find_a_prompt_of_at_least_eighty_percent(algorithm: str, tmp_path: Path) -> None:
    async def tune(seed: int) -> tuple[str, dict[str, Any]]:
        stand_in = StandIn()
        of_the_trainer = {"run_dir": tmp_path / str(seed), "console": SilentConsole()}
        url = await stand_in.start()
        trainer, tuner = trainer_for(algorithm, url, "agent", "critic", seed=seed, **of_the_trainer)
        try:
            result = await trainer.fit_async(room_agent, TRAIN, VAL)
        finally:  # a loop whose servers are open does not close where warnings are errors
            await stand_in.stop()
        return tuner.get_best_prompt().template, dict(result.metrics[-1])

    for seed in range(5):
        best, last = run_sync(tune(seed))
        assert score(FIRST_PROMPT, VAL) < 0.6
        assert score(best, VAL) >= 0.8, best
        assert last["rollouts"] <= SETTINGS[algorithm]["budget_rollouts"]
        assert last["critic_tokens"] <= SETTINGS[algorithm]["budget_critic_tokens"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("algorithm", list(SETTINGS))
def test_a_run_that_is_killed_and_resumed_pays_for_nothing_twice(algorithm: str, tmp_path: Path) -> None:
    """Counted at the server. Only agents' calls that were under way when the process died are made again."""
    run_dir, log = tmp_path / "run", tmp_path / "log.txt"
    with _server(log, "--hold-after", "500") as held:
        command = [*_tune(algorithm, _url(held)), "--run-dir", str(run_dir)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as run:
            _wait_for(lambda: log.exists() and _agents_calls(log) >= 500)
            run.kill()
        held.kill()
    killed_at = Counter(log.read_text().splitlines())
    with _server(log) as served:
        command = [*_tune(algorithm, _url(served)), "--resume", str(run_dir)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        served.kill()
    asked = Counter(log.read_text().splitlines())
    again = {key: n for key, n in asked.items() if key.startswith("agent") and 0 < killed_at[key] < n}
    assert len(again) <= 2 * 64, "at most the two calls of each rollout that was under way"
    kept = (run_dir / "critic.jsonl").read_text().splitlines()
    paid = sum(json.loads(line)["key"].startswith("ask-") for line in kept)
    assert sum(n for key, n in asked.items() if key.startswith("critic")) == paid, "each answer is kept, and used"
    assert 0 < sum(n for key, n in killed_at.items() if key.startswith("critic")) < paid
    prompts = json.loads((run_dir / "best" / "prompts.json").read_text())
    assert prompts["promoted"]


def _server(log: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "examples.room_booking.stand_in", "--port", "0", "--log", str(log), *more]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def _url(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    return server.stdout.readline().strip()


def _agents_calls(log: Path) -> int:
    return sum(line.startswith("agent") for line in log.read_text().splitlines())


def _tune(algorithm: str, url: str) -> list[str]:
    models = ["--model", "agent", "--critic", "critic"]
    return [sys.executable, "-m", "examples.room_booking.tune", "--algorithm", algorithm, "--url", url, *models]


def _wait_for(fact: Any) -> None:
    until = time.monotonic() + 300
    while not fact():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.2)
