"""Anthropic's `context_management`: what it clears is cleared, told in the answer, and a branch of that name."""

from __future__ import annotations

import copy
from typing import Any

import aiohttp
import pytest

from agentlightning.gateway import Gateway
from agentlightning.gateway.dialects import DIALECTS
from agentlightning.gateway.dialects.clearing import CLEARED
from agentlightning.gateway.exchange import Refusal
from agentlightning.rendering import RenderersRendering
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import RolloutMode
from tests.gateway.conftest import CALC, Site
from tests.gateway.scripted import ScriptedEngine

(DIALECT,) = [dialect for dialect in DIALECTS if dialect.name == "messages"]
TOOLS = [{"name": "calc", "input_schema": CALC["function"]["parameters"]}]
LONG = "7" * 400


def turn(number: int, name: str = "calc") -> list[dict[str, Any]]:
    use = {"type": "tool_use", "id": f"t{number}", "name": name, "input": {"a": number, "b": 3}}
    thought = {"type": "thinking", "thinking": f"thought {number}", "signature": ""}
    result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": f"{number}{LONG}"}
    return [{"role": "assistant", "content": [thought, use]}, {"role": "user", "content": [result]}]


CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "Go on."},
    *[message for number in range(5) for message in turn(number, "search" if number == 1 else "calc")],
]


def parsed(*edits: dict[str, Any]) -> Any:
    body = {"model": "m", "max_tokens": 5, "messages": copy.deepcopy(CONVERSATION), "tools": TOOLS}
    request = DIALECT.parse({**body, "context_management": {"edits": list(edits)}}, {})
    assert body["messages"] == CONVERSATION, "what came is never changed"
    return request


def results(request: Any) -> list[bool]:
    """Which tool results are still there."""
    return [m["content"] != CLEARED for m in request.messages if m["role"] == "tool"]


def inputs(request: Any) -> list[bool]:
    return [m["tool_calls"][0]["function"]["arguments"] != "{}" for m in request.messages if m.get("tool_calls")]


def thoughts(request: Any) -> list[bool]:
    return ["reasoning_content" in m for m in request.messages if m["role"] == "assistant"]


USES = {"type": "clear_tool_uses_20250919"}
NOW = {**USES, "trigger": {"type": "tool_uses", "value": 2}}
THINKING = {"type": "clear_thinking_20251015"}
YES, NO = [True] * 5, [False] * 5


@pytest.mark.parametrize(
    ("edit", "left", "cleared"),
    [
        (USES, YES, None),
        ({**USES, "trigger": {"type": "input_tokens", "value": 10**6}}, YES, None),
        ({**USES, "trigger": {"type": "input_tokens", "value": 300}}, [False] * 2 + [True] * 3, 2),
        ({**USES, "trigger": {"type": "tool_uses", "value": 5}}, YES, None),
        (NOW, [False] * 2 + [True] * 3, 2),
        ({**NOW, "keep": {"type": "tool_uses", "value": 0}}, NO, 5),
        ({**NOW, "exclude_tools": ["search"]}, [False, True, True, True, True], 1),
        ({**NOW, "clear_at_least": {"type": "input_tokens", "value": 100}}, [False] * 2 + [True] * 3, 2),
        ({**NOW, "clear_at_least": {"type": "input_tokens", "value": 10_000}}, YES, None),
    ],
)
def test_old_tool_results_are_cleared(edit: dict[str, Any], left: list[bool], cleared: int | None) -> None:
    request = parsed(edit)
    assert results(request) == left
    assert inputs(request) == YES
    applied = request.private["context_management"]["applied_edits"]
    assert [one["cleared_tool_uses"] for one in applied] == ([] if cleared is None else [cleared])
    assert all(one["cleared_input_tokens"] > 50 * (cleared or 0) for one in applied)
    assert request.cleared == (cleared is not None)


def test_inputs_are_cleared_where_that_is_asked() -> None:
    assert inputs(parsed({**NOW, "clear_tool_inputs": True})) == [False] * 2 + [True] * 3
    assert inputs(parsed({**NOW, "clear_tool_inputs": ["search"]})) == [True, False, True, True, True]


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        ({}, [False] * 4 + [True]),
        ({"keep": "all"}, YES),
        ({"keep": {"type": "all"}}, YES),
        ({"keep": {"type": "thinking_turns", "value": 2}}, [False] * 3 + [True] * 2),
        ({"keep": {"type": "thinking_turns", "value": 9}}, YES),
    ],
)
def test_old_thoughts_are_cleared(keep: dict[str, Any], left: list[bool]) -> None:
    request = parsed({**THINKING, **keep})
    assert thoughts(request) == left
    applied = request.private["context_management"]["applied_edits"]
    assert [one["cleared_thinking_turns"] for one in applied] == ([] if left == YES else [left.count(False)])


def test_edits_are_applied_together_and_unknown_ones_are_left_out() -> None:
    request = parsed(THINKING, NOW, {"type": "compact_20260112"}, {"type": "clear_dreams_20990101"})
    assert (thoughts(request), results(request)) == ([False] * 4 + [True], [False] * 2 + [True] * 3)
    assert [one.kind for one in request.left_out if "edits" in one.field] == ["unavailable", "unknown"]
    for wrong in ({**NOW, "keep": {"type": "tool_uses", "value": -1}}, {**NOW, "trigger": 5}, {**NOW, "keep": "all"}):
        with pytest.raises(Refusal):
            parsed(wrong)


def answers(_prompt: str, _params: object) -> str:
    return "So it is."


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cleared_history_is_a_branch_of_that_name_and_goes_on(
    store: InMemoryLightningStore, rendering: RenderersRendering, stream: bool
) -> None:
    engine = ScriptedEngine(rendering, answers, max_context=10_000)
    async with Gateway(store, engine, rendering) as gateway:
        claimed = await store.start_rollout(input={}, mode=RolloutMode.TRAIN)
        site = Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)
        history, told = list(CONVERSATION), []
        for edit in ({**THINKING, "keep": "all"}, NOW, NOW):
            body = {"model": "policy", "max_tokens": 50, "tools": TOOLS, "messages": history, "stream": stream}
            async with (
                aiohttp.ClientSession(headers={"x-api-key": site.key}) as http,
                http.post(
                    f"{site.base_url}/messages", json={**body, "context_management": {"edits": [edit]}}
                ) as answer,
            ):
                told.append(await answer.text())
                assert answer.status == 200
            history += [{"role": "assistant", "content": "So it is."}, {"role": "user", "content": "And now?"}]
        calls = await site.close()
    site.check_exact(calls)
    assert [call.info.divergence and call.info.divergence.cause for call in calls] == [None, "context_cleared", None]
    assert calls[2].info.parent_call_id == calls[1].info.call_id
    assert '"applied_edits":[]' in told[0]
    assert '"cleared_tool_uses":2' in told[1]
