"""`gym:`: observations and actions in words, rewards summed, and what cannot be is said by its name."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.environments.gym import GymEnvironment
from agentlightning.errors import AgentError, ConfigError, ExecutorError
from tests.environments.model import Answer, answering, attempted

GAMES = "gym:tests.environments.games"


def played(environment: Any, answer: Answer, seed: int = 0) -> float:
    """What an episode earns whose model answers so."""
    task = {"environment": "…", "seed": seed}
    with answering(answer) as llm:
        return asyncio.run(environment.agent.rollout_async(task, {"main": llm}, attempted(task)))


def test_what_is_seen_is_text_and_what_is_said_is_an_action() -> None:
    env = agl.load_environment(f"{GAMES}:Echo-v0")
    heard: list[Any] = []

    def answer(messages: list[dict[str, Any]]) -> str:
        heard.append(messages)
        return f"I say {messages[-1]['content'][-2]}"

    assert [played(env, answer, seed) for seed in range(5)] == [1.0] * 5
    system, observation = heard[0]
    assert "from 0 to 9" in system["content"]
    assert observation["content"].startswith("The number is")
    assert played(env, lambda _: "12345", 0) == 0.0


def test_rewards_are_summed_and_the_episode_is_remembered() -> None:
    heard: list[list[dict[str, Any]]] = []

    def answer(messages: list[dict[str, Any]]) -> str:
        heard.append(messages)
        return "ab"[len(heard) - 1]

    assert played(agl.load_environment(f"{GAMES}:Spelling-v0"), answer) == 1.0
    assert [m["role"] for m in heard[-1]] == ["system", "user", "assistant", "user"]
    heard.clear()
    assert played(agl.load_environment(f"{GAMES}:Spelling-v0", remembers=False), answer) == 1.0
    assert [m["role"] for m in heard[-1]] == ["system", "user"]


def test_a_way_across_a_lake_by_names() -> None:
    env = agl.load_environment("gym:FrozenLake-v1", is_slippery=False, actions=["left", "down", "right", "up"])
    way = iter(["down", "Down!", "right", "right, I think, not left: right", "down", "RIGHT"])
    seen: list[str] = []

    def answer(messages: list[dict[str, Any]]) -> str:
        seen.append(messages[-1]["content"])
        return next(way)

    assert played(env, answer) == 1.0
    assert seen[0].splitlines()[0] == "[red:S]FFF"
    assert seen[1].splitlines()[2] == "[red:F]HFH"
    assert "\x1b" not in "".join(seen)


def test_colours_that_are_all_that_tells_one_state_from_another_are_words() -> None:
    """Of each state of Gymnasium's own environments that draw text there is a text of its own."""
    taxi = GymEnvironment("Taxi-v4")
    with closing(taxi.make()) as made:
        drawn = set()
        for state in range(500):
            made.reset(seed=0)
            made.unwrapped.s = state
            drawn.add(taxi.shown(made, state))
    assert len(drawn) == 500
    assert any("[magenta:[yellow:R]]" in one for one in drawn)
    assert any("[green:_]" in one for one in drawn)


def test_numbers_are_shown_as_json() -> None:
    seen: list[str] = []

    def answer(messages: list[dict[str, Any]]) -> str:
        seen.append(messages[-1]["content"])
        return "0"

    assert played(agl.load_environment("gym:Blackjack-v1"), answer) in (-1.0, 0.0, 1.0)
    assert seen[0].startswith("[")


def test_an_answer_without_an_action_is_told_so_and_the_third_ends_it() -> None:
    told: list[str] = []

    def answer(messages: list[dict[str, Any]]) -> str:
        told.append(messages[-1]["content"])
        return "hm"

    assert played(agl.load_environment(f"{GAMES}:Echo-v0"), answer) == 0.0
    assert len(told) == 3
    assert "names no action" in told[-1]


def test_one_that_breaks_fails_its_attempt() -> None:
    with pytest.raises(ExecutorError, match="it broke"):
        played(agl.load_environment(f"{GAMES}:Endless-v0", breaks_at=2), lambda _: "1")


def test_a_task_is_a_seed_and_validation_has_others() -> None:
    env = agl.load_environment(f"{GAMES}:Echo-v0", tasks=3, val_tasks=2, first_seed=5)
    assert [task["seed"] for task in env.tasks()] == [5, 6, 7]
    assert [task["seed"] for task in env.val_tasks()] == [8, 9]
    with pytest.raises(ConfigError, match="seed"):
        env.agent.check_task({"question": 1})


