"""A gateway that takes over from one that died: same store, same secret, same tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agentlightning.gateway import Gateway
from agentlightning.gateway.history.restore import _continued  # pyright: ignore[reportPrivateUsage]
from agentlightning.gateway.recording.records import ARGUMENTS, CALL_ID, REMEMBERS_FROM, SAME_INPUT
from agentlightning.rendering import RenderersRendering
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import RolloutMode
from tests.gateway.conftest import CALC, Site, calculator
from tests.gateway.scripted import ScriptedEngine
from tests.gateway.test_dialects import TOOL

ASK: Any = [{"role": "system", "content": "Use the tool."}, {"role": "user", "content": "What is 2 + 3?"}]
SECRET = b"s" * 32


async def run_first(store: InMemoryLightningStore, rendering: RenderersRendering, dialect: str) -> tuple[Site, Any]:
    """The first turn of an agent, at a gateway that is gone afterwards."""
    engine = ScriptedEngine(rendering, calculator)
    claimed = await store.start_rollout(input={}, mode=RolloutMode.VAL)
    async with Gateway(store, engine, rendering, secret=SECRET) as gateway:
        site = Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)
        async with site.client() as client:
            create: Any = client.chat.completions.create if dialect == "chat" else client.responses.create
            fields = {"messages": ASK, "tools": [CALC]} if dialect == "chat" else {"input": ASK[1:], "tools": [TOOL]}
            if dialect == "responses":
                fields["instructions"] = "Use the tool."
            return site, await create(model="policy", **fields)


@pytest.mark.parametrize("dialect", ["chat", "responses"])
async def test_an_attempt_goes_on_after_a_restart(
    store: InMemoryLightningStore, rendering: RenderersRendering, dialect: str
) -> None:
    site, first = await run_first(store, rendering, dialect)
    async with Gateway(store, site.engine, rendering, secret=SECRET) as gateway:
        site.gateway = gateway
        async with site.client() as client:
            if dialect == "chat":
                message = first.choices[0].message
                got = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "5"}
                create: Any = client.chat.completions.create
                second = await create(model="policy", messages=[*ASK, message, got], tools=[CALC])
                assert second.choices[0].message.content == "The answer is 5."
            else:
                got = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "5"}
                create = client.responses.create
                second = await create(
                    model="policy",
                    input=[got],
                    previous_response_id=first.id,
                    instructions="Use the tool.",
                    tools=[TOOL],
                )
                assert second.output_text == "The answer is 5."
        one, two = await site.close()
    before = one.prompt_ids.tolist() + one.response_ids.tolist()
    assert two.prompt_ids[: len(before)].tolist() == before
    assert two.info.parent_call_id == one.info.call_id
    site.check_exact([one, two])


NOT_WRITTEN_BY_A_GATEWAY: list[tuple[str, Any]] = [
    *(("gen_ai.input.messages", value) for value in ("{", "5", "[5]", '[{"role": 5}]', "[" * 100_000, ["x"], 5)),
    *(("gen_ai.output.messages", value) for value in ("", "{}", '[{"role": "user", "parts": [{"type": "x"}]}]')),
    ("gen_ai.output.messages", '[{"role": [], "parts": []}]'),
    ("gen_ai.tool.definitions", "[[" + "9" * 5000),
    (ARGUMENTS, "[1]"),
    (SAME_INPUT, ["x"]),
    (REMEMBERS_FROM, "x"),
]


@pytest.mark.parametrize(("name", "value"), NOT_WRITTEN_BY_A_GATEWAY, ids=range(len(NOT_WRITTEN_BY_A_GATEWAY)))
async def test_whatever_a_stored_span_says_an_attempt_goes_on(
    store: InMemoryLightningStore, rendering: RenderersRendering, name: str, value: Any
) -> None:
    site, first = await run_first(store, rendering, "chat")
    (span,) = [s for s in await store.query_spans(site.rollout_id) if CALL_ID in s.attributes]
    await store.add_span(span.model_copy(update={"span_id": "b" * 16, "attributes": {**span.attributes, name: value}}))
    async with Gateway(store, site.engine, rendering, secret=SECRET) as gateway:
        site.gateway = gateway
        async with site.client() as client:
            message = first.choices[0].message
            got: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "5"}
            create: Any = client.chat.completions.create
            second = await create(model="policy", messages=[*ASK, message, got], tools=[CALC])
    assert second.choices[0].message.content == "The answer is 5."


async def test_calls_in_a_circle_are_read_once(store: InMemoryLightningStore, rendering: RenderersRendering) -> None:
    site, _ = await run_first(store, rendering, "chat")
    (call,) = (await store.query_calls([site.rollout_id]))[site.rollout_id]
    circle = [replace(call, info=replace(call.info, call_id=a, parent_call_id=b)) for a, b in ("xy", "yx")]
    assert len(_continued(circle, "x")) == 2


async def test_a_history_may_branch_off_what_was_restored(
    store: InMemoryLightningStore, rendering: RenderersRendering
) -> None:
    site, _ = await run_first(store, rendering, "chat")
    async with Gateway(store, site.engine, rendering, secret=SECRET) as gateway:
        site.gateway = gateway
        async with site.client() as client:
            create: Any = client.chat.completions.create
            await create(model="policy", messages=ASK, tools=[CALC])
            await create(model="policy", messages=[*ASK, {"role": "user", "content": "Now!"}], tools=[CALC])
        calls = await site.close()
    assert len(calls) == 3
    site.check_exact(calls)


async def test_calls_that_were_lost_mark_the_attempt(
    store: InMemoryLightningStore, rendering: RenderersRendering
) -> None:
    site, _ = await run_first(store, rendering, "chat")
    async with Gateway(store, site.engine, rendering, secret=SECRET) as gateway:
        site.gateway = gateway
        async with site.client() as client:
            create: Any = client.chat.completions.create
            lost = {"role": "assistant", "content": "An answer the store never got."}
            await create(model="policy", messages=[*ASK, lost, {"role": "user", "content": "on"}], tools=[CALC])
        summary = await gateway.close_attempt(site.rollout_id, site.attempt_id)
    assert summary.lost == "model calls of this attempt were lost with an earlier gateway"


async def test_a_history_that_was_rendered_anew_is_known_again(rendering: RenderersRendering) -> None:
    """The client leaves the reasoning out, the template drops it: after a restart the cause is still the same."""
    store = InMemoryLightningStore()
    engine = ScriptedEngine(rendering, lambda *_: "<think>\nhm\n</think>\n\nIt is 5.")
    claimed = await store.start_rollout(input={}, mode=RolloutMode.VAL)
    messages: list[Any] = [{"role": "user", "content": "What is 2 + 3?"}]
    for _ in range(3):
        async with Gateway(store, engine, rendering, secret=b"s" * 32) as gateway:
            site = Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)
            async with site.client() as client:
                await client.chat.completions.create(model="policy", messages=messages)
                reply = await client.chat.completions.create(model="policy", messages=messages)
            messages += [
                {"role": "assistant", "content": reply.choices[0].message.content},
                {"role": "user", "content": "Sure?"},
            ]
    calls = (await store.query_calls([claimed.rollout_id]))[claimed.rollout_id]
    assert [c.info.divergence.cause if c.info.divergence else None for c in calls] == [
        None,
        None,
        *["reasoning_stripped"] * 4,
    ]
    await store.close()
