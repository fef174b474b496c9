"""Prompts that are too long: refused as a provider does, or cut where the gateway is told to."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import openai
import pytest
from hypothesis import given, settings, strategies as st

from agentlightning.gateway import Gateway
from agentlightning.gateway.routing.models import Frozen
from agentlightning.gateway.sampling.size import Truncation
from agentlightning.rendering import RenderersRendering
from agentlightning.rendering.messages import Message
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import Call, RolloutMode
from tests.gateway.conftest import CALC, Site, call_text
from tests.gateway.scripted import ScriptedEngine

TASK: Message = {"role": "user", "content": "Read the files."}
SYSTEM: Message = {"role": "system", "content": "Be exact."}
CONTEXT = 4096


async def agent(
    store: InMemoryLightningStore,
    rendering: RenderersRendering,
    results: list[str],
    model: str = "policy",
    ask: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> tuple[list[Call], ScriptedEngine, list[str]]:
    """An agent that calls a tool once for each result and then answers; its calls, and what the model was shown."""
    shown: list[str] = []

    def script(prompt: str, _params: object) -> str:
        shown.append(prompt)
        return call_text(len(shown), 1) if len(shown) <= len(results) else "Done."

    engine = ScriptedEngine(rendering, script, max_context=CONTEXT)
    claimed = await store.start_rollout(input={}, mode=RolloutMode.TRAIN)
    async with Gateway(store, engine, rendering, models={"frozen": Frozen(engine, rendering)}, **settings) as gateway:
        site = Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)
        messages: list[Any] = [SYSTEM, TASK]
        async with site.client() as client:
            create: Any = client.chat.completions.create
            for result in [*results, ""]:
                message = (await create(model=model, messages=messages, tools=[CALC], **ask)).choices[0].message
                messages.append(message)
                for call in message.tool_calls or ():
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        calls = await site.close()
        site.check_exact(calls)
    return calls, engine, shown


async def test_off_by_default(store: InMemoryLightningStore, rendering: RenderersRendering) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await agent(store, rendering, ["7" * 5000])
    assert refused.value.code == "context_length_exceeded"


async def test_the_oldest_results_are_cut_and_the_call_says_so(
    store: InMemoryLightningStore, rendering: RenderersRendering
) -> None:
    results = [f"{n}" * 450 for n in range(10)]
    calls, _, shown = await agent(store, rendering, results, cut_long_prompts=True)
    cuts = [call.info.used.get("cut") for call in calls]
    assert cuts[0] is None
    done = [cut["results"] for cut in cuts if cut]
    assert done == sorted(done)
    assert done[-1] >= 4
    last = shown[-1]
    assert "00000000\n[250 more characters were left out to fit the context]" in last
    assert "9" * 450 in last, "the newest result is whole"
    assert "Read the files." in last
    assert "Be exact." in last
    assert all(len(call.prompt_ids) < CONTEXT for call in calls)
    branches = [call.info.divergence.cause for call in calls if call.info.divergence]
    assert set(branches) == {"cut_to_fit"}
    assert len(branches) < len(done), "a conversation that was cut goes on with its tokens for a while"


@pytest.mark.slow
async def test_there_is_room_for_the_answer(store: InMemoryLightningStore, rendering: RenderersRendering) -> None:
    """All that an agent asks for, however its conversation grows: no answer is cut off because a prompt just fits."""
    calls, _, _ = await agent(store, rendering, ["7" * 137] * 40, cut_long_prompts=True, ask={"max_tokens": 60})
    assert sum(call.info.used.get("cut") is not None for call in calls) > 10
    assert max(len(call.prompt_ids) for call in calls) <= CONTEXT - 60


async def test_a_single_result_that_is_too_long_is_cut_too(
    store: InMemoryLightningStore, rendering: RenderersRendering
) -> None:
    calls, _, _ = await agent(store, rendering, ["7" * 5000], cut_long_prompts=True)
    assert [call.info.used.get("cut") for call in calls] == [None, {"results": 1, "messages": 0}]


async def test_then_the_oldest_messages_go(store: InMemoryLightningStore, rendering: RenderersRendering) -> None:
    calls, _, shown = await agent(store, rendering, ["7" * 150] * 25, cut_long_prompts=True)
    cut = calls[-1].info.used["cut"]
    assert cut["results"] == 0
    assert cut["messages"] > 2
    assert f"Read the files.\n\n[{cut['messages']} earlier messages were left out" in shown[-1]
    assert len(calls) == 26


async def test_prompts_of_a_frozen_model_are_cut_too(
    store: InMemoryLightningStore, rendering: RenderersRendering
) -> None:
    """As those of the policy that plays against it."""
    calls, _, _ = await agent(store, rendering, ["7" * 5000], model="frozen", cut_long_prompts=True)
    assert [(c.info.policy, c.info.used.get("cut")) for c in calls] == [
        ("frozen", None),
        ("frozen", {"results": 1, "messages": 0}),
    ]


async def test_what_cannot_be_cut_is_refused_as_ever(
    store: InMemoryLightningStore, rendering: RenderersRendering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TASK, "content", "7" * 5000)
    with pytest.raises(openai.BadRequestError) as refused:
        await agent(store, rendering, [], cut_long_prompts=True)
    assert refused.value.code == "context_length_exceeded"


STEP = st.tuples(st.integers(0, 3), st.integers(0, 600), st.booleans())


@settings(max_examples=60, deadline=None)
@given(st.lists(STEP, max_size=8), st.booleans())
def test_every_cut_is_a_talk_and_shorter_than_the_one_before(steps: list[tuple[int, int, bool]], system: bool) -> None:
    messages: list[Message] = [SYSTEM, TASK] if system else [TASK]
    for number, (results, size, asks) in enumerate(steps):
        calls = [{"id": f"{number}.{i}", "function": {"name": "f", "arguments": "{}"}} for i in range(results)]
        messages.append({"role": "assistant", "content": "x", **({"tool_calls": calls} if calls else {})})
        messages += [{"role": "tool", "content": "7" * size, "tool_call_id": call["id"]} for call in calls]
        messages += [{"role": "user", "content": "And?"}] if asks else []
    before = sum(len(m["content"]) for m in messages) + 1
    for cut, done in Truncation(messages):
        known = {call["id"] for m in cut for call in m.get("tool_calls", ())}
        assert all(m["tool_call_id"] in known for m in cut if m["role"] == "tool")
        assert cut[-1]["role"] == messages[-1]["role"]
        assert cut[0]["role"] == messages[0]["role"]
        assert any(m["role"] == "user" and m["content"].startswith(TASK["content"]) for m in cut)
        assert len(cut) == len(messages) - done["messages"]
        if not done["messages"]:
            size = sum(len(m["content"]) for m in cut)
            assert size < before
            before = size
