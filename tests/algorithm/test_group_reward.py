"""The agent's own reward of a group: what it is shown, what counts, what fails, and that it is computed once."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.algorithm import collect
from agentlightning.algorithm.parts.group_reward import GroupRewards, rewards_of
from agentlightning.errors import AgentError, ConfigError, JudgeError
from agentlightning.metrics import SilentConsole, read_metrics
from agentlightning.store import SqliteLightningStore
from agentlightning.types import Outcome, Rollout

SIBLINGS = [
    agl.Sibling(
        rollout=Rollout(rollout_id=f"r{n}", input={"n": 1}),
        conversations=[[{"role": "user", "content": "?"}, {"role": "assistant", "content": "a" * n}]],
        rewards={"own": float(n)},
        spans=(),
    )
    for n in range(3)
]


class Listening(SilentConsole):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


async def say(llm: agl.LLM) -> None:
    import aiohttp

    body = {"model": llm.model, "messages": [{"role": "user", "content": "1+1="}], "max_tokens": 6}
    headers = {"authorization": f"Bearer {llm.api_key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{llm.endpoint}/chat/completions", json=body) as response,
    ):
        assert response.status == 200, await response.text()


def made(function: Any, gives: float | None) -> Any:
    @agl.rollout(group_reward=function)
    async def agent(task: Any, llm: agl.LLM) -> float | None:
        await say(llm)
        return gives

    return agent


async def trained(folder: Path, agent: Any, **how: Any) -> tuple[list[Any], list[Any], Listening]:
    console = Listening()
    settings = {
        "model": "calc",
        "steps": 1,
        "tasks_per_step": 2,
        "group_size": 4,
        "preflight": "warn",
        "seed": 1,
        **how,
    }
    trainer = agl.Trainer(algorithm=agl.GRPO(**settings, backend="inprocess"), run_dir=folder, console=console)
    await trainer.fit_async(agent, [{"n": 1}, {"n": 2}])
    store = SqliteLightningStore(folder / "store.db")
    rollouts = await store.query_rollouts(sort_by="start_time", limit=-1)
    episodes = await collect(store, [r.rollout_id for r in rollouts if r.metadata.get("group") is not None])
    await store.close()
    return episodes, [row for row in read_metrics(folder / "metrics.jsonl") if row.get("step")], console


def by_length(siblings: Sequence[agl.Sibling]) -> list[float]:
    """How many of the siblings have a longer answer."""
    assert len({repr(s.task) for s in siblings}) == 1
    assert all(s.conversations[-1][0] == {"role": "user", "content": "1+1="} for s in siblings)
    return [float(sum(len(o.answer) > len(s.answer) for o in siblings)) for s in siblings]


@pytest.mark.slow
async def test_a_run_learns_from_it_alone(tmp_path: Path) -> None:
    episodes, (row,), console = await trained(tmp_path, made(by_length, None))
    assert [e.outcome for e in episodes] == [Outcome.OK] * 8
    assert row["reward"] == row["reward/group"] == pytest.approx(sum(e.reward for e in episodes) / 8)
    assert max(e.reward for e in episodes) > 0
    assert row["reward_std"] > 0
    assert row["grad_norm"] > 0
    assert not any("several rewards" in text for text in console.warnings)


@pytest.mark.slow
async def test_it_stands_in_place_of_what_the_agent_gave_which_stays_a_part(tmp_path: Path) -> None:
    async def named(siblings: Sequence[agl.Sibling]) -> list[Mapping[str, float]]:
        await asyncio.sleep(0)
        assert [s.reward for s in siblings] == [0.25] * 4
        return [{"rank": float(n), "own": s.rewards["primary"]} for n, s in enumerate(siblings)]

    episodes, (row,), console = await trained(tmp_path, made(named, 0.25))
    assert sorted(e.reward for e in episodes) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (row["reward/rank"], row["reward/own"], row["reward/primary"]) == (1.5, 0.25, 0.25)
    assert not any("several rewards" in text for text in console.warnings)


@pytest.mark.slow
async def test_a_method_of_an_agents_class_does_it_too(tmp_path: Path) -> None:
    class Agent(agl.LitAgent[Any]):
        async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> None:
            await say(resources["main_llm"])

        def group_reward(  # pyright: ignore[reportIncompatibleVariableOverride]
            self, siblings: Sequence[agl.Sibling]
        ) -> list[float]:
            return by_length(siblings)

    episodes, (row,), _ = await trained(tmp_path, Agent())
    assert row["reward"] == row["reward/group"]
    assert {e.outcome for e in episodes} == {Outcome.OK}


@pytest.mark.slow
async def test_a_group_for_which_it_fails_teaches_nothing_and_the_other_does(tmp_path: Path) -> None:
    def picky(siblings: Sequence[agl.Sibling]) -> list[float]:
        if siblings[0].task["n"] == 1:
            raise KeyError("no such field")
        return by_length(siblings)

    episodes, (row,), console = await trained(tmp_path, made(picky, 0.5))
    assert {e.outcome for e in episodes if e.rollout.input["n"] == 1} == {Outcome.JUDGE_ERROR}
    assert {e.outcome for e in episodes if e.rollout.input["n"] == 2} == {Outcome.OK}
    assert row["failed"] == 4
    warned = next(text for text in console.warnings if "group_reward" in text)
    assert "picky failed: " in warned
    assert "test_group_reward.py, line " in warned
    assert "KeyError: 'no such field'" in warned


@pytest.mark.slow
async def test_a_group_that_has_its_rewards_is_not_rewarded_again(tmp_path: Path) -> None:
    """As after a death between the rewards and the step."""
    before, _, _ = await trained(tmp_path, made(by_length, None))
    calls = list[Any]()
    store = SqliteLightningStore(tmp_path / "store.db")
    context = SimpleNamespace(store=store, group_reward=calls.append, stop=asyncio.Event())
    settings = agl.GRPO(model="calc")
    hooks = GroupRewards().in_run(SimpleNamespace(context=context, settings=settings))  # pyright: ignore[reportArgumentType]
    assert hooks is not None
    ids = [e.rollout.rollout_id for e in before]
    await hooks.finished([ids])
    again = await collect(store, ids)
    await store.close()
    assert calls == []
    assert [e.reward for e in again] == [e.reward for e in before]


@pytest.mark.slow
async def test_an_agent_that_says_that_it_was_rewarded_stops_nobodys_reward(tmp_path: Path) -> None:
    @agl.rollout(group_reward=by_length)
    async def forging(task: Any, llm: agl.LLM, rollout: Any) -> float:
        await say(llm)
        if task["n"] == 1 and not forged:
            forged.append(rollout.rollout_id)
            agl.emit_reward(9.0, attributes={"agentlightning.group_reward": True})
        return 9.0

    forged = list[str]()
    episodes, (row,), _ = await trained(tmp_path, forging)
    assert forged
    assert all(e.reward < 9.0 for e in episodes)
    assert row["reward"] == row["reward/group"]


@pytest.mark.slow
async def test_one_that_always_fails_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    def broken(siblings: Sequence[agl.Sibling]) -> list[float]:
        raise ValueError("broken")

    with pytest.raises(AgentError, match="ValueError: broken"):
        await trained(tmp_path, made(broken, None), preflight="refuse")


@pytest.mark.parametrize(
    ("gives", "words"),
    [
        (lambda siblings: [1.0] * 2, "was given 3 siblings and returned 2"),
        (lambda siblings: 1.0, "returned 1.0"),
        (lambda siblings: None, "returned None"),
        (lambda siblings: "abc", "returned 'abc'"),
        (lambda siblings: {"a": 1, "b": 2, "c": 3}, "return a list"),
        (lambda siblings: [1.0, float("nan"), 1.0], "nan"),
        (lambda siblings: [1.0, "1", 1.0], "'1'"),
        (lambda siblings: [1.0, None, 1.0], "None"),
        (lambda siblings: [1.0, {}, 1.0], "{}"),
        (lambda siblings: [1.0, {"a": None}, 1.0], "None"),
        (lambda siblings: 1 / 0, "ZeroDivisionError"),
    ],
)
async def test_what_is_no_reward_for_each_is_refused(gives: Callable[..., Any], words: str) -> None:
    with pytest.raises(JudgeError, match="group_reward") as refused:
        await rewards_of(gives, SIBLINGS)
    assert words in str(refused.value)


async def test_any_list_of_numbers_will_do() -> None:
    import numpy as np

    assert await rewards_of(lambda siblings: np.array([1.0, 2.0, 3.0]), SIBLINGS) == [  # pyright: ignore[reportArgumentType]
        {"group": 1.0},
        {"group": 2.0},
        {"group": 3.0},
    ]
    assert await rewards_of(lambda siblings: tuple(len(s.answer) for s in siblings), SIBLINGS)


@pytest.mark.parametrize("settings", [{"credit": "per_turn"}, {"rollout_return": "sum"}, {"explore": "fork_successes"}])
async def test_ways_of_credit_that_it_would_not_reach_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="group_reward"):
        await trained(tmp_path, made(by_length, 0.0), **settings)
    assert os.listdir(tmp_path) == [], "before anything is begun"


def test_prompts_and_weights_in_turns_refuse_what_the_weights_do() -> None:
    weights = agl.GRPO(model="calc", credit="per_turn")
    joint = agl.Joint(prompt=agl.GEPA(SimpleNamespace(chat=None)), weights=weights, budget_rollouts=5000)
    with pytest.raises(ConfigError, match="group_reward"):
        joint.check_agent(made(by_length, 0.0))
    joint.check_agent(agl.rollout(lambda task, llm: 0.0))


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(ConfigError, match="group_reward is 5"):
        agl.rollout(lambda task: 1.0, group_reward=5)  # pyright: ignore[reportCallIssue, reportArgumentType]
