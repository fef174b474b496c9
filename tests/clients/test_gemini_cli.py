"""gemini-cli as npm installs it: thoughts, several calls in a turn and a sub-agent, continued token for token."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agentlightning.gateway import Gateway, load_rendering
from agentlightning.models import resolve_model
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import Call, RolloutMode
from tests.clients import node
from tests.gateway.scripted import ScriptedEngine

pytestmark = [pytest.mark.clients, pytest.mark.timeout(240), pytest.mark.filterwarnings("default")]

PROGRAM = node.HOME / "node_modules" / "@google" / "gemini-cli" / "bundle" / "gemini.js"
SETTINGS = {"security": {"auth": {"selectedType": "gemini-api-key"}}, "general": {"enableAutoUpdate": False}}
ASKED = "What does a.txt say?"


def _call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _reads_a_file(prompt: str, _params: object) -> str:
    results = prompt.count("<tool_response>\n")
    if results == 0:
        calls = _call("list_directory", dir_path=".") + "\n" + _call("read_file", file_path="a.txt")
        return f"<think>\nLook first.\n</think>\n\nI will look.\n{calls}"
    if results == 2:
        return "<think>\nAgain.\n</think>\n\n" + _call("glob", pattern="*.txt")
    return "<think>\nDone.\n</think>\n\nThe file says hello."


def _asks_another(prompt: str, params: object) -> str:
    if "complete_task" in prompt.partition("</tools>")[0]:
        if "<tool_response>\n" not in prompt:
            return "<think>\nMine.\n</think>\n\n" + _call("read_file", file_path="a.txt")
        return _call("complete_task", result={"response": "hello"})
    if "<tool_response>\n" not in prompt:
        return "<think>\nAsk.\n</think>\n\n" + _call("invoke_agent", agent_name="generalist", prompt="Read a.txt.")
    return "The file says hello."


async def run(folder: Path, script: Any) -> tuple[str, list[Call], ScriptedEngine]:
    """What the program prints, and its calls."""
    if not PROGRAM.is_file():
        pytest.skip(f"npm install in {node.HOME}")
    (folder / ".gemini").mkdir()
    (folder / ".gemini" / "settings.json").write_text(json.dumps(SETTINGS))
    (folder / "work").mkdir()
    (folder / "work" / "a.txt").write_text("hello\n")
    rendering, store = load_rendering(resolve_model("calc")), InMemoryLightningStore()
    engine = ScriptedEngine(rendering, script, max_context=100_000)
    async with Gateway(store, engine, rendering) as gateway:
        claimed = await store.start_rollout(input={}, mode=RolloutMode.TRAIN)
        owner = claimed.rollout_id, claimed.attempt.attempt_id
        llm = gateway.bind(gateway.as_resource(), *owner)
        given = {
            **os.environ,
            "HOME": str(folder),
            "GEMINI_CLI_TRUST_WORKSPACE": "true",
            "GOOGLE_GEMINI_BASE_URL": llm.endpoint.removesuffix("/v1"),
            "GEMINI_API_KEY": "dummy",
            "GEMINI_MODEL": llm.model,
        }
        process = await asyncio.create_subprocess_exec(
            *("node", str(PROGRAM), "--yolo", "-p", ASKED),
            cwd=folder / "work",
            env=given,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        out, err = await process.communicate()
        assert process.returncode == 0, err.decode()[-3000:]
        await gateway.close_attempt(*owner)
        calls = list((await store.query_calls([owner[0]]))[owner[0]])
    await store.close()
    return out.decode(), calls, engine


def check_exact(calls: list[Call], engine: ScriptedEngine) -> None:
    for call in calls:
        prompt, response, _ = engine.sampled[call.info.call_id]
        assert call.prompt_ids.tolist() == prompt.tolist()
        assert call.response_ids.tolist() == response.tolist()
    by_id = {call.info.call_id: call for call in calls}
    for call in calls:
        if call.info.parent_call_id is not None:
            parent = by_id[call.info.parent_call_id]
            before = [*parent.prompt_ids.tolist(), *parent.response_ids.tolist()]
            assert call.prompt_ids[: len(before)].tolist() == before


async def test_thoughts_and_several_calls_are_continued(tmp_path: Path) -> None:
    said, calls, engine = await run(tmp_path, _reads_a_file)
    assert "The file says hello." in said
    check_exact(calls, engine)
    assert [call.info.parent_call_id for call in calls] == [None, *(call.info.call_id for call in calls[:2])]
    assert all(call.info.divergence is None for call in calls)


async def test_a_sub_agent_is_a_conversation_of_its_own(tmp_path: Path) -> None:
    said, calls, engine = await run(tmp_path, _asks_another)
    assert "The file says hello." in said
    check_exact(calls, engine)
    first, sub, goes_on, last = calls
    assert (sub.info.parent_call_id, goes_on.info.parent_call_id) == (None, sub.info.call_id)
    assert last.info.parent_call_id == first.info.call_id
    assert sub.info.divergence is not None
    assert (sub.info.divergence.cause, sub.info.divergence.tokens_lost) == ("new_conversation", 0)
