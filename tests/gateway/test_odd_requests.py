"""Odd requests, legal ones and others: each is honoured, or refused in the provider's own shape, and none hangs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import aiohttp
import anthropic
import pytest

from agentlightning.errors import ConfigError, StoreUnavailableError
from agentlightning.gateway import Gateway
from agentlightning.gateway.routing.upstream import Provider
from agentlightning.rendering import RenderersRendering
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import AttemptedRollout, CallRecord, Rollout, RolloutMode, Span
from tests.gateway.conftest import CALC, Site, calculator, call_text
from tests.gateway.scripted import ScriptedEngine

USER: Any = {"role": "user", "content": "What is 2 + 3?"}
OF_WORDS: Any = {"type": "object", "properties": {"a": "number", "b": "number"}, "required": ["a"]}
WORDS_OF_ANTHROPIC = {"name": "calc", "input_schema": OF_WORDS}
FUNCTION = {"type": "function"}
ANTHROPIC_TOOL = {"name": "calc", "input_schema": CALC["function"]["parameters"]}


async def post(site: Site, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {site.key}"}
    timeout = aiohttp.ClientTimeout(total=10)
    body = {"model": "policy", **body}
    async with (
        aiohttp.ClientSession(headers=headers, timeout=timeout) as http,
        http.post(site.base_url + path, json=body) as answer,
    ):
        text = await answer.text()
    return answer.status, text if body.get("stream") and answer.status == 200 else json.loads(text)


def taking(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "calc", "parameters": parameters}}


def said(**fields: Any) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "content": None, **fields}, USER]


def called(**call: Any) -> list[dict[str, Any]]:
    return [USER, {"type": "function_call", "call_id": "c", "name": "calc", "arguments": "{}", **call}, USER]


def block(**fields: Any) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "content": [fields]}, USER]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        ("/chat/completions", {"messages": said(tool_calls=5)}, "tool_calls"),
        ("/chat/completions", {"messages": said(tool_calls=["x"])}, "messages[1].tool_calls[0]"),
        ("/chat/completions", {"messages": said(function_call={"name": "", "arguments": "{}"})}, "function_call"),
        ("/chat/completions", {"messages": [USER], "tools": [CALC], "tool_choice": {"type": "function"}}, "name"),
        (
            "/chat/completions",
            {"messages": [USER], "tools": [CALC], "tool_choice": "calc"},
            "'function': {'name': 'calc'}",
        ),
        (
            "/responses",
            {"input": "x", "tools": [{"type": "function", **CALC["function"]}], "tool_choice": "calc"},
            "'calc'",
        ),
        (
            "/chat/completions",
            {"messages": [USER], "tools": [CALC], "tool_choice": {"type": "function", "function": "calc"}},
            "function",
        ),
        ("/chat/completions", {"messages": [USER], "max_tokens": 1.5}, "max_tokens"),
        ("/chat/completions", {"messages": [USER], "seed": 2**63}, "seed"),
        ("/responses", {"input": called(name=None)}, "input[1].name"),
        ("/responses", {"input": called(call_id=5)}, "input[1].call_id"),
        ("/messages", {"messages": [{"role": "user", "content": 5}]}, "content"),
        ("/messages", {"messages": [{"role": "user"}]}, "content"),
        ("/messages", {"messages": block(type="thinking", thinking=5)}, "thinking"),
        ("/messages", {"messages": block(type="tool_use", id="x", input={})}, "messages[1].content[0].name"),
    ],
)
async def test_what_makes_no_sense_is_refused_by_name(
    site: Site, path: str, body: dict[str, Any], names: str, stream: bool
) -> None:
    status, answer = await post(
        site, path, {"max_output_tokens" if path == "/responses" else "max_tokens": 9} | body | {"stream": stream}
    )
    assert status == 400
    assert names in json.dumps(answer["error"])


@pytest.mark.parametrize(
    ("path", "body", "seen"),
    [
        ("/chat/completions", {"messages": said(refusal="I will not.")}, "I will not."),
        ("/chat/completions", {"messages": said(content=[{"type": "refusal", "refusal": "Never."}])}, "Never."),
        ("/chat/completions", {"messages": said(function_call={"name": "old", "arguments": "{}"})}, '"old"'),
        ("/chat/completions", {"messages": [USER], "top_k": -1}, ""),
        ("/chat/completions", {"messages": [USER], "temperature": 1e-40}, ""),
        ("/chat/completions", {"messages": [{**USER, "name": "bob"}], "tools": [], "parallel_tool_calls": False}, ""),
        ("/responses", {"input": called(arguments={"a": 1})}, '{"a":1}'),
        ("/messages", {"messages": block(type="tool_use", id="x", name="calc", input=None), "max_tokens": 9}, "calc"),
    ],
)
async def test_what_makes_sense_is_honoured(site: Site, path: str, body: dict[str, Any], seen: str) -> None:
    status, answer = await post(site, path, body)
    assert status == 200, answer
    (call,) = await site.close()
    assert seen in site.engine.rendering.decode(call.prompt_ids)


async def test_settings_that_mean_off_are_off(site: Site) -> None:
    place = await site.another(RolloutMode.VAL)
    await post(place, "/chat/completions", {"messages": [USER], "top_k": -1, "temperature": 1e-40})
    assert (site.engine.params[-1].top_k, site.engine.params[-1].temperature) == (0, 0.0)
    (call,) = await place.close()
    assert call.info.temperature == 0.0


@pytest.mark.parametrize("bad", [{"temperature": "hot"}, {"top_p": 0}, {"max_tokens": 0.5}])
async def test_overrides_are_checked(store: InMemoryLightningStore, rendering: RenderersRendering, bad: Any) -> None:
    with pytest.raises(ConfigError, match="train_sampling"):
        Gateway(store, ScriptedEngine(rendering, calculator), rendering, train_sampling=bad)


# ---- Anthropic -------------------------------------------------------------------------------------------------------


def listed_arguments(prompt: str, _: object) -> str:
    """Calls the tool with arguments that are no object."""
    if "<tool_response>" in prompt:
        return "Done."
    return '<tool_call>\n{"name": "calc", "arguments": [1,  2]}\n</tool_call>'


@pytest.mark.parametrize("script", [listed_arguments])
async def test_arguments_that_are_no_object_come_back_as_they_were(site: Site) -> None:
    """Anthropic's format has objects only: streamed or not, what is sent is one, and sent back it is the same call."""
    client = anthropic.AsyncAnthropic(base_url=site.base_url.removesuffix("/v1"), api_key=site.key, max_retries=0)
    ask: Any = {"model": "policy", "max_tokens": 200, "tools": [ANTHROPIC_TOOL]}
    async with client:
        plain = await client.messages.create(messages=[USER], **ask)
        async with client.messages.stream(messages=[USER], **ask) as stream:
            streamed = await stream.get_final_message()
        for message in (plain, streamed):
            (use,) = [b for b in message.content if b.type == "tool_use"]
            assert use.input == {"_arguments": [1, 2]}
            results: Any = [{"type": "tool_result", "tool_use_id": use.id, "content": "?"}]
            turns: Any = [USER, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
            await client.messages.create(messages=turns, **ask)
    calls = await site.close()
    assert [c.info.parent_call_id is not None for c in calls] == [False, False, True, True]


async def test_models_are_found_by_both_clients(site: Site) -> None:
    async with site.client() as client:
        assert (await client.models.retrieve("policy")).id == "policy"
    async with anthropic.AsyncAnthropic(base_url=site.base_url.removesuffix("/v1"), api_key=site.key) as other:
        page = await other.models.list()
        assert (page.data[0].id, page.has_more) == ("policy", False)
        assert (await other.models.retrieve("policy")).display_name == "policy"
        with pytest.raises(anthropic.NotFoundError):
            await other.models.retrieve("gpt-99")


async def test_counting_what_cannot_be_rendered_is_refused(site: Site) -> None:
    class Picky:
        """A rendering whose template takes no system prompt."""

        def __init__(self, inner: RenderersRendering) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def with_arguments(self, arguments: Any) -> Any:
            return self

        def render(self, messages: Any, tools: Any) -> Any:
            from agentlightning.errors import ModelError

            raise ModelError("The chat format cannot express these messages: no system prompt.")

    rendering: Any = Picky(site.engine.rendering)
    async with Gateway(site.store, site.engine, rendering) as gateway:
        place = Site(site.store, site.engine, gateway, site.rollout_id, site.attempt_id)
        status, answer = await post(place, "/messages/count_tokens", {"messages": [USER]})
    assert status == 400
    assert "no system prompt" in answer["error"]["message"]


# ---- a store that is away -------------------------------------------------------------------------------------------


class FullStore(InMemoryLightningStore):
    """Takes no calls until it is told to, and answers no questions about rollouts while `away`."""

    def __init__(self) -> None:
        super().__init__()
        self.open = asyncio.Event()
        self.away = False

    async def add_calls(self, records: Sequence[CallRecord]) -> None:
        await self.open.wait()
        await super().add_calls(records)

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        await self.open.wait()
        return await super().add_many_spans(spans)

    async def get_rollout_by_id(self, rollout_id: str) -> AttemptedRollout | Rollout | None:
        if self.away:
            raise StoreUnavailableError("The disk is full.")
        return await super().get_rollout_by_id(rollout_id)


@pytest.mark.parametrize(("path", "stream"), [("/chat/completions", True), ("/messages", True), ("/messages", False)])
async def test_a_call_that_waits_for_the_store_ends_with_its_attempt(
    rendering: RenderersRendering, path: str, stream: bool
) -> None:
    store = FullStore()
    engine = ScriptedEngine(rendering, lambda *_: "x")
    far = Provider(base_url="http://127.0.0.1:9/v1")
    async with Gateway(store, engine, rendering, models={"far": far}) as gateway:
        claimed = await store.start_rollout(input={}, mode=RolloutMode.VAL)
        site = Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)
        await asyncio.gather(*[post(site, "/chat/completions", {"messages": [USER], "n": 128}) for _ in range(2)])
        calls = engine.params.copy()
        body = {"messages": [USER], "stream": stream, "max_tokens": 9}
        waiting = [asyncio.create_task(post(site, path, body)) for _ in range(3)]
        forwarded = asyncio.create_task(post(site, path, {**body, "model": "far"}))
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in (*waiting, forwarded)), "nothing new is begun that could not be kept"
        assert engine.params == calls
        closing = asyncio.create_task(gateway.close_attempt(claimed.rollout_id, claimed.attempt.attempt_id))
        answers = await asyncio.wait_for(asyncio.gather(*waiting), 5)
        forwarded.cancel()
        store.open.set()
        await closing
    assert {status for status, _ in answers} == {410}
    assert all("error" in answer for _, answer in answers)
    await store.close()


@pytest.mark.parametrize("path", ["/chat/completions", "/messages"])
async def test_a_store_that_is_away_at_the_first_call_is_said(rendering: RenderersRendering, path: str) -> None:
    store = FullStore()
    store.open.set()
    engine = ScriptedEngine(rendering, lambda *_: call_text(1, 2))
    async with Gateway(store, engine, rendering) as gateway:
        claimed = await store.start_rollout(input={}, mode=RolloutMode.VAL)
        site = Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)
        store.away = True
        status, answer = await post(site, path, {"messages": [USER], "max_tokens": 9})
        store.away = False
        assert status == 503
        assert "The disk is full" in answer["error"]["message"]
        assert (await post(site, path, {"messages": [USER], "max_tokens": 9}))[0] == 200
    await store.close()
