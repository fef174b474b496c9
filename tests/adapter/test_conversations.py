"""Adapters over what the gateway and frameworks really record: triplets and fine-tuning messages."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest

from agentlightning.adapter import LlmProxyTraceToTriplet, TracerTraceToTriplet, TraceToMessages
from agentlightning.adapter.tools import tool_outcomes
from agentlightning.errors import EngineError
from agentlightning.gateway import Gateway, Provider
from agentlightning.gateway.dialects import DIALECTS
from agentlightning.gateway.recording.records import answer_in, read_forwarded
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import Span
from agentlightning.types.names import REWARD_RESPONSE
from agentlightning.types.reward import reward_attributes
from tests.gateway.conftest import CALC, Site, calculator, rendering  # noqa: F401
from tests.gateway.scripted import ScriptedEngine


@pytest.fixture
async def site(rendering: Any) -> AsyncIterator[Site]:  # noqa: F811
    store = InMemoryLightningStore()
    engine = ScriptedEngine(rendering, calculator)
    async with Gateway(store, engine, rendering) as gateway:
        claimed = await store.start_rollout(input={})
        yield Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)
    await store.close()


async def converse(site: Site, agent: str) -> list[str]:
    """Two turns with a tool between them; the ids of the responses."""
    async with site.client(default_headers={"x-agl-agent": agent}) as client:
        messages: list[Any] = [{"role": "user", "content": "What is 2 + 3?"}]
        first = await client.chat.completions.create(model="policy", messages=messages, tools=[CALC])
        message = first.choices[0].message
        assert message.tool_calls
        messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "5"}]
        second = await client.chat.completions.create(model="policy", messages=messages, tools=[CALC])
        return [first.id, second.id]


def reward(site: Site, value: float, response: str | None = None) -> Span:
    attributes = reward_attributes(value) | ({REWARD_RESPONSE: response} if response else {})
    return Span.from_attributes(
        name="agentlightning.reward", attributes=attributes, rollout_id=site.rollout_id, attempt_id=site.attempt_id
    )


async def test_triplets_have_tokens_messages_and_rewards(site: Site) -> None:
    first, second = await converse(site, "solver")
    calls = await site.close()
    spans = [*await site.spans(), reward(site, 0.25, first), reward(site, 1.0)]
    triplets = TracerTraceToTriplet().adapt(spans, calls)
    assert [t.metadata["response_id"] for t in triplets] == [first, second]
    assert [t.reward for t in triplets] == [0.25, 1.0]
    assert [t.prompt["token_ids"] for t in triplets] == [c.prompt_ids.tolist() for c in calls]
    assert [t.response["token_ids"] for t in triplets] == [c.response_ids.tolist() for c in calls]
    assert [m["role"] for m in triplets[1].prompt["messages"]] == ["user", "assistant", "tool"]
    assert triplets[1].response["message"]["content"] == "The answer is 5."


async def test_agents_are_chosen_by_name(site: Site) -> None:
    await converse(site, "planner")
    await converse(site, "solver 1")
    await site.close()
    spans = await site.spans()
    assert len(TracerTraceToTriplet().adapt(spans)) == 4
    assert {t.metadata["agent_name"] for t in TracerTraceToTriplet(agent_match="solver").adapt(spans)} == {"solver 1"}
    assert TracerTraceToTriplet(agent_match="nobody").adapt(spans) == []


async def test_a_frameworks_span_of_the_same_call_counts_once_and_names_the_agent(site: Site) -> None:
    async with site.client() as client:
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "What is 2 + 3?"}])
    await site.close()
    (own,) = [s for s in await site.spans() if "gen_ai.response.id" in s.attributes]

    def framework(name: str, parent: str | None, **attributes: Any) -> Span:
        made = Span.from_attributes(
            name=name, attributes={}, rollout_id=own.rollout_id, attempt_id=own.attempt_id, parent_id=parent
        )
        return made.model_copy(update={"attributes": {k.replace("__", "."): v for k, v in attributes.items()}})

    agent = framework("researcher", None, openinference__span__kind="AGENT")
    llm = framework(
        "ChatOpenAI",
        agent.span_id,
        openinference__span__kind="LLM",
        gen_ai__response__id=own.attributes["gen_ai.response.id"],
    )
    other = framework("ChatOther", agent.span_id, openinference__span__kind="LLM")
    spans = [own, llm, other, agent]
    triplets = TracerTraceToTriplet(agent_match="research").adapt(spans)
    assert [t.metadata["call_id"] is None for t in triplets] == [False, True]
    assert len(LlmProxyTraceToTriplet(agent_match="research").adapt(spans)) == 1
    assert len(TracerTraceToTriplet(llm_call_match="^ChatOther$").adapt(spans)) == 1


async def test_messages_for_fine_tuning(site: Site) -> None:
    await converse(site, "solver")
    await site.close()
    line = TraceToMessages().to_jsonl([await site.spans()])
    assert line.count("\n") == 1, "one conversation, not one per call"
    example = json.loads(line)
    assert [m["role"] for m in example["messages"]] == ["user", "assistant", "tool", "assistant"]
    call = example["messages"][1]["tool_calls"][0]
    assert (call["type"], call["function"]["name"]) == ("function", "calc")
    assert example["messages"][2]["tool_call_id"] == call["id"]
    assert example["tools"][0]["function"]["name"] == "calc"
    assert example["messages"][3]["content"] == "The answer is 5."


async def test_calls_that_gave_the_agent_nothing_are_left_out(site: Site) -> None:
    """A final reward belongs to the last answer, not to the refusal after it."""
    _, second = await converse(site, "solver")
    async with site.client() as client:
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="policy", messages=[], extra_body={"n": 0})
        site.engine.fail = EngineError("gone")
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "More?"}])
    calls = await site.close()
    assert len(await site.spans()) == 4
    triplets = LlmProxyTraceToTriplet().adapt([*await site.spans(), reward(site, 1.0)], calls)
    assert [t.reward for t in triplets] == [None, 1.0]
    assert triplets[-1].metadata["response_id"] == second


async def test_every_choice_of_a_response_is_a_triplet(site: Site) -> None:
    async with site.client() as client:
        answer = await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "What is 2 + 3?"}], n=3
        )
    calls = await site.close()
    triplets = TracerTraceToTriplet().adapt([*await site.spans(), reward(site, 0.5, answer.id)], calls)
    assert [t.metadata["call_id"] for t in triplets] == [f"{answer.id}:{i}" for i in range(3)]
    assert [t.reward for t in triplets] == [None, None, 0.5]


async def ask_twice(site: Site, model: str, dialect: str, stream: bool) -> None:
    """Two turns with a tool between them, as the raw requests of three wire formats."""
    function = CALC["function"]
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {site.key}"}) as http:

        async def post(path: str, body: dict[str, Any]) -> str:
            async with http.post(site.base_url + path, json={"model": model, "stream": stream, **body}) as answer:
                assert answer.status == 200, await answer.text()
                return await answer.text()

        def first_id(text: str, prefix: str) -> str:
            found = re.search(rf'"({prefix}[0-9a-f]+)"', text)
            assert found is not None, text
            return found[1]

        user = {"role": "user", "content": "What is 2 + 3?"}
        if dialect == "chat":
            text = await post("/chat/completions", {"messages": [user], "tools": [CALC], "user": "u"})
            calls = [
                {"id": first_id(text, "call_"), "type": "function", "function": {"name": "calc", "arguments": ARGS}}
            ]
            turn = [{"role": "assistant", "content": None, "tool_calls": calls}]
            turn += [{"role": "tool", "tool_call_id": calls[0]["id"], "content": "5"}]
            await post("/chat/completions", {"messages": [user, *turn], "tools": [CALC], "logit_bias": {}})
        elif dialect == "responses":
            tools = [{"type": "function", **function}]
            call_id = first_id(await post("/responses", {"input": [user], "tools": tools}), "call_")
            turn = [{"type": "function_call", "call_id": call_id, "name": "calc", "arguments": ARGS}]
            turn += [{"type": "function_call_output", "call_id": call_id, "output": "5"}]
            await post("/responses", {"input": [user, *turn], "tools": tools, "store": False})
        else:
            body = {"tools": [{"name": "calc", "input_schema": function["parameters"]}], "max_tokens": 200}
            call_id = first_id(await post("/messages", {"messages": [user], **body}), "call_")
            used = {"type": "tool_use", "id": call_id, "name": "calc", "input": json.loads(ARGS)}
            turn = [{"role": "assistant", "content": [used]}]
            turn += [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, "content": "5"}]}]
            await post("/messages", {"messages": [user, *turn], **body})


ARGS = '{"a": 2, "b": 3}'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
async def test_what_another_provider_said_reads_as_what_the_policy_says(site: Site, dialect: str, stream: bool) -> None:
    """For fine-tuning on a stronger model's runs: it was asked through the gateway, in any format, streamed or not."""
    store, engine = site.store, site.engine
    async with Gateway(store, engine, engine.rendering, policy="far") as far:
        claimed = await store.start_rollout(input={})
        afar = Site(store, engine, far, claimed.rollout_id, claimed.attempt.attempt_id)
        provider = Provider(base_url=far.endpoint, api_key=afar.key)
        await site.gateway.update_model_list({"far": provider})
        near = await site.another()
        await ask_twice(near, "policy", dialect, stream)
        await ask_twice(site, "far", dialect, stream)
        await near.close()
        await site.close()
    (expected,) = TraceToMessages().adapt(await near.spans())
    (found,) = TraceToMessages().adapt(await site.spans())
    assert _without_ids(found) == _without_ids(expected)
    assert [m["role"] for m in found["messages"]] == ["user", "assistant", "tool", "assistant"]
    for span in await site.spans():
        assert span.attributes["gen_ai.response.id"], "joins it with a framework's own span"
        assert span.attributes["gen_ai.response.model"] == "far"
    (outcome,) = tool_outcomes(await site.spans())
    assert (outcome.name, outcome.output, outcome.error) == ("calc", "5", None)


def _without_ids(example: dict[str, Any]) -> str:
    """Nor the white space of arguments, which Anthropic's format does not keep."""
    return re.sub(r"call_[0-9a-f]+", "call", json.dumps(example)).replace(" ", "")


@pytest.mark.parametrize("name", ["chat", "responses", "messages", "completions"])
def test_bodies_that_make_no_sense_are_not_read(name: str) -> None:
    (dialect,) = [d for d in DIALECTS if d.name == name]
    events = [b'data: {"type": "message_start"}', b'data: {"choices": [{"delta": {"tool_calls": [5]}}]}', b"data: [1]"]
    bodies = [b"", b"<html>", b"[]", b'{"choices": []}', b'{"output": [5], "content": 5}', b"\n".join(events), b"\xff"]
    requests: list[Any] = [
        {},
        {"messages": 5, "input": 5},
        {"messages": [{"role": "user", "content": "x"}], "input": "x"},
    ]
    for request in requests:
        for body in bodies:
            assert read_forwarded(dialect, request, answer_in(dialect, body)).answer_message is None
