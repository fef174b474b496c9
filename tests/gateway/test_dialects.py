"""Responses, Anthropic Messages and Completions through the official clients: the same agent, streamed and not."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from agentlightning.types import Call
from tests.gateway.conftest import CALC, Site, call_text

TOOL: Any = {"type": "function", **CALC["function"], "strict": False}
QUESTION = "What is 2 + 3?"


def check_two_turns(site: Site, calls: list[Call]) -> None:
    """The second call continues the first token by token, and everything is as it was sampled."""
    site.check_exact(calls)
    first, second = calls
    before = first.prompt_ids.tolist() + first.response_ids.tolist()
    assert second.prompt_ids[: len(before)].tolist() == before
    assert second.info.parent_call_id == first.info.call_id
    assert second.info.divergence is None


# ---- Responses -----------------------------------------------------------------------------------------------------


async def respond(client: openai.AsyncOpenAI, stream: bool, **fields: Any) -> Any:
    create: Any = client.responses.create
    if not stream:
        return await create(model="policy", tools=[TOOL], **fields)
    final, numbers = None, []
    async for event in await create(model="policy", tools=[TOOL], stream=True, **fields):
        numbers.append(event.sequence_number)
        if event.type in ("response.completed", "response.incomplete"):
            final = event.response
    assert numbers == list(range(len(numbers)))
    return final


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stateful", [False, True])
async def test_a_two_turn_agent_on_responses(site: Site, stream: bool, stateful: bool) -> None:
    async with site.client() as client:
        first = await respond(client, stream, instructions="Use the tool.", input=QUESTION)
        (call,) = first.output
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "calc", {"a": 2, "b": 3})
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
        if stateful:
            follow: dict[str, Any] = {"input": [result], "previous_response_id": first.id}
        else:
            follow = {"input": [{"role": "user", "content": QUESTION}, call.model_dump(), result]}
        second = await respond(client, stream, instructions="Use the tool.", **follow)
    assert second.output_text == "The answer is 5."
    assert second.status == "completed"
    assert second.usage.total_tokens > 0
    check_two_turns(site, await site.close())


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_hold_reasoning_text_and_calls_in_order(site: Site, stream: bool) -> None:
    site.engine.script = lambda prompt, params: (
        "<think>\nHm.\n</think>\n\nLet me see.\n" + call_text(1, 2) + call_text(3, 4)
    )
    async with site.client() as client:
        reply = await respond(client, stream, input=[{"role": "user", "content": QUESTION}])
        assert [item.type for item in reply.output] == ["reasoning", "message", "function_call", "function_call"]
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "3"} for item in reply.output[2:]
        ]
        items = [item.model_dump(exclude_none=True) for item in reply.output]
        await respond(client, stream, input=[{"role": "user", "content": QUESTION}, *items, *results])
    check_two_turns(site, await site.close())


async def test_responses_state_is_the_attempts_own(site: Site) -> None:
    async with site.client() as client:
        unstored = await respond(client, False, input=QUESTION, store=False)
        stored = await respond(client, False, input=QUESTION)
        for previous in (unstored.id, "resp_none"):
            with pytest.raises(openai.BadRequestError, match="not found"):
                await respond(client, False, input="on", previous_response_id=previous)
    other = await site.another()
    async with other.client() as client:
        with pytest.raises(openai.BadRequestError, match="not found"):
            await respond(client, False, input="on", previous_response_id=stored.id)


async def test_responses_refuse_by_name_and_end_incomplete(site: Site) -> None:
    async with site.client() as client:
        for fields, param in (
            ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
            ({"background": True}, "background"),
            ({"input": [{"type": "function_call"}]}, "input[0].name"),
            ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ):
            create: Any = client.responses.create
            with pytest.raises(openai.BadRequestError) as refused:
                await create(**{"model": "policy", "input": QUESTION, **fields})
            assert refused.value.param == param
        short = await respond(client, False, input=QUESTION, max_output_tokens=2)
    assert (short.status, short.incomplete_details.reason) == ("incomplete", "max_output_tokens")


# ---- Anthropic Messages --------------------------------------------------------------------------------------------


def anthropic_client(site: Site) -> Any:
    anthropic = pytest.importorskip("anthropic")
    return anthropic.AsyncAnthropic(base_url=site.base_url.removesuffix("/v1"), api_key=site.key, max_retries=0)


ANTHROPIC_TOOL = {
    "name": "calc",
    "description": "One binary operation.",
    "input_schema": CALC["function"]["parameters"],
}


async def message(client: Any, stream: bool, messages: list[Any], **fields: Any) -> Any:
    wanted = {"model": "policy", "max_tokens": 100, "messages": messages, "tools": [ANTHROPIC_TOOL], **fields}
    if not stream:
        return await client.messages.create(**wanted)
    async with client.messages.stream(**wanted) as events:
        return await events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_two_turn_agent_on_messages(site: Site, stream: bool) -> None:
    asked = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    async with anthropic_client(site) as client:
        first = await message(client, stream, asked, system="Use the tool.")
        (use,) = first.content
        assert (first.stop_reason, use.name, use.input) == ("tool_use", "calc", {"a": 2, "b": 3})
        result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "5"}]}
        history = [*asked, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        second = await message(client, stream, history, system=[{"type": "text", "text": "Use the tool."}])
        counted = await client.messages.count_tokens(model="policy", messages=asked, system="Use the tool.")
    assert [block.text for block in second.content] == ["The answer is 5."]
    assert second.stop_reason == "end_turn"
    assert second.usage.input_tokens > counted.input_tokens > 0
    check_two_turns(site, await site.close())


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_hold_thinking_text_and_tool_use(site: Site, stream: bool) -> None:
    site.engine.script = lambda prompt, params: "<think>\nHm.\n</think>\n\nLet me see.\n" + call_text(1, 2)
    async with anthropic_client(site) as client:
        reply = await message(client, stream, [{"role": "user", "content": QUESTION}])
        assert [block.type for block in reply.content] == ["thinking", "text", "tool_use"]
        site.engine.script = lambda prompt, params: "one STOP two"
        reply = await message(client, stream, [{"role": "user", "content": QUESTION}], stop_sequences=["STOP"])
    assert (reply.stop_reason, reply.stop_sequence, reply.content[0].text) == ("stop_sequence", "STOP", "one")


async def test_messages_refuse_in_anthropics_shape(site: Site) -> None:
    anthropic = pytest.importorskip("anthropic")
    async with anthropic_client(site) as client:
        with pytest.raises(anthropic.BadRequestError, match="content"):
            await message(client, False, [{"role": "user", "content": [{"type": "text"}]}])
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            await message(client, False, [{"role": "user", "content": "word " * 5000}])
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            await message(client, False, [{"role": "user", "content": "x"}], model="claude-99")
        forced = await message(
            client, False, [{"role": "user", "content": QUESTION}], tool_choice={"type": "tool", "name": "calc"}
        )
    assert forced.id.startswith("msg_")


# ---- Completions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_completions_take_text_and_tokens(site: Site, stream: bool) -> None:
    site.engine.script = lambda prompt, params: "  two <think> STOP three"
    rendering = site.engine.rendering
    async with site.client() as client:
        create: Any = client.completions.create
        for prompt in ("one", rendering.encode("one").tolist(), ["one"]):
            fields = {"model": "policy", "prompt": prompt, "stop": "STOP", "logprobs": 1, "stream": stream}
            reply = await create(**fields, max_tokens=50, extra_body={"return_token_ids": True})
            choices = [p.choices[0] async for p in reply if p.choices] if stream else [reply.choices[0]]
            assert "".join(choice.text for choice in choices) == "  two <think> "
            assert "".join(choices[-1].logprobs.tokens) == "  two <think> STOP"
            assert choices[-1].finish_reason == "stop"
        short = await create(model="policy", prompt="one")
        for wrong in ([], "", ["a", 5], [10**6]):
            with pytest.raises(openai.BadRequestError):
                await create(model="policy", prompt=wrong)
    assert short.usage.completion_tokens <= 16
    calls = await site.close()
    site.check_exact(calls)


async def test_completions_continue_what_they_sampled(site: Site) -> None:
    async with site.client() as client:
        create: Any = client.completions.create
        ids = site.engine.rendering.encode("Count: 1").tolist()
        fields = {"model": "policy", "max_tokens": 5, "extra_body": {"return_token_ids": True}}
        first = await create(prompt=ids, **fields)
        longer = ids + first.choices[0].token_ids + site.engine.rendering.encode(" and on").tolist()
        await create(prompt=longer, **fields)
    calls = await site.close()
    assert calls[1].info.parent_call_id == calls[0].info.call_id
