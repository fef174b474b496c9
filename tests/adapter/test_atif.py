"""Trajectories in ATIF: what the format allows and nothing else, every sampled token once, sub-agents by reference."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from agentlightning.adapter.atif import trajectory_of
from agentlightning.gateway import Gateway
from agentlightning.store import InMemoryLightningStore
from tests.environments.test_against_harbor import harbor  # noqa: F401 (a fixture)
from tests.gateway.conftest import CALC, Site, calculator, rendering  # noqa: F401
from tests.gateway.scripted import ScriptedEngine

ALLOWED: Mapping[str, set[str]] = {
    "trajectory": {
        *("schema_version", "session_id", "trajectory_id", "agent", "steps", "notes", "final_metrics", "extra"),
        *("continued_trajectory_ref", "subagent_trajectories"),
    },
    "agent": {"name", "version", "model_name", "tool_definitions", "extra"},
    "step": {
        *("step_id", "timestamp", "source", "model_name", "reasoning_effort", "message", "reasoning_content"),
        *("tool_calls", "observation", "metrics", "is_copied_context", "llm_call_count", "extra"),
    },
    "tool_call": {"tool_call_id", "function_name", "arguments", "extra"},
    "result": {"source_call_id", "content", "subagent_trajectory_ref", "extra"},
    "reference": {"trajectory_id", "session_id", "trajectory_path", "extra"},
    "metrics": {
        *("prompt_tokens", "completion_tokens", "cached_tokens", "cost_usd", "prompt_token_ids"),
        *("completion_token_ids", "logprobs", "extra"),
    },
    "final_metrics": {
        *("total_prompt_tokens", "total_completion_tokens", "total_cached_tokens", "total_cost_usd", "total_steps"),
        "extra",
    },
}
OF_AGENTS = ("model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics")


def check(trajectory: Mapping[str, Any]) -> None:
    """Fails for anything that the format does not allow."""
    assert set(trajectory) <= ALLOWED["trajectory"]
    assert set(trajectory["agent"]) <= ALLOWED["agent"]
    assert trajectory["agent"]["name"]
    assert set(trajectory.get("final_metrics", ())) <= ALLOWED["final_metrics"]
    assert [step["step_id"] for step in trajectory["steps"]] == list(range(1, len(trajectory["steps"]) + 1))
    named = {one["trajectory_id"] for one in trajectory.get("subagent_trajectories", ())}
    for step in trajectory["steps"]:
        assert set(step) <= ALLOWED["step"]
        assert step["source"] in ("system", "user", "agent")
        assert step["source"] == "agent" or not [name for name in OF_AGENTS if name in step]
        assert set(step.get("metrics", ())) <= ALLOWED["metrics"]
        calls = step.get("tool_calls", [])
        assert all(set(call) <= ALLOWED["tool_call"] and isinstance(call["arguments"], dict) for call in calls)
        for result in step.get("observation", {}).get("results", ()):
            assert set(result) <= ALLOWED["result"]
            assert result.get("source_call_id") in {None, *(call["tool_call_id"] for call in calls)}
            for reference in result.get("subagent_trajectory_ref", ()):
                assert set(reference) <= ALLOWED["reference"]
                assert reference["trajectory_id"] in named
    for one in trajectory.get("subagent_trajectories", ()):
        check(one)


def sampled_ids(trajectory: Mapping[str, Any]) -> Iterator[list[int]]:
    """The sampled tokens of each step of a trajectory and of those embedded in it."""
    for one in (trajectory, *trajectory.get("subagent_trajectories", ())):
        yield from (step["metrics"]["completion_token_ids"] for step in one["steps"] if "metrics" in step)


@pytest.fixture
async def site(rendering: Any) -> AsyncIterator[Site]:  # noqa: F811
    store = InMemoryLightningStore()
    engine = ScriptedEngine(rendering, calculator)
    async with Gateway(store, engine, rendering) as gateway:
        claimed = await store.start_rollout(input={})
        yield Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)
    await store.close()


async def ask(site: Site, agent: str, messages: list[Any]) -> Any:
    """One turn of an agent, whose answer is added to the messages."""
    async with site.client(default_headers={"x-agl-agent": agent}) as client:
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=[CALC])
    message = answer.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    return message


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def result_of(message: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "5"}


async def written(site: Site) -> tuple[dict[str, Any], list[Any]]:
    """The attempt's trajectory, which is checked, and its calls."""
    calls = list(await site.close())
    found = trajectory_of(await site.spans(), calls, session_id="ro", trajectory_id="at", extra={"reward": 1.0})
    assert found is not None
    check(json.loads(json.dumps(found)))
    sampled = sorted(map(tuple, sampled_ids(found)))
    assert sampled == sorted(tuple(call.response_ids.tolist()) for call in calls), "each once"
    return found, calls