async def test_it_is_tried_out_at_random() -> None:
    env = agl.load_environment(f"{GAMES}:Echo-v0", tasks=20)
    probes = [probe async for probe in env.probes(env.tasks())]
    assert all(probe.good for probe in probes)
    assert {probe.reward for probe in probes} <= {0.0, 1.0}
    cases: list[tuple[dict[str, Any], str]] = [({"breaks_at": 3}, "it broke"), ({}, "max_episode_steps")]
    for options, why in cases:
        broken = agl.load_environment(f"{GAMES}:Endless-v0", **options)
        [probe] = [probe async for probe in broken.probes(broken.tasks()[:1])]
        assert (probe.good, probe.reward) == (False, None)
        assert why in probe.why
    ending = agl.load_environment(f"{GAMES}:Endless-v0", max_episode_steps=5)
    assert [probe.good async for probe in ending.probes(ending.tasks()[:1])] == [True]


WRONG = {
    "old reset": "reset returned str; Gymnasium's returns observation, info",
    "old step": "step returned 4 values; Gymnasium's returns observation, reward, terminated, truncated, info",
    "no reward": "must be a number, not NoneType",
    "nan": "must be a finite number",
    "bytes": "bytes is not JSON serializable",
}


@pytest.mark.parametrize("way", WRONG)
async def test_what_an_environment_returns_is_looked_at(way: str) -> None:
    env = agl.load_environment(f"{GAMES}:Wrong-v0", way=way)
    (probe,) = [one async for one in env.probes(env.tasks()[:1])]
    assert not probe.good
    assert WRONG[way] in probe.why
    with answering(lambda _: "1") as llm, pytest.raises(ExecutorError, match=re.escape(WRONG[way])):
        await env.agent.rollout_async(env.tasks()[0], {"main": llm}, attempted(env.tasks()[0]))


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        ("gym:NoSuch-v0", {}, "`NoSuch` doesn't exist. All names:  python -c"),
        ("gym:FrozenLake-v1", {"slippery": False}, "is_slippery, "),
        ("gym:", {}, "behind the colon"),
        ("jym:Taxi-v4", {}, "gym:…"),
        ("gym", {}, "names no environment"),
        ("gymnasium:Taxi-v4", {}, "Did you mean gym:Taxi-v4?"),
        ("verifers:sums", {}, "Did you mean verifiers:sums?"),
        ("Taxi-v4", {}, "Did you mean gym:Taxi-v4?"),
        ("tests", {}, "Did you mean harbor:tests?"),
        ("gym:ALE/Pong-v5", {}, "when it is imported: gym:ale_py:ALE/Pong-v5"),
        ("gym:no_such_module:Taxi-v4", {}, "no_such_module"),
        ("gym:FrozenLake-v1", {"is_slipery": True}, "is_slipery"),
        ("gym:FrozenLake-v1", {"tasks": 0}, "tasks is 0"),
        ("gym:FrozenLake-v1", {"tasks": "many"}, "tasks is 'many'"),
        ("gym:FrozenLake-v1", {"val_tasks": -1}, "val_tasks is -1"),
        ("gym:FrozenLake-v1", {"actions": ["a", "b", "c", "d", "e"]}, "'e'"),
        ("gym:FrozenLake-v1", {"actions": []}, "actions"),
        (f"{GAMES}:Spelling-v0", {"actions": ["a"]}, "no effect"),
        ("gym:Pendulum-v1", {}, "cannot be said in words"),
        ("gym:FrozenLake-v1", {"agent": "codex"}, "an agent of its own"),
    ],
)
def test_what_cannot_be_is_said_by_its_name(spec: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        agl.load_environment(spec, **options)
    assert words in str(caught.value)


def test_without_a_model_there_is_nobody_to_play() -> None:
    env = GymEnvironment("FrozenLake-v1")
    task = env.tasks()[0]
    with pytest.raises(AgentError, match="no model"):
        asyncio.run(env.agent.rollout_async(task, {}, attempted(task)))


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_small_model_learns_to_say_what_it_sees(seed: int, tmp_path: Path) -> None:
    """The calculator model writes numbers already, but not the one that it is shown."""
    env = agl.load_environment(f"{GAMES}:Echo-v0", tasks=200, val_tasks=40, numbers=5, answer_tokens=16)
    algorithm = agl.GRPO(model="calc", steps=45, group_size=8, tasks_per_step=8, seed=seed, val_every=45)
    result = agl.Trainer(algorithm=algorithm, run_dir=tmp_path / "run").fit(env.agent, env.tasks(), env.val_tasks())
    rows = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    validated = [row["val_reward"] for row in rows if row.get("val_reward") is not None]
    assert validated[-1] > validated[0] + 0.15