async def test_a_conversation_with_a_tool(site: Site) -> None:
    messages: list[Any] = [{"role": "system", "content": "Calculate."}, user("What is 2 + 3?")]
    first = await ask(site, "solver", messages)
    messages.append(result_of(first))
    await ask(site, "solver", messages)
    found, calls = await written(site)
    assert [step["source"] for step in found["steps"]] == ["system", "user", "agent", "agent"]
    called = found["steps"][2]
    assert called["tool_calls"][0]["function_name"] == "calc"
    assert called["observation"]["results"] == [
        {"source_call_id": called["tool_calls"][0]["tool_call_id"], "content": "5"}
    ]
    assert called["metrics"]["prompt_token_ids"] == calls[0].prompt_ids.tolist()
    assert called["metrics"]["logprobs"] == pytest.approx(calls[0].logprobs.tolist())
    assert found["agent"]["name"] == "solver"
    assert found["agent"]["tool_definitions"]
    assert found["final_metrics"]["total_completion_tokens"] == sum(len(call.response_ids) for call in calls)


async def test_a_sub_agent_is_referred_to_by_the_step_that_started_it(site: Site) -> None:
    main: list[Any] = [user("What is 2 + 3?")]
    first = await ask(site, "main", main)
    await ask(site, "helper", [user("What is 7 + 1?")])
    main.append(result_of(first))
    await ask(site, "main", main)
    found, _ = await written(site)
    [helper] = found["subagent_trajectories"]
    assert helper["agent"]["name"] == "helper"
    [result] = found["steps"][1]["observation"]["results"]
    assert [one["trajectory_id"] for one in result["subagent_trajectory_ref"]] == [helper["trajectory_id"]]


async def test_a_branch_begins_with_copied_context(site: Site) -> None:
    messages: list[Any] = [user("What is 2 + 3?")]
    first = await ask(site, "solver", messages)
    other = [*messages, {**result_of(first), "content": "6"}]
    messages.append(result_of(first))
    await ask(site, "solver", messages)
    await ask(site, "solver", other)
    found, calls = await written(site)
    [branch] = found["subagent_trajectories"]
    assert branch["extra"] == {"branched_from": "at", "call_id": calls[0].info.call_id}
    copied = [step.get("is_copied_context", False) for step in branch["steps"]]
    assert copied == [True, True, False]


async def test_what_follows_after_the_end_says_so(site: Site) -> None:
    await ask(site, "solver", [user("What is 2 + 3?")])
    await ask(site, "solver", [user("What is 4 + 3?")])
    found, _ = await written(site)
    assert found["subagent_trajectories"][0]["extra"] == {"began_after": "at"}


def test_an_attempt_without_calls_has_none() -> None:
    assert trajectory_of([], [], session_id="ro", trajectory_id="at", extra={}) is None


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_harbors_own_model_reads_them(site: Site, harbor: str, tmp_path: Path) -> None:  # noqa: F811
    main: list[Any] = [user("What is 2 + 3?")]
    first = await ask(site, "main", main)
    await ask(site, "helper", [user("What is 7 + 1?")])
    main.append(result_of(first))
    await ask(site, "main", main)
    found, _ = await written(site)
    (tmp_path / "trajectory.json").write_text(json.dumps(found))
    read = (
        "import json, sys; from harbor.models.trajectories.trajectory import Trajectory; "
        "Trajectory.model_validate(json.load(open(sys.argv[1])))"
    )
    command = [harbor, "-c", read, str(tmp_path / "trajectory.json")]
    await asyncio.to_thread(subprocess.run, command, check=True)
